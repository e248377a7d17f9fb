import errno
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from conftest import COMMANDS, ROOT, Run, made_round, save_tiny_policy, scored

from rft_batch import cli
from rft_batch.settings import option_name


@pytest.fixture
def arguments(tmp_path: Path, policy: Path, prompts: Path, reward: str) -> list[object]:
    """A whole `generate` command line."""
    return [
        "generate", tmp_path / "run" / "round-1", "--policy", policy, "--prompts", prompts,
        "--reward", reward, "--samples-per-prompt", 4, "--steps", 3,
    ]  # fmt: skip


def test_a_round_by_commands(run: Run, arguments: list[object], policy: Path) -> None:
    round_dir = arguments[1]

    code, out, err = run(*arguments)
    assert code == 0
    assert out.splitlines()[:4] == [
        "  prompts                           7",
        "  samples                          28",
        "  scored                           28",
        "  unscored                          0",
    ]
    assert "7 prompts x 4 samples in 1 shards, 1 process(es), cpu, float32, policy" in err

    code, out, err = run("select", round_dir, "--top-k", 5)
    assert code == 0
    assert err == "Warning: 7 prompts have fewer than 5 samples to keep and 0 have none.\n"

    code, out, err = run("finetune", round_dir, "--policy", policy, "--epochs", 1)
    assert code == 0
    assert out.splitlines()[0].split() == ["rows", "28"]

    new_policy = Path(str(round_dir)) / "policy"
    arguments[3] = new_policy
    code, out, err = run(*arguments, "--into", "eval")
    assert code == 0
    code, out, err = run("report", Path(str(round_dir)).parent)
    assert code == 0
    assert "best of K" in out


def test_an_empty_selection_warns_and_stops_the_next_stage(
    run: Run, arguments: list[object], policy: Path
) -> None:
    run(*arguments)
    code, _, err = run("select", arguments[1], "--min-score", 99)
    assert (code, err) == (0, "Warning: nothing is selected; finetune will refuse it.\n")
    code, _, err = run("finetune", arguments[1], "--policy", policy)
    assert code == 3
    assert err.startswith(f"Error: {arguments[1]}/selection: nothing is selected, so there is")


def test_a_dry_run_shows_the_table_alone(run: Run, tmp_path: Path) -> None:
    round_dir = made_round(tmp_path, [[*scored("a", 1, 2), *scored("b", 1, 1)]])
    code, out, err = run("select", round_dir, "--scope", "global", "--top-k", 1, "--dry-run")
    assert (code, err) == (0, "")
    assert [line.split() for line in out.splitlines()] == [
        ["samples", "4"],
        ["selected", "1"],
        ["prompts", "2"],
        ["prompts", "with", "none", "1"],
        ["prompts", "without", "spread", "1"],
        ["top", "k", "1"],
        ["below", "top", "k", "3"],
        ["Dry", "run:", "nothing", "was", "written."],
    ]
    assert not (round_dir / "selection").exists()


@pytest.mark.parametrize(
    ("value", "recorded"), [("keys.py:key", "keys.py:key"), ("completion", "completion")]
)
def test_a_key_function_is_found_from_the_file_of_settings(
    run: Run, tmp_path: Path, value: str, recorded: str
) -> None:
    (tmp_path / "keys.py").write_text("def key(prompt_id):\n    return prompt_id\n")
    (tmp_path / "mine.toml").write_text(f'[select]\ndistinct_by = "{value}"\n')
    round_dir = made_round(tmp_path / "round-1", [scored("a", 1, 2)])
    code, out, err = run("select", round_dir, "--config", tmp_path / "mine.toml")
    assert code == 0, err
    assert out.split()[-2:] == ["duplicate", "1"]
    assert identity(round_dir, "selection")["distinct_by"]["name"] == recorded


@pytest.mark.parametrize("command", COMMANDS)
def test_every_option_has_help_and_every_command_an_example(run: Run, command: str) -> None:
    code, out, _ = run(command, "--help")
    assert code == 0
    assert f"rft-batch {command} runs/mine" in out
    for field in fields(COMMANDS[command]):
        if not field.metadata["argument"]:
            assert option_name(field.name) in out
        assert field.metadata["help"].endswith(".")


def test_the_group_names_its_commands(run: Run) -> None:
    code, out, _ = run("--help")
    assert code == 0
    assert all(command in out for command in COMMANDS)


def test_help_and_version_answer_as_a_process() -> None:
    for arguments in (["--help"], ["generate", "--help"], ["--version"]):
        done = subprocess.run(
            [sys.executable, "-m", "rft_batch", *arguments],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
        )
        assert done.stdout
        assert done.stderr == ""


