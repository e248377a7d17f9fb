import numpy as np
import pytest

from rft_batch.randomness import SampleNoise, Stream, first_words, gumbel, unit_uniform

GOLDEN_TOKENS = [9720325118924289100, 2890192296630266906, 13886470230384321824]
GOLDEN_ORDER = [6009695295811226296, 6852115517394200949]


def test_words_are_those_of_philox_at_the_counter_of_stream_and_step() -> None:
    noise = SampleNoise("x")
    key = noise._philox.state["state"]["key"]

    drawn = noise.words(Stream.ORDER, step=3, count=10, start=8)

    expected = np.random.Philox(key=key, counter=[2, Stream.ORDER, 3, 0]).random_raw(10)
    assert drawn.tolist() == expected.tolist()


def test_the_stream_of_a_sample_is_a_contract() -> None:
    # Changing these numbers changes every sample that anyone has made.
    noise = SampleNoise.for_sample(seed=0, round_number=1, prompt_id="a", sample_index=2)
    assert noise.words(Stream.TOKENS, 0, 3).tolist() == GOLDEN_TOKENS
    assert noise.words(Stream.ORDER, 5, 2).tolist() == GOLDEN_ORDER


def test_words_do_not_depend_on_the_order_of_calls() -> None:
    calls = [
        (Stream.TOKENS, 0, 5),
        (Stream.ORDER, 7, 3),
        (Stream.TOKENS, 0, 5),
        (Stream.TOKENS, 1, 4),
    ]
    one = SampleNoise("x")

    together = [one.words(*call).tolist() for call in calls]

    assert together == [SampleNoise("x").words(*call).tolist() for call in calls]


@pytest.mark.parametrize("vocab", [3, 4, 17, 1000])
def test_token_words_of_a_position_do_not_depend_on_the_others(vocab: int) -> None:
    noise = SampleNoise("x")

    some = noise.token_words(2, [0, 1, 5, 200], vocab)

    single = [noise.token_words(2, [position], vocab)[0] for position in (0, 1, 5, 200)]
    assert some.tolist() == [words.tolist() for words in single]


def test_samples_prompts_rounds_and_seeds_have_different_words() -> None:
    identities = [(0, 1, "a", 0), (0, 1, "a", 1), (0, 1, "b", 0), (0, 2, "a", 0), (1, 1, "a", 0)]
    first = {int(SampleNoise.for_sample(*i).words(Stream.TOKENS, 0, 1)[0]) for i in identities}
    assert len(first) == len(identities)


def test_ids_that_look_alike_when_joined_have_different_words() -> None:
    one, other = SampleNoise("a", "b"), SampleNoise("a', 'b")
    assert one.words(Stream.TOKENS, 0, 1) != other.words(Stream.TOKENS, 0, 1)


def test_uniforms_stay_inside_the_open_interval() -> None:
    ends = np.array([0, 2**64 - 1], dtype=np.uint64)
    assert unit_uniform(ends).tolist() == [2.0**-53, 1 - 2.0**-53]
    assert np.isfinite(gumbel(ends)).all()


def test_gumbel_max_draws_by_probability() -> None:
    probabilities = np.array([0.1, 0.2, 0.7])
    draws = 20_000
    words = SampleNoise("law").words(Stream.TOKENS, 0, draws * 4).reshape(draws, 4)[:, :3]

    counts = np.bincount((np.log(probabilities) + gumbel(words)).argmax(1), minlength=3)

    # Five standard deviations of a binomial count.
    allowed = 5 * np.sqrt(draws * probabilities * (1 - probabilities))
    assert (abs(counts - draws * probabilities) < allowed).all()


def test_permutations_are_uniform_over_the_first_place() -> None:
    draws = 6_000
    first = [SampleNoise("p", i).permutation(Stream.ORDER, 0, 6)[0] for i in range(draws)]
    assert (abs(np.bincount(first, minlength=6) - 1000) < 5 * np.sqrt(draws / 6 * 5 / 6)).all()


def test_first_words_are_those_of_each_sample_alone() -> None:
    ids, indexes = [f"prompt {i}é" for i in range(200)], list(range(200))
    for stream in Stream:
        found = first_words(7, 3, ids, indexes, stream)
        single = [
            SampleNoise.for_sample(7, 3, prompt_id, index).words(stream, 0, 1)[0]
            for prompt_id, index in zip(ids, indexes, strict=True)
        ]
        assert found.tolist() == [int(word) for word in single]
    assert len(first_words(0, 0, [], [], Stream.SELECTION)) == 0
