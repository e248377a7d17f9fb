from pathlib import Path

import datasets
import duckdb
import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rft_batch.errors import DataError
from rft_batch.schema import FLAGS, SAMPLES, SCHEMA_VERSION
from rft_batch.shards import (
    rank_group_bounds,
    read_columns,
    read_rows,
    shard_info,
    unfinished_shards,
    write_samples,
)


def sample_table(num_prompts: int = 20, samples_per_prompt: int = 16) -> pa.Table:
    """Prompt-major rows; the last sample of every prompt has no score."""
    count = num_prompts * samples_per_prompt
    rank = np.tile(np.arange(samples_per_prompt, dtype=np.int32), num_prompts)
    unscored = rank == samples_per_prompt - 1
    rng = np.random.default_rng(0)
    columns = {
        "prompt_id": [f"p{i // samples_per_prompt}" for i in range(count)],
        "sample_index": rank,
        "rank": pa.array(rank, mask=unscored),
        "score": pa.array(1 - rank / 100, type=pa.float32(), mask=unscored),
        "score_error": ["the reward returned None" if u else None for u in unscored],
        "prompt": ["3"] * count,
        "prompt_ids": [[]] * count,
        "completion": [None] * count,
        "completion_ids": rng.integers(0, 50_000, (count, 64)).tolist(),
        "finish_reason": ["stop"] * count,
        "reward_terms": [[{"reward": "a", "score": 0.5}]] * count,
        "logprob": [-1.5] * count,
    }
    return pa.table(columns, schema=SAMPLES)


class CountingStream:
    """A file that counts the bytes that are asked of it."""

    closed = False

    def __init__(self, path: Path) -> None:
        self.bytes_read = 0
        self._stream = path.open("rb")

    def read(self, size: int = -1) -> bytes:
        data = self._stream.read(size)
        self.bytes_read += len(data)
        return data

    def __getattr__(self, name: str) -> object:
        return getattr(self._stream, name)


@pytest.fixture
def shard(tmp_path: Path) -> Path:
    path = tmp_path / "shard-00000.parquet"
    write_samples(path, sample_table(), {"fingerprint": "f"})
    return path


def test_rows_come_back_rank_by_rank(shard: Path) -> None:
    table = read_columns(shard, SAMPLES.names)
    order = sorted(sample_table().to_pylist(), key=lambda r: 99 if r["rank"] is None else r["rank"])
    assert table.to_pylist() == order
    assert table.schema.remove_metadata() == SAMPLES.remove_metadata()


def test_row_groups_break_at_powers_of_two_of_the_rank() -> None:
    rank = np.repeat(np.arange(9), 3)
    assert rank_group_bounds(rank) == [0, 3, 6, 12, 24, 27]
    assert rank_group_bounds(np.array([], dtype=np.int64)) == [0]
    assert rank_group_bounds(np.array([0, 0])) == [0, 2]


def test_the_best_of_every_prompt_are_the_first_row_groups(shard: Path) -> None:
    file = pq.ParquetFile(shard)
    column = SAMPLES.get_field_index("rank")
    of_group = [file.metadata.row_group(g).column(column).statistics for g in range(5)]
    assert [(s.min, s.max) for s in of_group] == [(0, 0), (1, 1), (2, 3), (4, 7), (8, 14)]


def test_a_filter_on_rank_reads_the_first_row_groups_alone(tmp_path: Path) -> None:
    path = tmp_path / "large.parquet"
    write_samples(path, sample_table(num_prompts=200), {})
    metadata = pq.ParquetFile(path).metadata
    wanted = sum(metadata.row_group(g).total_byte_size for g in range(2))
    counting = CountingStream(path)

    found = pq.read_table(pa.PythonFile(counting, mode="r"), filters=[("rank", "<", 2)])

    footer_read_ahead = 64 * 1024
    assert len(found) == 400
    assert counting.bytes_read < wanted + footer_read_ahead
    assert counting.bytes_read < path.stat().st_size / 3


