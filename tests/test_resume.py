"""`kill -9` in the middle of every stage, then the same command again."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import REWARD, ROOT, save_tiny_policy, write_jsonl

from rft_batch.files import file_digest

COUNTED_KILL = """
import os, signal
from pathlib import Path

def counted(function, times, marker=Path({marker!r})):
    calls = []
    def call(*arguments, **named):
        calls.append(1)
        if len(calls) == times and not marker.exists():
            marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*arguments, **named)
    return call
"""

KILLS = {
    "generate": {
        "while a shard is scored": ("rft_batch.scored_shards", "score_completions", 2),
        "before a shard is written": ("rft_batch.scored_shards", "write_samples", 3),
        "while a shard is renamed": ("os", "replace", 3),
        "while a file is synced": ("os", "fsync", 6),
        "before the manifest": ("rft_batch.scored_shards", "shard_entries", 1),
    },
    "select": {
        "between shards": ("rft_batch.selection", "write_flags", 3),
        "while a shard is renamed": ("os", "replace", 2),
        "before the manifest": ("rft_batch.selection", "publish_json", 1),
    },
    "finetune": {
        "before the first step": ("rft_batch.finetuning", "append_metrics", 1),
        "between checkpoints": ("rft_batch.finetuning", "append_metrics", 4),
        "while a checkpoint is saved": ("rft_batch.checkpoints", "file_digest", 5),
        "while a checkpoint is renamed": ("os", "replace", 4),
        "before the export": ("rft_batch.finetuning", "ema_tensors", 1),
        "between the exports": ("rft_batch.policies.token_model", "publish_folder", 2),
        "before the manifest": ("rft_batch.finetuning", "publish_json", 2),
    },
}
CASES = [(stage, moment) for stage, moments in KILLS.items() for moment in moments]


FOLDERS = {"generate": "samples", "select": "selection", "finetune": "training"}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("inputs")
    save_tiny_policy(folder / "policy")
    write_jsonl(
        folder / "prompts.jsonl", [{"prompt_id": f"p{i}", "prompt": i % 3} for i in range(7)]
    )
    (folder / "reward.py").write_text(REWARD)
    return folder


@pytest.fixture(scope="module")
def whole(inputs: Path) -> Path:
    """A round that was never stopped."""
    for stage in KILLS:
        assert run(inputs, stage, inputs / "whole" / "round-1") == 0
    return inputs / "whole" / "round-1"


def run(
    inputs: Path,
    stage: str,
    round_dir: Path,
    prelude: str = "",
    allowed: tuple[int, ...] = (0, -signal.SIGKILL),
) -> int:
    added: dict[str, list[object]] = {
        "generate": [
            "--policy", inputs / "policy", "--prompts", inputs / "prompts.jsonl",
            "--reward", f"{inputs / 'reward.py'}:share_of_class", "--steps", 3,
            "--samples-per-prompt", 4, "--prompts-per-shard", 2,
        ],
        "select": ["--top-k", 2],
        "finetune": [
            "--policy", inputs / "policy", "--epochs", 2, "--batch-size", 5, "--save-every", 2,
        ],
    }  # fmt: skip
    script = f"{prelude}\nfrom rft_batch.cli import main\nmain()\n"
    done = subprocess.run(
        [sys.executable, "-c", script, stage, str(round_dir), *map(str, added[stage])],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode in allowed, done.stderr
    assert "Traceback" not in done.stderr
    return done.returncode


def results(round_dir: Path, stage: str) -> dict[str, str]:
    """Digests of what a stage leaves to later ones."""
    folders = ["policy", "policy-raw"] if stage == "finetune" else [FOLDERS[stage]]
    paths = [path for name in folders for path in (round_dir / name).iterdir()]
    results = {str(p.relative_to(round_dir)): file_digest(p) for p in paths if p.suffix != ".json"}
    assert len(results) >= 2
    return results


@pytest.mark.parametrize(("stage", "moment"), CASES)
def test_a_killed_stage_ends_like_one_that_was_not(
    tmp_path: Path, inputs: Path, whole: Path, stage: str, moment: str
) -> None:
    killed = tmp_path / "round-1"
    stages = list(KILLS)
    for before in stages[: stages.index(stage)]:
        shutil.copytree(whole / FOLDERS[before], killed / FOLDERS[before])
    module, name, times = KILLS[stage][moment]
    marker = tmp_path / "killed.marker"
    prelude = COUNTED_KILL.format(marker=str(marker)) + (
        f"import {module}\n{module}.{name} = counted({module}.{name}, {times})\n"
    )

    assert run(inputs, stage, killed, prelude) == -signal.SIGKILL
    assert marker.exists()
    assert not (killed / FOLDERS[stage] / "manifest.json").exists()
    assert run(inputs, stage, killed, prelude) == 0

    assert results(killed, stage) == results(whole, stage)
    assert not list(killed.rglob("*.tmp"))


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_stop_by_a_signal_says_so_and_can_go_on(
    tmp_path: Path, inputs: Path, whole: Path, number: signal.Signals, code: int
) -> None:
    stopped = tmp_path / "round-1"
    marker = tmp_path / "stopped.marker"
    prelude = COUNTED_KILL.format(marker=str(marker)).replace("signal.SIGKILL", str(int(number)))
    prelude += (
        "import rft_batch.scored_shards as s\n"
        "s.score_completions = counted(s.score_completions, 2)\n"
    )

    assert run(inputs, "generate", stopped, prelude, allowed=(code,)) == code
    assert 1 <= len(list((stopped / "samples").glob("shard-*.parquet"))) < 4
    assert run(inputs, "generate", stopped) == 0

    assert results(stopped, "generate") == results(whole, "generate")
