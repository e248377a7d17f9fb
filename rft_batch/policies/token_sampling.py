"""What every sampler of token generators is made of: schedules, the token warp, guidance.

Pure functions. `count` rows of logits over `vocab` token ids; natural logarithms.
"""

import math

import torch
from torch import Tensor

SCHEDULES = ("cosine", "linear", "square", "cubic", "root", "arccos")


def masked_fraction(schedule: str, progress: float) -> float:
    """Share of positions that are still masked after `progress` of the steps.

    The schedules of MaskGIT (Chang et al. 2022, arXiv 2202.04200, section 3.3; google-research/
    maskgit libml/mask_schedule.py) and of Halton-MaskGIT (arccos, root).

    Args:
        schedule: one of `SCHEDULES`.
        progress: in [0, 1]; 1 after the last step.

    Returns:
        A value in [0, 1], 1 at progress 0 and 0 at progress 1.
    """
    match schedule:
        case "cosine":
            return math.cos(math.pi * progress / 2)
        case "linear":
            return 1 - progress
        case "square":
            return 1 - progress**2
        case "cubic":
            return 1 - progress**3
        case "root":
            return 1 - math.sqrt(progress)
        case "arccos":
            return 2 / math.pi * math.acos(progress)
    raise AssertionError(schedule)


def masked_counts(schedule: str, steps: int, num_masked: int) -> list[int]:
    """How many positions are still masked after each step, ending with 0.

    At least one position is committed in every step and none is left at the end, so a row of
    fewer positions than steps ends early.

    Args:
        schedule: one of `SCHEDULES`.
        steps: largest number of steps, at least 1.
        num_masked: positions that are masked before the first step.

    Returns:
        At most `steps` strictly falling counts; empty where `num_masked` is 0.
    """
    counts = []
    left = num_masked
    for step in range(steps):
        if left == 0:
            break
        wanted = math.floor(num_masked * masked_fraction(schedule, (step + 1) / steps))
        left = 0 if step == steps - 1 else max(min(wanted, left - 1), min(1, left - 1))
        counts.append(left)
    return counts


def warp(logits: Tensor, temperature: float, top_k: int, top_p: float) -> Tensor:
    """Logits after temperature, top-k and top-p, in that order.

    Args:
        logits: `[count, vocab]`, float32 or float64; banned ids are -inf already.
        temperature: above 0.
        top_k: keep the k largest, ties with the k-th included; 0 keeps all.
        top_p: keep the smallest set of tokens whose probabilities reach `top_p`, the first
            always; 1 keeps all.

    Returns:
        `[count, vocab]`, the same dtype, -inf where a token was cut. The argument is not changed.
    """
    logits = logits / temperature
    if 0 < top_k < logits.shape[-1]:
        kth = logits.topk(top_k, dim=-1).values[..., -1:]
        logits = logits.masked_fill(logits < kth, -torch.inf)
    if top_p < 1:
        ordered, order = logits.sort(dim=-1, descending=True, stable=True)
        mass = ordered.softmax(-1)
        cut = mass.cumsum(-1) - mass >= top_p
        cut[..., 0] = False
        logits = logits.masked_fill(cut.scatter(-1, order, cut), -torch.inf)
    return logits


def guide(conditional: Tensor, unconditional: Tensor, scale: float) -> Tensor:
    """Classifier-free guidance in log-probabilities: `u + scale * (c - u)`.

    Scale 1 is the conditional policy, 0 the unconditional one (Ho and Salimans 2022, arXiv
    2207.12598; the convention of huggingface/open-muse). Both are normalised first, so that the
    scale does not depend on a row's constant offset.

    Args:
        conditional: `[count, vocab]`.
        unconditional: `[count, vocab]`.
        scale: guidance scale.

    Returns:
        `[count, vocab]`, not normalised.
    """
    u = unconditional.log_softmax(-1)
    return u + scale * (conditional.log_softmax(-1) - u)
