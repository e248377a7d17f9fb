"""Stage one, second half: sample shards -> flag shards and a manifest.

    rft-batch select runs/digits/round-1 --top-k 2 --min-score 0.5

Samples are expensive and are never rewritten; flags are small and stand beside them, row for row,
so that another choice costs a second. Only score columns are read.
"""

from collections import Counter
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from rft_batch.errors import DataError
from rft_batch.files import publish_json
from rft_batch.progress import say
from rft_batch.randomness import SampleNoise, Stream
from rft_batch.ranking import UNRANKED, select_best, select_random
from rft_batch.schema import FLAGS, KEPT_REASONS, REASONS
from rft_batch.settings import SelectSettings, fingerprint, refuse_other_identity
from rft_batch.shards import (
    manifest_shards,
    read_columns,
    read_manifest,
    shard_entries,
    write_flags,
)
from rft_batch.versions import versions

_COLUMNS = ["prompt_id", "sample_index", "rank", "score", "finish_reason"]


def select(settings: SelectSettings) -> dict[str, Any]:
    """Flags the samples of a round that are to be trained on.

    Args:
        settings: see `SelectSettings`.

    Returns:
        The manifest.

    Raises:
        InputError: bad settings; or the folder was made with others.
        DataError: the samples are not complete or damaged; or, where the settings ask for it, a
            prompt has too few samples to keep, or nothing is selected.
    """
    samples, folder = settings.round_dir / "samples", settings.round_dir / settings.into
    made_by = read_manifest(samples, f"rft-batch generate {settings.round_dir}")
    identity = settings.identity(samples=fingerprint({"shards": made_by["shards"]}))
    refuse_other_identity(
        folder,
        identity,
        "Nothing was touched. Pass --into with another name, or remove the folder: "
        "it is made again in a second.",
    )
    if (folder / "manifest.json").exists():
        say(f"{folder}: complete already, nothing to do")
        return read_manifest(folder, f"rft-batch select {settings.round_dir}")

    reasons: Counter[str] = Counter()
    kept_of_prompts: list[NDArray[np.int64]] = []
    paths = manifest_shards(samples, made_by)
    for number, path in enumerate(paths):
        table = read_columns(path, _COLUMNS)
        group = table["prompt_id"].combine_chunks().dictionary_encode().indices.to_numpy()
        reason = _reasons(table, group, settings, made_by["identity"]["round_number"])
        selected = np.isin(reason, list(KEPT_REASONS))
        flags = pa.table(
            {
                "prompt_id": table["prompt_id"],
                "sample_index": table["sample_index"],
                "selected": selected,
                "reason": pa.array(reason).dictionary_encode(),
            },
            schema=FLAGS,
        )
        metadata = {
            "fingerprint": fingerprint(identity),
            "shard": str(number),
            "samples": made_by["shards"][number]["xxh3_128"],
        }
        write_flags(folder / path.name, flags, metadata)
        reasons.update(dict(zip(*(a.tolist() for a in np.unique_counts(reason)), strict=True)))
        # All samples of a prompt stand in one shard, so its count is whole.
        kept_of_prompts.append(np.bincount(group[selected], minlength=group.max(initial=-1) + 1))
    counts = _counts(reasons, np.concatenate(kept_of_prompts), settings.top_k)
    _refuse_shortage(settings, counts)
    manifest = {
        "stage": "select",
        "identity": identity,
        "counts": counts,
        "reasons": {name: reasons[name] for name in REASONS if reasons[name]},
        "shards": shard_entries([folder / path.name for path in paths]),
        "versions": versions(),
    }
    publish_json(folder / "manifest.json", manifest)
    return manifest


def _reasons(
    table: pa.Table, group: NDArray[np.int64], settings: SelectSettings, round_number: int
) -> NDArray[np.str_]:
    """Why each sample of a shard is kept or left out, `[rows]`."""
    rank = table["rank"].fill_null(UNRANKED).to_numpy()
    score = table["score"].to_numpy(zero_copy_only=False)
    truncated = np.array([r == "length" for r in table["finish_reason"].to_pylist()], dtype=bool)
    truncated &= not settings.keep_truncated
    best = select_best(group, rank, score, truncated, settings.top_k, settings.min_score)
    if settings.strategy == "best":
        return best
    word = [
        SampleNoise.for_sample(settings.seed, round_number, prompt_id, index).words(
            Stream.SELECTION, 0, 1
        )[0]
        for prompt_id, index in zip(
            table["prompt_id"].to_pylist(), table["sample_index"].to_pylist(), strict=True
        )
    ]
    return select_random(group, best, np.array(word, dtype=np.uint64))


def _counts(reasons: Counter[str], kept: NDArray[np.int64], top_k: int) -> dict[str, int]:
    return {
        "samples": reasons.total(),
        "selected": sum(reasons[name] for name in KEPT_REASONS),
        "prompts": len(kept),
        "prompts_with_fewer": int(((kept > 0) & (kept < top_k)).sum()),
        "prompts_with_none": int((kept == 0).sum()),
    }


def _refuse_shortage(settings: SelectSettings, counts: dict[str, int]) -> None:
    short = counts["prompts_with_fewer"] + counts["prompts_with_none"]
    if settings.strict_k and short:
        raise DataError(
            f"{short} of {counts['prompts']} prompts have fewer than --top-k {settings.top_k} "
            "samples to keep. Lower --top-k or --min-score, or leave out --strict-k."
        )
    if settings.require_nonempty and not counts["selected"]:
        raise DataError(
            f"nothing is selected of {counts['samples']} samples. "
            "Lower --min-score, or leave out --require-nonempty."
        )