def change(path: Path, **keys: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | keys))


def bad_inputs() -> dict[str, tuple[list[object], str]]:
    """By name: options to add to a good command line, and how the error begins."""
    return {
        "missing prompts": (["--prompts", "no.jsonl"], "no.jsonl: there is no such file."),
        "missing policy": (["--policy", "nowhere"], "policy nowhere: policy.json and model"),
        "K of zero": (["--samples-per-prompt", 0], "--samples-per-prompt 0: must be at least 1."),
        "negative K": (["--samples-per-prompt", -2], "--samples-per-prompt -2: must be at least"),
        "no steps": (["--steps", 0], "--steps 0: must be at least 1."),
        "top-p of zero": (["--top-p", 0], "--top-p 0.0: must be above 0."),
        "top-p above one": (["--top-p", 1.5], "--top-p 1.5: must be at most 1."),
        "no such column": (["--prompt-column", "q"], '{prompts} line 1: column "q" is missing '
                           "(found: prompt_id, prompt, level). Rename it, or pass --prompt-col"),
        "no such module": (["--reward", "nowhere:f"], '--reward: "nowhere:f" cannot be imported'),
        "two weights": (["--reward-weight", 1, "--reward-weight", 2], "--reward-weight: 2 given"),
        "bad name": (["--into", "../out"], "--into '../out': a name has up to 100 of"),
        "no such device": (["--device", "tpu"], "--device tpu: not on this machine (found: cpu"),
        "no such config": (["--config", "no.toml"], "--config no.toml: there is no such file."),
    }  # fmt: skip


@pytest.mark.parametrize("name", bad_inputs())
def test_bad_input_ends_with_2_before_any_work(
    run: Run, arguments: list[object], prompts: Path, name: str
) -> None:
    added, message = bad_inputs()[name]
    code, out, err = run(*arguments, *added)
    assert code == 2
    assert err.startswith("Error: " + message.replace("{prompts}", str(prompts)))
    assert out == ""
    assert not Path(str(arguments[1])).exists()


def test_several_settings_are_refused_together(run: Run, arguments: list[object]) -> None:
    code, _, err = run(*arguments, "--steps", 0, "--temperature", -1)
    assert code == 2
    assert err == "Error: --steps 0: must be at least 1.\n--temperature -1.0: must be at least 0.\n"


def test_a_duplicate_prompt_id_is_refused(run: Run, arguments: list[object], prompts: Path) -> None:
    prompts.write_text(prompts.read_text() + '{"prompt_id": "p3", "prompt": 0}\n')
    code, _, err = run(*arguments)
    assert code == 2
    assert err == (
        f'Error: {prompts} line 8: prompt id "p3" stands at line 4 already. Ids must be unique.\n'
    )


def test_a_mask_id_outside_the_embedding_is_refused(
    run: Run, arguments: list[object], policy: Path
) -> None:
    change(policy / "policy.json", mask_id=8)
    code, _, err = run(*arguments)
    assert code == 2
    assert "an id lies outside the model's embedding (mask_id 8" in err
    assert not Path(str(arguments[1])).exists()


def test_a_reward_that_fails_everywhere_ends_with_4(
    run: Run, arguments: list[object], reward_file: Callable[[str], str]
) -> None:
    arguments[7] = reward_file("raise RuntimeError('down')")
    code, _, err = run(*arguments)
    assert code == 4
    assert "28 of 28 samples could not be scored" in err
    assert "RuntimeError: down" in err
    # One traceback, of the reward: what is to be mended is there and not here.
    assert err.count("Traceback") == 1
    assert 'user_reward.py", line 2, in reward' in err
    assert "rft_batch/" not in err


def test_a_wrong_number_of_scores_ends_with_3(
    run: Run, arguments: list[object], reward_file: Callable[[str], str]
) -> None:
    arguments[7] = reward_file("return []")
    code, _, err = run(*arguments)
    assert code == 3
    assert "returned 0 scores for 28 completions" in err


def test_an_unknown_option_and_command_end_with_2(run: Run) -> None:
    assert run("generate", "r", "--tempereture", 1)[0] == 2
    assert run("sample")[0] == 2
    assert run("generate")[0] == 2


@pytest.fixture
def config(tmp_path: Path, policy: Path, prompts: Path, reward: str) -> Path:
    folder = tmp_path / "config"
    folder.mkdir()
    path = folder / "mine.toml"
    path.write_text(
        "[generate]\n"
        'policy = "../policy"\n'
        'prompts = "../prompts.jsonl"\n'
        'reward = ["../reward.py:share_of_class"]\n'
        "samples_per_prompt = 3\n"
        "steps = 2\n"
        "[generate.eval]\n"
        "samples_per_prompt = 5\n"
        "[select]\n"
        "top_k = 1\n"
    )
    return path


