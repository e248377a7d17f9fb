import json
import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import TINY, run_sampler, save_tiny_policy
from torch import Tensor, nn

from rft_batch.errors import DataError, InputError
from rft_batch.policies import load_policy, unmasking
from rft_batch.policies.maskgit import MaskGITPolicy
from rft_batch.policies.protocol import Completions
from rft_batch.policies.token_model import Recipe, TokenModelSpec
from rft_batch.randomness import SampleNoise

ALL_EQUAL = TokenModelSpec(
    family="maskgit", model="rft_batch.none:none", vocab_size=16, mask_id=16, seq_len=8
)
OPTIONS = {
    "order": "random",
    "steps": 8,
    "schedule": "linear",
    "temperature": 1.0,
    "top_k": 0,
    "top_p": 1.0,
    "choice_temperature": 4.5,
    "guidance_scale": 1.0,
}


class AllEqual(nn.Module):
    """The exact posterior of data whose tokens are all the same; remembers what it was given."""

    def __init__(self, vocab: int = 16) -> None:
        super().__init__()
        self.anchor = nn.Parameter(torch.zeros(()))
        self.vocab = vocab
        self.seen: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(x.clone())
        logits = torch.zeros(*x.shape, self.vocab)
        for row, ids in enumerate(x):
            visible = ids[ids < self.vocab]
            if len(visible):
                logits[row] = -math.inf
                logits[row, :, visible] = 0.0
        return logits


def unmask(
    model: nn.Module,
    spec: TokenModelSpec = ALL_EQUAL,
    known: list[list[int]] | None = None,
    rows: int = 4,
    **changes: Any,
) -> Completions:
    x = np.array(known or [[spec.mask_id] * spec.seq_len] * rows)
    noises = [SampleNoise("row", row) for row in range(len(x))]
    options = OPTIONS | changes
    return unmasking.unmask(model, spec, x, np.zeros(len(x), dtype=np.int64), noises, **options)


def sampler(folder: Path, **changes: Any) -> Callable[..., Completions]:
    return partial(run_sampler, load_policy(folder).sampler(**(OPTIONS | changes)))


def noises(count: int, start: int = 0) -> list[SampleNoise]:
    return [SampleNoise("test", number) for number in range(start, start + count)]


def as_lists(completions: Completions) -> list[list[int]]:
    return [ids.tolist() for ids in completions.ids]


@pytest.mark.parametrize("order", ["random", "confidence"])
@pytest.mark.parametrize("steps", [8, 50])
def test_one_token_a_step_from_the_exact_posterior_is_always_valid(order: str, steps: int) -> None:
    completions = unmask(AllEqual(), rows=64, order=order, steps=steps)
    assert all(len(set(ids)) == 1 for ids in as_lists(completions))
    assert len({ids[0] for ids in as_lists(completions)}) > 8


def test_drawing_everything_at_once_is_not_valid() -> None:
    # Shows that the test above can fail.
    completions = unmask(AllEqual(), rows=64, steps=1)
    assert sum(len(set(ids)) == 1 for ids in as_lists(completions)) < 4


@pytest.mark.parametrize("order", ["random", "confidence"])
@pytest.mark.parametrize("steps", [1, 2, 3, 8, 50])
@pytest.mark.parametrize("schedule", ["cosine", "linear"])
def test_committed_and_known_positions_never_change(order: str, steps: int, schedule: str) -> None:
    model = AllEqual()
    known = [[16] * 8, [3, 16, 16, 3, 16, 16, 16, 3], [5] * 7 + [16], [2] * 8]

    completions = unmask(model, known=known, order=order, steps=steps, schedule=schedule)

    final = as_lists(completions)
    assert not any(16 in ids for ids in final)
    for row, given in enumerate(known):
        assert all(a == b for a, b in zip(given, final[row], strict=True) if a != 16)
    masked = [int((x == 16).sum()) for x in model.seen]
    assert all(after < before for before, after in pairwise(masked))
    # A row that is done leaves the batch; of the others, what is visible stays as it ends.
    assert len(model.seen[0]) == 3
    for x in model.seen:
        for ids in x.tolist():
            visible = [(place, token) for place, token in enumerate(ids) if token != 16]
            assert any(all(done[p] == t for p, t in visible) for done in final)


@pytest.mark.parametrize("order", ["random", "confidence"])
@pytest.mark.parametrize("temperature", [0.0, 1.0, 5.0])
def test_banned_ids_never_come_out(order: str, temperature: float) -> None:
    spec = replace(ALL_EQUAL, banned_ids=(0, 1, 2, 15))
    completions = unmask(AllEqual(), spec, rows=32, order=order, temperature=temperature, steps=2)
    tokens = {token for ids in as_lists(completions) for token in ids}
    assert tokens <= set(range(3, 15))
    assert len(tokens) > 3 or temperature == 0


