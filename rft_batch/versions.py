"""The versions that matter, for manifests and `--version`."""

import platform
from importlib.metadata import PackageNotFoundError, version

from rft_batch import __version__

_PACKAGES = ("torch", "accelerate", "datasets", "pyarrow", "numpy", "torch-ema")


def versions() -> dict[str, str]:
    """This project's version, Python's, and those of the packages that results depend on."""
    found = {"rft-batch": __version__, "python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found
