import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import save_tiny_policy
from safetensors.torch import load_file
from torch import nn
from torch_ema import ExponentialMovingAverage

from rft_batch import finetuning
from rft_batch.checkpoints import checkpoint_steps
from rft_batch.errors import DataError, InputError
from rft_batch.files import file_digest
from rft_batch.finetuning import decay_groups, finetune, learning_rate
from rft_batch.generation import generate
from rft_batch.metrics import read_metrics
from rft_batch.policies import load_policy
from rft_batch.policies.maskgit import MaskGITPolicy
from rft_batch.selection import select
from rft_batch.settings import FinetuneSettings, GenerateSettings, SelectSettings


@pytest.fixture
def training(selected: Path, policy: Path) -> FinetuneSettings:
    """14 rows, 3 steps per epoch, 2 epochs."""
    return FinetuneSettings(
        round_dir=selected, policy=policy, epochs=2, batch_size=5, learning_rate=1e-2, save_every=2
    )


def test_rows_of_a_prompt_can_be_limited(training: FinetuneSettings) -> None:
    manifest = finetune(replace(training, max_per_prompt=1))
    counts = manifest["counts"]
    assert (counts["rows"], counts["repeats_left_out"], counts["over_limit_left_out"]) == (7, 0, 7)
    with pytest.raises(InputError, match="max_per_prompt: recorded 1, now None"):
        finetune(training)


def weights(round_dir: Path, name: str = "policy") -> dict[str, torch.Tensor]:
    return load_file(round_dir / name / "model.safetensors")


def restart(settings: FinetuneSettings, **changes: Any) -> dict[str, torch.Tensor]:
    """Raw weights of a training from the start with other settings."""
    import shutil

    shutil.rmtree(settings.round_dir / "training", ignore_errors=True)
    finetune(replace(settings, **changes))
    return weights(settings.round_dir, "policy-raw")


def test_the_result_is_a_policy_that_generate_reads(
    training: FinetuneSettings, settings: GenerateSettings
) -> None:
    manifest = finetune(training)

    assert manifest["counts"] == {
        "rows": 14,
        "anchor_rows": 0,
        "repeats_left_out": 0,
        "over_limit_left_out": 0,
        "steps": 6,
        "skipped_steps": 0,
        "attempts": 1,
    }
    raw, averaged, base = (
        weights(training.round_dir, "policy-raw"),
        weights(training.round_dir),
        load_file(training.policy / "model.safetensors"),
    )
    assert raw.keys() == averaged.keys() == base.keys()
    for name in base:
        if name != "classes.weight":
            assert not torch.equal(raw[name], base[name]), name
        assert averaged[name].dtype == torch.float32
    assert not torch.equal(averaged["head.weight"], raw["head.weight"])
    evaluated = generate(
        replace(settings, policy=training.round_dir / "policy", into="eval", seed=3)
    )
    assert evaluated["identity"]["policy"] == manifest["exported"]["policy"]


def test_training_raises_the_likelihood_of_the_selected_rows(training: FinetuneSettings) -> None:
    finetune(replace(training, epochs=15, ema_decay=0.0))
    records = read_metrics(training.round_dir / "training" / "metrics.jsonl")
    first = [r["loss"] for r in records if r["epoch"] < 3]
    last = [r["loss"] for r in records if r["epoch"] >= 12]
    assert sum(last) / len(last) < sum(first) / len(first) - 0.2


def test_without_averaging_both_exports_are_the_same(training: FinetuneSettings) -> None:
    finetune(replace(training, ema_decay=0.0))
    names = ["policy", "policy-raw"]
    one, other = (file_digest(training.round_dir / n / "model.safetensors") for n in names)
    assert one == other


def test_every_row_is_trained_on_once_per_epoch(
    training: FinetuneSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[int, str, int]] = []
    original = MaskGITPolicy.collate

    def spy(self: MaskGITPolicy, rows: Any, noises: Any, epoch: int) -> Any:
        seen.extend((epoch, row["prompt_id"], row["sample_index"]) for row in rows)
        return original(self, rows, noises, epoch)

    monkeypatch.setattr(MaskGITPolicy, "collate", spy)

    finetune(replace(training, micro_batch_size=2))

    epochs = [[row[1:] for row in seen if row[0] == epoch] for epoch in (0, 1)]
    assert len(epochs[0]) == len(epochs[1]) == 14
    assert set(epochs[0]) == set(epochs[1])
    assert len(set(epochs[0])) == 14
    assert epochs[0] != epochs[1]


@pytest.mark.usefixtures("sgd")
def test_micro_batches_do_not_change_the_result(training: FinetuneSettings) -> None:
    whole = restart(training, batch_size=8)
    for size in (1, 2, 3, 8):
        split = restart(training, batch_size=8, micro_batch_size=size)
        for name in whole:
            torch.testing.assert_close(split[name], whole[name], rtol=0, atol=1e-6)


