from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from conftest import save_tiny_policy
from language_models import lm_settings, save_tiny_lm

from rft_batch.errors import DataError
from rft_batch.generation import generate
from rft_batch.inspection import inspect, picture, printable
from rft_batch.policies.token_model import Display
from rft_batch.settings import GenerateSettings, InspectSettings


def test_figures_and_settings_are_shown(sampled: Path) -> None:
    text = inspect(InspectSettings(round_dir=sampled))
    figures = {tuple(line.rsplit(maxsplit=1)) for line in text.splitlines() if line.strip()}
    assert {("  prompts", "7"), ("  samples", "28"), ("  samples per prompt", "4")} <= figures
    assert ("  shards", "4") in figures
    scores = [
        score
        for path in (sampled / "samples").glob("*.parquet")
        for score in pq.read_table(path)["score"].to_pylist()
    ]
    assert ("  score, highest", f"{max(scores):.3f}") in figures
    assert ("  score, lowest", f"{min(scores):.3f}") in figures


def heads(text: str, title: str) -> list[str]:
    part = text.split(f"{title}\n\n")[1]
    return [line for line in part.splitlines() if " sample " in line]


def test_best_worst_and_one_prompt_are_shown_in_order(sampled: Path) -> None:
    text = inspect(InspectSettings(round_dir=sampled, best=3, worst=2, prompt="p4"))
    rows = [
        row
        for path in sorted((sampled / "samples").glob("*.parquet"))
        for row in pq.read_table(path).to_pylist()
    ]
    scores = sorted((row["score"] for row in rows), reverse=True)
    best, worst = heads(text, "Best 3")[:3], heads(text, "Worst 2")[:2]
    assert [line.split("score ")[1].split(",")[0] for line in best] == [
        f"{score:.4f}" for score in scores[:3]
    ]
    assert [line.split("score ")[1].split(",")[0] for line in worst] == [
        f"{score:.4f}" for score in scores[::-1][:2]
    ]
    of_prompt = heads(text, "Prompt p4")
    assert len(of_prompt) == 4
    assert all(line.startswith("p4 sample ") for line in of_prompt)
    assert "[" in text.split("Prompt p4\n\n")[1]


def test_an_unknown_prompt_is_named(sampled: Path) -> None:
    with pytest.raises(DataError, match=r"^--prompt p99: there is no prompt of that id"):
        inspect(InspectSettings(round_dir=sampled, prompt="p99"))


def test_pictures_are_drawn_where_the_policy_says_how(settings: GenerateSettings) -> None:
    save_tiny_policy(settings.policy, display=Display(height=2, width=3, levels=7))
    generate(settings)
    text = inspect(InspectSettings(round_dir=settings.round_dir, best=1))
    prompt, *lines = text.split("rank 0, stop\n")[1].splitlines()
    assert prompt.startswith("prompt: ")
    assert [len(line) for line in lines] == [6, 6]
    assert set("".join(lines)) <= set(" ░▒▓█")


def test_a_picture_is_darker_for_higher_levels() -> None:
    ids = [0, 4, 8, 12, 16, 16]
    assert picture(ids, {"height": 2, "width": 3, "levels": 17}) == "  ░░▒▒\n▓▓████"


def test_a_chat_is_shown_once_for_its_samples_a_line_for_each_message(tmp_path: Path) -> None:
    policy = save_tiny_lm(tmp_path / "lm")
    chat = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "a\nb"}]
    settings = lm_settings(tmp_path, policy, [chat, "plain text"])
    generate(settings)
    text = inspect(InspectSettings(round_dir=settings.round_dir, prompt="p0"))
    assert text.count(" sample ") == 4
    assert text.count("\nsystem: be brief\nuser: a\\nb\n") == 1
    of_other = inspect(InspectSettings(round_dir=settings.round_dir, prompt="p1"))
    assert of_other.count("\nprompt: plain text\n") == 1


def test_text_cannot_move_the_cursor() -> None:
    assert printable("a\x1b[2Jb\x00\n\u202ee ü") == "a\\x1b[2Jb\\x00\\n\\u202ee ü"


def test_reasons_of_unscored_samples_are_counted(
    settings: GenerateSettings, reward_file: Callable[[str], str]
) -> None:
    reference = reward_file("return [None if level == 2 else 0.5 for level in columns['level']]")
    generate(replace(settings, reward=(reference,), max_error_rate=1.0))
    text = inspect(InspectSettings(round_dir=settings.round_dir, prompt="p2"))
    (line,) = [line for line in text.splitlines() if "not scored" in line]
    assert line.split() == ["not", "scored:", "the", "reward", "returned", "None", "4"]
    assert "score the reward returned None, rank None" in text


def test_verification_is_reported_or_ends_the_command(sampled: Path) -> None:
    wanted = InspectSettings(round_dir=sampled, verify=True)
    assert inspect(wanted).endswith("Verified: 5 files are what their manifests say.")
    path = sampled / "samples" / "shard-00002.parquet"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    with pytest.raises(DataError, match=f"^{path}: damaged"):
        inspect(wanted)


def test_an_incomplete_stage_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="this stage is not complete"):
        inspect(InspectSettings(round_dir=tmp_path))
