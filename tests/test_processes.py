"""Two processes, as torchrun starts them, against one."""

import shutil
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import torch
from conftest import launch, write_sgd_script
from safetensors.torch import load_file

from rft_batch.metrics import read_metrics
from rft_batch.processes import Process


def rows(folder: Path) -> list[dict[str, Any]]:
    paths = sorted(folder.glob("shard-*.parquet"))
    return [row for path in paths for row in pq.read_table(path).to_pylist()]


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.glob("shard-*.parquet")}


def test_work_is_shared_without_gaps_and_overlaps() -> None:
    for count in (1, 2, 3, 8):
        for pieces in (0, 1, 2, 5, 17):
            shares = [Process(i, count).share(range(pieces)) for i in range(count)]
            assert sorted(piece for share in shares for piece in share) == list(range(pieces))


def test_two_processes_make_the_samples_of_one_and_one_ends_what_two_began(
    tmp_path: Path, policy: Path, prompts: Path, reward: str
) -> None:
    command = [
        "--policy", policy, "--prompts", prompts, "--reward", reward, "--steps", 3,
        "--samples-per-prompt", 4, "--prompts-per-shard", 2,
    ]  # fmt: skip
    one = launch(1, "generate", tmp_path / "one" / "round-1", *command)
    two = launch(2, "generate", tmp_path / "two" / "round-1", *command)
    assert one.returncode == two.returncode == 0, one.stderr + two.stderr

    assert "2 process(es), cpu, float32" in two.stderr
    assert rows(tmp_path / "one/round-1/samples") == rows(tmp_path / "two/round-1/samples")
    assert contents(tmp_path / "one/round-1/samples") == contents(tmp_path / "two/round-1/samples")
    assert (tmp_path / "two/round-1/samples/manifest.json").exists()

    begun = launch(2, "generate", tmp_path / "mixed" / "round-1", *command, "--limit", 3)
    ended = launch(1, "generate", tmp_path / "mixed" / "round-1", *command)
    assert begun.returncode == ended.returncode == 0, begun.stderr + ended.stderr
    assert "partial, as --limit asked" in begun.stdout
    assert "16 samples are there already" in ended.stderr
    assert contents(tmp_path / "mixed/round-1/samples") == contents(
        tmp_path / "one/round-1/samples"
    )


def test_a_process_without_work_ends_well(
    tmp_path: Path, policy: Path, prompts: Path, reward: str
) -> None:
    done = launch(
        2, "generate", tmp_path / "round-1", "--policy", policy, "--prompts", prompts,
        "--reward", reward, "--steps", 1, "--samples-per-prompt", 2,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert len(rows(tmp_path / "round-1/samples")) == 14


def test_two_processes_train_like_one(selected: Path, policy: Path, tmp_path: Path) -> None:
    script = write_sgd_script(tmp_path)
    losses, weights = {}, {}
    for processes in (1, 2):
        copy = tmp_path / f"copy-{processes}" / "round-1"
        shutil.copytree(selected, copy)
        # 14 rows, 5 a step: processes get 3 and 2 rows, and 2 and 2 in the last step.
        done = launch(
            processes, "finetune", copy, "--policy", policy, "--epochs", 2, "--batch-size", 5,
            "--micro-batch-size", 2, "--learning-rate", 0.1, "--ema-decay", 0.5, script=script,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        losses[processes] = read_metrics(copy / "training" / "metrics.jsonl")
        weights[processes] = load_file(copy / "policy" / "model.safetensors")

    for one, two in zip(losses[1], losses[2], strict=True):
        assert (one["targets"], one["rows"]) == (two["targets"], two["rows"])
        assert abs(one["loss"] - two["loss"]) < 1e-5
        assert abs(one["grad_norm"] - two["grad_norm"]) < 1e-5 * one["grad_norm"]
    base = load_file(policy / "model.safetensors")
    assert (weights[1]["head.weight"] - base["head.weight"]).abs().max() > 1e-2
    for name, tensor in weights[1].items():
        torch.testing.assert_close(weights[2][name], tensor, rtol=0, atol=1e-5)


def test_bad_input_ends_all_processes(tmp_path: Path, prompts: Path, reward: str) -> None:
    done = launch(
        2, "generate", tmp_path / "round-1", "--policy", tmp_path / "no", "--prompts", prompts,
        "--reward", reward,
    )  # fmt: skip
    assert done.returncode != 0
    assert "policy.json and model.safetensors not found" in done.stderr
