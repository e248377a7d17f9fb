"""Reward functions in real processes: time-outs, deaths, exceptions, and that nothing is left."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from conftest import ROOT

from rft_batch.errors import DataError, TooManyRowErrors
from rft_batch.generation import generate
from rft_batch.rewards import Score, load_rewards, ready_rewards, score_completions
from rft_batch.settings import GenerateSettings

# Every call leaves its process id where the tests look for it.
REWARDS = """
import ctypes, os, subprocess, sys, time, threading
from pathlib import Path

def _note():
    with open(Path(__file__).with_name("pids"), "a") as file:
        file.write(f"{os.getpid()}\\n")

def plain(prompts, **columns):
    _note()
    assert threading.current_thread() is threading.main_thread()
    assert len(prompts) == 1
    return [float(prompt) for prompt in prompts]

def hangs_on_3(prompts, **columns):
    _note()
    if prompts[0] == 3:
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        with open(Path(__file__).with_name("pids"), "a") as file:
            file.write(f"{child.pid}\\n")
        time.sleep(600)
    return [float(prompts[0])]

def dies_on_odd(prompts, **columns):
    _note()
    if prompts[0] % 2:
        os._exit(7)
    return [float(prompts[0])]

def crashes_on_2(prompts, **columns):
    _note()
    if prompts[0] == 2:
        ctypes.string_at(0)
    return [float(prompts[0])]

def raises(prompts, **columns):
    _note()
    raise ValueError(f"no {prompts[0]}")

def short(prompts, **columns):
    return []

async def later(prompts, **columns):
    return [2.0 * prompts[0]]
"""


@pytest.fixture
def rewards_file(tmp_path: Path) -> Path:
    path = tmp_path / "slow_rewards.py"
    path.write_text(REWARDS)
    return path


def scored(
    file: Path, *names: str, count: int, workers: int = 2, timeout: float | None = None
) -> list[Score]:
    rewards = load_rewards([f"{file}:{name}" for name in names], [])
    with ready_rewards(rewards, [], workers, timeout) as call:
        return score_completions(
            rewards, list(range(count)), [None] * count, [[1]] * count, {}, call
        )


def alive(pid: int) -> bool:
    """Whether it runs; a dead one that nobody has waited for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def pids(file: Path) -> set[int]:
    return set(map(int, file.with_name("pids").read_text().split()))


def test_scores_are_those_of_the_main_thread_and_no_process_is_left(rewards_file: Path) -> None:
    found = scored(rewards_file, "plain", "later", count=9)
    assert [s.score for s in found] == [3.0 * i for i in range(9)]
    assert found[4].terms == (("slow_rewards.py:plain", 4.0), ("slow_rewards.py:later", 8.0))
    used = pids(rewards_file)
    assert os.getpid() not in used
    assert 1 <= len(used) <= 2
    assert not any(map(alive, used))


def test_one_item_that_hangs_is_ended_with_all_that_it_started(rewards_file: Path) -> None:
    found = scored(rewards_file, "hangs_on_3", count=12, timeout=1)
    assert [i for i, s in enumerate(found) if s.score is None] == [3]
    assert [s.score for s in found if s.score is not None] == [i for i in range(12) if i != 3]
    assert found[3].error == "timed out after 1 s"
    used = pids(rewards_file)
    assert len(used) >= 3
    assert not any(map(alive, used))


def test_a_limit_alone_makes_a_worker(rewards_file: Path) -> None:
    found = scored(rewards_file, "hangs_on_3", count=5, workers=0, timeout=0.5)
    assert [s.error for s in found] == [None, None, None, "timed out after 0.5 s", None]


def test_a_time_out_of_one_reward_leaves_the_others_their_scores(rewards_file: Path) -> None:
    found = scored(rewards_file, "plain", "hangs_on_3", count=4, timeout=0.5)
    assert found[3].terms == (("slow_rewards.py:plain", 3.0), ("slow_rewards.py:hangs_on_3", None))
    assert found[3].error == "slow_rewards.py:hangs_on_3: timed out after 0.5 s"


def test_a_process_that_dies_is_the_state_of_its_row(rewards_file: Path) -> None:
    found = scored(rewards_file, "dies_on_odd", count=12)
    for i, score in enumerate(found):
        if i % 2:
            assert (score.score, score.error) == (None, "the reward's process died (exit code 7)")
        else:
            assert (score.score, score.error) == (float(i), None)
    assert not any(map(alive, pids(rewards_file)))


def test_a_segmentation_fault_is_the_state_of_its_row(rewards_file: Path) -> None:
    found = scored(rewards_file, "crashes_on_2", count=4)
    assert [s.error for s in found] == [None, None, "the reward's process died (SIGSEGV)", None]


