"""The selected rows of a round as a memory-mapped Hugging Face dataset.

flags -> touched row groups -> those rows -> one Arrow file -> `datasets.Dataset`. The Arrow file's
name is the digest of the manifests that it was made from, never a time stamp, so a changed shard or
another selection cannot be answered from an old file.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from rft_batch.errors import DataError
from rft_batch.files import file_digest, publish
from rft_batch.schema import SAMPLES
from rft_batch.settings import fingerprint
from rft_batch.shards import manifest_shards, read_columns, read_manifest, read_rows, shard_info

if TYPE_CHECKING:
    from datasets import Dataset

COLUMNS = ["prompt_id", "sample_index", "score", "prompt", "prompt_ids", "completion_ids"]
"""What training needs of a sample."""


def selection_digest(round_dir: Path, selection: str) -> str:
    """Digest of the samples and the flags that a selection consists of.

    Raises:
        DataError: one of the two stages is not complete.
    """
    manifests = _manifests(round_dir, selection)
    return fingerprint({str(i): manifest["shards"] for i, manifest in enumerate(manifests)})


def load_selected(round_dir: Path, selection: str, cache_dir: Path) -> "Dataset":
    """The selected rows in shard order, then row order.

    Args:
        round_dir: the round.
        selection: its folder of flags.
        cache_dir: where the Arrow file is kept.

    Returns:
        A dataset of `COLUMNS`, memory-mapped.

    Raises:
        DataError: a stage is not complete, a file is damaged, the flags belong to other samples,
            or nothing is selected.
    """
    from datasets import Dataset

    path = cache_dir / f"selected-{selection_digest(round_dir, selection)}.arrow"
    if not path.exists():
        tables = list(_selected_tables(round_dir, selection))
        if not sum(map(len, tables)):
            raise DataError(
                f"{round_dir / selection}: nothing is selected, so there is nothing to train on. "
                "Select with a lower --min-score, or generate more samples."
            )
        publish(path, lambda temporary: _write_arrow(temporary, tables))
    return Dataset.from_file(str(path))


def _selected_tables(round_dir: Path, selection: str) -> list[pa.Table]:
    samples, flags = round_dir / "samples", round_dir / selection
    made_samples, made_flags = _manifests(round_dir, selection)
    pairs = zip(
        manifest_shards(samples, made_samples),
        made_samples["shards"],
        manifest_shards(flags, made_flags),
        made_flags["shards"],
        strict=True,
    )
    tables = []
    for sample_path, sample_entry, flag_path, flag_entry in pairs:
        # Flags are small enough to be hashed whole; of the samples only pages are checked.
        if file_digest(flag_path) != flag_entry["xxh3_128"]:
            raise DataError(
                f"{flag_path}: damaged, its digest is not the one in the manifest. "
                f"Remove {flags} and run rft-batch select again."
            )
        if shard_info(flag_path).metadata.get("samples") != sample_entry["xxh3_128"]:
            raise DataError(
                f"{flag_path}: its flags belong to other samples than {sample_path}. "
                f"Remove {flags} and run rft-batch select again."
            )
        selected = read_columns(flag_path, ["selected"])["selected"].to_numpy()
        tables.append(read_rows(sample_path, np.flatnonzero(selected), COLUMNS))
    return tables


def _manifests(round_dir: Path, selection: str) -> tuple[dict, dict]:  # type: ignore[type-arg]
    return (
        read_manifest(round_dir / "samples", f"rft-batch generate {round_dir}"),
        read_manifest(round_dir / selection, f"rft-batch select {round_dir} --into {selection}"),
    )


def _write_arrow(path: Path, tables: Sequence[pa.Table]) -> None:
    schema = pa.schema([SAMPLES.field(name) for name in COLUMNS])
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, schema) as writer:
        for table in tables:
            writer.write_table(table.cast(schema))
