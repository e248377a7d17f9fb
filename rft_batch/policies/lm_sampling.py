"""From logits to a token: penalty, temperature, cuts, and a draw that belongs to the sample.

Letters: `rows` sequences in progress, `vocab` token ids.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from rft_batch.randomness import SampleNoise, Stream, gumbel

# Token ids that are drawn among together; part of the contract: another number, other samples.
_BLOCK = 256
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


def draw(
    logits: Tensor,
    noises: Sequence[SampleNoise],
    steps: Sequence[int],
    sampling: Sampling,
    seen: Tensor | None = None,
) -> Drawn:
    """One token for each row by Gumbel-max in two stages: a block of token ids, then one of it.

    One stage would need a Gumbel draw for each of 50,000 ids, a third of a small model's forward
    pass; two need a few hundred, and the chain rule keeps the distribution exact. Inverting the
    cumulative distribution needs one draw alone, but where it hits an unlikely token, logits that
    differ in their last bits give another one: on SmolLM2, between two batch sizes, one in 766.

    Args:
        logits: `[rows, vocab]`, any float type.
        noises: that of each row's sample.
        steps: place of the token in each row's completion.
        sampling: temperature 0 takes the likeliest, the lowest id of equals.
        seen: `[rows, vocab]` bool, the ids in prompt and completion so far; for the penalty.
    """
    policy = logits.float()
    warped = _warped(policy, sampling, seen)
    if sampling.temperature == 0:
        tokens = warped.argmax(-1)
    else:
        rows, vocab = warped.shape
        blocks = -(-vocab // _BLOCK)
        words_of_blocks = -(-blocks // 4) * 4
        words = [
            noise.words(Stream.TOKENS, step, words_of_blocks + _BLOCK)
            for noise, step in zip(noises, steps, strict=True)
        ]
        noise = torch.from_numpy(gumbel(np.stack(words)).astype(np.float32)).to(warped.device)
        padded = pad(warped, (0, blocks * _BLOCK - vocab), value=-torch.inf)
        by_block = padded.view(rows, blocks, _BLOCK)
        block = (by_block.logsumexp(-1) + noise[:, :blocks]).argmax(-1)
        inside = by_block[torch.arange(rows, device=block.device), block]
        tokens = block * _BLOCK + (inside + noise[:, words_of_blocks:]).argmax(-1)
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
