import math
from typing import Any

import pytest
import torch
from language_models import noises
from torch import Tensor
from transformers import LogitsProcessorList
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from rft_batch.policies import lm_sampling
from rft_batch.policies.lm_sampling import Drawn, Sampling, draw
from rft_batch.randomness import SampleNoise

DRAWS = 20_000
WARPINGS = [
    {"temperature": 0.7},
    {"temperature": 1.6},
    {"top_k": 5},
    {"top_k": 1},
    {"top_k": 999},
    {"top_p": 0.8},
    {"top_p": 0.01},
    {"min_p": 0.1},
    {"min_p": 1.0},
    {"repetition_penalty": 1.4},
    {"repetition_penalty": 0.6},
    {"temperature": 0.6, "top_k": 9, "top_p": 0.9, "min_p": 0.05, "repetition_penalty": 1.3},
    {"temperature": 1.5, "top_k": 12, "top_p": 0.7, "min_p": 0.2, "repetition_penalty": 0.8},
]


def random_logits(rows: int, vocab: int, seed: int = 0, scale: float = 3.0) -> Tensor:
    return scale * torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed))


def draw_many(logits: Tensor, sampling: Sampling, seen: Tensor | None = None) -> Drawn:
    """`DRAWS` tokens of one row's logits, `[vocab]`, as the steps of one sample."""
    many = None if seen is None else seen.expand(DRAWS, -1)
    rows = logits.expand(DRAWS, -1)
    return draw(rows, [SampleNoise("draws")] * DRAWS, range(DRAWS), sampling, many)


def chi_square(tokens: Tensor, law: Tensor) -> float:
    expected = DRAWS * law[law > 0]
    counts = tokens.bincount(minlength=len(law)).double()[law > 0]
    return float(((counts - expected) ** 2 / expected).sum())


def most_by_chance(degrees: int) -> float:
    # Mean n and variance 2n; six deviations, for the law is skewed.
    return degrees + 6 * math.sqrt(2 * degrees) + 1e-9


def transformers_distribution(logits: Tensor, prompt: Tensor, sampling: Sampling) -> Tensor:
    """Log-probabilities after transformers' processors in the order in which it applies them."""
    processors: list[Any] = []
    if sampling.repetition_penalty != 1:
        processors.append(RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty))
    if sampling.temperature != 1:
        processors.append(TemperatureLogitsWarper(sampling.temperature))
    if sampling.top_k:
        processors.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1:
        processors.append(TopPLogitsWarper(sampling.top_p))
    if sampling.min_p:
        processors.append(MinPLogitsWarper(sampling.min_p))
    return LogitsProcessorList(processors)(prompt, logits.clone()).log_softmax(-1)


def own_distribution(logits: Tensor, sampling: Sampling, seen: Tensor) -> Tensor:
    return lm_sampling._warped(logits, sampling, seen).log_softmax(-1)


def seen_in(prompts: Tensor, vocab: int) -> Tensor:
    return torch.zeros(len(prompts), vocab, dtype=torch.bool).scatter_(1, prompts, True)


