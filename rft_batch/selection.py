"""Stage one, second half: sample shards -> flag shards and a manifest.

    rft-batch select runs/digits/round-1 --top-k 2 --min-score 0.5

Samples are expensive and are never rewritten; flags are small and stand beside them, row for row,
so that another choice costs a second. Only score columns are read, and what `--distinct-by` needs.

The rules, each for the samples that no earlier one left out: prompts without spread, prompts that
are too easy, no score, truncated, score too low, no key, key of a better one; then the count.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from decimal import Decimal
from functools import partial
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from rft_batch.distinct import NO_KEY, Distinct, far_repeats, load_distinct
from rft_batch.errors import DataError
from rft_batch.files import publish_json, read_json
from rft_batch.progress import say
from rft_batch.randomness import Stream, first_words
from rft_batch.ranking import (
    UNRANKED,
    Reason,
    best_of_groups,
    draw_control,
    draw_places,
    lowest_numbers,
    mark,
    pass_rates,
    repeats,
    round_order,
    without_spread,
)
from rft_batch.schema import FLAGS, KEPT_REASONS, REASONS
from rft_batch.settings import SelectSettings, fingerprint, refuse_other_identity
from rft_batch.shards import (
    finished_shards,
    manifest_shards,
    read_columns,
    read_manifest,
    shard_entries,
    write_flags,
)
from rft_batch.versions import versions

_COLUMNS = ["prompt_id", "sample_index", "rank", "score", "finish_reason"]
_IDS = "completion_ids"
_WORDS = pa.array(list(REASONS))
_IS_KEPT = np.array([word in KEPT_REASONS for word in REASONS])


@dataclass(frozen=True)
class _Shard:
    """What the rules see of a shard; the arrays are `[rows]`."""

    table: pa.Table
    group: NDArray[np.int64]
    rank: NDArray[np.int32]
    score: NDArray[np.float32]
    truncated: NDArray[np.bool_]
    num_tokens: NDArray[np.int64]
    """The end of a text not counted; empty where nothing asks."""

    @property
    def num_prompts(self) -> int:
        return int(self.group.max(initial=-1)) + 1


@dataclass(frozen=True)
class _Shards:
    """The sample shards, read anew in every call."""

    paths: list[Path]
    columns: list[str]
    end_ids: list[int]
    """Token ids that end a text."""

    def __call__(self) -> Iterator[_Shard]:
        for path in self.paths:
            table = read_columns(path, self.columns)
            finish = table["finish_reason"].cast(pa.string())
            yield _Shard(
                table=table,
                group=table["prompt_id"].combine_chunks().dictionary_encode().indices.to_numpy(),
                rank=table["rank"].fill_null(UNRANKED).to_numpy(),
                score=table["score"].to_numpy(),
                truncated=pc.equal(finish, "length").to_numpy(),
                num_tokens=_num_tokens(table, self.end_ids),
            )


@dataclass(frozen=True)
class _Judged:
    """A shard's samples by all rules but the count, which leaves some of them open."""

    reason: NDArray[np.int8]
    draw: NDArray[np.int32]
    """From `draw_places`; empty unless --strategy random."""


def select(settings: SelectSettings) -> dict[str, Any]:
    """Flags the samples of a round that are to be trained on.

    Args:
        settings: see `SelectSettings`.

    Returns:
        The manifest; of a dry run its figures alone.

    Raises:
        InputError: bad settings; or the folder was made with others.
        DataError: the samples are not complete or damaged; a function of `distinct_by` failed; or,
            where the settings ask for it, a prompt has too few samples to keep, or nothing is
            selected.
    """
    distinct = load_distinct(settings.distinct_by) if settings.distinct_by else None
    samples, folder = settings.round_dir / settings.samples, settings.round_dir / settings.into
    made_by = _samples_manifest(settings, samples)
    identity = settings.identity(
        distinct_by=distinct and {"name": distinct.name, "digest": distinct.digest},
        samples=fingerprint({"shards": made_by["shards"]}),
    )
    if not settings.dry_run:
        refuse_other_identity(
            folder,
            identity,
            "Nothing was touched. Pass --into with another name, or remove the folder: "
            "it is made again in a second.",
        )
        if (folder / "manifest.json").exists():
            say(f"{folder}: complete already, nothing to do")
            return read_manifest(folder, f"rft-batch select {settings.round_dir}")

    paths = manifest_shards(samples, made_by)
    tally = _Tally(settings)
    columns = [*_COLUMNS, *(distinct.columns if distinct else ())]
    if settings.min_tokens and _IDS not in columns:
        columns.append(_IDS)
    shards = _Shards(paths, columns, made_by.get("policy", {}).get("end_ids", []))
    judge = partial(
        _judge,
        settings=settings,
        distinct=distinct,
        round_number=made_by["identity"]["round_number"],
    )
    for number, (shard, reason) in enumerate(_chosen(shards, settings, judge)):
        tally.add(shard, reason)
        if not settings.dry_run:
            metadata = {
                "fingerprint": fingerprint(identity),
                "shard": str(number),
                "samples": made_by["shards"][number]["xxh3_128"],
            }
            write_flags(folder / paths[number].name, _flags(shard, reason), metadata)
    counts = tally.counts()
    _refuse_shortage(settings, counts)
    figures = {"stage": "select", "identity": identity, "counts": counts, "reasons": tally.reasons}
    if settings.dry_run:
        return figures
    manifest = {
        **figures,
        "samples": settings.samples,
        "shards": shard_entries([folder / path.name for path in paths]),
        "versions": versions(),
    }
    if made_by["stage"] == "partial":
        manifest["partial_samples"] = made_by
    publish_json(folder / "manifest.json", manifest)
    return manifest


