"""The shipped pipeline: its data, its reward, and what it must show."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from conftest import ROOT, run_sampler

from rft_batch.import_strings import import_callable
from rft_batch.policies import load_policy
from rft_batch.prompts import read_prompts
from rft_batch.randomness import SampleNoise
from rft_batch.reporting import read_rounds

DATA = ROOT / "data" / "digits"
REWARD = f"{ROOT / 'pipelines' / 'digits_reward.py'}:class_probability"


def test_training_and_held_out_prompts_do_not_overlap() -> None:
    train, held_out = (
        read_prompts(DATA / name, "prompt_id", "prompt")
        for name in ("prompts.jsonl", "held_out.jsonl")
    )
    assert len(train) == len(held_out) == 100
    assert not {p.prompt_id for p in train} & {p.prompt_id for p in held_out}
    for prompts in (train, held_out):
        assert np.bincount([prompt.content for prompt in prompts]).tolist() == [10] * 10


def test_the_reward_knows_real_digits() -> None:
    reward = import_callable(REWARD, "--reward")
    anchor = read_prompts(DATA / "anchor.jsonl", "prompt_id", "prompt")
    labels = [row.content for row in anchor]
    ids = [row.columns["completion_ids"] for row in anchor]

    right = reward(prompts=labels, completion_ids=ids)
    wrong = reward(prompts=[(label + 1) % 10 for label in labels], completion_ids=ids)

    assert len(right) == 400
    assert np.mean(right) > 0.85
    assert np.mean(wrong) < 0.02
    singles = [
        reward(prompts=[label], completion_ids=[x])[0] for label, x in zip(labels, ids, strict=True)
    ]
    assert singles == pytest.approx(right, abs=1e-12)


def test_the_shipped_policy_is_mediocre() -> None:
    policy = load_policy(DATA / "policy")
    sampler = policy.sampler(
        order="random", steps=16, schedule="linear", temperature=1.0, top_k=0, top_p=1.0,
        choice_temperature=0.0, guidance_scale=1.0,
    )  # fmt: skip
    prompts = [i % 10 for i in range(100)]
    ids = run_sampler(sampler, prompts, [SampleNoise("digits", i) for i in range(100)]).ids
    scores = import_callable(REWARD, "--reward")(prompts=prompts, completion_ids=ids)
    assert 0.65 < np.mean(scores) < 0.85
    assert len({tuple(x.tolist()) for x in ids}) == 100


@pytest.mark.slow
def test_three_rounds_improve_the_policy_and_the_control_does_not(tmp_path: Path) -> None:
    for select in ("best", "random"):
        done = subprocess.run(
            [
                "make", "-C", str(ROOT / "pipelines"), "rounds", f"SELECT={select}",
                f"RUN={tmp_path / select}", f"VENV={sys.prefix}", f"INSTALLED={sys.prefix}",
            ],
            capture_output=True,
            text=True,
            check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
    best, control = read_rounds(tmp_path / "best"), read_rounds(tmp_path / "random")
    assert best[3].mean > best[0].mean + 0.12
    assert control[3].mean < best[3].mean - 0.15
    assert all(figures.distinct > 0.98 for figures in best)
    manifest = json.loads((tmp_path / "best/round-3/training/manifest.json").read_text())
    assert manifest["counts"]["rows"] == 200