@pytest.mark.parametrize("changes", WARPINGS)
@pytest.mark.parametrize("vocab", [24, 700])
def test_the_distribution_is_that_of_transformers(changes: dict[str, Any], vocab: int) -> None:
    logits, sampling = random_logits(16, vocab), Sampling(**changes)
    prompts = torch.randint(vocab, (16, 8), generator=torch.Generator().manual_seed(1))

    expected = transformers_distribution(logits, prompts, sampling)
    found = own_distribution(logits, sampling, seen_in(prompts, vocab))

    assert torch.equal(found.isfinite(), expected.isfinite())
    torch.testing.assert_close(found.exp(), expected.exp(), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("changes", [{}, *WARPINGS])
def test_draws_follow_the_distribution(changes: dict[str, Any]) -> None:
    vocab, sampling = 12, Sampling(**changes)
    logits = random_logits(1, vocab, seed=3, scale=1.5)
    prompt = torch.tensor([[2, 5, 7]])
    seen = seen_in(prompt, vocab)
    law = transformers_distribution(logits, prompt, sampling).exp()[0].double()

    tokens = draw_many(logits[0], sampling, seen).tokens

    assert not (law == 0)[tokens].any()
    degrees = int((law > 0).sum()) - 1
    assert chi_square(tokens, law) <= most_by_chance(degrees)


def test_draws_of_another_distribution_would_be_seen() -> None:
    # Shows that the test above can fail.
    logits = random_logits(1, 12, seed=3, scale=1.5)
    tokens = draw_many(logits[0], Sampling(temperature=1.1)).tokens
    assert chi_square(tokens, logits[0].softmax(-1).double()) > most_by_chance(11)


def test_draws_among_many_blocks_follow_the_distribution() -> None:
    logits = random_logits(1, 700, seed=4, scale=1.0)[0]
    law = logits.softmax(-1).double()
    assert chi_square(draw_many(logits, Sampling()).tokens, law) <= most_by_chance(699)


def test_a_token_of_no_probability_never_comes_out() -> None:
    # The last block is not full, and one between has nothing at all.
    logits = torch.full((900,), -torch.inf)
    logits[[2, 5, 300, 899]] = 0.0
    assert set(draw_many(logits, Sampling()).tokens.tolist()) == {2, 5, 300, 899}


def test_logits_that_differ_in_their_last_bits_give_the_same_tokens() -> None:
    # Flat: nearly all mass is in tokens that are each less likely than the jitter.
    logits = random_logits(1, 49_152, scale=1.0).expand(300, -1)
    jitter = 1e-5 * random_logits(300, 49_152, seed=9, scale=1.0)
    one, other = (
        draw(rows, noises(300), [7] * 300, Sampling()).tokens for rows in (logits, logits + jitter)
    )
    assert torch.equal(one, other)


def test_temperature_zero_takes_the_likeliest_and_the_lowest_of_equals() -> None:
    logits = torch.tensor([[0.0, 3.0, 3.0, -1.0], [5.0, 1.0, 1.0, 5.0]])
    drawn = draw(logits, noises(2), [0, 0], Sampling(temperature=0))
    assert drawn.tokens.tolist() == [1, 0]


@pytest.mark.parametrize("changes", [{}, *WARPINGS])
def test_log_probabilities_are_the_warped_ones_and_the_policys(changes: dict[str, Any]) -> None:
    logits, sampling = random_logits(32, 50), Sampling(**changes)
    prompts = torch.randint(50, (32, 8), generator=torch.Generator().manual_seed(1))

    drawn = draw(logits, noises(32), range(32), sampling, seen_in(prompts, 50))

    at = drawn.tokens[:, None]
    warped = transformers_distribution(logits, prompts, sampling).gather(1, at)[:, 0]
    torch.testing.assert_close(drawn.logprobs, warped, rtol=1e-5, atol=1e-6)
    raw = logits.log_softmax(-1).gather(1, at)[:, 0]
    torch.testing.assert_close(drawn.policy_logprobs, raw, rtol=1e-5, atol=1e-6)


def test_reduced_precision_logits_are_drawn_from_in_float32() -> None:
    logits = random_logits(4, 50).to(torch.bfloat16)
    drawn = draw(logits, noises(4), [0] * 4, Sampling())
    exact = draw(logits.float(), noises(4), [0] * 4, Sampling())
    assert drawn.policy_logprobs.dtype == torch.float32
    assert torch.equal(drawn.tokens, exact.tokens)
    assert torch.equal(drawn.logprobs, exact.logprobs)


@pytest.mark.parametrize("top_p", [0.1, 0.5, 0.9, 0.97, 0.999])
@pytest.mark.parametrize("scale", [0.1, 1.0, 4.0])
def test_top_p_is_the_same_among_the_likeliest_and_in_the_whole_vocabulary(
    monkeypatch: pytest.MonkeyPatch, top_p: float, scale: float
) -> None:
    # From flat rows, whose set is nearly the whole vocabulary, to sharp ones.
    logits = random_logits(8, 600, scale=scale)
    floors = []
    for likeliest in (1, 16, 256, 600):
        monkeypatch.setattr(lm_sampling, "_LIKELIEST", likeliest)
        floors.append(lm_sampling._top_p_floor(logits, top_p))
    assert all(torch.equal(floor, floors[-1]) for floor in floors)


def test_top_p_keeps_the_smallest_set_that_reaches_it() -> None:
    logits = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log()
    for top_p, kept in ((0.4, 1), (0.6, 2), (0.79, 2), (0.81, 3), (0.96, 4)):
        found = own_distribution(logits, Sampling(top_p=top_p), torch.zeros(1, 4, dtype=torch.bool))
        assert int(found.isfinite().sum()) == kept, top_p


def test_a_draw_belongs_to_its_sample_and_step_alone() -> None:
    logits = random_logits(6, 600, scale=0.5)
    whole = draw(logits, noises(6), range(6), Sampling()).tokens
    backwards = [
        draw(logits[row : row + 1], [noises(6)[row]], [row], Sampling()).tokens for row in range(6)
    ]
    assert torch.equal(torch.cat(backwards), whole)
    others = draw(logits, noises(7)[1:], range(6), Sampling()).tokens
    later = draw(logits, noises(6), range(1, 7), Sampling()).tokens
    assert not torch.equal(others, whole)
    assert not torch.equal(later, whole)