def test_exceptions_are_states_and_the_first_traceback_is_told_once(
    rewards_file: Path, capsys: Any
) -> None:
    found = scored(rewards_file, "raises", count=3)
    assert [s.error for s in found] == [f"ValueError: no {i}" for i in range(3)]
    told = capsys.readouterr().err
    assert told.startswith(
        "reward slow_rewards.py:raises raised, here for the first time:\nTraceback"
    )
    assert told.count("Traceback") == 1
    assert f'File "{rewards_file}", line ' in told
    assert "calls.py" not in told


def test_a_wrong_number_of_scores_stops(rewards_file: Path) -> None:
    with pytest.raises(
        DataError, match=r"slow_rewards\.py:short: returned 0 scores for 1 completions"
    ):
        scored(rewards_file, "short", count=3)


def test_a_function_that_cannot_be_loaded_there_stops(rewards_file: Path) -> None:
    rewards = load_rewards([f"{rewards_file}:plain"], [])
    rewards_file.write_text("import os\nos._exit(5)\n")
    with (
        pytest.raises(DataError, match="ended with exit code 5 while it loaded"),
        ready_rewards(rewards, [], 1) as call,
    ):
        score_completions(rewards, [1], [None], [[1]], {}, call)
    rewards_file.write_text("plain = 1\n")
    with (
        pytest.raises(DataError, match=r'slow_rewards\.py has no callable "plain"'),
        ready_rewards(rewards, [], 1) as call,
    ):
        score_completions(rewards, [1], [None], [[1]], {}, call)


@pytest.mark.parametrize("workers", [0, 2])
def test_an_exception_on_every_row_is_never_a_score(
    settings: GenerateSettings, rewards_file: Path, workers: int
) -> None:
    failing = replace(settings, reward=(f"{rewards_file}:raises",), reward_workers=workers)
    with pytest.raises(TooManyRowErrors):
        generate(failing)
    paths = list((settings.round_dir / "samples").glob("shard-*.parquet"))
    assert paths
    for path in paths:
        table = pq.read_table(path)
        assert table["score"].null_count == len(table)
        assert table["score_error"].null_count == 0


def test_a_stage_with_workers_makes_the_shards_of_one_without(settings: GenerateSettings) -> None:
    plain = generate(settings)
    other = replace(settings, round_dir=settings.round_dir.parent / "other-1")
    assert (
        generate(replace(other, reward_workers=2, reward_timeout=60))["shards"] == (plain["shards"])
    )


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGKILL, -9)]
)
def test_a_stop_by_a_signal_leaves_no_process(
    settings: GenerateSettings, rewards_file: Path, number: signal.Signals, code: int
) -> None:
    rewards_file.write_text(REWARDS.replace("prompts[0] == 3", "True"))
    stage = subprocess.Popen(
        [
            sys.executable, "-m", "rft_batch", "generate", settings.round_dir,
            "--policy", settings.policy, "--prompts", settings.prompts, "--steps", "1",
            "--reward", f"{rewards_file}:hangs_on_3", "--reward-workers", "2",
        ],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stderr=subprocess.DEVNULL,
    )  # fmt: skip
    seen = rewards_file.with_name("pids")
    waited = time.monotonic() + 60
    while not (seen.exists() and len(pids(rewards_file)) >= 4) and time.monotonic() < waited:
        os.sched_yield()
    stage.send_signal(number)
    assert stage.wait(60) == code
    used = pids(rewards_file)
    assert len(used) == 4
    while any(map(alive, used)) and time.monotonic() < waited:
        os.sched_yield()
    assert not any(map(alive, used))


def test_a_script_needs_no_guard(tmp_path: Path, rewards_file: Path) -> None:
    # multiprocessing's spawn would run the script again in every worker.
    script = tmp_path / "script.py"
    script.write_text(
        "from rft_batch.rewards import load_rewards, ready_rewards, score_completions\n"
        f"rewards = load_rewards([{str(rewards_file)!r} + ':plain'], [])\n"
        "with ready_rewards(rewards, [], 1) as call:\n"
        "    print(score_completions(rewards, [5], [None], [[1]], {}, call)[0].score)\n"
    )
    done = subprocess.run(
        [sys.executable, str(script)],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "5.0\n"


def test_columns_and_completions_belong_together(
    reward_file: Callable[[str], str],
) -> None:
    reference = reward_file(
        "own = [p.split(':')[0] for p in completions]\n"
        "assert prompts == columns['key'] == own, (prompts, columns, own)\n"
        "return [float(c.split(':')[1]) for c in completions]"
    )
    rewards = load_rewards([reference], [])
    ids = [f"p{i}" for i in range(7) for _ in range(3)]
    texts = [f"{p}:{i % 3}" for i, p in enumerate(ids)]
    for workers in (0, 1, 2):
        with ready_rewards(rewards, ids, workers) as call:
            found = score_completions(rewards, ids, texts, [[1]] * 21, {"key": ids}, call)
        assert [s.score for s in found] == [i % 3 for i in range(21)]
