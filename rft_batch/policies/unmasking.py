"""Sampling of masked token models: mask everything unknown, commit positions step by step.

Two departures from MaskGIT (arXiv 2202.04200). Positions are committed in uniformly random order by
default, because the paper's confidence order is not sampling from the policy, and a policy that is
fine-tuned on such samples loses its diversity and the likelihood of its data, while its reward
rises (measured in the README). And every draw is keyed by the sample, not by the batch.

Letters: `batch` samples, `seq_len` positions, `vocab` ids of the codebook, `count` positions of the
whole batch that are drawn in a step.
"""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from rft_batch.errors import DataError
from rft_batch.policies.protocol import Completions
from rft_batch.policies.token_model import TokenModelSpec, token_logits
from rft_batch.policies.token_sampling import guide, masked_counts, warp
from rft_batch.randomness import SampleNoise, Stream, gumbel


@torch.inference_mode()
def unmask(
    model: nn.Module,
    spec: TokenModelSpec,
    x: NDArray[np.int64],
    class_labels: NDArray[np.int64],
    noises: Sequence[SampleNoise],
    *,
    order: str,
    steps: int,
    schedule: str,
    temperature: float,
    top_k: int,
    top_p: float,
    choice_temperature: float,
    guidance_scale: float,
) -> Completions:
    """Commits a token to every masked position in at most `steps` forward passes.

    `order="random"` commits a uniformly random set of positions in every step, which are the
    conditionals of the policy itself. `order="confidence"` is the paper's decoding (section 3.2;
    google-research/maskgit libml/parallel_decode.py): it draws all masked positions and keeps the
    most confident, by log-probability before any warp plus `choice_temperature * (1 - progress)`
    Gumbel noise. In both, known and committed positions never change, rows that have finished
    leave the batch, and no banned id comes out.

    Args:
        model: in eval mode.
        spec: the policy's spec.
        x: `[batch, seq_len]`, known tokens, and the mask id elsewhere; not changed.
        class_labels: `[batch]`; not used where the policy has no classes.
        noises: the noise of each sample.
        order: `random` or `confidence`.
        steps: largest number of forward passes.
        schedule: one of `token_sampling.SCHEDULES`.
        temperature: of the tokens; 0 takes the likeliest.
        top_k: 0 keeps all tokens.
        top_p: 1 keeps all tokens.
        choice_temperature: scale of the noise on confidences.
        guidance_scale: 1 is no guidance.

    Returns:
        The completions. `logprobs` are sums of log-probabilities under the warped policy at the
        moment of commitment; None for confidence order and temperature 0, whose choices have
        none.

    Raises:
        DataError: the model's logits are not finite.
    """
    device = next(model.parameters()).device
    known_ids, x = x, x.copy()
    unknown = x == spec.mask_id
    plans = [masked_counts(schedule, steps, int(row.sum())) for row in unknown]
    turns = _turns(unknown, noises) if order == "random" else None
    logprobs = np.zeros(len(x))
    for step in range(max(map(len, plans), default=0)):
        rows = np.array([row for row, plan in enumerate(plans) if step < len(plan)])
        keep = np.array([plans[row][step] for row in rows])
        drawn = unknown[rows] if turns is None else unknown[rows] & (turns[rows] >= keep[:, None])
        at_row, at_position = np.nonzero(drawn)
        logits = _conditionals(
            model, spec, x[rows], class_labels[rows], drawn, guidance_scale, device
        )
        if not (logits < torch.inf).all():  # also false for NaN; -inf is a banned id
            raise DataError(
                f"the policy's logits at sampling step {step} are not finite. "
                "Its weights may be damaged, or --dtype too narrow for them."
            )
        # In random order a position is drawn once, so its noise needs no step.
        noise_step = step if turns is None else 0
        words = [
            noises[row].token_words(noise_step, np.flatnonzero(drawn[i]), spec.vocab_size)
            for i, row in enumerate(rows)
        ]
        tokens, token_logprobs = _draw(logits, np.concatenate(words), temperature, top_k, top_p)
        if turns is None:
            progress = (step + 1) / steps
            confidence = logits.log_softmax(-1).gather(-1, tokens[:, None])[:, 0].cpu().numpy()
            scale = choice_temperature * (1 - progress)
            noise = _confidence_noise(noises, rows, step, spec.seq_len)[at_row, at_position]
            committed = _most_confident(confidence + scale * noise, at_row, drawn, keep)
        else:
            committed = np.ones(len(at_row), dtype=bool)
            np.add.at(logprobs, rows[at_row], token_logprobs.cpu().numpy())
        chosen = rows[at_row[committed]], at_position[committed]
        x[chosen] = tokens.cpu().numpy()[committed]
        unknown[chosen] = False
    has_logprob = order == "random" and temperature > 0
    return Completions(
        prompt_ids=[row.tolist() if (row != spec.mask_id).any() else [] for row in known_ids],
        ids=list(x.astype(np.int32)),
        texts=[None] * len(x),
        finish_reasons=["stop"] * len(x),
        logprobs=[float(value) if has_logprob else None for value in logprobs],
        losses=[None] * len(x),
        errors=[None] * len(x),
    )


