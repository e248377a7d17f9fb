import math
from dataclasses import fields
from itertools import pairwise

import pytest
import torch

from rft_batch.policies.token_sampling import SCHEDULES, guide, masked_counts, masked_fraction, warp
from rft_batch.settings import GenerateSettings

COSINE = [
    (8, 256, [251, 236, 212, 181, 142, 97, 49, 0]),
    (12, 256, [253, 247, 236, 221, 203, 181, 155, 128, 97, 66, 33, 0]),
    (8, 4, [3, 2, 1, 0]),
    (1, 64, [0]),
    (5, 1, [0]),
    (5, 0, []),
]


@pytest.mark.parametrize(("steps", "masked", "expected"), COSINE)
def test_cosine_counts_are_those_of_the_reference(
    steps: int, masked: int, expected: list[int]
) -> None:
    assert masked_counts("cosine", steps, masked) == expected


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("steps", [1, 2, 7, 100])
@pytest.mark.parametrize("masked", [0, 1, 2, 9, 64])
def test_counts_fall_strictly_to_zero(schedule: str, steps: int, masked: int) -> None:
    counts = [masked, *masked_counts(schedule, steps, masked)]
    assert counts[-1] == 0
    assert len(counts) - 1 <= steps
    assert all(after < before for before, after in pairwise(counts))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_everything_is_masked_at_the_start_and_nothing_at_the_end(schedule: str) -> None:
    assert masked_fraction(schedule, 0) == pytest.approx(1)
    assert masked_fraction(schedule, 1) == pytest.approx(0)


def test_the_option_offers_every_schedule() -> None:
    (option,) = (f for f in fields(GenerateSettings) if f.name == "schedule")
    assert option.metadata["choices"] == SCHEDULES


def test_warp_divides_by_the_temperature() -> None:
    logits = torch.tensor([[1.0, 2.0]])
    assert warp(logits, 0.5, 0, 1.0).tolist() == [[2.0, 4.0]]
    assert logits.tolist() == [[1.0, 2.0]]


def test_top_k_keeps_ties_with_the_last() -> None:
    kept = warp(torch.tensor([[3.0, 1.0, 2.0, 2.0]]), 1.0, 2, 1.0)
    assert kept.tolist() == [[3.0, -math.inf, 2.0, 2.0]]


@pytest.mark.parametrize(
    ("top_p", "kept"), [(0.05, [2]), (0.69, [2]), (0.71, [1, 2]), (0.91, [0, 1, 2])]
)
def test_top_p_keeps_the_smallest_set_that_reaches_the_mass(top_p: float, kept: list[int]) -> None:
    logits = torch.tensor([[0.1, 0.2, 0.7]]).log()
    assert torch.isfinite(warp(logits, 1.0, 0, top_p))[0].nonzero()[:, 0].tolist() == kept


def test_warp_does_not_bring_banned_tokens_back() -> None:
    logits = torch.tensor([[-math.inf, 0.0, -1.0]])
    assert warp(logits, 2.0, 2, 0.99)[0, 0] == -math.inf


def test_guidance_follows_one_convention() -> None:
    c, u = torch.tensor([[0.7, 0.3]]).log(), torch.tensor([[0.5, 0.5]]).log()
    torch.testing.assert_close(guide(c, u, 1.0), c)
    torch.testing.assert_close(guide(c, u, 0.0), u)
    torch.testing.assert_close(guide(c, u, 3.0), u + 3 * (c - u))


def test_guidance_does_not_depend_on_a_rows_offset() -> None:
    c, u = torch.randn(4, 5), torch.randn(4, 5)
    shifted = guide(c + 100, u - 7, 3.0)
    torch.testing.assert_close(shifted, guide(c, u, 3.0), rtol=0, atol=2e-4)
