"""Against transformers' own `generate`, and against itself in other batches."""

import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from language_models import BOS, EOS, VOCAB_SIZE, count_tokens, make_tiny_lm, noises, save_tiny_lm

from rft_batch.errors import InputError
from rft_batch.policies import lm_cache, load_policy
from rft_batch.policies.lm_engine import Written, complete
from rft_batch.policies.lm_sampling import Sampling

# An id that no model has.
NO_END = 10_000
PLAIN = Sampling()
GREEDY = Sampling(temperature=0)
# Grouped queries, absolute positions, windows, soft caps, chunks, experts, and no positions at all.
ARCHITECTURES = [
    "llama", "gpt2", "mistral", "qwen2", "qwen3", "gemma2", "gemma3", "neox", "phi", "opt", "bloom",
    "llama4", "mixtral",
]  # fmt: skip
# Short ones in between and behind, so that rows are refilled by prompts of other lengths.
LENGTHS = (3, 20, 1, 9, 30, 2)


def make_prompts(lengths: Sequence[int] = LENGTHS) -> list[list[int]]:
    return [[4 + (i * 7 + j * 3) % 48 for j in range(n)] for i, n in enumerate(lengths)]


def write(
    model: Any,
    prompts: Sequence[Sequence[int]],
    budgets: int | Sequence[int] = 24,
    rows: int = 8,
    sampling: Sampling = PLAIN,
    keys: Sequence[int] | None = None,
    **options: Any,
) -> list[Written]:
    """What the engine writes after each prompt, in the prompts' order."""
    listed = [budgets] * len(prompts) if isinstance(budgets, int) else budgets
    one_each = noises(len(prompts))
    own = [one_each[key] for key in keys] if keys is not None else one_each
    parts = complete(model, prompts, listed, own, rows, sampling, {EOS}, **options)
    return sorted((written for part in parts for written in part), key=lambda w: w.place)


def ids(written: Sequence[Written]) -> list[list[int]]:
    return [one.ids for one in written]


def reference(
    model: Any, prompts: Sequence[Sequence[int]], budget: int = 24, end: int = EOS, **options: Any
) -> list[list[int]]:
    """What transformers writes after each prompt, by itself."""
    out = []
    for prompt in prompts:
        tokens = torch.tensor([prompt])
        sequence = model.generate(
            tokens,
            attention_mask=torch.ones_like(tokens),
            max_new_tokens=budget,
            do_sample=False,
            eos_token_id=end,
            pad_token_id=0,
            **options,
        )
        out.append(sequence[0, len(prompt) :].tolist())
    return out


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_the_likeliest_tokens_are_those_of_transformers_in_every_batch(kind: str) -> None:
    model, prompts = make_tiny_lm(kind), make_prompts()
    expected = reference(model, prompts)
    for rows in (1, 3, 8):
        assert ids(write(model, prompts, rows=rows, sampling=GREEDY)) == expected, rows
    assert len({token for one in expected for token in one}) > 10, "prompts matter"


def test_positions_counted_with_the_padding_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    # Shows that the test above can fail: a mask of the wrong columns.
    model, prompts = make_tiny_lm("gpt2"), make_prompts()
    expected = reference(model, prompts)
    original = model.forward

    def shifted(position_ids: Any, attention_mask: Any, **named: Any) -> Any:
        width = attention_mask.shape[1]
        columns = torch.arange(width - position_ids.shape[1], width)
        return original(
            position_ids=columns.expand_as(position_ids), attention_mask=attention_mask, **named
        )

    shifted.__signature__ = inspect.signature(original)  # type: ignore[attr-defined]
    monkeypatch.setattr(model, "forward", shifted)
    assert ids(write(model, prompts, rows=3, sampling=GREEDY)) != expected


