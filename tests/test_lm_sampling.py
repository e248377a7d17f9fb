import math
from typing import Any

import numpy as np
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
from rft_batch.policies.lm_sampling import Drawn, Sampling, TokenUniforms, draw
from rft_batch.randomness import SampleNoise, Stream, unit_uniform

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
    """`DRAWS` tokens of one row's logits, `[vocab]`, with uniforms of one seed."""
    uniforms = unit_uniform(SampleNoise("draws").words(Stream.TOKENS, 0, DRAWS))
    many = None if seen is None else seen.expand(DRAWS, -1)
    return draw(logits.expand(DRAWS, -1), uniforms.tolist(), sampling, many)


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


def test_a_token_of_no_probability_never_comes_out_at_the_borders_of_the_uniforms() -> None:
    logits = torch.full((1, 8), -torch.inf)
    logits[0, [2, 5]] = 0.0
    borders = [2.0**-53, 0.25, 0.5 - 2.0**-53, 0.5, 0.5 + 2.0**-52, 1 - 2.0**-53]
    tokens = draw(logits.expand(6, -1), borders, Sampling()).tokens
    assert tokens.tolist() == [2, 2, 2, 5, 5, 5]


def test_the_last_of_many_tokens_can_come_out_and_none_behind_it() -> None:
    # Running sums of 100,000 float32 would end some thousandths beside 1.
    vocab = 100_000
    logits = random_logits(1, vocab, scale=0.5)
    logits[0, -10:] = -torch.inf
    tokens = draw(logits.expand(2, -1), [2.0**-53, 1 - 2.0**-53], Sampling()).tokens
    assert tokens.tolist() == [0, vocab - 11]


def test_temperature_zero_takes_the_likeliest_and_the_lowest_of_equals() -> None:
    logits = torch.tensor([[0.0, 3.0, 3.0, -1.0], [5.0, 1.0, 1.0, 5.0]])
    drawn = draw(logits, [0.99, 0.99], Sampling(temperature=0))
    assert drawn.tokens.tolist() == [1, 0]


@pytest.mark.parametrize("changes", [{}, *WARPINGS])
def test_log_probabilities_are_the_warped_ones_and_the_policys(changes: dict[str, Any]) -> None:
    logits, sampling = random_logits(32, 50), Sampling(**changes)
    prompts = torch.randint(50, (32, 8), generator=torch.Generator().manual_seed(1))
    uniforms = np.linspace(0.01, 0.99, 32).tolist()

    drawn = draw(logits, uniforms, sampling, seen_in(prompts, 50))

    at = drawn.tokens[:, None]
    warped = transformers_distribution(logits, prompts, sampling).gather(1, at)[:, 0]
    torch.testing.assert_close(drawn.logprobs, warped, rtol=1e-5, atol=1e-6)
    raw = logits.log_softmax(-1).gather(1, at)[:, 0]
    torch.testing.assert_close(drawn.policy_logprobs, raw, rtol=1e-5, atol=1e-6)


def test_reduced_precision_logits_are_drawn_from_in_float32() -> None:
    logits = random_logits(4, 50).to(torch.bfloat16)
    drawn = draw(logits, [0.1, 0.4, 0.6, 0.9], Sampling())
    exact = draw(logits.float(), [0.1, 0.4, 0.6, 0.9], Sampling())
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


def test_uniforms_do_not_depend_on_the_order_of_asking() -> None:
    noise = noises(1)[0]
    forward = TokenUniforms(noise)
    in_order = [forward.of(token) for token in range(200)]
    backward = TokenUniforms(noises(1)[0])
    assert [backward.of(token) for token in reversed(range(200))] == in_order[::-1]
    direct = unit_uniform(noises(1)[0].words(Stream.TOKENS, 0, 200))
    assert in_order == direct.tolist()


def test_uniforms_of_two_samples_differ() -> None:
    one, other = (TokenUniforms(noise) for noise in noises(2))
    assert not {one.of(token) for token in range(100)} & {other.of(token) for token in range(100)}