def _samples_manifest(settings: SelectSettings, folder: Path) -> dict[str, Any]:
    """The manifest of the samples, or with `allow_partial` what would stand in it by now."""
    begun = folder / "settings.json"
    complete = (folder / "manifest.json").exists()
    if complete or not settings.allow_partial or not begun.exists():
        return read_manifest(folder, f"rft-batch generate {settings.round_dir}")
    identity = read_json(begun)
    paths = finished_shards(folder, fingerprint(identity))
    if not paths:
        raise DataError(f"{folder}: no shard is finished yet, so there is nothing to select from.")
    say(f"{folder}: not complete, {len(paths)} finished shards are selected from")
    return {"stage": "partial", "identity": identity, "shards": shard_entries(paths)}


def _chosen(
    shards: _Shards, settings: SelectSettings, judge: Callable[[_Shard], _Judged]
) -> Iterator[tuple[_Shard, NDArray[np.int8]]]:
    """Every shard with the reasons of its samples."""
    best = _best_of_round if settings.scope == "global" else _best_of_prompts
    for shard, judged, kept in best(shards, settings, judge):
        mark(judged.reason, kept, Reason.TOP_K)
        mark(judged.reason, ~kept, Reason.BELOW_TOP_K)
        if settings.strategy == "random":
            yield shard, draw_control(shard.group, judged.reason, judged.draw)
        else:
            yield shard, judged.reason


def _best_of_prompts(
    shards: _Shards, settings: SelectSettings, judge: Callable[[_Shard], _Judged]
) -> Iterator[tuple[_Shard, _Judged, NDArray[np.bool_]]]:
    """Every shard with the samples that are kept: the best of each prompt."""
    for shard in shards():
        judged = judge(shard)
        able = judged.reason == Reason.OPEN
        top_k = settings.top_k_of_prompt
        yield shard, judged, best_of_groups(shard.group, shard.rank, able, top_k)


def _best_of_round(
    shards: _Shards, settings: SelectSettings, judge: Callable[[_Shard], _Judged]
) -> Iterator[tuple[_Shard, _Judged, NDArray[np.bool_]]]:
    """Every shard with the samples that are kept: the best of all shards together.

    Ties go to the better rank in its prompt, then to the order of the shards and their rows, which
    is that of the prompts. What was judged waits on disk, because functions of `distinct_by` are
    called once and memory holds one shard.
    """
    with TemporaryFile() as judged_file, TemporaryFile() as order_file:
        scored = 0
        for shard in shards():
            judged = judge(shard)
            able = judged.reason == Reason.OPEN
            scored += int((shard.rank != UNRANKED).sum())
            np.save(judged_file, judged.reason)
            np.save(judged_file, judged.draw)
            np.save(order_file, round_order(shard.score[able], shard.rank[able]))
        wanted = settings.top_k
        if wanted is None:
            # As decimals, because 0.29 of 100 are 29 and as binary fractions 28.
            wanted = int(Decimal(str(settings.top_fraction)) * scored)

        def orders() -> Iterator[NDArray[np.uint64]]:
            order_file.seek(0)
            for _ in shards.paths:
                yield np.load(order_file)

        limit, at_limit = lowest_numbers(orders, wanted)
        judged_file.seek(0)
        for shard, order in zip(shards(), orders(), strict=True):
            judged = _Judged(np.load(judged_file), np.load(judged_file))
            taken = order < limit
            ties = np.flatnonzero(order == limit)[:at_limit]
            taken[ties] = True
            at_limit -= len(ties)
            kept = judged.reason == Reason.OPEN
            kept[kept] = taken
            yield shard, judged, kept


