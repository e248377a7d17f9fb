"""Rounds of a language model by commands: in two processes, killed, and one after the other."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT, launch, sample_rows
from language_models import lm_settings, save_tiny_lm
from test_resume import COUNTED_KILL

from rft_batch.files import file_digest
from rft_batch.generation import generate
from rft_batch.policies import policy_digest
from rft_batch.settings import GenerateSettings

CHATS = [
    [{"role": "user", "content": "1+1="}],
    [{"role": "system", "content": "be brief"}, {"role": "user", "content": "why?"}],
]
PROMPTS = ["ab", "cdefgh", "q", *CHATS, "ab", "x" * 200, "no"]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> GenerateSettings:
    """A round that was made in this process, never stopped: 8 prompts in 4 shards."""
    folder = tmp_path_factory.mktemp("whole")
    policy = save_tiny_lm(folder / "lm", sharpness=4.0)
    settings = lm_settings(folder, policy, PROMPTS, max_error_rate=0.2)
    generate(settings)
    return settings


def arguments(settings: GenerateSettings, round_dir: Path) -> list[str]:
    """The command that makes a round like that of the settings."""
    return [
        "generate", str(round_dir), "--policy", str(settings.policy),
        "--prompts", str(settings.prompts), "--reward", settings.reward[0],
        "--samples-per-prompt", "4", "--prompts-per-shard", "2", "--max-new-tokens", "12",
        "--max-error-rate", "0.2",
    ]  # fmt: skip


def run(*arguments: object, prelude: str = "") -> subprocess.CompletedProcess[str]:
    script = f"{prelude}\nfrom rft_batch.cli import main\nmain()\n"
    return subprocess.run(
        [sys.executable, "-c", script, *map(str, arguments)],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )


def shards(round_dir: Path) -> dict[str, str]:
    found = sorted((round_dir / "samples").glob("shard-*.parquet"))
    return {path.name: file_digest(path) for path in found}


def test_two_processes_make_the_samples_of_one(whole: GenerateSettings, tmp_path: Path) -> None:
    done = launch(2, *arguments(whole, tmp_path / "round-1"))
    assert done.returncode == 0, done.stderr
    assert "2 process(es), cpu, float32" in done.stderr
    assert shards(tmp_path / "round-1") == shards(whole.round_dir)
    errors = {row["score_error"] for row in sample_rows(tmp_path / "round-1")}
    assert errors == {None, "prompt too long: 200 tokens, the model has room for 128"}


def test_a_round_killed_in_the_middle_of_a_completion_ends_like_one_that_was_not(
    whole: GenerateSettings, tmp_path: Path
) -> None:
    killed = tmp_path / "round-1"
    # Of about 13 tokens for each of 4 shards, in the third.
    prelude = COUNTED_KILL.format(marker=str(tmp_path / "killed.marker")) + (
        "import rft_batch.policies.lm_engine as engine\nengine.draw = counted(engine.draw, 30)\n"
    )

    assert run(*arguments(whole, killed), prelude=prelude).returncode == -signal.SIGKILL
    before = shards(killed)
    assert 1 <= len(before) < 4
    assert not (killed / "samples" / "manifest.json").exists()
    done = run(*arguments(whole, killed), prelude=prelude)

    assert done.returncode == 0, done.stderr
    assert "samples are there already" in done.stderr
    assert shards(killed) == shards(whole.round_dir)


def test_a_round_begins_with_what_the_one_before_it_exported(
    whole: GenerateSettings, tmp_path: Path
) -> None:
    first, second = tmp_path / "round-1", tmp_path / "round-2"
    shutil.copytree(whole.round_dir, first)

    for command in (
        ["select", first, "--top-k", 2, "--keep-truncated"],
        ["finetune", first, "--policy", whole.policy, "--epochs", 3, "--learning-rate", 0.01],
        [*arguments(whole, second), "--policy", first / "policy"],
    ):
        done = run(*command)
        assert done.returncode == 0, done.stderr
        assert "Traceback" not in done.stderr

    manifest = json.loads((second / "samples" / "manifest.json").read_text())
    exported = json.loads((first / "training" / "manifest.json").read_text())["exported"]
    assert manifest["identity"]["policy"] == exported["policy"] == policy_digest(first / "policy")
    assert exported["policy"] != policy_digest(whole.policy)
    assert manifest["identity"]["round_number"] == 2
    rows, old = sample_rows(second), sample_rows(first)
    assert [row["prompt_ids"] for row in rows] == [row["prompt_ids"] for row in old]
    assert [row["completion_ids"] for row in rows] != [row["completion_ids"] for row in old]
