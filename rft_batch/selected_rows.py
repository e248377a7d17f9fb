"""The selected rows of one or several rounds as a memory-mapped Hugging Face dataset.

flags -> touched row groups -> those rows -> one Arrow file -> `datasets.Dataset`. The Arrow file's
name is the digest of the manifests that it was made from, never a time stamp, so a changed shard or
another selection cannot be answered from an old file.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from rft_batch.errors import DataError
from rft_batch.files import file_digest, publish
from rft_batch.ranking import places
from rft_batch.schema import SAMPLES
from rft_batch.settings import fingerprint
from rft_batch.shards import (
    ids_as_bytes,
    manifest_shards,
    read_columns,
    read_manifest,
    read_rows,
    samples_folder,
    shard_info,
)

if TYPE_CHECKING:
    from datasets import Dataset

_OF_SAMPLE = ["prompt_id", "sample_index", "score", "prompt", "prompt_ids", "completion_ids"]
SCHEMA = pa.schema(
    [
        *(SAMPLES.field(name) for name in _OF_SAMPLE),
        pa.field("round_number", pa.int32(), nullable=False),
    ]
)
_OVER_LIMIT = "rft_batch.over_limit_left_out"
COLUMNS = SCHEMA.names
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


def load_selected(
    rounds: Sequence[Path], selection: str, cache_dir: Path, max_per_prompt: int | None = None
) -> "Dataset":
    """The selected rows of some rounds, in the order of rounds, shards and rows.

    A completion that a prompt has in several rounds is taken from the first of them alone.

    Args:
        rounds: one round, or several, the newest first.
        selection: their folder of flags.
        cache_dir: where the Arrow file is kept.
        max_per_prompt: how many rows a prompt may have in all rounds together: those with the
            highest scores, ties by round as given, then by sample index. None: all.

    Returns:
        A dataset of `COLUMNS`, memory-mapped.

    Raises:
        DataError: a stage is not complete, a file is damaged, the flags belong to other samples,
            or nothing is selected.
    """
    from datasets import Dataset

    path = _arrow_path(rounds, selection, cache_dir, max_per_prompt)
    if not path.exists():
        tables = _without_repeats([_round_table(folder, selection) for folder in rounds])
        count = sum(map(len, tables))
        if not count:
            raise DataError(
                f"{rounds[0] / selection}: nothing is selected, so there is nothing to train on. "
                "Select with a lower --min-score, or generate more samples."
            )
        if max_per_prompt is not None:
            tables = _at_most(tables, max_per_prompt)
        metadata = {_OVER_LIMIT: str(count - sum(map(len, tables)))}
        publish(path, lambda temporary: _write_arrow(temporary, tables, metadata))
    return Dataset.from_file(str(path))


def over_limit_left_out(
    rounds: Sequence[Path], selection: str, cache_dir: Path, max_per_prompt: int | None
) -> int:
    """How many rows `load_selected` of the same arguments left out because of the limit."""
    path = _arrow_path(rounds, selection, cache_dir, max_per_prompt)
    with pa.OSFile(str(path)) as source, pa.ipc.open_stream(source) as stream:
        return int(stream.schema.metadata[_OVER_LIMIT.encode()])


def _arrow_path(
    rounds: Sequence[Path], selection: str, cache_dir: Path, max_per_prompt: int | None
) -> Path:
    digest = selection_digest(rounds, selection)
    if max_per_prompt is not None:
        digest = fingerprint({"rows": digest, "max_per_prompt": max_per_prompt})
    return cache_dir / f"selected-{digest}.arrow"


def _without_repeats(tables: Sequence[pa.Table]) -> list[pa.Table]:
    """Each round's rows without the completions that an earlier table has for the same prompt."""
    if len(tables) == 1:
        return list(tables)
    seen: set[tuple[str, bytes]] = set()
    kept = []
    for table in tables:
        ids = ids_as_bytes(table["completion_ids"]).to_pylist()
        keys = list(zip(table["prompt_id"].to_pylist(), ids, strict=True))
        kept.append(table.filter(pa.array([key not in seen for key in keys], type=pa.bool_())))
        seen.update(keys)
    return kept


def _at_most(tables: Sequence[pa.Table], max_per_prompt: int) -> list[pa.Table]:
    """The rows of some rounds that are among the best of their prompt in all of them."""
    columns = pa.concat_tables(
        [table.select(["prompt_id", "score", "sample_index"]) for table in tables]
    )
    group = columns["prompt_id"].combine_chunks().dictionary_encode().indices.to_numpy()
    starts = np.cumsum([0, *map(len, tables)])
    place = places(
        group,
        -columns["score"].to_numpy(),
        np.repeat(np.arange(len(tables)), np.diff(starts)),
        columns["sample_index"].to_numpy(),
    )
    kept = np.split(place < max_per_prompt, starts[1:-1])
    return [table.filter(pa.array(rows)) for table, rows in zip(tables, kept, strict=True)]


def _round_table(round_dir: Path, selection: str) -> pa.Table:
    made_samples, made_flags = _manifests(round_dir, selection)
    samples, flags = round_dir / samples_folder(made_flags), round_dir / selection
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
    return table.append_column(SCHEMA.field("round_number"), pa.array(numbers, type=pa.int32()))


def _manifests(round_dir: Path, selection: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """What was recorded of the samples that were selected from, and of their flags."""
    made_flags = read_manifest(
        round_dir / selection, f"rft-batch select {round_dir} --into {selection}"
    )
    folder = round_dir / samples_folder(made_flags)
    made_part: dict[str, Any] | None = made_flags.get("partial_samples")
    if made_part is not None and not (folder / "manifest.json").exists():
        return made_part, made_flags
    made_samples = read_manifest(folder, f"rft-batch generate {round_dir}")
    if made_part is not None and made_part["shards"] != made_samples["shards"]:
        raise DataError(
            f"{round_dir / selection}: selected from {len(made_part['shards'])} of "
            f"{len(made_samples['shards'])} shards, before the samples were complete. "
            f"Remove {round_dir / selection} and run rft-batch select again."
        )
    return made_samples, made_flags


def _write_arrow(path: Path, tables: Sequence[pa.Table], metadata: dict[str, str]) -> None:
    schema = SCHEMA.with_metadata(metadata)
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, schema) as writer:
        for table in tables:
            writer.write_table(table.cast(schema))
