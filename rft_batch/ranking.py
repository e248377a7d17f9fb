"""Order, ties and choice among samples. Pure numpy: no files, no torch.

A choice is a chain of rules. Each gives a mask of rows, and `mark` writes its reason into those
that no earlier rule has spoken of; so the order of the rules is the order of the calls.

Letters: `rows` samples; a prompt's rows are those with the same `group`, a number from 0 on.
"""

from collections.abc import Callable, Iterable
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

UNRANKED = -1
UNDRAWABLE, REPEATED = -1, -2
_DIGIT_BITS = 16


class Reason(IntEnum):
    """Numbers of the words in `schema.REASONS`, in their order."""

    OPEN = -1
    """No rule has spoken yet; never written."""
    TOP_K = 0
    RANDOM = 1
    BELOW_TOP_K = 2
    NOT_DRAWN = 3
    BELOW_MIN_SCORE = 4
    DUPLICATE = 5
    BANNED = 6
    TRUNCATED = 7
    TOO_SHORT = 8
    NO_SPREAD = 9
    TOO_EASY = 10
    NOT_SCORED = 11


def rank_samples(
    group: NDArray[np.int64], score: NDArray[np.float32], sample_index: NDArray[np.int32]
) -> NDArray[np.int32]:
    """Place of every sample among its group's samples by score, 0 = best.

    Ties go to the lower `sample_index`. Scores that are not finite have no place: sorting would
    put NaN first or last by accident of the library.

    Args:
        group: `[rows]`, equal for the samples of one prompt.
        score: `[rows]`, NaN where not scored.
        sample_index: `[rows]`.

    Returns:
        `[rows]` int32, `UNRANKED` where the score is not finite.
    """
    scored = np.flatnonzero(np.isfinite(score))
    ranks = np.full(len(score), UNRANKED, dtype=np.int32)
    ranks[scored] = places(group[scored], -score[scored].astype(np.float64), sample_index[scored])
    return ranks


def places(group: NDArray[np.int64], *order: NDArray[np.generic]) -> NDArray[np.int32]:
    """Place of each row in its group, 0 = first.

    Args:
        group: `[rows]`.
        order: `[rows]` each; ascending by the first, then by the second, then by row.

    Returns:
        `[rows]` int32.
    """
    return _places_in(np.lexsort((*order[::-1], group)), group)


def without_spread(group: NDArray[np.int64], score: NDArray[np.float32]) -> NDArray[np.bool_]:
    """Which groups have at least two finite scores, and these all exactly equal.

    Args:
        group: `[rows]`.
        score: `[rows]`, NaN where not scored.

    Returns:
        `[groups]`.
    """
    count = _group_count(group)
    scored = np.isfinite(score)
    group, score = group[scored], score[scored]
    any_score = np.zeros(count, dtype=np.float32)
    any_score[group] = score
    differing = np.bincount(group[score != any_score[group]], minlength=count)
    equal: NDArray[np.bool_] = (np.bincount(group, minlength=count) >= 2) & (differing == 0)
    return equal


def pass_rates(
    group: NDArray[np.int64], score: NDArray[np.float32], min_score: float
) -> NDArray[np.float64]:
    """Share of each group's finite scores that are at least `min_score`.

    Args:
        group: `[rows]`.
        score: `[rows]`, NaN where not scored.
        min_score: the score that passes.

    Returns:
        `[groups]` in [0, 1]; 0 where a group has no finite score.
    """
    count = _group_count(group)
    scored = np.bincount(group[np.isfinite(score)], minlength=count)
    passed = np.bincount(group[np.isfinite(score) & (score >= min_score)], minlength=count)
    rates: NDArray[np.float64] = passed / np.maximum(scored, 1)
    return rates


def mark(reason: NDArray[np.int8], rows: NDArray[np.bool_], why: Reason) -> None:
    """Writes a reason into those of some rows that are still open, in place."""
    reason[rows & (reason == Reason.OPEN)] = why


def repeats(
    group: NDArray[np.int64],
    key: NDArray[np.int64],
    order: NDArray[np.generic],
    rows: NDArray[np.bool_],
) -> NDArray[np.bool_]:
    """Which of some rows have the key of another of their group that stands before them.

    Args:
        group: `[rows]`.
        key: `[rows]`, negative where a row has none and so repeats nothing.
        order: `[rows]`, the lowest of equal keys stands first.
        rows: `[rows]`, the rows that are compared.

    Returns:
        `[rows]`, False outside `rows`.
    """
    compared = np.flatnonzero(rows & (key >= 0))
    _, same = np.unique(
        group[compared] * (key.max(initial=0) + 1) + key[compared], return_inverse=True
    )
    found = np.zeros(len(group), dtype=bool)
    found[compared] = places(same, order[compared]) > 0
    return found


