import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import launch, sample_rows, write_sgd_script
from language_models import (
    EOS,
    PAD,
    lm_settings,
    noises,
    record_training,
    save_chain_lm,
    save_tiny_lm,
)
from peft import PeftModel
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from rft_batch import finetuning
from rft_batch.errors import DataError, InputError
from rft_batch.finetuning import finetune
from rft_batch.generation import generate
from rft_batch.metrics import read_metrics
from rft_batch.policies.causal_lm import CausalLMPolicy
from rft_batch.selection import select
from rft_batch.settings import FinetuneSettings, SelectSettings

CHAIN = "abcdefghijklmnopqrstuvwxyz012345"
# From the end alone to the longest; the prompts are as long as the completions are short.
LENGTHS = (1, 2, 3, 5, 9, 17, 25, 32)
TEXT = torch.tensor([[5, 9, 30, 8, 41, 12, 12, 7]])


def chain_round(folder: Path, lengths: Sequence[int] = LENGTHS) -> Path:
    """A selected round whose completions have so many tokens, their end among them."""
    following = dict(pairwise(CHAIN))
    prompts = [CHAIN[: 1 + len(CHAIN) - length] for length in lengths]
    speaker = save_chain_lm(folder / "speaker", following)
    settings = lm_settings(
        folder, speaker, prompts, samples_per_prompt=1, max_new_tokens=99, prompts_per_shard=99
    )
    generate(settings)
    found = {len(row["completion_ids"]) for row in sample_rows(settings.round_dir)}
    assert found == set(lengths)
    select(SelectSettings(round_dir=settings.round_dir, top_k=1))
    return settings.round_dir


@pytest.fixture
def training(tmp_path: Path) -> FinetuneSettings:
    """8 rows, 3 steps per epoch, 2 epochs, of a model that does not know the chain."""
    return FinetuneSettings(
        round_dir=chain_round(tmp_path),
        policy=save_tiny_lm(tmp_path / "lm", sharpness=2.0),
        epochs=2,
        batch_size=3,
        learning_rate=1e-2,
        ema_decay=0.9,
        save_every=2,
    )


def weights(settings: FinetuneSettings, name: str = "policy-raw") -> dict[str, Tensor]:
    return load_file(settings.round_dir / name / "model.safetensors")


def restart(settings: FinetuneSettings, **changes: Any) -> dict[str, Tensor]:
    """Raw weights of a training from the start with other settings."""
    shutil.rmtree(settings.round_dir / "training", ignore_errors=True)
    finetune(replace(settings, **changes))
    return weights(settings)


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=TEXT).logits


def exported_logits(settings: FinetuneSettings, name: str = "policy-raw") -> Tensor:
    return logits(AutoModelForCausalLM.from_pretrained(settings.round_dir / name))


def assert_close(found: dict[str, Tensor], expected: dict[str, Tensor], atol: float) -> None:
    assert found.keys() == expected.keys()
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], rtol=0, atol=atol, msg=name)


@pytest.mark.parametrize("pad", ["<pad>", "<eos>"])
def test_labels_are_the_completion_with_its_end_and_nothing_else(tmp_path: Path, pad: str) -> None:
    policy = CausalLMPolicy(save_tiny_lm(tmp_path / "lm", pad=pad))
    rows = [
        {"prompt_ids": [7] * (9 - n), "completion_ids": [*range(10, 10 + n), EOS]} for n in range(6)
    ]

    labels = policy.collate(rows, noises(6), epoch=0).tensors["labels"]

    for row, found in zip(rows, labels.tolist(), strict=True):
        start, completion = len(row["prompt_ids"]), row["completion_ids"]
        padding = labels.shape[1] - start - len(completion)
        assert found == [-100] * start + completion + [-100] * padding


