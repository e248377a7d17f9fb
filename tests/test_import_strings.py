from pathlib import Path

import pytest

from rft_batch.errors import InputError
from rft_batch.import_strings import import_callable, source_digest


@pytest.fixture
def module(tmp_path: Path) -> Path:
    path = tmp_path / "mine.py"
    path.write_text("def score():\n    return 1\n\nnumber = 3\n")
    return path


def test_a_function_of_a_file_and_of_a_module(module: Path) -> None:
    assert import_callable(f"{module}:score", "--reward")() == 1
    assert import_callable("math:sqrt", "--reward")(9) == 3


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        ("score", '--reward: "score" is not an import string. '
         "Write module:function or path/to/file.py:function."),
        (":x", '--reward: ":x" is not an import string. '
         "Write module:function or path/to/file.py:function."),
        ("no_such_module:f", "--reward: \"no_such_module:f\" cannot be imported: No module named "
         "'no_such_module'. Install the package, or give the file as path/to/file.py:function."),
        ("{folder}/no.py:f", '--reward: the file of "{folder}/no.py:f" does not exist.'),
        ("{folder}/mine.py:other", '--reward: {folder}/mine.py has no callable "other" '
         "(found: score)."),
        ("{folder}/mine.py:number", '--reward: {folder}/mine.py has no callable "number" '
         "(found: score)."),
        ("{folder}/bad.py:f", '--reward: importing "{folder}/bad.py:f" failed: '
         "ZeroDivisionError: division by zero"),
    ],
)  # fmt: skip
def test_what_cannot_be_imported_is_named(module: Path, reference: str, message: str) -> None:
    folder = module.parent
    (folder / "bad.py").write_text("1 / 0\n")
    with pytest.raises(InputError) as error:
        import_callable(reference.format(folder=folder), "--reward")
    assert str(error.value) == message.format(folder=folder)


def test_a_file_may_import_its_neighbours(module: Path) -> None:
    (module.parent / "beside.py").write_text(
        "from mine import number\n\ndef f():\n    return number\n"
    )
    assert import_callable(f"{module.parent / 'beside.py'}:f", "--reward")() == 3


def test_the_digest_follows_the_source(module: Path) -> None:
    before = source_digest(import_callable(f"{module}:score", "--reward"))
    module.write_text("def score():\n    return 2\n")
    assert source_digest(import_callable(f"{module}:score", "--reward")) != before
    assert source_digest(len) == ""