def _turns(unknown: NDArray[np.bool_], noises: Sequence[SampleNoise]) -> NDArray[np.int64]:
    """`[batch, seq_len]`: how many unknown positions are committed after this one."""
    turns = np.full(unknown.shape, -1)
    for row, noise in enumerate(noises):
        positions = np.flatnonzero(unknown[row])
        turns[row, positions] = noise.permutation(Stream.ORDER, 0, len(positions)).argsort()
    return turns


def _conditionals(
    model: nn.Module,
    spec: TokenModelSpec,
    x: NDArray[np.int64],
    labels: NDArray[np.int64],
    drawn: NDArray[np.bool_],
    guidance_scale: float,
    device: torch.device,
) -> Tensor:
    """Guided logits `[count, vocab]` float64 at the drawn positions, -inf for banned ids."""
    ids, classes = torch.from_numpy(x).to(device), torch.from_numpy(labels).to(device)
    where = torch.from_numpy(drawn).to(device)
    if guidance_scale == 1:
        logits = _double(token_logits(model, spec, ids, classes)[where])
    else:
        assert spec.condition is not None
        assert spec.condition.null_class is not None
        null = torch.full_like(classes, spec.condition.null_class)
        both = token_logits(model, spec, ids.repeat(2, 1), torch.cat([null, classes]))
        u, c = _double(both[where.repeat(2, 1)]).chunk(2)
        logits = guide(c, u, guidance_scale)
    if spec.banned_ids:
        logits[:, list(spec.banned_ids)] = -torch.inf
    return logits


def _double(logits: Tensor) -> Tensor:
    # Apple's GPUs have no float64, so there the few positions that are drawn go to the CPU.
    return logits.to("cpu" if logits.device.type == "mps" else logits.device, torch.float64)


def _draw(
    logits: Tensor, words: NDArray[np.uint64], temperature: float, top_k: int, top_p: float
) -> tuple[Tensor, Tensor]:
    """Tokens `[count]` by Gumbel-max, and their log-probabilities after the warp.

    Noise belongs to the token id, so logits that differ in their last bits give the same token;
    an inverse cumulative distribution would not.
    """
    if temperature == 0:
        tokens = logits.argmax(-1)
        return tokens, torch.zeros_like(tokens, dtype=logits.dtype)
    warped = warp(logits, temperature, top_k, top_p)
    tokens = (warped + torch.from_numpy(gumbel(words)).to(logits.device)).argmax(-1)
    return tokens, warped.log_softmax(-1).gather(-1, tokens[:, None])[:, 0]


def _confidence_noise(
    noises: Sequence[SampleNoise], rows: NDArray[np.int64], step: int, seq_len: int
) -> NDArray[np.float64]:
    """`[len(rows), seq_len]` Gumbel noise, by position."""
    words = [noises[row].words(Stream.CONFIDENCE, step, seq_len) for row in rows]
    return gumbel(np.stack(words))


def _most_confident(
    confidence: NDArray[np.float64],
    at_row: NDArray[np.int64],
    drawn: NDArray[np.bool_],
    keep_masked: NDArray[np.int64],
) -> NDArray[np.bool_]:
    """Which of the drawn positions to commit: all but the `keep_masked` least confident of a row.

    Ties go by position: the sort is stable and positions ascend.
    """
    order = np.lexsort((confidence, at_row))
    starts = np.concatenate([[0], np.cumsum(drawn.sum(1))[:-1]])
    place = np.empty(len(order), dtype=np.int64)
    place[order] = np.arange(len(order)) - np.repeat(starts, drawn.sum(1))
    committed: NDArray[np.bool_] = place >= keep_masked[at_row]
    return committed
