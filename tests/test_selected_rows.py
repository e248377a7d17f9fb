import json
import os
from dataclasses import replace
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from conftest import made_round, scored

from rft_batch.errors import DataError
from rft_batch.generation import generate
from rft_batch.selected_rows import (
    COLUMNS,
    count_selected,
    load_selected,
    over_limit_left_out,
    selection_digest,
)
from rft_batch.selection import select
from rft_batch.settings import GenerateSettings, SelectSettings


def test_exactly_the_selected_rows_are_loaded(selected: Path, tmp_path: Path) -> None:
    rows = load_selected([selected], "selection", tmp_path)

    expected = []
    for path in sorted((selected / "samples").glob("shard-*.parquet")):
        flags = pq.read_table(selected / "selection" / path.name)["selected"].to_pylist()
        samples = pq.read_table(path, columns=COLUMNS[:-1]).to_pylist()
        expected += [
            row | {"round_number": 1} for row, kept in zip(samples, flags, strict=True) if kept
        ]
    assert rows.to_list() == expected
    assert len(rows) == 14
    assert rows.cache_files[0]["filename"].startswith(str(tmp_path))


def test_only_row_groups_with_selected_rows_are_read(
    selected: Path, tmp_path: Path, read_groups: list[int]
) -> None:
    load_selected([selected], "selection", tmp_path)
    # Ranks 0, 1 and 2-3 stand in groups of their own; the last is not touched.
    assert read_groups == [0, 1] * 4


def test_a_second_load_reads_the_arrow_file_alone(selected: Path, tmp_path: Path) -> None:
    first = load_selected([selected], "selection", tmp_path).to_list()
    for path in (selected / "samples").glob("shard-*.parquet"):
        path.write_bytes(b"gone")
    assert load_selected([selected], "selection", tmp_path).to_list() == first


def test_another_content_of_the_same_size_and_time_is_noticed(
    settings: GenerateSettings, tmp_path: Path
) -> None:
    generate(settings)
    round_dir = settings.round_dir
    select(SelectSettings(round_dir=round_dir))
    before = selection_digest([round_dir], "selection")
    stats = {p.name: p.stat() for p in (round_dir / "samples").iterdir()}

    for folder in ("samples", "selection"):
        for path in (round_dir / folder).iterdir():
            path.unlink()
    generate(replace(settings, seed=1))
    select(SelectSettings(round_dir=round_dir))
    for path in (round_dir / "samples").iterdir():
        os.utime(path, ns=(stats[path.name].st_atime_ns, stats[path.name].st_mtime_ns))

    assert selection_digest([round_dir], "selection") != before


def test_flags_of_other_samples_are_refused(settings: GenerateSettings, tmp_path: Path) -> None:
    generate(settings)
    select(SelectSettings(round_dir=settings.round_dir))
    for path in (settings.round_dir / "samples").iterdir():
        path.unlink()
    generate(replace(settings, seed=1))
    with pytest.raises(DataError, match="its flags belong to other samples than"):
        load_selected([settings.round_dir], "selection", tmp_path)


def test_an_empty_selection_is_refused(sampled: Path, tmp_path: Path) -> None:
    select(SelectSettings(round_dir=sampled, min_score=99))
    with pytest.raises(DataError, match="nothing is selected, so there is nothing to train on"):
        load_selected([sampled], "selection", tmp_path)
    assert not list(tmp_path.glob("*.arrow"))


def test_a_damaged_flag_shard_is_refused(selected: Path, tmp_path: Path) -> None:
    path = selected / "selection" / "shard-00001.parquet"
    content = bytearray(path.read_bytes())
    content[40] ^= 1
    path.write_bytes(content)
    with pytest.raises(DataError, match=str(path)):
        load_selected([selected], "selection", tmp_path)


@pytest.fixture
def rounds(settings: GenerateSettings) -> list[Path]:
    """Two rounds, the newest first."""
    for number in (1, 2):
        folder = settings.round_dir.parent / f"round-{number}"
        generate(replace(settings, round_dir=folder))
        select(SelectSettings(round_dir=folder, top_k=2))
    return [settings.round_dir.parent / f"round-{number}" for number in (2, 1)]


def test_rounds_are_joined_without_repeats(rounds: list[Path], tmp_path: Path) -> None:
    both = load_selected(rounds, "selection", tmp_path).to_list()
    newest, other = (load_selected([folder], "selection", tmp_path).to_list() for folder in rounds)
    known = [(row["prompt_id"], row["completion_ids"]) for row in newest]
    new = [row for row in other if (row["prompt_id"], row["completion_ids"]) not in known]
    assert both == newest + new
    assert {row["round_number"] for row in new} == {1}
    assert 0 < len(new) < 14
    assert count_selected(rounds, "selection") == 28


def test_a_completion_of_several_rounds_is_taken_once(
    settings: GenerateSettings, rounds: list[Path], tmp_path: Path
) -> None:
    again = settings.round_dir.parent / "again"
    generate(replace(settings, round_dir=again, round_number=1))
    select(SelectSettings(round_dir=again, top_k=3))

    rows = load_selected([again, rounds[1]], "selection", tmp_path).to_list()

    assert count_selected([again, rounds[1]], "selection") == 21 + 14
    assert rows == load_selected([again], "selection", tmp_path).to_list()


def test_a_prompt_has_at_most_so_many_rows_of_all_rounds(tmp_path: Path) -> None:
    ids = [[[10 * r + i] for i in range(3)] for r in range(2)]
    newest = made_round(
        tmp_path / "round-2",
        [scored("p", 5, 7, 1, completion_ids=ids[0]), scored("q", 1, 1, 1, completion_ids=ids[0])],
    )
    oldest = made_round(tmp_path / "round-1", [scored("p", 5, 9, 5, completion_ids=ids[1])])
    rounds = [newest, oldest]
    for folder in rounds:
        select(SelectSettings(round_dir=folder, top_k=3))

    def kept(limit: int | None) -> list[tuple[str, int]]:
        rows = load_selected(rounds, "selection", tmp_path, limit).to_list()
        return sorted((row["prompt_id"], row["completion_ids"][0]) for row in rows)

    def left_out(limit: int | None) -> int:
        return over_limit_left_out(rounds, "selection", tmp_path, limit)

    assert len(kept(None)) == 9
    assert kept(2) == [("p", 1), ("p", 11), ("q", 0), ("q", 1)]
    # Of three rows of score 5 that of the newer round goes first, then the lower sample index.
    assert kept(3) == [("p", 0), ("p", 1), ("p", 11), ("q", 0), ("q", 1), ("q", 2)]
    assert [row for row in kept(4) if row[0] == "p"] == [("p", 0), ("p", 1), ("p", 10), ("p", 11)]
    assert [left_out(limit) for limit in (None, 2, 3, 4)] == [0, 5, 3, 2]
    assert len(list(tmp_path.glob("selected-*.arrow"))) == 4


def test_a_manifest_that_names_no_folder_of_samples_means_samples(
    selected: Path, tmp_path: Path
) -> None:
    path = selected / "selection" / "manifest.json"
    manifest = json.loads(path.read_text())
    rows = load_selected([selected], "selection", tmp_path / "one").to_list()
    assert manifest.pop("samples") == "samples"
    path.write_text(json.dumps(manifest))
    assert load_selected([selected], "selection", tmp_path / "two").to_list() == rows
    for name in ("../samples", "..", "", 3):
        path.write_text(json.dumps(manifest | {"samples": name}))
        with pytest.raises(DataError, match="is not the name of a folder of samples"):
            load_selected([selected], "selection", tmp_path)