def _judge(
    shard: _Shard, settings: SelectSettings, distinct: Distinct | None, round_number: int
) -> _Judged:
    """All rules but the count."""
    group, score = shard.group, shard.score
    reason = np.full(len(group), Reason.OPEN, dtype=np.int8)
    if settings.drop_no_spread:
        mark(reason, without_spread(group, score)[group], Reason.NO_SPREAD)
    if settings.max_pass_rate is not None and settings.min_score is not None:
        easy = pass_rates(group, score, settings.min_score) > settings.max_pass_rate
        mark(reason, easy[group], Reason.TOO_EASY)
    mark(reason, shard.rank == UNRANKED, Reason.NOT_SCORED)
    if not settings.keep_truncated:
        mark(reason, shard.truncated, Reason.TRUNCATED)
    if settings.min_tokens:
        mark(reason, shard.num_tokens < settings.min_tokens, Reason.TOO_SHORT)
    pool = reason == Reason.OPEN
    if settings.min_score is not None:
        mark(reason, score < settings.min_score, Reason.BELOW_MIN_SCORE)
    is_random = settings.strategy == "random"
    key = np.full(len(group), NO_KEY, dtype=np.int64)
    if distinct is not None:
        compared = pool if is_random else reason == Reason.OPEN
        key[compared] = distinct.keys(shard.table.filter(pa.array(compared)))
        mark(reason, key == NO_KEY, Reason.BANNED)
        mark(reason, _repeated(shard, reason == Reason.OPEN, key, distinct), Reason.DUPLICATE)
    if not is_random:
        return _Judged(reason, np.empty(0, dtype=np.int32))
    ids, index = shard.table["prompt_id"].to_pylist(), shard.table["sample_index"].to_pylist()
    word = first_words(settings.seed, round_number, ids, index, Stream.SELECTION)
    return _Judged(reason, draw_places(group, pool, key, word))


def _num_tokens(table: pa.Table, end_ids: list[int]) -> NDArray[np.int64]:
    if _IDS not in table.column_names:
        return np.empty(0, dtype=np.int64)
    ids = table[_IDS].combine_chunks()
    offsets = ids.offsets.to_numpy()
    lengths = np.diff(offsets)
    ends = np.zeros(len(lengths), dtype=bool)
    some = lengths > 0
    ends[some] = np.isin(ids.values.to_numpy()[offsets[1:][some] - 1], end_ids)
    counted: NDArray[np.int64] = lengths - ends
    return counted


def _repeated(
    shard: _Shard, able: NDArray[np.bool_], key: NDArray[np.int64], distinct: Distinct
) -> NDArray[np.bool_]:
    """Which of the samples that can be kept give way to another with their key."""
    if not distinct.prefers_far:
        return repeats(shard.group, key, shard.rank, able)
    repeated = able.copy()
    repeated[able] = far_repeats(
        shard.group[able],
        key[able],
        shard.rank[able],
        shard.score[able],
        shard.table["completion"].filter(pa.array(able)).to_pylist(),
    )
    return repeated


def _flags(shard: _Shard, reason: NDArray[np.int8]) -> pa.Table:
    return pa.table(
        {
            "prompt_id": shard.table["prompt_id"],
            "sample_index": shard.table["sample_index"],
            "selected": _IS_KEPT[reason],
            "reason": pa.DictionaryArray.from_arrays(pa.array(reason, pa.int32()), _WORDS),
        },
        schema=FLAGS,
    )


class _Tally:
    """What the closing table says, added up shard by shard."""

    def __init__(self, settings: SelectSettings) -> None:
        self._settings = settings
        self._by_reason = np.zeros(len(REASONS), dtype=np.int64)
        self._prompts = Counter[str]()

    @property
    def reasons(self) -> dict[str, int]:
        """How many samples have each reason; those alone that some have."""
        counts = dict(zip(REASONS, self._by_reason.tolist(), strict=True))
        return {word: count for word, count in counts.items() if count}

    def add(self, shard: _Shard, reason: NDArray[np.int8]) -> None:
        """Counts a shard."""
        self._by_reason += np.bincount(reason, minlength=len(REASONS))
        # All samples of a prompt stand in one shard, so its count is whole.
        kept = np.bincount(shard.group[_IS_KEPT[reason]], minlength=shard.num_prompts)
        self._prompts["prompts"] += len(kept)
        self._prompts["prompts_with_fewer"] += int(
            ((kept > 0) & (kept < self._settings.top_k_of_prompt)).sum()
        )
        self._prompts["prompts_with_none"] += int((kept == 0).sum())
        self._prompts["prompts_without_spread"] += int(
            without_spread(shard.group, shard.score).sum()
        )

    def counts(self) -> dict[str, int]:
        """The figures of all shards."""
        counts = {
            "samples": int(self._by_reason.sum()),
            "selected": int(self._by_reason[_IS_KEPT].sum()),
            **self._prompts,
        }
        if self._settings.scope == "global":
            # How many of one prompt are kept is not what was asked for.
            del counts["prompts_with_fewer"]
        return counts


def _refuse_shortage(settings: SelectSettings, counts: dict[str, int]) -> None:
    short = counts.get("prompts_with_fewer", 0) + counts["prompts_with_none"]
    if settings.strict_k and short:
        raise DataError(
            f"{short} of {counts['prompts']} prompts have fewer than "
            f"--top-k {settings.top_k_of_prompt} samples to keep. "
            "Lower --top-k or --min-score, or leave out --strict-k."
        )
    if settings.require_nonempty and not counts["selected"]:
        raise DataError(
            f"nothing is selected of {counts['samples']} samples. "
            "Lower --min-score, or leave out --require-nonempty."
        )