def best_of_groups(
    group: NDArray[np.int64], rank: NDArray[np.int32], rows: NDArray[np.bool_], top_k: int
) -> NDArray[np.bool_]:
    """The `top_k` of some rows of each group that have the lowest ranks.

    Args:
        group: `[rows]`.
        rank: `[rows]`, each once in a group.
        rows: `[rows]`, the rows that can be kept.
        top_k: how many of each group.

    Returns:
        `[rows]`.
    """
    able = np.flatnonzero(rows)
    # One number for both is sorted several times faster than two columns are.
    both = group[able] * (int(rank.max(initial=0)) + 1) + rank[able]
    kept = np.zeros(len(group), dtype=bool)
    kept[able] = _places_in(np.argsort(both), group[able]) < top_k
    return kept


def draw_places(
    group: NDArray[np.int64],
    pool: NDArray[np.bool_],
    key: NDArray[np.int64],
    word: NDArray[np.uint64],
) -> NDArray[np.int32]:
    """The order in which the rows of each group would be drawn, whatever their score.

    Args:
        group: `[rows]`.
        pool: `[rows]`, the rows that can be drawn.
        key: `[rows]`, of equal keys one alone is drawn; negative: none.
        word: `[rows]`, each row's own random word; the lowest are drawn first.

    Returns:
        `[rows]` int32, 0 = first; `UNDRAWABLE` outside the pool, `REPEATED` where another row with
        the key is drawn before.
    """
    again = repeats(group, key, word, pool)
    able = np.flatnonzero(pool & ~again)
    place = np.full(len(group), UNDRAWABLE, dtype=np.int32)
    place[again] = REPEATED
    place[able] = places(group[able], word[able])
    return place


def draw_control(
    group: NDArray[np.int64], best: NDArray[np.int8], place: NDArray[np.int32]
) -> NDArray[np.int8]:
    """The matched control: of each prompt as many as the best would be, but drawn.

    Args:
        group: `[rows]`.
        best: `[rows]` reasons, what the best would be.
        place: `[rows]`, from `draw_places`.

    Returns:
        `[rows]` reasons; rows outside the pool keep theirs, so the control differs from the best
        by the choice alone.
    """
    reason = best.copy()
    reason[place == REPEATED] = Reason.DUPLICATE
    budget = np.bincount(group[best == Reason.TOP_K], minlength=_group_count(group))
    reason[place >= 0] = Reason.NOT_DRAWN
    reason[(place >= 0) & (place < budget[group])] = Reason.RANDOM
    return reason


def round_order(score: NDArray[np.float32], rank: NDArray[np.int32]) -> NDArray[np.uint64]:
    """Numbers that ascend as scores descend, and among equal scores as ranks ascend.

    Args:
        score: `[rows]`, finite.
        rank: `[rows]`, not negative.

    Returns:
        `[rows]`.
    """
    # Adding 0 makes -0.0 the 0.0 that it equals.
    bits = (score.astype(np.float32) + np.float32(0)).view(np.uint32)
    ascending = np.where(bits >> np.uint32(31), ~bits, bits | np.uint32(1 << 31))
    return (~ascending).astype(np.uint64) << np.uint64(32) | rank.astype(np.uint64)


def lowest_numbers(
    parts: Callable[[], Iterable[NDArray[np.uint64]]], count: int
) -> tuple[int, int]:
    """Where the lowest `count` of many numbers end, without holding them together.

    Four passes, each of which counts one digit of 16 bits among the numbers that agree with the
    digits found before (a radix selection): memory is one part and 65,536 counters.

    Args:
        parts: gives all numbers anew, in parts.
        count: how many; above their number: all.

    Returns:
        A number `limit` and how many of those equal to it are wanted beside all that are lower.
    """
    if sum(map(len, parts())) <= count:
        return 1 << 64, 0
    found = 0
    for shift in range(64 - _DIGIT_BITS, -1, -_DIGIT_BITS):
        seen = np.zeros(1 << _DIGIT_BITS, dtype=np.int64)
        for part in parts():
            if shift + _DIGIT_BITS < 64:
                higher = np.uint64(shift + _DIGIT_BITS)
                part = part[part >> higher == np.uint64(found)]
            digit = part >> np.uint64(shift) & np.uint64((1 << _DIGIT_BITS) - 1)
            seen += np.bincount(digit.astype(np.int64), minlength=len(seen))
        ends = np.cumsum(seen)
        digit_found = int(np.searchsorted(ends, count, side="left")) if count else 0
        count -= int(ends[digit_found] - seen[digit_found])
        found = found << _DIGIT_BITS | digit_found
    return found, count


def _group_count(group: NDArray[np.int64]) -> int:
    return int(group.max(initial=-1)) + 1


def _places_in(order: NDArray[np.intp], group: NDArray[np.int64]) -> NDArray[np.int32]:
    """Places in their groups of rows whose `order` has each group together, `[rows]` int32."""
    ordered = group[order]
    starts = np.flatnonzero(np.r_[True, ordered[1:] != ordered[:-1]]) if len(order) else order
    sizes = np.diff(np.r_[starts, len(order)])
    found = np.empty(len(order), dtype=np.int32)
    found[order] = np.arange(len(order)) - np.repeat(starts, sizes)
    return found
