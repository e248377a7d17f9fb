"""The rules of `select` on samples whose scores are given; files are in test_selection.py."""

import json
import sys
import tempfile
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pyarrow.parquet as pq
import pytest
from conftest import made_round, scored
from hypothesis import given, settings
from hypothesis import strategies as st

from rft_batch.errors import DataError, InputError
from rft_batch.files import publish_json
from rft_batch.randomness import SampleNoise, Stream
from rft_batch.selected_rows import load_selected
from rft_batch.selection import select
from rft_batch.settings import SelectSettings
from rft_batch.verification import verify_round

NAN, INF = float("nan"), float("inf")
Key = tuple[str, int]


def reasons(round_dir: Path, into: str = "selection") -> dict[Key, str]:
    found = {}
    for path in sorted((round_dir / into).glob("shard-*.parquet")):
        for row in pq.read_table(path).to_pylist():
            found[row["prompt_id"], row["sample_index"]] = row["reason"]
    return found


def kept(round_dir: Path, **rules: Any) -> list[str]:
    """The samples that are kept, as `prompt:index`."""
    rules = {"into": "selection", **rules}
    select(SelectSettings(round_dir=round_dir, **rules))
    found = reasons(round_dir, rules["into"]).items()
    return sorted(f"{p}:{i}" for (p, i), why in found if why in ("top_k", "random"))


def of_prompt(round_dir: Path, prompt_id: str, into: str = "selection") -> list[str]:
    found = reasons(round_dir, into)
    return [found[key] for key in sorted(found) if key[0] == prompt_id]


def test_scores_that_are_not_finite_are_never_kept(tmp_path: Path) -> None:
    shard = [*scored("a", 1, NAN, 3), *scored("b", NAN, NAN), *scored("c", INF, 1)]
    made_round(tmp_path, [shard])
    manifest = select(SelectSettings(round_dir=tmp_path, top_k=1))
    assert of_prompt(tmp_path, "a") == ["below_top_k", "not_scored", "top_k"]
    assert of_prompt(tmp_path, "b") == ["not_scored", "not_scored"]
    assert of_prompt(tmp_path, "c") == ["not_scored", "top_k"]
    assert manifest["counts"]["prompts_with_none"] == 1


def test_null_is_not_a_score(tmp_path: Path) -> None:
    made_round(tmp_path, [scored("a", None, 1, 1, 3)])
    assert kept(tmp_path, top_k=3, into="three") == ["a:1", "a:2", "a:3"]
    manifest = select(SelectSettings(round_dir=tmp_path, top_k=4))
    assert manifest["counts"]["selected"] == 3
    assert manifest["counts"]["prompts_with_fewer"] == 1


def test_prompts_of_equal_text_are_not_one_prompt(tmp_path: Path) -> None:
    made_round(tmp_path, [[*scored("a", 1, 2), *scored("b", 3, 4)]])
    assert kept(tmp_path, top_k=2) == ["a:0", "a:1", "b:0", "b:1"]
    manifest = select(SelectSettings(round_dir=tmp_path, top_k=5, into="five"))
    assert manifest["counts"]["selected"] == 4
    assert manifest["counts"]["prompts_with_fewer"] == 2
    with pytest.raises(DataError, match="2 of 2 prompts have fewer than --top-k 5"):
        select(SelectSettings(round_dir=tmp_path, top_k=5, into="strict", strict_k=True))


def test_ties_go_to_the_lower_index_in_any_order_of_rows(tmp_path: Path) -> None:
    rows = scored("a", *[1] * 8)
    for name, given_rows in (("one", rows), ("two", rows[::-1]), ("three", rows[3:] + rows[:3])):
        made_round(tmp_path / name, [given_rows])
        assert kept(tmp_path / name, top_k=3) == ["a:0", "a:1", "a:2"]
    one, two = (tmp_path / n / "selection" / "shard-00000.parquet" for n in ("one", "two"))
    # The digest of the samples that stands in them is equal too: shards are written rank-major.
    assert one.read_bytes() == two.read_bytes()