@pytest.mark.usefixtures("sgd")
def test_a_mean_of_means_would_be_seen(
    training: FinetuneSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Shows that the test above can fail: each micro-batch divided by its own count.
    whole = restart(training, batch_size=8)
    original = MaskGITPolicy.loss
    monkeypatch.setattr(
        MaskGITPolicy,
        "loss",
        lambda self, model, t: original(self, model, t) * 10 / (t["targets"] != -100).sum(),
    )
    split = restart(training, batch_size=8, micro_batch_size=1)
    assert any((split[name] - whole[name]).abs().max() > 1e-4 for name in whole)


@pytest.mark.usefixtures("sgd")
def test_one_step_is_the_gradient_of_the_mean_over_all_targets(training: FinetuneSettings) -> None:
    """Against a bare loop over one batch of all rows."""
    from rft_batch.randomness import SampleNoise
    from rft_batch.selected_rows import load_selected

    found = restart(training, batch_size=14, max_steps=1, warmup_ratio=0.0, max_grad_norm=1e9)

    policy = load_policy(training.policy)
    rows = load_selected(
        [training.round_dir], "selection", training.round_dir / "training"
    ).to_list()
    noises = [SampleNoise.for_sample(0, 1, r["prompt_id"], r["sample_index"]) for r in rows]
    batch = policy.collate(rows, noises, epoch=0)
    optimizer = torch.optim.AdamW(decay_groups(policy.model, 0.01), lr=1e-2)  # SGD in this test
    (policy.loss(policy.model.train(), batch.tensors) / batch.num_targets).backward()
    optimizer.step()
    for name, tensor in policy.model.state_dict().items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=1e-6)