def test_after_training_on_one_answer_the_model_says_it_and_stops(tmp_path: Path) -> None:
    # The pad id is the end's: labels made by comparing ids would leave the end out.
    speaker = save_chain_lm(tmp_path / "speaker", {"?": "y", "y": "e", "e": "s"})
    learner = save_tiny_lm(tmp_path / "learner", pad="<eos>", pad_token_id=EOS, sharpness=1.0)
    settings = lm_settings(tmp_path, speaker, ["ok?", "is it?"], samples_per_prompt=1)
    generate(settings)
    select(SelectSettings(round_dir=settings.round_dir, top_k=1))

    finetune(
        FinetuneSettings(
            round_dir=settings.round_dir, policy=learner, epochs=150, batch_size=2,
            learning_rate=1e-2, ema_decay=0.0, save_every=999,
        )
    )  # fmt: skip

    trained = replace(
        settings, policy=settings.round_dir / "policy", into="eval", temperature=0.0,
        max_new_tokens=50,
    )  # fmt: skip
    generate(trained)
    for row in sample_rows(settings.round_dir, "eval"):
        assert (row["completion"], row["finish_reason"]) == ("yes", "stop")
        assert row["completion_ids"][-1] == EOS


def test_every_row_is_trained_on_once_per_epoch(
    training: FinetuneSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = record_training(monkeypatch)
    finetune(replace(training, epochs=1, batch_size=5, micro_batch_size=2))
    assert sorted(len(ids) - labels.count(-100) for ids, labels in seen) == sorted(LENGTHS)


STEP: dict[str, Any] = {
    "epochs": 1,
    "batch_size": 8,
    "learning_rate": 0.5,
    "warmup_ratio": 0.0,
    "max_grad_norm": 1e9,
    "weight_decay": 0.0,
    "ema_decay": 0.0,
}


@pytest.mark.usefixtures("sgd")
@pytest.mark.parametrize("kind", ["llama", "gpt2", "gemma3", "qwen3"])
def test_one_step_is_the_same_in_any_micro_batches_and_packed(
    training: FinetuneSettings, tmp_path: Path, kind: str
) -> None:
    off = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0} if kind == "gpt2" else {}
    folder = save_tiny_lm(tmp_path / kind, kind, sharpness=2.0, **off)
    step = replace(training, policy=folder, **STEP)
    whole = restart(step)
    base = load_file(folder / "model.safetensors")
    assert max(float((whole[name] - base[name]).abs().max()) for name in whole) > 1e-3
    for changes in (
        {"micro_batch_size": 1},
        {"micro_batch_size": 2},
        {"micro_batch_size": 3},
        {"packing": True},
        {"packing": True, "micro_batch_size": 3},
    ):
        assert_close(restart(step, **changes), whole, atol=1e-6)