@pytest.mark.parametrize("kind", ["llama", "gpt2", "mistral", "gemma3"])
def test_long_completions_move_and_widen_the_cache_and_stay_the_same(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, prompts = make_tiny_lm(kind), make_prompts((1, 18, 5, 40))
    # Two short budgets, so that rows are refilled and dropped in between.
    budgets = [230, 70, 12, 210]
    expected = [
        one[:budget]
        for one, budget in zip(reference(model, prompts, 230, NO_END), budgets, strict=True)
    ]
    moves = []
    original = lm_cache._shifted
    monkeypatch.setattr(
        lm_cache, "_shifted", lambda *a: (moves.append(a[0].shape[2]), original(*a))[1]
    )

    for rows in (2, 4):
        moves.clear()
        found = []
        for part in complete(model, prompts, budgets, noises(4), rows, GREEDY, ()):
            found += part
        assert ids(sorted(found, key=lambda w: w.place)) == expected, rows
        assert len(set(moves)) >= 2, "the cache grew"


def test_samples_do_not_depend_on_their_neighbours() -> None:
    model = make_tiny_lm(sharpness=4.0)
    prompts = [prompt for prompt in make_prompts() for _ in range(6)]
    whole = write(model, prompts, rows=32)

    for rows in (1, 5):
        other = write(model, prompts, rows=rows)
        assert ids(other) == ids(whole)
        assert [w.loss for w in other] == pytest.approx([w.loss for w in whole], rel=1e-4)
    order = torch.randperm(len(prompts), generator=torch.Generator().manual_seed(0)).tolist()
    shuffled = write(model, [prompts[i] for i in order], rows=5, keys=order)
    assert ids(shuffled) == [whole[i].ids for i in order]
    assert len({tuple(one) for one in ids(whole)}) == len(prompts)


def test_equal_prompts_are_run_once() -> None:
    model = make_tiny_lm()
    prompts = [prompt for prompt in make_prompts((10, 6)) for _ in range(8)]
    seen = count_tokens(model)

    write(model, prompts, budgets=1, rows=4)

    # Both in one pass, the shorter one padded; every sample ends with its first token.
    assert seen == [2 * 10]


def test_prompts_are_run_together_only_up_to_some_tokens() -> None:
    model = make_tiny_lm(max_position_embeddings=4096)
    seen = count_tokens(model)
    write(model, make_prompts((1000, 900, 800, 700)), budgets=1)
    assert seen == [2 * 1000, 2 * 800]


def test_rows_that_end_at_once_take_no_row_and_stop_no_other() -> None:
    model, prompts = make_tiny_lm(), make_prompts((4, 4, 4, 4, 4, 4))
    firsts = {one[0] for one in reference(model, prompts, budget=1)[:3]}
    parts = complete(model, prompts, [9] * 6, noises(6), 2, GREEDY, firsts)
    written = sorted((w for part in parts for w in part), key=lambda w: w.place)

    assert [w.finish_reason for w in written[:3]] == ["stop"] * 3
    assert [len(w.ids) for w in written[:3]] == [1] * 3
    expected = reference(model, prompts[3:], 9, NO_END)
    for found, ending in zip(written[3:], expected, strict=True):
        cut = next((i + 1 for i, token in enumerate(ending) if token in firsts), 9)
        assert found.ids == ending[:cut]


def test_each_completion_has_its_own_budget() -> None:
    model, prompts = make_tiny_lm(), make_prompts((5, 3, 8))
    written = complete(model, prompts, [1, 7, 4], noises(3), 2, GREEDY, ())
    found = {w.place: (len(w.ids), w.finish_reason) for part in written for w in part}
    assert found == {0: (1, "length"), 1: (7, "length"), 2: (4, "length")}


def test_an_end_within_the_budget_is_a_stop_and_its_last_token() -> None:
    model = make_tiny_lm(sharpness=1.0)
    written = write(model, make_prompts() * 4, budgets=500)
    assert {w.finish_reason for w in written} == {"stop"}
    assert all(w.ids[-1] == EOS and EOS not in w.ids[:-1] for w in written)


def test_the_loss_is_that_of_a_forward_pass_over_the_whole_row() -> None:
    model, prompts = make_tiny_lm(sharpness=4.0), make_prompts()
    for written, prompt in zip(write(model, prompts, rows=3), prompts, strict=True):
        row = torch.tensor([prompt + written.ids])
        with torch.no_grad():
            logprobs = model(input_ids=row).logits.log_softmax(-1)[0, len(prompt) - 1 : -1]
        own = logprobs.gather(1, torch.tensor(written.ids)[:, None]).sum()
        assert written.loss == pytest.approx(-float(own), rel=1e-4)
        assert written.logprob == pytest.approx(float(own), rel=1e-4)


def test_a_penalty_counts_the_prompt_and_each_row_by_itself() -> None:
    model, prompts = make_tiny_lm(sharpness=6.0), make_prompts()
    penalised = Sampling(temperature=0, repetition_penalty=1.7)
    expected = reference(model, prompts, repetition_penalty=1.7)
    for rows in (1, 2, 8):
        assert ids(write(model, prompts, rows=rows, sampling=penalised)) == expected
    assert expected != reference(model, prompts)


def test_a_stop_string_ends_a_row_as_an_end_token_does() -> None:
    model, prompts = make_tiny_lm(), make_prompts()
    plain = reference(model, prompts, 24, NO_END)
    written = complete(
        model, prompts, [24] * 6, noises(6), 3, GREEDY, (), stops=lambda ids: len(ids) == 5
    )
    found = sorted((w for part in written for w in part), key=lambda w: w.place)
    assert ids(found) == [one[:5] for one in plain]
    assert {w.finish_reason for w in found} == {"stop"}


def test_nothing_to_write_is_no_work() -> None:
    model = make_tiny_lm()
    seen = count_tokens(model)
    assert write(model, []) == []
    assert seen == []


@pytest.mark.parametrize(
    ("kind", "name"), [("lfm2", "Lfm2"), ("mamba", "Mamba"), ("xlnet", "XLNetLMHead")]
)
def test_models_with_another_state_than_keys_and_values_are_refused(
    tmp_path: Path, kind: str, name: str
) -> None:
    # Convolutions beside attention, a recurrence, and memories of its own.
    folder = save_tiny_lm(tmp_path / kind, kind)
    with pytest.raises(InputError) as error:
        load_policy(folder)
    assert str(error.value).startswith(f"policy {folder}: {name}")
    assert str(error.value).endswith(
        "keeps another state than keys and values (recurrent, convolutional, or of its own), and "
        "only models without are supported."
    )


def test_with_longrope_rows_end_before_they_would_change_their_neighbours(tmp_path: Path) -> None:
    rope = {
        "rope_type": "longrope",
        "rope_theta": 10_000.0,
        "short_factor": [1.0] * 4,
        "long_factor": [8.0] * 4,
        "factor": 4.0,
        "original_max_position_embeddings": 32,
    }
    folder = save_tiny_lm(tmp_path / "lm", rope_parameters=rope, max_position_embeddings=128)
    policy: Any = load_policy(folder)
    prompts = make_prompts((4, 28, 2))
    budgets = [policy.room(prompt, 100) for prompt in prompts]

    alone = [
        write(policy.model, [p], b, sampling=GREEDY)[0]
        for p, b in zip(prompts, budgets, strict=True)
    ]

    assert budgets == [28, 4, 30]
    assert policy.facts()["context"] == 32
    assert ids(write(policy.model, prompts, budgets, sampling=GREEDY)) == ids(alone)


def test_no_limit_is_assumed_where_a_model_has_none(tmp_path: Path) -> None:
    policy: Any = load_policy(save_tiny_lm(tmp_path / "bloom", "bloom"))
    assert policy.facts()["context"] is None
    assert policy.room([BOS] * 10_000, 77) == 77
    assert policy.model.config.vocab_size == VOCAB_SIZE