def identity(round_dir: Path, into: str = "samples") -> dict[str, Any]:
    manifest: dict[str, Any] = json.loads((round_dir / into / "manifest.json").read_text())
    return manifest["identity"]


def test_a_file_gives_defaults_and_the_command_line_wins(
    run: Run, config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    for round_dir, into, added, expected in (
        (tmp_path / "round-1", "samples", [], (3, 2)),
        (tmp_path / "round-1", "eval", [], (5, 2)),
        (tmp_path / "round-2", "eval", ["--samples-per-prompt", 1], (1, 2)),
        (tmp_path / "round-2", "samples", ["--steps", 1], (3, 1)),
    ):
        code, _, err = run("generate", round_dir, "--config", config, "--into", into, *added)
        assert code == 0, err
        found = identity(round_dir, into)
        assert (found["samples_per_prompt"], found["steps"]) == expected
    run("select", tmp_path / "round-1", "--config", config)
    assert identity(tmp_path / "round-1", "selection")["top_k"] == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[generate]\nstepps = 2\n",
         '{path}: [generate] has the unknown key "stepps". Did you mean "steps"?'),
        ("[generate.eval]\ntop_kk = 2\n",
         '{path}: [generate.eval] has the unknown key "top_kk". Did you mean "top_k"?'),
        ("[sample]\nx = 1\n", '{path}: table has the unknown key "sample". '
         "Known: finetune, generate, inspect, report, select."),
        ("generate = 3\n", "{path}: generate must be a table, [generate]."),
        ("[generate\n", "--config {path}: not TOML: "),
    ],
)  # fmt: skip
def test_a_file_that_is_wrong_is_refused(run: Run, tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "bad.toml"
    path.write_text(text)
    code, _, err = run("generate", tmp_path / "round-1", "--config", path)
    assert code == 2
    assert err.startswith("Error: " + message.format(path=path))


def test_a_value_of_the_wrong_type_is_refused(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "bad.toml"
    path.write_text('[finetune]\nlearning_rate = "high"\n')
    code, _, err = run("finetune", tmp_path / "round-1", "--config", path, "--policy", "p")
    assert code == 2
    assert "'high' is not a valid float" in err


def test_a_stop_by_ctrl_c_ends_with_130(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli.cli, "main", interrupted)
    code, _, err = run("--help")
    assert (code, err) == (130, "Stopped. The same command goes on where it was.\n")


def test_the_folder_of_a_policy_is_not_changed_by_sampling_it(
    run: Run, arguments: list[object], tmp_path: Path
) -> None:
    other = save_tiny_policy(tmp_path / "other")
    run(*arguments)
    assert sorted(p.name for p in other.iterdir()) == sorted(
        p.name for p in Path(str(arguments[3])).iterdir()
    )


def test_a_full_disk_or_a_closed_folder_is_one_line(
    run: Run, arguments: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", "/full/shard")

    monkeypatch.setattr("rft_batch.scored_shards.write_samples", full)
    code, _, err = run(*arguments)
    assert code == 3
    assert err.splitlines()[-1] == (
        "Error: [Errno 28] No space left on device: '/full/shard'. "
        "What is published is whole; run it again."
    )


def test_a_file_leads_to_rewards_with_arguments_and_to_models(
    run: Run, config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Relative to the file, whatever an argument holds; a name on the hub stays what it is.
    (tmp_path / "reward.py").write_text(
        "def of_length(completion_ids, unit):\n    return [len(unit)] * len(completion_ids)\n"
    )
    text = config.read_text().replace("share_of_class", "of_length(unit='a/b.py:c')")
    config.write_text(text)
    monkeypatch.chdir(ROOT)
    code, _, err = run("generate", tmp_path / "round-1", "--config", config)
    assert code == 0, err
    found = json.loads((tmp_path / "round-1/samples/manifest.json").read_text())
    assert list(found["identity"]["rewards"]) == ["reward.py:of_length(unit='a/b.py:c')"]
    assert found["scores"]["mean"] == 8

    (config.parent / "here").mkdir()
    command = cli.cli.commands["generate"]
    assert isinstance(command, cli.ConfiguredCommand)
    config.write_text('[generate]\nreward_model = ["here", "owner/there"]\n')
    assert command._defaults(config, None) == {
        "reward_model": [str(config.parent / "here"), "owner/there"]
    }