def test_equal_completions_are_kept_once(tmp_path: Path) -> None:
    ids = [[1, 2], [1, 2], [3]]
    made_round(
        tmp_path,
        [
            [
                *scored("p", 0.9, 0.9, 0.5, completion_ids=ids),
                *scored("q", 1, 2, 3, completion_ids=ids),
            ]
        ],
    )
    assert kept(tmp_path, top_k=2, into="plain") == ["p:0", "p:1", "q:1", "q:2"]
    assert kept(tmp_path, top_k=2, distinct_by="completion") == ["p:0", "p:2", "q:1", "q:2"]
    assert of_prompt(tmp_path, "p") == ["top_k", "duplicate", "top_k"]
    assert of_prompt(tmp_path, "q") == ["duplicate", "top_k", "top_k"]


def test_completions_are_read_only_when_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made_round(tmp_path, [scored("p", 1, 2, completion_ids=[[1], [1]])])
    columns: list[list[str]] = []
    original = pq.ParquetFile.read

    def read(self: pq.ParquetFile, names: list[str]) -> Any:
        columns.append(names)
        return original(self, names)

    monkeypatch.setattr(pq.ParquetFile, "read", read)
    plain = ["prompt_id", "sample_index", "rank", "score", "finish_reason"]
    select(SelectSettings(round_dir=tmp_path))
    select(SelectSettings(round_dir=tmp_path, into="distinct", distinct_by="completion"))
    assert columns == [plain, [*plain, "completion_ids"]]


def test_equations_of_the_paper(tmp_path: Path) -> None:
    texts = [
        "one <<1+1=2>>", "one! <<1 + 1 = 2>>", "wrong <<1+1=3>>", "<<2+2=4>>", "none", "nothing",
    ]  # fmt: skip
    made_round(tmp_path, [scored("p", *[1] * 6, completion=texts)])
    assert kept(tmp_path, top_k=9, distinct_by="equations") == ["p:0", "p:3", "p:5"]
    why = ["top_k", "duplicate", "banned", "top_k", "duplicate", "top_k"]
    assert of_prompt(tmp_path, "p") == why


def test_a_function_is_called_once_for_what_is_eligible(tmp_path: Path) -> None:
    keys = tmp_path / "keys.py"
    keys.write_text(
        "calls = []\n"
        "def key(completion_ids, prompt_id):\n"
        "    calls.append((prompt_id, completion_ids[0]))\n"
        "    return None if completion_ids[0] == 2 else completion_ids[0] % 2\n"
    )
    made_round(
        tmp_path,
        [
            scored(
                "p", 5, 4, 3, 0, None, 9,
                completion_ids=[[0], [1], [2], [3], [4], [5]],
                finish_reason=["stop"] * 5 + ["length"],
            ),
            scored("q", *[7] * 6, completion_ids=[[1]] * 6),
        ],
    )  # fmt: skip
    rules = {"distinct_by": f"{keys}:key", "min_score": 1, "drop_no_spread": True, "top_k": 2}
    for scope in ("prompt", "global"):
        assert kept(tmp_path, scope=scope, into=scope, **rules) == ["p:0", "p:1"]
        module = sys.modules["_rft_user_keys"]
        assert sorted(module.calls) == [("p", 0), ("p", 1), ("p", 2)]
        module.calls.clear()
    assert of_prompt(tmp_path, "p", "prompt") == [
        "top_k", "top_k", "banned", "below_min_score", "not_scored", "truncated",
    ]  # fmt: skip


def test_a_changed_function_is_another_selection(tmp_path: Path) -> None:
    keys = tmp_path / "keys.py"
    made_round(tmp_path, [scored("p", 1, 2)])
    rules = SelectSettings(round_dir=tmp_path, distinct_by=f"{keys}:key")
    keys.write_text("def key(prompt_id): return 1\n")
    select(rules)
    keys.write_text("def key(prompt_id): return None\n")
    with pytest.raises(InputError, match=r"distinct_by: recorded \{'name': 'keys.py:key', 'dig"):
        select(rules)


