import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rft_batch.ranking import (
    UNRANKED,
    Reason,
    best_of_groups,
    draw_control,
    draw_places,
    lowest_numbers,
    mark,
    pass_rates,
    rank_samples,
    repeats,
    round_order,
    without_spread,
)
from rft_batch.schema import REASONS

NAN, INF = float("nan"), float("inf")


def ranks(scores: list[float], groups: list[int] | None = None) -> list[int]:
    group = np.array(groups or [0] * len(scores))
    index = np.arange(len(scores), dtype=np.int32)
    return rank_samples(group, np.array(scores, dtype=np.float32), index).tolist()


def chosen(scores: list[float], groups: list[int], top_k: int, rows: list[bool]) -> list[int]:
    """Numbers of the rows that are among the best of their group."""
    group = np.array(groups, dtype=np.int64)
    score = np.array(scores, dtype=np.float32)
    rank = rank_samples(group, score, np.arange(len(scores), dtype=np.int32))
    able = np.array(rows, dtype=bool) & (rank != UNRANKED)
    return np.flatnonzero(best_of_groups(group, rank, able, top_k)).tolist()


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
    assert chosen([1, 5, 3, 9, 7, 8], [0, 0, 0, 1, 1, 1], 2, [True] * 6) == [1, 2, 3, 5]


def test_a_group_with_too_few_keeps_what_it_has() -> None:
    assert chosen([2, 1], [0, 0], 5, [True] * 2) == [0, 1]
    assert chosen([], [], 2, []) == []


def test_samples_without_a_score_are_never_kept() -> None:
    assert chosen([NAN, 1, INF], [0, 0, 0], 3, [True] * 3) == [1]


def test_what_was_left_out_gives_its_place_to_the_next() -> None:
    assert chosen([9, 5, 1], [0, 0, 0], 1, [False, True, True]) == [1]


def test_a_reason_is_written_where_there_is_none() -> None:
    reason = np.array([Reason.OPEN, Reason.NOT_SCORED, Reason.OPEN], dtype=np.int8)
    mark(reason, np.array([True, True, False]), Reason.TRUNCATED)
    assert reason.tolist() == [Reason.TRUNCATED, Reason.NOT_SCORED, Reason.OPEN]


def test_the_numbers_of_the_reasons_are_those_of_the_words() -> None:
    assert [reason.name.lower() for reason in sorted(Reason) if reason >= 0] == list(REASONS)
    assert [reason.value for reason in sorted(Reason)] == list(range(-1, len(REASONS)))


@pytest.mark.parametrize(
    ("scores", "expected"),
    [
        ([0.4] * 4, True),
        ([0, 1, 0, 1], False),
        ([0.4, 0.4, 0.4, 0.4 + 1e-7], False),
        ([0.4, NAN, NAN, 0.4], True),
        ([0.4, NAN, NAN], False),
        ([NAN, NAN], False),
        ([0.0, -0.0], True),
        ([INF, 1, 1], True),
    ],
)
def test_a_group_has_no_spread_when_two_scores_or_more_are_all_equal(
    scores: list[float], expected: bool
) -> None:
    others = [7.0, 8.0]
    group = np.array([1, 0, *[2] * len(scores)])
    score = np.array([*others, *scores], dtype=np.float32)
    assert without_spread(group, score).tolist() == [False, False, expected]


def test_a_pass_rate_is_of_the_scored() -> None:
    group = np.array([0, 0, 0, 1, 1, 2])
    score = np.array([1, 0.5, NAN, 0, 0.4, NAN], dtype=np.float32)
    assert pass_rates(group, score, 0.5).tolist() == [1.0, 0.0, 0.0]


def test_the_first_of_equal_keys_in_a_group_is_no_repeat() -> None:
    group = np.array([0, 0, 0, 1, 0, 0])
    key = np.array([5, 5, 5, 5, -1, -1])
    order = np.array([2, 0, 1, 0, 3, 4])
    found = repeats(group, key, order, np.array([True] * 6))
    assert found.tolist() == [True, False, True, False, False, False]
    found = repeats(group, key, order, np.array([True, False, True, True, True, True]))
    assert found.tolist() == [True, False, False, False, False, False]