def test_temperature_zero_takes_the_likeliest(policy: Path) -> None:
    run = sampler(policy, temperature=0.0, order="confidence", choice_temperature=0.0)
    first, second = as_lists(run([1, 1], noises(2)))
    assert first == second
    assert sampler(policy, temperature=0.0)([1, 1], noises(2)).logprobs == [None, None]


def test_logprob_is_that_of_the_chosen_tokens() -> None:
    # One token a step: the first of 16 equally likely ones, the others certain.
    completions = unmask(AllEqual(), rows=3)
    assert completions.logprobs == pytest.approx([-math.log(16)] * 3)


def test_logprob_is_none_in_confidence_order() -> None:
    assert unmask(AllEqual(), rows=2, order="confidence").logprobs == [None, None]


@pytest.mark.parametrize("order", ["random", "confidence"])
@pytest.mark.parametrize("guidance", [1.0, 2.5])
def test_samples_do_not_depend_on_the_batch(policy: Path, order: str, guidance: float) -> None:
    run = sampler(policy, order=order, steps=4, schedule="cosine", guidance_scale=guidance)
    prompts = [i % 3 for i in range(12)]
    whole = as_lists(run(prompts, noises(12)))

    single = [as_lists(run([p], [n]))[0] for p, n in zip(prompts, noises(12), strict=True)]
    split = as_lists(run(prompts[:5], noises(5))) + as_lists(run(prompts[5:], noises(7, start=5)))
    places = np.random.default_rng(0).permutation(12)
    keys = noises(12)
    shuffled = as_lists(run([prompts[i] for i in places], [keys[i] for i in places]))

    assert single == whole
    assert split == whole
    assert shuffled == [whole[i] for i in places]


def test_samples_of_one_prompt_differ(policy: Path) -> None:
    # 7^6 sequences: two of eight equal by chance has probability below 1 in 2,000.
    completions = sampler(policy, steps=6, temperature=2.0)([0] * 8, noises(8))
    assert len({tuple(ids) for ids in as_lists(completions)}) == 8


def test_the_class_and_the_guidance_matter(policy: Path) -> None:
    run, guided = sampler(policy), sampler(policy, guidance_scale=4.0)
    assert as_lists(run([0] * 4, noises(4))) != as_lists(run([2] * 4, noises(4)))
    assert as_lists(run([0] * 4, noises(4))) != as_lists(guided([0] * 4, noises(4)))


def test_guidance_without_a_null_class_is_refused(tmp_path: Path) -> None:
    condition = replace(TINY.condition, null_class=None)
    folder = save_tiny_policy(tmp_path / "p", condition=condition, recipe=Recipe())
    with pytest.raises(InputError, match=r"^--guidance-scale 2\.0: this policy has no null class"):
        sampler(folder, guidance_scale=2.0)


def test_logits_that_are_not_finite_stop_the_sampling(policy: Path) -> None:
    loaded = load_policy(policy)
    with torch.no_grad():
        loaded.model.head.bias[2] = math.nan
    with pytest.raises(DataError, match="logits at sampling step 0 are not finite"):
        run_sampler(loaded.sampler(**OPTIONS), [0], noises(1))


def batch_of(policy: MaskGITPolicy, count: int, epoch: int = 0, prompt: Any = 1) -> Any:
    rows = [
        {"prompt_id": "p", "prompt": json.dumps(prompt), "completion_ids": [i % 7] * 6}
        for i in range(count)
    ]
    return policy.collate(rows, noises(count), epoch)


def test_the_mask_ratio_has_the_cosine_law(policy: Path) -> None:
    batch = batch_of(MaskGITPolicy(policy), 4_000)

    share = (batch.tensors["targets"] != -100).double().mean(1)

    # E[max(1, round(6 cos(pi u / 2)))] / 6 over a uniform u, worked out from the borders.
    borders = [2 / math.pi * math.acos(min(1, (k + 0.5) / 6)) for k in range(7)]
    chances = [borders[k - 1] - borders[k] for k in range(1, 7)]
    expected = sum(k * p for k, p in enumerate(chances, start=1)) + (1 - sum(chances))
    assert share.mean() == pytest.approx(expected / 6, abs=5 * 0.32 / math.sqrt(4_000))
    assert (share > 0).all()


def test_masks_differ_by_epoch_and_not_by_batch(policy: Path) -> None:
    loaded = MaskGITPolicy(policy)
    first, again, next_epoch = (batch_of(loaded, 8, epoch) for epoch in (0, 0, 1))
    assert torch.equal(first.tensors["x"], again.tensors["x"])
    assert not torch.equal(first.tensors["x"], next_epoch.tensors["x"])
    assert torch.equal(batch_of(loaded, 3).tensors["x"], first.tensors["x"][:3])