def test_prompts_whose_scores_are_all_equal_can_be_dropped(tmp_path: Path) -> None:
    scores = {"a": [0.4] * 4, "b": [0, 1, 0, 1], "c": [0.4] * 3 + [0.4 + 1e-7]}
    made_round(tmp_path, [scored(name, *values) for name, values in scores.items()])
    plain = select(SelectSettings(round_dir=tmp_path, into="plain"))
    assert plain["counts"]["selected"] == 6
    assert plain["counts"]["prompts_without_spread"] == 1
    manifest = select(SelectSettings(round_dir=tmp_path, drop_no_spread=True))
    assert manifest["reasons"] == {"top_k": 4, "below_top_k": 4, "no_spread": 4}
    assert manifest["counts"]["prompts_without_spread"] == 1
    assert of_prompt(tmp_path, "a") == ["no_spread"] * 4


def test_prompts_that_are_too_easy_can_be_dropped(tmp_path: Path) -> None:
    made_round(tmp_path, [scored("a", 1, 1, 0, None), scored("b", 1, 0, 0, 0)])
    rules = {"min_score": 0.5, "top_k": 1}
    assert kept(tmp_path, max_pass_rate=0.5, **rules) == ["b:0"]
    assert of_prompt(tmp_path, "a") == ["too_easy"] * 4
    # Two of three that were scored.
    assert kept(tmp_path, max_pass_rate=2 / 3, into="at", **rules) == ["a:0", "b:0"]


def test_the_scope_decides_what_is_compared(tmp_path: Path) -> None:
    made_round(tmp_path, [scored("A", 9, 8), scored("B", 2, 1)])
    assert kept(tmp_path, top_k=1) == ["A:0", "B:0"]
    manifest = select(SelectSettings(round_dir=tmp_path, scope="global", top_k=2, into="all"))
    assert reasons(tmp_path, "all") == {
        ("A", 0): "top_k", ("A", 1): "top_k", ("B", 0): "below_top_k", ("B", 1): "below_top_k",
    }  # fmt: skip
    assert manifest["identity"]["scope"] == "global"
    assert manifest["counts"] == {
        "samples": 4, "selected": 2, "prompts": 2, "prompts_with_none": 1,
        "prompts_without_spread": 0,
    }  # fmt: skip


def test_a_fraction_is_of_the_scored_samples_and_exact(tmp_path: Path) -> None:
    made_round(tmp_path, [scored(f"p{i}", *[i] * 10, None) for i in range(10)])
    for fraction, count in ((0.29, 29), (0.07, 7), (1.0, 100), (0.001, 0), (0.999, 99)):
        rules = SelectSettings(
            round_dir=tmp_path, scope="global", top_fraction=fraction, into=f"f{count}"
        )
        assert select(rules)["counts"]["selected"] == count


def test_ties_of_a_round_go_by_rank_then_by_prompt(tmp_path: Path) -> None:
    made_round(tmp_path, [[*scored("c", 5, 5), *scored("a", 5, 5)], scored("b", 9, 5)])
    rules = {"scope": "global"}
    assert kept(tmp_path, top_k=2, into="two", **rules) == ["b:0", "c:0"]
    assert kept(tmp_path, top_k=4, into="four", **rules) == ["a:0", "b:0", "c:0", "c:1"]
    assert kept(tmp_path, top_k=5, into="five", **rules) == ["a:0", "a:1", "b:0", "c:0", "c:1"]


def test_another_folder_of_samples_is_recorded_and_used(tmp_path: Path) -> None:
    round_dir = tmp_path / "round-1"
    made_round(round_dir, [scored("p", 1, 2, 3, completion_ids=[[1], [2], [3]])])
    made_round(round_dir, [scored("p", 3, 2, 1, completion_ids=[[1], [2], [3]])], into="rescored")
    manifest = select(SelectSettings(round_dir=round_dir, samples="rescored", top_k=1))
    assert manifest["samples"] == "rescored"
    (row,) = load_selected([round_dir], "selection", tmp_path).to_list()
    assert (row["sample_index"], row["score"]) == (0, 3.0)
    assert verify_round(round_dir)[0] == []
    (round_dir / "rescored" / "shard-00000.parquet").write_bytes(b"")
    assert any("rescored" in problem for problem in verify_round(round_dir)[0])


