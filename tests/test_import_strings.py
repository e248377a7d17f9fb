from pathlib import Path

import pytest

from rft_batch.errors import InputError
from rft_batch.import_strings import (
    ImportString,
    given_arguments,
    import_callable,
    source_digest,
)


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


def test_a_file_is_run_once_for_all_its_functions(module: Path) -> None:
    module.write_text("runs = []\n\ndef f():\n    runs.append(1)\n    return len(runs)\n\ng = f\n")
    first = import_callable(f"{module}:f", "--reward")
    assert (first(), import_callable(f"{module}:g", "--reward")()) == (1, 2)
    module.write_text("def f():\n    return 'changed'\n")
    assert import_callable(f"{module}:f", "--reward")() == "changed"


def test_the_digest_follows_the_source(module: Path) -> None:
    before = source_digest(import_callable(f"{module}:score", "--reward"))
    module.write_text("def score():\n    return 2\n")
    assert source_digest(import_callable(f"{module}:score", "--reward")) != before
    assert source_digest(len) == ""


def test_arguments_are_literals_that_are_bound(module: Path) -> None:
    module.write_text(
        "def f(texts, pattern, *, bounds=(), **columns):\n    return pattern, bounds\n"
    )
    reference = f"{module}:f(pattern='a/b:c(d)\\'', bounds=[1, -2.5, None, {{'k': True}}])"
    found = import_callable(reference, "--reward")
    assert found(texts=[]) == ("a/b:c(d)'", [1, -2.5, None, {"k": True}])
    assert given_arguments(found) == {
        "pattern": "a/b:c(d)'",
        "bounds": [1, -2.5, None, {"k": True}],
    }
    assert given_arguments(import_callable(f"{module}:f", "--reward")) == {}
    assert import_callable(f"{module}:f()", "--reward")(texts=[], pattern=1) == (1, ())


@pytest.mark.parametrize(
    "arguments",
    [
        "(1)",
        "(**{'pattern': 1})",
        "(pattern=print('x'))",
        "(pattern=__import__('os').getcwd())",
        "(pattern=texts)",
        "(pattern=1)(texts=2)",
        "(pattern=1",
        "(pattern=)",
        "(pattern=1, pattern=2)",
        "(pattern=1) + g(texts=1)",
    ],
)
def test_what_is_no_literal_is_refused_and_never_run(
    module: Path, arguments: str, capsys: pytest.CaptureFixture[str]
) -> None:
    module.write_text("def f(texts, pattern):\n    raise AssertionError('it was run')\n")
    with pytest.raises(InputError, match=r"^--reward: "):
        import_callable(f"{module}:f{arguments}", "--reward")
    assert capsys.readouterr().out == ""


def test_the_form_of_arguments_is_shown(module: Path) -> None:
    with pytest.raises(InputError) as error:
        import_callable(f"{module}:score(1)", "--reward")
    assert str(error.value) == (
        f'--reward: the arguments of "{module}:score(1)" are not name=value with numbers, texts, '
        "True, False, None, lists or dictionaries. Write them as in function(name='text')."
    )


def test_an_unknown_argument_is_refused_also_where_any_would_be_taken(module: Path) -> None:
    module.write_text("def f(texts, pattern, **columns):\n    return 1\n")
    with pytest.raises(InputError) as error:
        import_callable(f"{module}:f(patern='a')", "--reward")
    assert str(error.value) == (
        f'--reward: f of "{module}:f(patern=\'a\')" has no argument "patern" '
        "(found: texts, pattern)."
    )


@pytest.mark.parametrize(
    ("text", "short", "seen"),
    [
        ("a.b:f", "a.b:f", "a.b:f"),
        ("d/e.py:f", "e.py:f", "/x/d/e.py:f"),
        ("../e.py:f(p='a:b/c.py:d')", "e.py:f(p='a:b/c.py:d')", "/x/../e.py:f(p='a:b/c.py:d')"),
        ("/d/e.py:f(n=1)", "e.py:f(n=1)", "/d/e.py:f(n=1)"),
        ("a.b:f(p='c.py:d')", "a.b:f(p='c.py:d')", "a.b:f(p='c.py:d')"),
        ("a b/c:d.py:f", "c:d.py:f", "/x/a b/c:d.py:f"),
    ],
)
def test_its_parts_keep_what_arguments_say(text: str, short: str, seen: str) -> None:
    parts = ImportString.parse(text)
    assert parts is not None
    assert (parts.short, parts.seen_from(Path("/x"))) == (short, seen)


@pytest.mark.parametrize("text", ["prompts.jsonl", "../policy", "a:", ":f", "a:f(1", "a:f-g"])
def test_other_texts_are_no_import_strings(text: str) -> None:
    assert ImportString.parse(text) is None


def test_the_digest_sees_through_arguments(module: Path) -> None:
    module.write_text("def f(texts, pattern):\n    return 1\n")
    plain = source_digest(import_callable(f"{module}:f", "--reward"))
    assert source_digest(import_callable(f"{module}:f(pattern=1)", "--reward")) == plain != ""
