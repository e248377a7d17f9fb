from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from rft_batch.errors import DataError, InputError
from rft_batch.files import file_digest
from rft_batch.generation import generate
from rft_batch.schema import FLAGS
from rft_batch.selected_rows import load_selected
from rft_batch.selection import select
from rft_batch.settings import GenerateSettings, SelectSettings
from rft_batch.shards import shard_info, write_samples
from rft_batch.verification import verify_round


def joined(round_dir: Path, into: str = "selection") -> list[dict[str, Any]]:
    found = []
    for path in sorted((round_dir / "samples").glob("shard-*.parquet")):
        flags = pq.read_table(round_dir / into / path.name).to_pylist()
        samples = pq.read_table(path).to_pylist()
        for flag, sample in zip(flags, samples, strict=True):
            assert flag["prompt_id"] == sample["prompt_id"]
            assert flag["sample_index"] == sample["sample_index"]
            found.append(sample | flag)
    return found


def test_the_best_k_of_every_prompt_are_flagged(sampled: Path) -> None:
    manifest = select(SelectSettings(round_dir=sampled, top_k=2))
    found = joined(sampled)
    assert {(r["rank"], r["selected"], r["reason"]) for r in found} == {
        (0, True, "top_k"),
        (1, True, "top_k"),
        (2, False, "below_top_k"),
        (3, False, "below_top_k"),
    }
    assert manifest["counts"] == {
        "samples": 28,
        "selected": 14,
        "prompts": 7,
        "prompts_with_fewer": 0,
        "prompts_with_none": 0,
        "prompts_without_spread": 0,
    }
    assert manifest["reasons"] == {"top_k": 14, "below_top_k": 14}


def test_samples_are_not_touched(sampled: Path) -> None:
    before = {p: (file_digest(p), p.stat().st_mtime_ns) for p in (sampled / "samples").iterdir()}
    select(SelectSettings(round_dir=sampled))
    after = {p: (file_digest(p), p.stat().st_mtime_ns) for p in (sampled / "samples").iterdir()}
    assert after == before


def test_flag_shards_name_the_samples_that_they_belong_to(selected: Path) -> None:
    for path in (selected / "selection").glob("shard-*.parquet"):
        info = shard_info(path)
        assert pq.read_schema(path).remove_metadata() == FLAGS.remove_metadata()
        assert info.metadata["samples"] == file_digest(selected / "samples" / path.name)