def test_a_dry_run_writes_nothing(tmp_path: Path) -> None:
    made_round(tmp_path, [scored("p", 1, 2, 3)])
    rules = {"round_dir": tmp_path, "top_k": 1}
    figures = select(SelectSettings(**rules, dry_run=True))
    assert [path.name for path in tmp_path.iterdir()] == ["samples"]
    manifest = select(SelectSettings(**rules))
    assert figures == {key: manifest[key] for key in figures}
    # Nor does it mind what others have written.
    other = select(SelectSettings(round_dir=tmp_path, top_k=2, dry_run=True))
    assert other["counts"]["selected"] == 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_pass_rate": 0.5}, "--max-pass-rate: needs --min-score, the score that passes."),
        ({"scope": "global"}, "--scope global: needs one of --top-k and --top-fraction."),
        (
            {"scope": "global", "top_k": 1, "top_fraction": 0.5},
            "--scope global: needs one of --top-k and --top-fraction.",
        ),
        ({"top_fraction": 0.5}, "--top-fraction: a share of the whole round. Add --scope global."),
        ({"scope": "global", "top_fraction": 0.0}, "--top-fraction 0.0: must be above 0."),
        (
            {"scope": "global", "top_k": 1, "strict_k": True},
            "--strict-k: counts the samples of a prompt. Leave out --scope global.",
        ),
        (
            {"into": "rescored", "samples": "rescored"},
            "--into rescored: that is the folder of the samples. Choose another name.",
        ),
    ],
)
def test_options_that_contradict_each_other_are_refused(
    changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError) as error:
        SelectSettings(round_dir=Path("r"), **changes)
    assert str(error.value) == message


def reference(shards: list[list[dict[str, Any]]], rules: SelectSettings) -> dict[Key, str]:
    """All rules in plain Python, for samples with `completion_ids` as keys."""
    why: dict[Key, str] = {}
    pools, ordered = {}, []
    rows = [row for shard in shards for row in shard]
    count_scored = sum(row["score"] is not None for row in rows)
    prompts: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        prompts.setdefault(row["prompt_id"], []).append(row)
    for place, (prompt_id, listed) in enumerate(prompts.items()):
        good = [row for row in listed if row["score"] is not None]
        good.sort(key=lambda row: (-row["score"], row["sample_index"]))
        values = [row["score"] for row in good]
        drop = ""
        if rules.drop_no_spread and len(values) > 1 and len(set(values)) == 1:
            drop = "no_spread"
        elif rules.max_pass_rate is not None and values:
            passed = sum(value >= (rules.min_score or 0) for value in values)
            drop = "too_easy" if passed / len(values) > rules.max_pass_rate else ""
        seen = set()
        pools[prompt_id] = []
        for row in listed:
            if row["score"] is None:
                why[prompt_id, row["sample_index"]] = drop or "not_scored"
        for rank, row in enumerate(good):
            cut = row["finish_reason"] == "length" and not rules.keep_truncated
            if not drop and not cut:
                pools[prompt_id].append(row)
            key = tuple(row["completion_ids"]) if rules.distinct_by else row["sample_index"]
            if drop:
                reason = drop
            elif cut:
                reason = "truncated"
            elif rules.min_score is not None and row["score"] < rules.min_score:
                reason = "below_min_score"
            elif key in seen:
                reason = "duplicate"
            else:
                seen.add(key)
                reason = "below_top_k"
                ordered.append((-row["score"], rank, place, prompt_id, row["sample_index"]))
            why[prompt_id, row["sample_index"]] = reason
    if rules.scope == "global":
        count = rules.top_k
        if count is None:
            count = int(Decimal(str(rules.top_fraction)) * count_scored)
        best = sorted(ordered)[:count]
    else:
        best = [
            entry
            for prompt_id in prompts
            for entry in [e for e in ordered if e[3] == prompt_id][: rules.top_k or 2]
        ]
    for *_, prompt_id, index in best:
        why[prompt_id, index] = "top_k"
    if rules.strategy == "best":
        return why
    for prompt_id, pool in pools.items():
        budget = sum(entry[3] == prompt_id for entry in best)
        pool.sort(
            key=lambda row: SampleNoise.for_sample(
                rules.seed, 1, row["prompt_id"], row["sample_index"]
            ).words(Stream.SELECTION, 0, 1)[0]
        )
        seen = set()
        for row in pool:
            key = tuple(row["completion_ids"]) if rules.distinct_by else row["sample_index"]
            if key in seen:
                why[prompt_id, row["sample_index"]] = "duplicate"
            else:
                drawn = "random" if len(seen) < budget else "not_drawn"
                why[prompt_id, row["sample_index"]] = drawn
                seen.add(key)
    return why


