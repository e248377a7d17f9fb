"""From logits to a token: penalty, temperature, cuts, and a draw that belongs to the sample.

Letters: `rows` sequences in progress, `vocab` token ids.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rft_batch.randomness import SampleNoise, Stream, unit_uniform

_UNIFORMS_PER_CALL = 64
# Tokens that top-p looks at before it sorts the whole vocabulary.
_LIKELIEST = 256


@dataclass(frozen=True)
class Sampling:
    """How a token is drawn; the order and the meaning are those of transformers' processors."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0

    @property
    def draws_from_the_policy(self) -> bool:
        """Whether the distribution is the policy's own."""
        return self == Sampling()


@dataclass(frozen=True)
class Drawn:
    """One token for each row."""

    tokens: Tensor
    """`[rows]` int64."""
    logprobs: Tensor
    """`[rows]` float32: under the distribution that it was drawn from, in nats."""
    policy_logprobs: Tensor
    """`[rows]` float32: under the policy itself, in nats."""


class TokenUniforms:
    """The uniforms of one sample's tokens: token `t` has word `t` of its stream.

    Args:
        noise: the sample's.
    """

    def __init__(self, noise: SampleNoise) -> None:
        self._noise = noise
        self._drawn: NDArray[np.float64] = np.empty(0)

    def of(self, token: int) -> float:
        """The uniform of a token by its place in the completion."""
        while token >= len(self._drawn):
            start = len(self._drawn)
            words = self._noise.words(Stream.TOKENS, 0, _UNIFORMS_PER_CALL, start)
            self._drawn = np.concatenate([self._drawn, unit_uniform(words)])
        return float(self._drawn[token])


def draw(
    logits: Tensor, uniforms: Sequence[float], sampling: Sampling, seen: Tensor | None = None
) -> Drawn:
    """One token for each row, by inversion of its cumulative distribution over the token ids.

    One uniform for each token, and not a Gumbel draw for each token id as where the codebook is
    small: 49,152 of those cost as much as a third of the forward pass of a small model on a CPU,
    and on a GPU they would have to be brought there. A row's logits that differ in their last bits
    change its token only where the uniform lies that near to a boundary.

    Args:
        logits: `[rows, vocab]`, any float type.
        uniforms: one in (0, 1) for each row.
        sampling: temperature 0 takes the likeliest, the lowest id of equals.
        seen: `[rows, vocab]` bool, the ids in prompt and completion so far; for the penalty.
    """
    policy = logits.float()
    warped = _warped(policy, sampling, seen)
    if sampling.temperature == 0:
        tokens = warped.argmax(-1)
    else:
        # float64: a running sum of 100,000 float32 probabilities is off by more than most of them.
        cumulative = warped.softmax(-1).to(_wide(logits.device)).cumsum(-1)
        height = torch.tensor(uniforms, dtype=cumulative.dtype, device=logits.device)[:, None]
        # `right`: a token of no probability ends where the one before it does, and is passed over.
        tokens = torch.searchsorted(cumulative, height * cumulative[:, -1:], right=True)[:, 0]
    policy_logprobs = _logprobs(policy, tokens)
    same = sampling.draws_from_the_policy
    return Drawn(tokens, policy_logprobs if same else _logprobs(warped, tokens), policy_logprobs)


def _warped(logits: Tensor, sampling: Sampling, seen: Tensor | None) -> Tensor:
    if seen is not None and sampling.repetition_penalty != 1:
        penalty = sampling.repetition_penalty
        penalised = torch.where(logits < 0, logits * penalty, logits / penalty)
        logits = torch.where(seen, penalised, logits)
    if sampling.temperature == 0:
        return logits
    if sampling.temperature != 1:
        logits = logits / sampling.temperature
    if 0 < sampling.top_k < logits.shape[-1]:
        kth = logits.topk(sampling.top_k, dim=-1).values[:, -1:]
        logits = logits.masked_fill(logits < kth, -torch.inf)
    if sampling.top_p < 1:
        logits = logits.masked_fill(logits < _top_p_floor(logits, sampling.top_p), -torch.inf)
    if sampling.min_p > 0:
        floor = logits.amax(-1, keepdim=True) + np.log(sampling.min_p)
        logits = logits.masked_fill(logits < floor, -torch.inf)
    return logits


def _top_p_floor(logits: Tensor, top_p: float) -> Tensor:
    """`[rows, 1]`: the lowest logit of the smallest set of likeliest tokens that reaches `top_p`.

    Sorting the whole vocabulary costs more than the model's last layer; nearly always the set lies
    within the first few hundred.
    """
    total = logits.logsumexp(-1, keepdim=True)
    for count in (min(_LIKELIEST, logits.shape[-1]), logits.shape[-1]):
        likeliest = logits.topk(count, dim=-1).values
        mass = (likeliest - total).exp().cumsum(-1)
        if bool((mass[:, -1] >= top_p).all()):
            break
    last = (mass < top_p).sum(-1, keepdim=True).clamp(max=count - 1)
    return likeliest.gather(-1, last)


def _logprobs(logits: Tensor, tokens: Tensor) -> Tensor:
    return logits.gather(-1, tokens[:, None])[:, 0] - logits.logsumexp(-1)


def _wide(device: torch.device) -> torch.dtype:
    return torch.float32 if device.type == "mps" else torch.float64
