"""What the tree must look like, and what importing may cost."""

import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT

HEAVY = ("torch", "numpy", "pyarrow", "datasets", "accelerate", "safetensors", "matplotlib")


def loaded_after(statement: str) -> set[str]:
    script = f"import sys; {statement}; print(' '.join(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return set(done.stdout.split()) & set(HEAVY)


def test_the_command_line_loads_nothing_heavy() -> None:
    assert loaded_after("import rft_batch.cli") == set()


def test_that_a_heavy_import_would_be_seen() -> None:
    assert {"torch", "numpy", "pyarrow"} <= loaded_after("import rft_batch.generation")


def test_no_file_is_longer_than_four_hundred_lines() -> None:
    files = sorted((ROOT / "rft_batch").rglob("*.py"))
    assert len(files) > 20
    lengths = {str(f.relative_to(ROOT)): len(f.read_text().splitlines()) for f in files}
    assert {name: length for name, length in lengths.items() if length > 400} == {}


def test_no_module_bears_the_name_of_a_standard_one() -> None:
    names = {path.stem for path in (ROOT / "rft_batch").rglob("*.py")} - {"__init__", "__main__"}
    # torchrun puts a script's folder first on the path, where the library would import ours.
    assert names & sys.stdlib_module_names == set()


def test_data_stays_small() -> None:
    sizes = [path.stat().st_size for path in (ROOT / "data").rglob("*") if path.is_file()]
    assert sizes
    assert sum(sizes) < 15e6


@pytest.mark.parametrize("name", ["policy.json", "model.safetensors"])
def test_the_shipped_policy_is_there(name: str) -> None:
    assert Path(ROOT / "data" / "digits" / "policy" / name).is_file()