def control(groups: list[int], best: list[Reason], words: list[int], pool: list[bool]) -> list[str]:
    group = np.array(groups)
    key = np.full(len(groups), -1)
    place = draw_places(group, np.array(pool), key, np.array(words, dtype=np.uint64))
    drawn = draw_control(group, np.array(best, dtype=np.int8), place)
    return [Reason(number).name.lower() for number in drawn]


def test_the_control_draws_as_many_of_every_group_as_the_best() -> None:
    low, kept, unscored = Reason.BELOW_MIN_SCORE, Reason.TOP_K, Reason.NOT_SCORED
    found = control(
        [0, 0, 0, 0, 1, 1, 1, 1],
        [low, low, kept, kept, kept, low, unscored, low],
        words=[1, 2, 3, 4, 9, 8, 0, 7],
        pool=[True] * 6 + [False, True],
    )
    assert found[:4] == ["random", "random", "not_drawn", "not_drawn"]
    assert found[4:] == ["not_drawn", "not_drawn", "not_scored", "random"]


def test_the_control_does_not_look_at_the_score() -> None:
    rng = np.random.default_rng(1)
    groups = np.repeat(np.arange(2_000), 4).tolist()
    best = [Reason.BELOW_TOP_K, Reason.BELOW_TOP_K, Reason.BELOW_TOP_K, Reason.TOP_K] * 2_000
    words = rng.integers(0, 2**63, 8_000).tolist()

    found = np.array(control(groups, best, words, [True] * 8_000)).reshape(2_000, 4)

    drawn = (found == "random").sum(0)
    assert drawn.sum() == 2_000
    assert (abs(drawn - 500) < 5 * np.sqrt(2_000 * 0.25 * 0.75)).all()


def test_the_control_draws_one_of_equal_keys() -> None:
    group = np.zeros(4, dtype=np.int64)
    word = np.array([4, 3, 2, 1], dtype=np.uint64)
    place = draw_places(group, np.ones(4, dtype=bool), np.array([0, 1, 1, -1]), word)
    best = np.array([Reason.TOP_K, Reason.TOP_K, Reason.DUPLICATE, Reason.BANNED], dtype=np.int8)
    found = [Reason(number) for number in draw_control(group, best, place)]
    assert found == [Reason.NOT_DRAWN, Reason.DUPLICATE, Reason.RANDOM, Reason.RANDOM]


FLOATS = st.floats(width=32, allow_nan=False, allow_infinity=False)


@given(st.lists(st.tuples(FLOATS, st.integers(0, 300)), max_size=40))
def test_numbers_of_a_round_are_in_the_order_of_scores_and_ranks(
    samples: list[tuple[float, int]],
) -> None:
    score = np.array([score for score, _ in samples], dtype=np.float32)
    rank = np.array([rank for _, rank in samples], dtype=np.int32)
    numbers = round_order(score, rank).tolist()
    rows = range(len(samples))
    expected = sorted(rows, key=lambda row: (-samples[row][0], samples[row][1]))
    assert sorted(rows, key=numbers.__getitem__) == expected


@given(
    st.lists(st.lists(st.integers(0, 2**64 - 1) | st.integers(0, 3), max_size=20), max_size=5),
    st.integers(0, 60),
)
def test_the_lowest_numbers_of_many_parts_are_those_of_a_sort(
    parts: list[list[int]], count: int
) -> None:
    arrays = [np.array(part, dtype=np.uint64) for part in parts]

    limit, at_limit = lowest_numbers(lambda: iter(arrays), count)

    numbers = sorted(number for part in parts for number in part)
    found = [number for number in numbers if number < limit]
    assert found + [limit] * at_limit == numbers[:count]
