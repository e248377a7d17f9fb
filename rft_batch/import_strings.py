"""`module:function` and `path/to/file.py:function` as callables, and their source."""

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rft_batch.errors import InputError
from rft_batch.files import file_digest


def import_callable(reference: str, option: str) -> Callable[..., Any]:
    """The callable that `reference` names.

    Args:
        reference: `module:function`, or `path/to/file.py:function`.
        option: the option or key that the reference came from, for the error's text.

    Raises:
        InputError: the text is not of that form, the module or file cannot be imported, or it
            has no such callable.
    """
    place, _, name = reference.rpartition(":")
    if not place or not name:
        raise InputError(
            f'{option}: "{reference}" is not an import string. '
            "Write module:function or path/to/file.py:function."
        )
    try:
        module = (
            _import_file(Path(place)) if place.endswith(".py") else importlib.import_module(place)
        )
    except ModuleNotFoundError as error:
        raise InputError(
            f'{option}: "{reference}" cannot be imported: {error}. '
            "Install the package, or give the file as path/to/file.py:function."
        ) from error
    except FileNotFoundError as error:
        raise InputError(f'{option}: the file of "{reference}" does not exist.') from error
    except Exception as error:  # the user's module ran, and anything can happen there
        raise InputError(
            f'{option}: importing "{reference}" failed: {type(error).__name__}: {error}'
        ) from error
    found = getattr(module, name, None)
    if not callable(found):
        callables = [n for n, v in vars(module).items() if inspect.isfunction(v) and n[0] != "_"]
        raise InputError(
            f'{option}: {place} has no callable "{name}" (found: {", ".join(callables) or "none"}).'
        )
    return found  # type: ignore[no-any-return]


def accepted_arguments(function: Callable[..., Any], arguments: dict[str, Any]) -> dict[str, Any]:
    """Those of some keyword arguments that a function takes: all if it takes `**others`."""
    parameters = inspect.signature(function).parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return arguments
    named = {parameter.name for parameter in parameters}
    return {name: value for name, value in arguments.items() if name in named}


def source_digest(function: Callable[..., Any]) -> str:
    """Digest of the file that defines `function`; empty where there is no such file."""
    try:
        source = inspect.getsourcefile(inspect.unwrap(function))
    except TypeError:
        return ""
    return file_digest(Path(source)) if source and Path(source).exists() else ""


def _import_file(path: Path) -> Any:
    if not path.is_file():
        raise FileNotFoundError(path)
    name = f"_rft_user_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path.resolve())
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    # Last on the path: the file may import its neighbours, and shadows nothing.
    sys.path.append(str(path.resolve().parent))
    spec.loader.exec_module(module)
    return module