def test_averages_move_once_per_optimizer_step(
    training: FinetuneSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    updates = []
    original = ExponentialMovingAverage.update
    monkeypatch.setattr(
        ExponentialMovingAverage,
        "update",
        lambda self, *a: (updates.append(1), original(self, *a))[1],
    )
    manifest = finetune(replace(training, micro_batch_size=1))
    assert len(updates) == manifest["counts"]["steps"] == 6


@pytest.mark.parametrize(("rows_per_step", "steps"), [(4, 4), (100, 1), (14, 1), (13, 2)])
def test_the_last_partial_batch_is_a_step(
    training: FinetuneSettings, rows_per_step: int, steps: int
) -> None:
    finetune(replace(training, epochs=1, batch_size=rows_per_step, micro_batch_size=3))
    records = read_metrics(training.round_dir / "training" / "metrics.jsonl")
    assert len(records) == steps
    assert sum(record["rows"] for record in records) == 14
    assert all(record["grad_norm"] > 0 for record in records)


@pytest.mark.parametrize("killed_after", [1, 2, 3, 4, 5, 6])
def test_a_run_stopped_after_any_step_ends_with_the_same_weights(
    training: FinetuneSettings, monkeypatch: pytest.MonkeyPatch, killed_after: int
) -> None:
    whole = restart(training)
    averaged = weights(training.round_dir)

    class Killed(BaseException):
        pass

    def kill(path: Path, figures: dict[str, Any]) -> None:
        append(path, figures)
        if figures["step"] == killed_after and figures["attempt"] == 1:
            raise Killed

    append = finetuning.append_metrics
    monkeypatch.setattr(finetuning, "append_metrics", kill)
    with pytest.raises(Killed):
        restart(training)
    finetune(training)

    resumed = weights(training.round_dir, "policy-raw")
    assert all(torch.equal(resumed[name], whole[name]) for name in whole)
    again = weights(training.round_dir)
    assert all(torch.equal(again[name], averaged[name]) for name in averaged)
    records = read_metrics(training.round_dir / "training" / "metrics.jsonl")
    assert [record["step"] for record in records] == [1, 2, 3, 4, 5, 6]


def test_a_finished_run_is_left_alone(training: FinetuneSettings, capsys: Any) -> None:
    first = finetune(training)
    files = [path for path in training.round_dir.rglob("*") if path.is_file()]
    before = {path: file_digest(path) for path in files}
    assert finetune(training) == first
    assert "complete already, nothing to do" in capsys.readouterr().err
    assert {path: file_digest(path) for path in files} == before


def test_checkpoints_are_made_and_kept_as_asked(training: FinetuneSettings) -> None:
    finetune(replace(training, save_every=1, keep_checkpoints=3))
    assert checkpoint_steps(training.round_dir / "training") == [3, 4, 5]


def test_changed_settings_are_refused(training: FinetuneSettings) -> None:
    finetune(training)
    with pytest.raises(InputError) as error:
        finetune(replace(training, learning_rate=1e-3, save_every=7))
    assert str(error.value).splitlines()[1] == "  learning_rate: recorded 0.01, now 0.001"


def test_another_policy_of_the_same_name_is_refused(training: FinetuneSettings) -> None:
    finetune(training)
    save_tiny_policy(training.policy, seed=8)
    with pytest.raises(InputError, match=r"\n  policy: recorded"):
        finetune(training)


def test_a_loss_that_is_not_finite_stops(
    training: FinetuneSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = MaskGITPolicy.loss
    calls = []

    def broken(self: MaskGITPolicy, model: nn.Module, tensors: Any) -> torch.Tensor:
        calls.append(1)
        return original(self, model, tensors) * (math.nan if len(calls) == 4 else 1)

    monkeypatch.setattr(MaskGITPolicy, "loss", broken)
    with pytest.raises(DataError) as error:
        finetune(training)
    assert str(error.value).startswith("step 4: loss nan, gradient norm nan: not finite. Rows of")
    assert "Last good checkpoint: step 2 in" in str(error.value)
    assert not (training.round_dir / "policy").exists()


def test_too_little_memory_says_what_to_do(
    training: FinetuneSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: MaskGITPolicy, model: nn.Module, tensors: Any) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(MaskGITPolicy, "loss", full)
    with pytest.raises(InputError) as error:
        finetune(training)
    assert str(error.value) == (
        "out of memory with --micro-batch-size 5. Pass a smaller one: the result stays the same, "
        "and the run goes on after its last checkpoint."
    )


def test_rows_of_other_rounds_are_added(
    training: FinetuneSettings, settings: GenerateSettings
) -> None:
    other = training.round_dir.parent / "round-2"
    generate(replace(settings, round_dir=other, seed=1))
    select(SelectSettings(round_dir=other, top_k=1))

    manifest = finetune(replace(training, also=(other,)))

    assert manifest["counts"]["rows"] == 14 + 7
    with pytest.raises(InputError, match=r"\n  rows: recorded"):
        finetune(training)
    with pytest.raises(InputError, match=r"^--also: a round is given twice"):
        replace(training, also=(other, other))


def test_an_incomplete_selection_is_refused(sampled: Path, policy: Path) -> None:
    with pytest.raises(DataError, match="Run rft-batch select"):
        finetune(FinetuneSettings(round_dir=sampled, policy=policy))
    assert not (sampled / "training").exists()


def rates(**changes: Any) -> list[float]:
    settings = FinetuneSettings(round_dir=Path("r"), policy=Path("p"), learning_rate=1.0, **changes)
    return [learning_rate(settings, step, 10) for step in range(10)]


def test_the_learning_rate_warms_up_and_decays_in_optimizer_steps() -> None:
    linear = rates(warmup_ratio=0.2, lr_schedule="linear")
    assert linear == pytest.approx([0.5, 1, 1, 7 / 8, 6 / 8, 5 / 8, 4 / 8, 3 / 8, 2 / 8, 1 / 8])
    cosine = rates(warmup_ratio=0.2, lr_schedule="cosine")
    assert cosine[6] == pytest.approx(0.5)
    assert rates(warmup_ratio=0.0, lr_schedule="constant") == [1.0] * 10


@pytest.mark.parametrize("schedule", ["cosine", "linear", "constant"])
@pytest.mark.parametrize("ratio", [0.0, 0.05, 0.5, 1.0])
def test_the_peak_is_always_reached_and_no_rate_is_zero(schedule: str, ratio: float) -> None:
    found = rates(warmup_ratio=ratio, lr_schedule=schedule)
    assert max(found) == 1.0
    assert min(found) > 0


def test_rates_are_logged_as_computed(training: FinetuneSettings) -> None:
    finetune(training)
    records = read_metrics(training.round_dir / "training" / "metrics.jsonl")
    assert [r["learning_rate"] for r in records] == [
        learning_rate(training, step, 6) for step in range(6)
    ]


def test_biases_norms_and_embeddings_do_not_decay(policy: Path) -> None:
    model = load_policy(policy).model
    decayed, others = decay_groups(model, 0.1)
    names = {id(p): name for name, p in model.named_parameters()}
    assert (decayed["weight_decay"], others["weight_decay"]) == (0.1, 0.0)
    assert len(decayed["params"]) + len(others["params"]) == len(names)
    plain = {names[id(p)] for p in others["params"]}
    assert {"tokens.weight", "classes.weight", "norm.weight", "head.bias"} <= plain
    assert "head.weight" not in plain


def test_reduced_precision_is_used_only_when_asked(training: FinetuneSettings, capsys: Any) -> None:
    restart(training)
    assert "mixed precision no" in capsys.readouterr().err
    with pytest.raises(InputError, match=r"^--mixed-precision fp16: needs a GPU"):
        finetune(replace(training, mixed_precision="fp16", device="cpu"))


def test_the_manifest_names_what_was_exported(training: FinetuneSettings) -> None:
    manifest = finetune(training)
    stored = json.loads((training.round_dir / "training" / "manifest.json").read_text())
    assert stored == manifest
    assert 0 < manifest["last_epoch_loss"] < 3
