"""Parquet shards and manifests: one shard in, one shard out. Knows nothing about models.

Sample shards are rank-major: rows sorted by rank, then by prompt, and row groups that break where
the rank changes, at ranks 0, 1, 2, 4, 8, ... So the best k of every prompt, for any k, are a prefix
of the row groups, and a reader that filters on `rank` skips the rest by their statistics.
Correctness never depends on that order: what is trained on is said by the flags.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from rft_batch.errors import DataError
from rft_batch.files import file_digest, publish, read_json
from rft_batch.schema import FLAGS, SAMPLES, SCHEMA_VERSION
from rft_batch.settings.options import name_problems

_PREFIX = "rft_batch."
# Larger groups gain nothing and only raise what one row costs to read.
_MAX_GROUP_ROWS = 16_384
_STATISTICS = ["prompt_id", "sample_index", "rank", "score"]


@dataclass(frozen=True)
class ShardInfo:
    """What a shard says about itself without reading its rows."""

    num_rows: int
    metadata: dict[str, str]


def shard_name(number: int) -> str:
    """The file name of a shard."""
    return f"shard-{number:05}.parquet"


def rank_major(table: pa.Table) -> pa.Table:
    """The rows by rank, then in the order given; rows without a rank last."""
    rank = table["rank"].fill_null(np.iinfo(np.int32).max).to_numpy()
    return table.take(pa.array(np.argsort(rank, kind="stable")))


def rank_group_bounds(rank: NDArray[np.int64]) -> list[int]:
    """Row numbers at which row groups begin and the last one ends.

    Args:
        rank: `[rows]`, ascending.

    Returns:
        `[0, ..., rows]`: breaks before ranks 1, 2, 4, 8, ... where such rows exist.
    """
    breaks = {int(np.searchsorted(rank, 1 << power)) for power in range(31)}
    return sorted(breaks | {0, len(rank)})


def write_samples(path: Path, table: pa.Table, metadata: Mapping[str, str]) -> None:
    """Publishes a sample shard, rank-major.

    Args:
        path: the final name.
        table: of schema `SAMPLES`, in any order.
        metadata: key-value metadata, without prefix.
    """
    table = rank_major(table)
    rank = table["rank"].fill_null(np.iinfo(np.int32).max).to_numpy()
    _write(path, table, SAMPLES, metadata, rank_group_bounds(rank))


def write_flags(path: Path, table: pa.Table, metadata: Mapping[str, str]) -> None:
    """Publishes a flag shard, its rows in the order of its sample shard."""
    _write(path, table, FLAGS, metadata, [0, len(table)])


def _write(
    path: Path,
    table: pa.Table,
    schema: pa.Schema,
    metadata: Mapping[str, str],
    bounds: Sequence[int],
) -> None:
    stored = {_PREFIX + key: value for key, value in metadata.items()}
    stored[_PREFIX + "schema_version"] = str(SCHEMA_VERSION)
    schema = schema.with_metadata(stored)
    table = table.cast(schema)
    lists = {name for name in table.column_names if name.endswith("_ids")}

    def write(temporary: Path) -> None:
        with pq.ParquetWriter(
            temporary,
            schema,
            compression="zstd",
            compression_level=1,
            use_dictionary=False,
            column_encoding={f"{name}.list.element": "BYTE_STREAM_SPLIT" for name in lists},
            write_statistics=[name for name in _STATISTICS if name in table.column_names],
            write_page_checksum=True,
        ) as writer:
            for first, last in pairwise(bounds):
                writer.write_table(table.slice(first, last - first), _MAX_GROUP_ROWS)

    publish(path, write)


def shard_info(path: Path) -> ShardInfo:
    """Row count and metadata of a shard, from its footer.

    Raises:
        DataError: it cannot be read, or a newer version of this project wrote it.
    """
    with _open(path) as file:
        return _info(path, file)


def read_columns(path: Path, columns: Sequence[str]) -> pa.Table:
    """Some columns of all rows of a shard, page checksums verified.

    Raises:
        DataError: it cannot be read.
    """
    with _open(path) as file:
        _info(path, file)
        return _checked(path, lambda: file.read(list(columns)))


def ids_as_bytes(ids: pa.ChunkedArray) -> pa.LargeBinaryArray:
    """The bytes of each list of token ids, which Arrow can compare and encode where lists cannot.

    Args:
        ids: `[rows]` of list<int32>.
    """
    lists = ids.combine_chunks()
    values = lists.values
    starts = (lists.offsets.to_numpy().astype(np.int64) + values.offset) * values.type.byte_width
    buffers = [None, pa.py_buffer(starts), values.buffers()[1]]
    return pa.LargeBinaryArray.from_buffers(pa.large_binary(), len(lists), buffers)


def read_rows(path: Path, row_numbers: NDArray[np.int64], columns: Sequence[str]) -> pa.Table:
    """Some rows of a shard; only the row groups that hold them are read.

    Args:
        path: the shard.
        row_numbers: ascending row numbers in the shard.
        columns: what to read of them.

    Raises:
        DataError: it cannot be read.
    """
    with _open(path) as file:
        sizes = [file.metadata.row_group(g).num_rows for g in range(file.num_row_groups)]
        ends = np.cumsum(sizes)
        group_of_row = np.searchsorted(ends, row_numbers, side="right")
        tables = []
        for group in np.unique(group_of_row):
            local = row_numbers[group_of_row == group] - (ends[group] - sizes[group])
            table = _checked(path, lambda g=group: file.read_row_group(int(g), list(columns)))
            tables.append(table.take(pa.array(local)))
        return (
            pa.concat_tables(tables) if tables else file.schema_arrow.empty_table().select(columns)
        )


def unfinished_shards(folder: Path, fingerprint: str, count: int) -> list[int]:
    """Numbers of the shards that are not there yet.

    Raises:
        DataError: one is damaged, or was made with other settings.
    """
    missing = []
    for number in range(count):
        path = folder / shard_name(number)
        if path.exists():
            _check_fingerprint(path, fingerprint)
        else:
            missing.append(number)
    return missing


def finished_shards(folder: Path, fingerprint: str) -> list[Path]:
    """The shards that are there, of a stage that need not be complete.

    Raises:
        DataError: one is damaged, or was made with other settings.
    """
    paths = sorted(folder.glob("shard-*.parquet"))
    for path in paths:
        _check_fingerprint(path, fingerprint)
    return paths


def _check_fingerprint(path: Path, fingerprint: str) -> None:
    if (found := shard_info(path).metadata.get("fingerprint")) != fingerprint:
        raise DataError(
            f"{path}: made with other settings (fingerprint {found}, these are {fingerprint}). "
            "Move it away, or write to another folder."
        )


def shard_entries(paths: Sequence[Path]) -> list[dict[str, Any]]:
    """What a manifest records of each shard: name, rows, bytes and digest."""
    return [
        {
            "name": path.name,
            "rows": shard_info(path).num_rows,
            "bytes": path.stat().st_size,
            "xxh3_128": file_digest(path),
        }
        for path in paths
    ]


def read_manifest(folder: Path, make_it: str) -> dict[str, Any]:
    """The manifest of a complete stage.

    Args:
        folder: the stage's folder.
        make_it: the command that completes the stage, for the error's text.

    Raises:
        DataError: there is none, or it is not one.
    """
    path = folder / "manifest.json"
    if not path.is_file():
        raise DataError(f"{path}: not found, so this stage is not complete. Run {make_it}.")
    manifest: dict[str, Any] = read_json(path)
    return manifest


def samples_folder(manifest: Mapping[str, Any]) -> str:
    """Name of the folder in the round whose samples a manifest of flags is of.

    Raises:
        DataError: it leads out of the round.
    """
    # Manifests that were made before there was a choice do not say it.
    name = manifest.get("samples", "samples")
    if not isinstance(name, str) or any(name_problems("samples", name)):
        raise DataError(f"{name!r} in a manifest of flags is not the name of a folder of samples.")
    return name


def manifest_shards(folder: Path, manifest: Mapping[str, Any]) -> list[Path]:
    """The shards that a manifest lists, each checked to have the size it records.

    Raises:
        DataError: a name leads out of the folder, or a file is missing or of another size.
    """
    paths = []
    for entry in manifest["shards"]:
        path = folder / entry["name"]
        if path.parent != folder or path.is_symlink():
            raise DataError(f'{folder}/manifest.json: "{entry["name"]}" is not a shard\'s name.')
        size = path.stat().st_size if path.is_file() else None
        if size != entry["bytes"]:
            found = "it is missing" if size is None else f"it has {size}"
            raise DataError(
                f"{path}: the manifest records {entry['bytes']} bytes, {found}. "
                "Restore the file, or delete the manifest and the file to make it again."
            )
        paths.append(path)
    return paths


def _open(path: Path) -> pq.ParquetFile:
    return _checked(path, lambda: pq.ParquetFile(path, page_checksum_verification=True))


def _info(path: Path, file: pq.ParquetFile) -> ShardInfo:
    stored = file.schema_arrow.metadata or {}
    metadata = {
        key.decode().removeprefix(_PREFIX): value.decode()
        for key, value in stored.items()
        if key.decode().startswith(_PREFIX)
    }
    version = metadata.get("schema_version", "")
    if not version.isdecimal() or int(version) > SCHEMA_VERSION:
        raise DataError(
            f'{path}: schema version "{version}", this rft-batch reads up to {SCHEMA_VERSION}. '
            "Install a newer one."
        )
    return ShardInfo(file.metadata.num_rows, metadata)


def _checked(path: Path, read: Any) -> Any:
    try:
        return read()
    except (pa.ArrowException, OSError) as error:
        raise DataError(
            f"{path}: damaged or not a shard: {error}. Delete it and run its stage again."
        ) from error