def test_only_masked_unknown_positions_have_a_gradient(policy: Path) -> None:
    loaded = MaskGITPolicy(policy)
    prompt = {"label": 1, "known_ids": [4, None, None, None, None, 4]}
    rows = [{"prompt_id": "p", "prompt": json.dumps(prompt), "completion_ids": [4] * 6}] * 16
    batch = loaded.collate(rows, noises(16), epoch=0)
    kept: dict[str, Tensor] = {}

    class Spy(nn.Module):
        def forward(self, x: Tensor, class_labels: Tensor) -> Tensor:
            kept["logits"] = loaded.model(x, class_labels)
            kept["logits"].retain_grad()
            return kept["logits"]

    loaded.loss(Spy(), batch.tensors).backward()

    has_gradient = kept["logits"].grad.abs().sum(-1) > 0
    masked = batch.tensors["x"] == loaded.spec.mask_id
    assert torch.equal(has_gradient, masked)
    assert not masked[:, 0].any()
    assert not masked[:, 5].any()
    assert masked.any(1).all()
    assert batch.num_targets == masked.sum()


def test_the_loss_is_a_sum_of_cross_entropies(policy: Path) -> None:
    loaded = MaskGITPolicy(policy)
    uniform = torch.zeros(8, 6, 7)

    class Uniform(nn.Module):
        def forward(self, x: Tensor, class_labels: Tensor) -> Tensor:
            return uniform[: len(x)]

    batch = batch_of(loaded, 8)
    expected = batch.num_targets * math.log(7)
    assert float(loaded.loss(Uniform(), batch.tensors)) == pytest.approx(expected, rel=1e-6)


def test_the_condition_is_dropped_at_the_rate_of_the_recipe(policy: Path) -> None:
    labels = batch_of(MaskGITPolicy(policy), 4_000).tensors["class_labels"]
    dropped = int((labels == 3).sum())
    assert abs(dropped - 400) < 5 * math.sqrt(4_000 * 0.1 * 0.9)
    assert set(labels.tolist()) == {1, 3}


def test_two_hundred_steps_of_the_loss_lower_the_held_out_loss(policy: Path) -> None:
    loaded = MaskGITPolicy(policy)
    rows = [  # runs: every token follows from its neighbours
        {
            "prompt_id": "p",
            "prompt": str(i % 3),
            "completion_ids": [(i + j // 3) % 7 for j in range(6)],
        }
        for i in range(84)
    ]
    held_out = loaded.collate(rows[:42], noises(42, start=1000), epoch=0)

    def held_out_loss() -> float:
        with torch.no_grad():
            return float(loaded.loss(loaded.model, held_out.tensors)) / held_out.num_targets

    before = held_out_loss()
    optimizer = torch.optim.AdamW(loaded.model.parameters(), lr=3e-3)
    for step in range(200):
        batch = loaded.collate(rows[42:], noises(42), epoch=step)
        optimizer.zero_grad()
        (loaded.loss(loaded.model, batch.tensors) / batch.num_targets).backward()
        optimizer.step()

    assert held_out_loss() < before - 0.5


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (3, "label 3 is not a whole number from 0 to 2"),
        ("1", "label '1' is not a whole number from 0 to 2"),
        (True, "label True is not a whole number from 0 to 2"),
        ({"label": 1, "class": 2}, "unknown keys ['class'] (known: label, known_ids)"),
        ({"known_ids": [1, 2]}, "known_ids must be a list of 6 entries"),
        ({"known_ids": [None] * 5 + [7]}, "known_ids has 7, which is neither null nor a token id"),
    ],
)
def test_prompts_that_do_not_suit_are_refused(policy: Path, content: Any, message: str) -> None:
    with pytest.raises(InputError) as error:
        load_policy(policy).encode_prompt(content)
    assert str(error.value) == message


def test_no_label_means_the_null_class(policy: Path) -> None:
    assert MaskGITPolicy(policy).encode_prompt(None).class_label == 3


@pytest.mark.parametrize("ids", [[1] * 5, [1] * 5 + [7], [-1] * 6, ["a"] * 6])
def test_completions_that_are_not_tokens_are_refused(policy: Path, ids: list[Any]) -> None:
    rows = [{"prompt_id": "p9", "prompt": "1", "completion_ids": ids}]
    with pytest.raises(DataError, match=r'^prompt "p9": completion_ids must be 6 token ids from 0'):
        MaskGITPolicy(policy).collate(rows, noises(1), epoch=0)