def test_a_prompt_with_too_few_good_samples_keeps_what_it_has(sampled: Path) -> None:
    scores = sorted(row["score"] for row in joined_samples(sampled))
    threshold = scores[len(scores) * 3 // 4]
    manifest = select(SelectSettings(round_dir=sampled, top_k=2, min_score=threshold))
    kept = [row for row in joined(sampled) if row["selected"]]
    assert kept
    assert all(row["score"] >= threshold for row in kept)
    of_prompt = {f"p{i}": sum(row["prompt_id"] == f"p{i}" for row in kept) for i in range(7)}
    counts = manifest["counts"]
    assert counts["prompts_with_none"] == sum(n == 0 for n in of_prompt.values())
    assert counts["prompts_with_fewer"] == sum(n == 1 for n in of_prompt.values())
    assert counts["selected"] == sum(of_prompt.values()) < 14


def joined_samples(round_dir: Path) -> list[dict[str, Any]]:
    paths = sorted((round_dir / "samples").glob("shard-*.parquet"))
    return [row for path in paths for row in pq.read_table(path).to_pylist()]


def test_top_k_above_the_samples_keeps_all_and_counts_the_shortage(sampled: Path) -> None:
    manifest = select(SelectSettings(round_dir=sampled, top_k=5))
    assert manifest["counts"]["selected"] == 28
    assert manifest["counts"]["prompts_with_fewer"] == 7


def test_strictness_is_asked_for(sampled: Path) -> None:
    with pytest.raises(DataError) as error:
        select(SelectSettings(round_dir=sampled, top_k=5, strict_k=True))
    assert str(error.value) == (
        "7 of 7 prompts have fewer than --top-k 5 samples to keep. "
        "Lower --top-k or --min-score, or leave out --strict-k."
    )
    with pytest.raises(DataError, match=r"^nothing is selected of 28 samples"):
        select(SelectSettings(round_dir=sampled, min_score=99, require_nonempty=True))
    assert select(SelectSettings(round_dir=sampled, min_score=99))["counts"]["selected"] == 0


def test_samples_without_a_score_are_never_selected(
    settings: GenerateSettings, reward_file: Callable[[str], str]
) -> None:
    reference = reward_file(
        "return [[0.2, float('nan'), None, 0.9][i % 4] for i in range(len(prompts))]"
    )
    generate(replace(settings, reward=(reference,), max_error_rate=1.0))
    manifest = select(SelectSettings(round_dir=settings.round_dir, top_k=4))
    assert manifest["reasons"] == {"top_k": 14, "not_scored": 14}
    assert all(row["score"] is not None for row in joined(settings.round_dir) if row["selected"])


def test_the_random_control_keeps_as_many_of_every_prompt(sampled: Path) -> None:
    rules = SelectSettings(round_dir=sampled, top_k=2, min_score=0.05)
    best = select(rules)
    drawn = select(replace(rules, strategy="random", into="random"))
    again = select(replace(rules, strategy="random", into="again"))
    other = select(replace(rules, strategy="random", into="other", seed=1))

    assert drawn["counts"] == best["counts"] == again["counts"] == other["counts"]
    kept = {
        name: [(r["prompt_id"], r["sample_index"]) for r in joined(sampled, name) if r["selected"]]
        for name in ("selection", "random", "again", "other")
    }
    assert kept["random"] == kept["again"] != kept["other"]
    assert kept["random"] != kept["selection"]
    for name in kept:
        assert sorted(p for p, _ in kept[name]) == sorted(p for p, _ in kept["selection"])


def test_the_same_selection_gives_the_same_bytes(sampled: Path) -> None:
    for into in ("one", "two"):
        select(SelectSettings(round_dir=sampled, into=into, top_k=3))
    names = sorted(path.name for path in (sampled / "one").glob("*.parquet"))
    assert len(names) == 4
    one, two = (
        [pq.read_table(sampled / into / name).to_pylist() for name in names]
        for into in ("one", "two")
    )
    assert one == two


def test_a_changed_setting_is_refused(selected: Path) -> None:
    before = {path: file_digest(path) for path in (selected / "selection").iterdir()}
    with pytest.raises(InputError) as error:
        select(SelectSettings(round_dir=selected, top_k=3))
    assert str(error.value).splitlines()[1] == "  top_k: recorded 2, now 3"
    assert {path: file_digest(path) for path in (selected / "selection").iterdir()} == before


def test_an_incomplete_stage_is_refused(settings: GenerateSettings) -> None:
    generate(replace(settings, limit=2))
    with pytest.raises(DataError) as error:
        select(SelectSettings(round_dir=settings.round_dir))
    folder = settings.round_dir / "samples"
    assert str(error.value) == (
        f"{folder / 'manifest.json'}: not found, so this stage is not complete. "
        f"Run rft-batch generate {settings.round_dir}."
    )


def test_the_finished_shards_of_a_stage_can_be_selected_from(
    settings: GenerateSettings, tmp_path: Path
) -> None:
    generate(replace(settings, limit=3))
    round_dir = settings.round_dir
    partial = SelectSettings(round_dir=round_dir, allow_partial=True)
    made = {p: p.stat().st_mtime_ns for p in (round_dir / "samples").glob("*.parquet")}

    manifest = select(partial)

    assert manifest["counts"]["prompts"] == 4
    assert select(partial) == manifest
    rows = load_selected([round_dir], "selection", tmp_path).to_list()
    assert {row["prompt_id"] for row in rows} == {"p0", "p1", "p2", "p3"}
    assert verify_round(round_dir)[0] == []

    generate(settings)

    assert {p: p.stat().st_mtime_ns for p in made} == made
    with pytest.raises(InputError, match=r"made with other settings:\n  samples: recorded"):
        select(partial)
    with pytest.raises(DataError) as error:
        load_selected([round_dir], "selection", tmp_path)
    assert str(error.value) == (
        f"{round_dir / 'selection'}: selected from 2 of 4 shards, before the samples were "
        f"complete. Remove {round_dir / 'selection'} and run rft-batch select again."
    )
    assert select(replace(partial, into="whole"))["counts"]["prompts"] == 7


def test_a_partial_stage_without_shards_and_one_with_others_are_refused(
    settings: GenerateSettings,
) -> None:
    partial = SelectSettings(round_dir=settings.round_dir, allow_partial=True)
    folder = settings.round_dir / "samples"
    with pytest.raises(DataError, match="not found, so this stage is not complete"):
        select(partial)
    generate(replace(settings, limit=3))
    path = folder / "shard-00001.parquet"
    content = path.read_bytes()
    write_samples(path, pq.read_table(path), {"fingerprint": "other"})
    with pytest.raises(DataError, match=rf"^{path}: made with other settings \(fingerprint other"):
        select(partial)
    path.write_bytes(content[:100])
    with pytest.raises(DataError, match=rf"^{path}: damaged or not a shard"):
        select(partial)
    path.unlink()
    (folder / "shard-00000.parquet").unlink()
    with pytest.raises(DataError, match="no shard is finished yet, so there is nothing to sel"):
        select(partial)


def test_a_missing_or_cut_shard_is_named(sampled: Path) -> None:
    path = sampled / "samples" / "shard-00002.parquet"
    content = path.read_bytes()
    path.write_bytes(content[:-1])
    with pytest.raises(
        DataError, match=rf"{path}: the manifest records {len(content)} bytes, it has"
    ):
        select(SelectSettings(round_dir=sampled))
    path.unlink()
    with pytest.raises(DataError, match=r"shard-00002.parquet: .*it is missing"):
        select(SelectSettings(round_dir=sampled))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"top_k": 0}, "--top-k 0: must be at least 1."),
        ({"top_k": -1}, "--top-k -1: must be at least 1."),
        ({"strategy": "worst"}, "--strategy 'worst': choose one of best, random."),
        ({"min_score": float("nan")}, "--min-score nan: not a number."),
    ],
)
def test_settings_out_of_range_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError) as error:
        SelectSettings(round_dir=Path("r"), **changes)
    assert str(error.value) == message
