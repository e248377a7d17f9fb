import numpy as np
import pytest

from rft_batch.ranking import UNRANKED, rank_samples, select_best, select_random

NAN, INF = float("nan"), float("inf")


def ranks(scores: list[float], groups: list[int] | None = None) -> list[int]:
    group = np.array(groups or [0] * len(scores))
    index = np.arange(len(scores), dtype=np.int32)
    return rank_samples(group, np.array(scores, dtype=np.float32), index).tolist()


def reasons(
    scores: list[float],
    groups: list[int] | None = None,
    top_k: int = 2,
    min_score: float | None = None,
    truncated: list[bool] | None = None,
) -> list[str]:
    group = np.array(groups or [0] * len(scores))
    score = np.array(scores, dtype=np.float32)
    rank = rank_samples(group, score, np.arange(len(scores), dtype=np.int32))
    cut = np.array(truncated or [False] * len(scores))
    return select_best(group, rank, score, cut, top_k, min_score).tolist()


def test_ranks_go_down_by_score_in_each_group() -> None:
    assert ranks([1, 5, 3, 9, 7], groups=[0, 0, 0, 1, 1]) == [2, 0, 1, 0, 1]


def test_groups_need_not_stand_together() -> None:
    assert ranks([1, 9, 5, 7, 3], groups=[0, 1, 0, 1, 0]) == [2, 0, 0, 1, 1]


def test_ties_go_to_the_lower_sample_index() -> None:
    assert ranks([1.0] * 64) == list(range(64))
    assert ranks([0.0, -0.0, 1.0]) == [1, 2, 0]


@pytest.mark.parametrize(
    ("scores", "expected"),
    [
        ([1, NAN, 3], [1, UNRANKED, 0]),
        ([NAN, NAN], [UNRANKED, UNRANKED]),
        ([INF, 1, -INF], [UNRANKED, 0, UNRANKED]),
        ([], []),
    ],
)
def test_scores_that_are_not_finite_have_no_rank(scores: list[float], expected: list[int]) -> None:
    assert ranks(scores) == expected


def test_ranks_agree_with_a_plain_sort() -> None:
    rng = np.random.default_rng(0)
    group = np.repeat(np.arange(50), 8)
    score = rng.integers(0, 5, 400).astype(np.float32)
    score[rng.random(400) < 0.1] = NAN
    index = np.tile(np.arange(8, dtype=np.int32), 50)
    shuffled = rng.permutation(400)

    found = rank_samples(group[shuffled], score[shuffled], index[shuffled])

    expected = np.full(400, UNRANKED)
    for g in range(50):
        rows = [r for r in np.flatnonzero(group == g) if np.isfinite(score[r])]
        for place, row in enumerate(sorted(rows, key=lambda r: (-score[r], index[r]))):
            expected[row] = place
    assert found.tolist() == expected[shuffled].tolist()


def test_the_best_k_of_every_group_are_kept() -> None:
    found = reasons([1, 5, 3, 9, 7, 8], groups=[0, 0, 0, 1, 1, 1])
    assert found == ["below_top_k", "top_k", "top_k", "top_k", "below_top_k", "top_k"]


def test_a_group_with_too_few_keeps_what_it_has() -> None:
    assert reasons([2, 1], top_k=5) == ["top_k", "top_k"]


def test_samples_without_a_score_are_never_kept() -> None:
    assert reasons([NAN, 1, INF], top_k=3) == ["not_scored", "top_k", "not_scored"]


def test_min_score_is_inclusive_and_comes_before_the_count() -> None:
    found = reasons([0.5, 0.4, 0.9, 0.7], min_score=0.5, top_k=2)
    assert found == ["below_top_k", "below_min_score", "top_k", "top_k"]


def test_a_truncated_sample_gives_its_place_to_the_next() -> None:
    found = reasons([9, 5, 1], top_k=1, truncated=[True, False, False])
    assert found == ["truncated", "top_k", "below_top_k"]


def control(scores: list[float], groups: list[int], words: list[int], **rules: float) -> list[str]:
    best = np.array(reasons(scores, groups, **rules))
    return select_random(np.array(groups), best, np.array(words, dtype=np.uint64)).tolist()


def test_the_control_draws_as_many_of_every_group_as_the_best() -> None:
    scores, groups = [1, 2, 3, 4, 9, 1, NAN, 1], [0, 0, 0, 0, 7, 7, 7, 7]
    found = control(scores, groups, words=[1, 2, 3, 4, 9, 8, 0, 7], min_score=2.5, top_k=2)
    assert found[:4] == ["random", "random", "not_drawn", "not_drawn"]
    assert found[4:] == ["not_drawn", "not_drawn", "not_scored", "random"]


def test_the_control_does_not_look_at_the_score() -> None:
    rng = np.random.default_rng(1)
    groups = np.repeat(np.arange(2_000), 4).tolist()
    scores = np.tile([1.0, 2.0, 3.0, 4.0], 2_000).tolist()
    words = rng.integers(0, 2**63, 8_000).tolist()

    found = np.array(control(scores, groups, words, top_k=1)).reshape(2_000, 4)

    drawn = (found == "random").sum(0)
    assert drawn.sum() == 2_000
    assert (abs(drawn - 500) < 5 * np.sqrt(2_000 * 0.25 * 0.75)).all()