def test_duckdb_reads_a_shard(shard: Path) -> None:
    query = f"select count(*), max(score), any_value(completion_ids) from '{shard}' where rank < 2"
    ((count, score, ids),) = duckdb.sql(query).fetchall()
    assert (count, score, len(ids)) == (40, 1.0, 64)
    errors = duckdb.sql(f"select distinct score_error from '{shard}' where score is null")
    assert errors.fetchall() == [("the reward returned None",)]


def test_polars_reads_a_shard(shard: Path) -> None:
    found = pl.scan_parquet(shard).filter(pl.col("rank") < 2).collect()
    assert len(found) == 40
    assert found["completion_ids"][0].len() == 64


def test_datasets_reads_shards(shard: Path, tmp_path: Path) -> None:
    loaded = datasets.load_dataset(
        "parquet",
        data_files=str(shard),
        split="train",
        cache_dir=str(tmp_path / "cache"),
        filters=[("rank", "<", 2)],
    )
    assert len(loaded) == 40
    assert loaded[0]["reward_terms"] == [{"reward": "a", "score": 0.5}]
    assert loaded.column_names == SAMPLES.names


def test_only_the_row_groups_of_the_wanted_rows_are_read(
    shard: Path, read_groups: list[int]
) -> None:
    rows = np.array([0, 25, 39])

    found = read_rows(shard, rows, ["prompt_id", "rank"])

    assert read_groups == [0, 1]
    assert found.to_pylist() == [
        {"prompt_id": "p0", "rank": 0},
        {"prompt_id": "p5", "rank": 1},
        {"prompt_id": "p19", "rank": 1},
    ]
    assert len(read_rows(shard, rows[:0], ["prompt_id"])) == 0


def test_all_shards_have_the_same_schema_whatever_is_null(tmp_path: Path) -> None:
    table = sample_table(2, 2)
    nulls = table.set_column(
        table.schema.get_field_index("score_error"),
        SAMPLES.field("score_error"),
        pa.nulls(len(table)).cast(SAMPLES.field("score_error").type),
    )
    for name, rows in (("a", nulls), ("b", table), ("c", table.slice(0, 0))):
        write_samples(tmp_path / f"{name}.parquet", rows, {})
    schemas = [pq.read_schema(tmp_path / f"{name}.parquet") for name in "abc"]
    assert schemas[0].equals(schemas[1], check_metadata=True)
    assert schemas[0].equals(schemas[2], check_metadata=True)


def test_the_same_rows_give_the_same_bytes(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write_samples(tmp_path / name, sample_table(), {"fingerprint": "f"})
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_every_column_is_described() -> None:
    for field in [*SAMPLES, *FLAGS]:
        assert field.metadata[b"description"]


def test_metadata_carries_the_schema_version(shard: Path) -> None:
    info = shard_info(shard)
    assert info.num_rows == 320
    assert info.metadata == {"fingerprint": "f", "schema_version": str(SCHEMA_VERSION)}


def test_a_newer_schema_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "new.parquet"
    schema = pa.schema([("a", pa.int32())], metadata={"rft_batch.schema_version": "99"})
    pq.write_table(pa.table({"a": [1]}, schema=schema), path)
    with pytest.raises(DataError) as error:
        shard_info(path)
    assert str(error.value) == (
        f'{path}: schema version "99", this rft-batch reads up to {SCHEMA_VERSION}. '
        "Install a newer one."
    )


@pytest.mark.parametrize("size", [0, 1, 0.5, -1])
def test_a_cut_file_is_refused_and_named(shard: Path, size: float) -> None:
    content = shard.read_bytes()
    shard.write_bytes(content[: int(size * len(content)) if size == 0.5 else int(size)])
    with pytest.raises(DataError, match=r"shard-00000\.parquet: damaged or not a shard"):
        shard_info(shard)


def test_a_flipped_bit_is_refused(shard: Path) -> None:
    content = bytearray(shard.read_bytes())
    content[len(content) // 3] ^= 4
    shard.write_bytes(content)
    with pytest.raises(DataError, match="damaged or not a shard"):
        read_columns(shard, SAMPLES.names)


def test_a_shard_of_other_settings_is_refused(shard: Path) -> None:
    assert unfinished_shards(shard.parent, "f", 3) == [1, 2]
    with pytest.raises(DataError, match="made with other settings"):
        unfinished_shards(shard.parent, "g", 3)
