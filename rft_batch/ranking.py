"""Order, ties and choice among the samples of a prompt. Pure numpy: no files, no torch.

Letters: `rows` samples; a prompt's rows are those with the same `group`.
"""

import numpy as np
from numpy.typing import NDArray

UNRANKED = -1


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
    ranks[scored] = _places(group[scored], -score[scored].astype(np.float64), sample_index[scored])
    return ranks


def select_best(
    group: NDArray[np.int64],
    rank: NDArray[np.int32],
    score: NDArray[np.float32],
    truncated: NDArray[np.bool_],
    top_k: int,
    min_score: float | None,
) -> NDArray[np.str_]:
    """Why each sample is kept or left out: the best `top_k` eligible samples of each prompt.

    Args:
        group: `[rows]`, equal for the samples of one prompt.
        rank: `[rows]`, from `rank_samples`.
        score: `[rows]`, NaN where not scored.
        truncated: `[rows]`, True where a limit cut the completion and that counts against it.
        top_k: how many to keep of each prompt.
        min_score: lowest score that may be kept; None: any.

    Returns:
        `[rows]` of the reasons in `schema.REASONS`.
    """
    reason = np.full(len(rank), "below_top_k", dtype="<U16")
    too_low = np.zeros(len(rank), dtype=bool) if min_score is None else score < min_score
    reason[too_low] = "below_min_score"
    reason[truncated] = "truncated"
    reason[rank == UNRANKED] = "not_scored"
    eligible = np.flatnonzero(reason == "below_top_k")
    place = _places(group[eligible], rank[eligible], rank[eligible])
    reason[eligible[place < top_k]] = "top_k"
    return reason


def select_random(
    group: NDArray[np.int64],
    best: NDArray[np.str_],
    word: NDArray[np.uint64],
) -> NDArray[np.str_]:
    """The matched control: of each prompt as many as the best would be, drawn whatever their score.

    Args:
        group: `[rows]`, equal for the samples of one prompt.
        best: `[rows]`, what `select_best` said.
        word: `[rows]`, each sample's own random word; the lowest are drawn.

    Returns:
        `[rows]` of the reasons in `schema.REASONS`. Samples without a score, and truncated ones,
        stay out: the control differs from the best by the choice alone.
    """
    reason = best.copy()
    eligible = np.flatnonzero((best != "not_scored") & (best != "truncated"))
    reason[eligible] = "not_drawn"
    _, codes = np.unique(group, return_inverse=True)
    budget = np.bincount(codes[best == "top_k"], minlength=codes.max(initial=-1) + 1)
    place = _places(group[eligible], word[eligible], word[eligible])
    reason[eligible[place < budget[codes[eligible]]]] = "random"
    return reason


def _places(
    group: NDArray[np.int64], first: NDArray[np.generic], second: NDArray[np.generic]
) -> NDArray[np.int32]:
    """Place of each row in its group by `first`, then `second`, ascending, `[rows]` int32."""
    order = np.lexsort((second, first, group))
    ordered = group[order]
    starts = np.flatnonzero(np.r_[True, ordered[1:] != ordered[:-1]]) if len(order) else order
    sizes = np.diff(np.r_[starts, len(order)])
    places = np.empty(len(order), dtype=np.int32)
    places[order] = np.arange(len(order)) - np.repeat(starts, sizes)
    return places
