"""The selected rows of one or several rounds as a memory-mapped Hugging Face dataset.

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

_OF_SAMPLE = ["prompt_id", "sample_index", "score", "prompt", "prompt_ids", "completion_ids"]
_SCHEMA = pa.schema(
    [
        *(SAMPLES.field(name) for name in _OF_SAMPLE),
        pa.field("round_number", pa.int32(), nullable=False),
    ]
)
COLUMNS = _SCHEMA.names
"""What training needs of a sample; `round_number` is that of the draws' keys."""


def selection_digest(rounds: Sequence[Path], selection: str) -> str:
    """Digest of the samples and the flags of some rounds.

    Raises:
        DataError: a stage of a round is not complete.
    """
    manifests = [m for round_dir in rounds for m in _manifests(round_dir, selection)]
    return fingerprint({str(i): manifest["shards"] for i, manifest in enumerate(manifests)})


def count_selected(rounds: Sequence[Path], selection: str) -> int:
    """Selected rows of some rounds together, duplicates included."""
    counts = [_manifests(round_dir, selection)[1]["counts"] for round_dir in rounds]
    return sum(count["selected"] for count in counts)


def load_selected(rounds: Sequence[Path], selection: str, cache_dir: Path) -> "Dataset":
    """The selected rows of some rounds, in the order of rounds, shards and rows.

    A completion that a prompt has in several rounds is taken from the first of them alone.

    Args:
        rounds: one round, or several, the newest first.
        selection: their folder of flags.
        cache_dir: where the Arrow file is kept.

    Returns:
        A dataset of `COLUMNS`, memory-mapped.

    Raises:
        DataError: a stage is not complete, a file is damaged, the flags belong to other samples,
            or nothing is selected.
    """
    from datasets import Dataset

    path = cache_dir / f"selected-{selection_digest(rounds, selection)}.arrow"
    if not path.exists():
        tables = _without_repeats([_round_table(folder, selection) for folder in rounds])
        if not sum(map(len, tables)):
            raise DataError(
                f"{rounds[0] / selection}: nothing is selected, so there is nothing to train on. "
                "Select with a lower --min-score, or generate more samples."
            )
        publish(path, lambda temporary: _write_arrow(temporary, tables))
    return Dataset.from_file(str(path))


def _without_repeats(tables: Sequence[pa.Table]) -> list[pa.Table]:
    """Each round's rows without the completions that an earlier table has for the same prompt."""
    if len(tables) == 1:
        return list(tables)
    seen: set[tuple[str, bytes]] = set()
    kept = []
    for table in tables:
        ids = table["completion_ids"].to_pylist()
        keys = [
            (prompt_id, np.array(row, dtype=np.int32).tobytes())
            for prompt_id, row in zip(table["prompt_id"].to_pylist(), ids, strict=True)
        ]
        kept.append(table.filter(pa.array([key not in seen for key in keys], type=pa.bool_())))
        seen.update(keys)
    return kept


def _round_table(round_dir: Path, selection: str) -> pa.Table:
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
        rows = read_rows(sample_path, np.flatnonzero(selected), _OF_SAMPLE)
        tables.append(rows.replace_schema_metadata())
    table = pa.concat_tables(tables)
    numbers = [made_samples["identity"]["round_number"]] * len(table)
    return table.append_column(_SCHEMA.field("round_number"), pa.array(numbers, type=pa.int32()))


def _manifests(round_dir: Path, selection: str) -> tuple[dict, dict]:  # type: ignore[type-arg]
    return (
        read_manifest(round_dir / "samples", f"rft-batch generate {round_dir}"),
        read_manifest(round_dir / selection, f"rft-batch select {round_dir} --into {selection}"),
    )


def _write_arrow(path: Path, tables: Sequence[pa.Table]) -> None:
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, _SCHEMA) as writer:
        for table in tables:
            writer.write_table(table.cast(_SCHEMA))