@st.composite
def rounds(draw: st.DrawFn) -> list[list[dict[str, Any]]]:
    per_prompt = draw(st.integers(1, 6))
    row = st.tuples(
        st.none() | st.sampled_from([-1.0, -0.0, 0.0, 0.25, 0.5, 1.0]),
        st.sampled_from([[], [1], [2], [1, 2]]),
        st.sampled_from(["stop", "stop", "length"]),
    )
    shards = draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))
    made, number = [], 0
    for prompts in shards:
        shard = []
        for _ in range(prompts):
            scores, ids, finish = zip(
                *draw(st.lists(row, min_size=per_prompt, max_size=per_prompt)), strict=True
            )
            number += 1
            shard += scored(
                f"p{-number}", *scores, completion_ids=list(ids), finish_reason=list(finish)
            )
        made.append(shard)
    return made


@st.composite
def all_rules(draw: st.DrawFn) -> dict[str, Any]:
    rules: dict[str, Any] = {
        "strategy": draw(st.sampled_from(["best", "random"])),
        "seed": draw(st.integers(0, 3)),
        "distinct_by": draw(st.sampled_from([None, "completion"])),
        "drop_no_spread": draw(st.booleans()),
        "keep_truncated": draw(st.booleans()),
        "min_score": draw(st.sampled_from([None, 0.0, 0.25, 0.9])),
        "scope": draw(st.sampled_from(["prompt", "global"])),
    }
    if rules["min_score"] is not None:
        rules["max_pass_rate"] = draw(st.sampled_from([None, 0.0, 0.5, 2 / 3]))
    if rules["scope"] == "global" and draw(st.booleans()):
        return rules | {"top_fraction": draw(st.sampled_from([0.1, 1 / 3, 0.5, 1.0]))}
    return rules | {"top_k": draw(st.integers(1, 7))}


@settings(max_examples=60)
@given(rounds(), all_rules())
def test_all_rules_together_are_those_of_a_plain_reference(
    shards: list[list[dict[str, Any]]], rules: dict[str, Any]
) -> None:
    # Waiting for the disk is what takes the time, and is not what is tested.
    with tempfile.TemporaryDirectory() as folder, patch("os.fsync"):
        round_dir = made_round(Path(folder), shards)
        given_rules = SelectSettings(round_dir=round_dir, **rules)

        manifest = select(given_rules)

        expected = reference(shards, given_rules)
        found = reasons(round_dir)
        assert found == expected
        assert manifest["counts"]["selected"] == list(expected.values()).count("top_k") + list(
            expected.values()
        ).count("random")
        if rules["strategy"] == "random":
            best = select(replace(given_rules, strategy="best", dry_run=True))
            for name in ("prompts", "selected", "prompts_with_none"):
                assert best["counts"][name] == manifest["counts"][name]


def test_completions_of_too_few_tokens_are_left_out_and_counted(tmp_path: Path) -> None:
    # C09: the likeliest way to please many rewards is to say nothing. 9 ends a text.
    ids = [[9], [], [5, 9], [5], [5, 9, 6, 9]]
    round_dir = made_round(tmp_path, [scored("p", 5, 4, 3, 2, 1, completion_ids=ids)])
    manifest = json.loads((round_dir / "samples/manifest.json").read_text())
    publish_json(round_dir / "samples/manifest.json", manifest | {"policy": {"end_ids": [9]}})

    assert kept(tmp_path, top_k=5, into="all") == ["p:0", "p:1", "p:2", "p:3", "p:4"]
    assert kept(tmp_path, top_k=5, min_tokens=1, into="some") == ["p:2", "p:3", "p:4"]
    assert kept(tmp_path, top_k=5, min_tokens=2, into="few") == ["p:4"]
    reasons = json.loads((round_dir / "few/manifest.json").read_text())["reasons"]
    assert reasons == {"top_k": 1, "too_short": 4}
    with_keys = {"distinct_by": "completion", "min_tokens": 1, "strategy": "random"}
    assert kept(tmp_path, top_k=5, into="drawn", **with_keys) == ["p:2", "p:3", "p:4"]