@pytest.mark.usefixtures("sgd")
def test_packing_without_positions_would_be_seen(
    training: FinetuneSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Shows that the test above can fail: rows that see those packed before them.
    step = replace(training, **STEP)
    whole = restart(step)
    original = CausalLMPolicy.collate

    def leaking(self: CausalLMPolicy, *arguments: Any, **named: Any) -> Any:
        batch = original(self, *arguments, **named)
        batch.tensors.pop("position_ids")
        return batch

    monkeypatch.setattr(CausalLMPolicy, "collate", leaking)
    packed = restart(step, packing=True)
    assert max(float((packed[name] - whole[name]).abs().max()) for name in whole) > 1e-4


@pytest.mark.usefixtures("sgd")
def test_two_processes_take_the_steps_of_one(training: FinetuneSettings, tmp_path: Path) -> None:
    copy = tmp_path / "two" / "round-1"
    shutil.copytree(training.round_dir, copy)
    # 8 rows, 5 a step: 3 and 2 rows of the processes, then 2 and 1; they stand by length.
    done = launch(
        2, "finetune", copy, "--policy", training.policy, "--epochs", 2, "--batch-size", 5,
        "--micro-batch-size", 2, "--learning-rate", 0.1, "--ema-decay", 0.5,
        script=write_sgd_script(tmp_path),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    two = replace(training, round_dir=copy)

    one = replace(training, batch_size=5, learning_rate=0.1, ema_decay=0.5)
    finetune(one)

    records = [read_metrics(s.round_dir / "training" / "metrics.jsonl") for s in (one, two)]
    for name in ("learning_rate", "targets", "rows"):
        assert [r[name] for r in records[0]] == [r[name] for r in records[1]]
    for name in ("policy", "policy-raw"):
        assert_close(weights(two, name), weights(one, name), atol=1e-6)


def gradients(policy: CausalLMPolicy, rows: list[dict[str, Any]]) -> tuple[float, list[Tensor]]:
    policy.model.zero_grad()
    loss = policy.loss(policy.model, policy.collate(rows, noises(len(rows)), epoch=0).tensors)
    loss.backward()
    return float(loss.detach()), [p.grad.clone() for p in policy.model.parameters()]


def options(**changes: Any) -> dict[str, Any]:
    return {
        "packing": False,
        "gradient_checkpointing": False,
        "lora_rank": 0,
        "lora_alpha": 32.0,
        "lora_dropout": 0.0,
        "lora_targets": (),
    } | changes


@pytest.mark.parametrize("kind", ["llama", "mistral", "gemma2", "qwen2", "phi", "neox"])
def test_a_packed_rows_loss_and_gradient_do_not_depend_on_its_neighbours(
    tmp_path: Path, kind: str
) -> None:
    policy = CausalLMPolicy(save_tiny_lm(tmp_path / kind, kind, sharpness=4.0))
    policy.trained(**options(packing=True))
    policy.model.eval()
    row, short, long = (
        {"prompt_ids": [5] * n, "completion_ids": list(range(20, 20 + m))}
        for n, m in ((3, 8), (1, 2), (9, 20))
    )
    alone, grads = gradients(policy, [row])
    for before in (short, long):
        other, other_grads = gradients(policy, [before])
        both, both_grads = gradients(policy, [before, row])
        assert both == pytest.approx(alone + other, rel=1e-5)
        for a, b, c in zip(grads, other_grads, both_grads, strict=True):
            torch.testing.assert_close(c, a + b, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("kind", ["opt", "bloom"])
def test_packing_is_refused_where_rows_would_see_each_other(tmp_path: Path, kind: str) -> None:
    policy = CausalLMPolicy(save_tiny_lm(tmp_path / kind, kind))
    with pytest.raises(InputError) as error:
        policy.trained(**options(packing=True))
    assert str(error.value) == (
        f"--packing: with {type(policy.model).__name__} of this transformers, a row would attend "
        "to those packed before it. Leave --packing out."
    )


@pytest.mark.usefixtures("sgd")
@pytest.mark.parametrize("lora", [{}, {"lora_rank": 2}])
def test_gradient_checkpointing_changes_nothing(
    training: FinetuneSettings, lora: dict[str, Any]
) -> None:
    step = replace(training, **(STEP | lora))
    plain = restart(step)
    saved = restart(step, gradient_checkpointing=True)
    assert_close(saved, plain, atol=1e-6)
    base = load_file(training.policy / "model.safetensors")
    assert any(not torch.equal(plain[name], base[name]) for name in base)


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_the_merged_export_and_the_adapter_are_the_trained_module(
    training: FinetuneSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    folder = save_tiny_lm(tmp_path / kind, kind, sharpness=2.0)
    kept = []
    original = CausalLMPolicy.trained
    monkeypatch.setattr(
        CausalLMPolicy, "trained", lambda self, **o: kept.append(original(self, **o)) or kept[0]
    )

    lora = {"lora_rank": 3, "lora_dropout": 0.2, "learning_rate": 0.05, "save_every": 3}
    finetune(replace(training, policy=folder, **lora))

    trained = logits(kept[0])
    base = AutoModelForCausalLM.from_pretrained(folder)
    assert float((trained - logits(base)).abs().max()) > 1e-2
    torch.testing.assert_close(exported_logits(training), trained, rtol=0, atol=1e-5)
    adapted = PeftModel.from_pretrained(base, training.round_dir / "policy-raw-adapter")
    torch.testing.assert_close(logits(adapted), trained, rtol=0, atol=1e-5)
    averaged = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(folder), training.round_dir / "policy-adapter"
    )
    torch.testing.assert_close(
        exported_logits(training, "policy"), logits(averaged), rtol=0, atol=1e-5
    )
    assert not torch.allclose(logits(averaged), trained, atol=1e-4)
    checkpoint = load_file(training.round_dir / "training/step-00000003/model.safetensors")
    assert checkpoint
    assert all("lora_" in name for name in checkpoint)


def test_adapters_go_where_they_are_asked_to(training: FinetuneSettings) -> None:
    finetune(replace(training, lora_rank=2, lora_targets=("q_proj", "v_proj")))
    adapter = load_file(training.round_dir / "policy-adapter" / "adapter_model.safetensors")
    assert {name.split(".")[-3] for name in adapter} == {"q_proj", "v_proj"}
    base = load_file(training.policy / "model.safetensors")
    changed = {name for name, tensor in weights(training).items() if not tensor.equal(base[name])}
    assert {name.split(".")[-2] for name in changed} == {"q_proj", "v_proj"}


def test_adapters_that_fit_no_module_are_refused(training: FinetuneSettings) -> None:
    with pytest.raises(InputError, match=r"^--lora-targets nowhere: "):
        finetune(replace(training, lora_rank=2, lora_targets=("nowhere",)))


def test_adapters_begin_with_the_seed(training: FinetuneSettings) -> None:
    first = restart(training, lora_rank=2, max_steps=1)
    torch.rand(3)  # as other work in this process does
    again = restart(training, lora_rank=2, max_steps=1)
    other = restart(training, lora_rank=2, max_steps=1, seed=1)
    assert all(torch.equal(again[name], first[name]) for name in first)
    assert any(not torch.equal(other[name], first[name]) for name in first)


class Killed(BaseException):
    pass


@pytest.mark.parametrize("changes", [{}, {"lora_rank": 2, "lora_dropout": 0.3}, {"packing": True}])
@pytest.mark.parametrize("killed_after", [1, 3])
def test_a_run_stopped_after_any_step_ends_with_the_same_weights(
    training: FinetuneSettings,
    monkeypatch: pytest.MonkeyPatch,
    changes: dict[str, Any],
    killed_after: int,
) -> None:
    # One before the first checkpoint, one after it; dropout is on.
    folder = save_tiny_lm(training.policy.parent / "dropping", "gpt2", sharpness=2.0)
    run = replace(training, policy=folder, **changes)
    whole, averaged = restart(run), weights(run, "policy")

    def kill(path: Path, figures: dict[str, Any]) -> None:
        append(path, figures)
        if figures["step"] == killed_after and figures["attempt"] == 1:
            raise Killed

    append = finetuning.append_metrics
    monkeypatch.setattr(finetuning, "append_metrics", kill)
    with pytest.raises(Killed):
        restart(run)
    finetune(run)

    resumed, again = weights(run), weights(run, "policy")
    assert all(torch.equal(resumed[name], whole[name]) for name in whole)
    assert all(torch.equal(again[name], averaged[name]) for name in averaged)


LOAD = """
import json, sys, torch
from transformers import AutoModelForCausalLM, AutoTokenizer
for folder in sys.argv[2:]:
    model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    AutoTokenizer.from_pretrained(folder)
    with torch.no_grad():
        logits = model(input_ids=torch.tensor(json.loads(sys.argv[1]))).logits
    print(json.dumps([{k: sorted(map(str, v)) for k, v in info.items() if v}, logits.tolist()]))
"""


def test_exports_load_in_a_new_process_without_this_package(
    training: FinetuneSettings, tmp_path: Path
) -> None:
    folders, expected = [], []
    for name, kind, changes in (
        ("untied", "llama", {}),
        ("tied", "llama", {"tie_word_embeddings": True}),
        ("tied-lora", "gpt2", {"tie_word_embeddings": True}),
    ):
        copy = tmp_path / name / "round-1"
        shutil.copytree(training.round_dir, copy)
        policy = save_tiny_lm(tmp_path / f"{name}-base", kind, sharpness=2.0, **changes)
        rank = 2 if "lora" in name else 0
        finetune(replace(training, round_dir=copy, policy=policy, lora_rank=rank))
        for export in ("policy", "policy-raw"):
            folders.append(copy / export)
            expected.append(logits(CausalLMPolicy(copy / export).model))
        assert not torch.allclose(expected[-1], expected[-2], atol=1e-4), "averages differ"
        names = [set(load_file(folder / "model.safetensors")) for folder in (*folders[-2:], policy)]
        assert names[0] == names[1] == names[2]
        assert ("lm_head.weight" in names[0]) == (name == "untied")

    done = subprocess.run(
        [sys.executable, "-c", LOAD, json.dumps(TEXT.tolist()), *map(str, folders)],
        cwd=tmp_path,
        env={"PATH": "", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 0, done.stderr
    for line, wanted in zip(done.stdout.splitlines(), expected, strict=True):
        problems, found = json.loads(line)
        assert problems == {}
        torch.testing.assert_close(torch.tensor(found), wanted, rtol=0, atol=1e-6)


def test_averages_of_tied_weights_are_those_of_their_one_name(
    training: FinetuneSettings, tmp_path: Path
) -> None:
    tied = save_tiny_lm(tmp_path / "tied", tie_word_embeddings=True, sharpness=2.0)
    finetune(replace(training, policy=tied, ema_decay=0.5))
    model = AutoModelForCausalLM.from_pretrained(training.round_dir / "policy")
    stored = weights(training, "policy")["model.embed_tokens.weight"]
    assert torch.equal(model.get_input_embeddings().weight, stored)
    assert torch.equal(model.get_output_embeddings().weight, stored)


@pytest.mark.parametrize("rank", [0, 2])
def test_tokenizer_template_and_generation_config_are_exported_byte_for_byte(
    training: FinetuneSettings, rank: int
) -> None:
    generation = training.policy / "generation_config.json"
    generation.write_text(json.dumps(json.loads(generation.read_text()) | {"top_k": 7}) + "\n\n")
    finetune(replace(training, lora_rank=rank))
    names = [
        "tokenizer.json",
        "tokenizer_config.json",
        "chat_template.jinja",
        "generation_config.json",
    ]
    for name in names:
        source = (training.policy / name).read_bytes()
        for export in ("policy", "policy-raw"):
            assert (training.round_dir / export / name).read_bytes() == source


def test_a_row_without_a_completion_is_refused(tmp_path: Path) -> None:
    policy = CausalLMPolicy(save_tiny_lm(tmp_path / "lm"))
    good = {"prompt_id": "p1", "prompt_ids": [5], "completion_ids": [6]}
    for bad in ({"completion_ids": []}, {"prompt_ids": []}):
        with pytest.raises(DataError) as error:
            policy.collate([good, good | bad], noises(2), epoch=0)
        counts = " and ".join(str(len((good | bad)[n])) for n in ("prompt_ids", "completion_ids"))
        assert str(error.value) == (
            f'prompt "p1": a row needs prompt_ids and completion_ids, found {counts} token ids.'
        )


def test_an_empty_selection_trains_nothing(training: FinetuneSettings) -> None:
    select(SelectSettings(round_dir=training.round_dir, top_k=1, min_score=1e9, into="none"))
    with pytest.raises(DataError) as error:
        finetune(replace(training, selection="none"))
    assert str(error.value) == (
        f"{training.round_dir / 'none'}: nothing is selected, so there is nothing to train on. "
        "Select with a lower --min-score, or generate more samples."
    )
    assert not (training.round_dir / "policy").exists()


def test_one_row_and_a_large_batch_are_one_step(training: FinetuneSettings, tmp_path: Path) -> None:
    one = chain_round(tmp_path / "one", [4])
    manifest = finetune(replace(training, round_dir=one, batch_size=64, epochs=1))
    assert manifest["counts"]["steps"] == 1
    base = load_file(training.policy / "model.safetensors")
    changed = load_file(one / "policy-raw" / "model.safetensors")
    assert any(not torch.equal(changed[name], base[name]) for name in base)


def test_a_rows_own_tokens_are_never_taken_for_padding(tmp_path: Path) -> None:
    policy = CausalLMPolicy(save_tiny_lm(tmp_path / "lm", sharpness=4.0))
    row = {"prompt_ids": [PAD, PAD, 5], "completion_ids": [PAD, 7, EOS]}
    batch = policy.collate([row, {"prompt_ids": [5] * 9, "completion_ids": [EOS]}], noises(2), 0)
    assert batch.num_targets == 4
    assert batch.tensors["labels"][0].tolist() == [-100] * 3 + [PAD, 7, EOS] + [-100] * 4
    alone = policy.collate([row], noises(1), 0)
    other = policy.collate([{"prompt_ids": [5] * 9, "completion_ids": [EOS]}], noises(1), 0)
    with torch.no_grad():
        parts = [float(policy.loss(policy.model, b.tensors)) for b in (alone, other, batch)]
    assert parts[2] == pytest.approx(parts[0] + parts[1], rel=1e-5)
