import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from rft_batch import distinct
from rft_batch.distinct import far_repeats, load_distinct
from rft_batch.errors import DataError, InputError
from rft_batch.schema import SAMPLES


def samples(**columns: list[Any]) -> pa.Table:
    (count,) = {len(values) for values in columns.values()}
    given = {"prompt_id": ["p"] * count, "sample_index": list(range(count)), **columns}
    return pa.table({n: pa.array(v, SAMPLES.field(n).type) for n, v in given.items()})


@pytest.fixture
def key_file(tmp_path: Path) -> Callable[[str], str]:
    """Writes a module with one function `key`; gives its import string."""

    def write(text: str) -> str:
        (tmp_path / "my_keys.py").write_text(text)
        return f"{tmp_path / 'my_keys.py'}:key"

    return write


def test_equal_token_ids_have_equal_keys() -> None:
    rule = load_distinct("completion")
    assert rule.columns == ("completion_ids",)
    table = samples(completion_ids=[[1], [], [1, 2], [1], [], [2, 1], [258], [2, 1, 0]])
    assert rule.keys(table).tolist() == [0, 1, 2, 0, 1, 3, 4, 5]
    assert rule.keys(table.slice(3)).tolist() == [0, 1, 2, 3, 4]
    in_parts = pa.concat_tables([table.slice(3, 2), table.slice(0, 2)])
    assert rule.keys(in_parts).tolist() == [0, 1, 0, 1]
    assert rule.keys(table.slice(0, 0)).tolist() == []


def test_a_function_gets_what_it_names_and_its_keys_are_compared(
    key_file: Callable[[str], str],
) -> None:
    reference = key_file(
        "def key(completion_ids, prompt_id):\n"
        "    assert type(completion_ids) is list and prompt_id == 'p'\n"
        "    return [None, 'a', 7, ('a', 7), 7.0, 'a'][completion_ids[0]]\n"
    )
    rule = load_distinct(reference)
    assert (rule.name, rule.columns) == ("my_keys.py:key", ("completion_ids",))
    assert len(rule.digest) == 32
    found = rule.keys(samples(completion_ids=[[i] for i in range(6)]))
    assert found.tolist() == [-1, 0, 1, 2, 1, 0]


def test_a_function_that_takes_everything_gets_everything(key_file: Callable[[str], str]) -> None:
    rule = load_distinct(key_file("def key(**given):\n    return tuple(sorted(given))\n"))
    assert rule.columns == ("completion", "completion_ids")
    assert rule.keys(samples(completion=[None], completion_ids=[[1]])).tolist() == [0]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("1 / 0", "ZeroDivisionError: division by zero"),
        ("return [1]", "TypeError: unhashable type: 'list'"),
        ("return ([1],)", "TypeError: unhashable type: 'list'"),
        (
            "return frozenset()",
            "returned frozenset. A key is text, a number or a tuple; None leaves the sample out.",
        ),
    ],
)
def test_a_function_that_fails_is_named_with_the_sample(
    key_file: Callable[[str], str], body: str, message: str
) -> None:
    rule = load_distinct(
        key_file(f"def key(completion):\n    if completion == 'b':\n        {body}\n    return 1\n")
    )
    with pytest.raises(DataError) as error:
        rule.keys(samples(completion=["a", "b"]))
    where = '--distinct-by my_keys.py:key: prompt "p" sample 1: '
    assert str(error.value) == where + message


def test_references_that_name_no_rule_are_refused(key_file: Callable[[str], str]) -> None:
    with pytest.raises(InputError, match=r'^--distinct-by: "text" is not an import string'):
        load_distinct("text")
    with pytest.raises(InputError) as error:
        load_distinct(key_file("def key(text):\n    return text\n"))
    assert str(error.value) == (
        "--distinct-by my_keys.py:key: the function names none of completion, completion_ids, "
        "prompt_id. It is called with those that it names."
    )


def test_equations_need_a_package_and_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    rule = load_distinct("equations")
    texts = ["1+1=2", "so 1 + 1 = 2", "none", "1+1=3", "nothing"]
    assert rule.keys(samples(completion=texts)).tolist() == [0, 0, 1, -1, 1]
    with pytest.raises(InputError, match=r'prompt "p" sample 1 has no text\. Use --distinct-by c'):
        rule.keys(samples(completion=["a", None]))
    monkeypatch.setattr(distinct, "find_spec", lambda name: None)
    with pytest.raises(InputError) as error:
        load_distinct("equations")
    assert str(error.value) == (
        "--distinct-by equations: rapidfuzz is not installed. pip install 'rft-batch[lm]'"
    )


def edit_distance(a: str, b: str) -> int:
    row = list(range(len(b) + 1))
    for i, x in enumerate(a, 1):
        before, row[0] = row[0], i
        for j, y in enumerate(b, 1):
            before, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, before + (x != y))
    return row[-1]


def paper(texts: list[str], keys: list[int]) -> list[str]:
    """The texts that Yuan et al. 2023 keep of one question, all of equal score."""
    kept: list[str] = []
    kept_keys: list[int] = []
    for text, key in zip(texts, keys, strict=True):
        if key not in kept_keys:
            kept.append(text)
            kept_keys.append(key)
            continue
        place = kept_keys.index(key)
        now, new = (
            sum(edit_distance(t, other) for other in kept if other != kept[place])
            for t in (kept[place], text)
        )
        if new > now:
            kept[place] = text
    return kept


def test_the_farthest_wording_is_kept_as_in_the_paper() -> None:
    rng = random.Random(0)
    replaced = 0
    for _ in range(200):
        count = rng.randint(1, 8)
        keys = [rng.randint(0, 2) for _ in range(count)]
        texts = [f"{k}" + "".join(rng.choices("abc", k=rng.randint(0, 6))) for k in keys]
        order = rng.sample(range(count), count)

        repeated = far_repeats(
            np.zeros(count, dtype=np.int64),
            np.array(keys),
            np.array(order, dtype=np.int32),
            np.ones(count, dtype=np.float32),
            texts,
        )

        by_rank = sorted(range(count), key=order.__getitem__)
        expected = paper([texts[i] for i in by_rank], [keys[i] for i in by_rank])
        assert sorted(t for t, r in zip(texts, repeated, strict=True) if not r) == sorted(expected)
        first = [next(texts[i] for i in by_rank if keys[i] == key) for key in set(keys)]
        replaced += sorted(first) != sorted(expected)
    assert replaced > 20


def test_a_lower_score_never_takes_a_place() -> None:
    texts, keys = ["aaa", "b", "bbbbbbbbbb"], np.array([0, 1, 1])
    rank, group = np.arange(3, dtype=np.int32), np.zeros(3, dtype=np.int64)
    for last, expected in ((1.0, [False, True, False]), (0.5, [False, False, True])):
        score = np.array([1.0, 1.0, last], dtype=np.float32)
        assert far_repeats(group, keys, rank, score, texts).tolist() == expected
