"""Problems in the form of GSM8K, written for these tests, and what the pipeline makes of them."""

import json
import re
import runpy
import tomllib
from pathlib import Path
from typing import Any

import click
import datasets
import pytest
from conftest import ROOT, made_round, scored

from rft_batch.equations import equation_key
from rft_batch.prompts import read_prompts
from rft_batch.rewards.text import gsm8k_answer
from rft_batch.selection import select
from rft_batch.settings import SelectSettings

SAMPLE = ROOT / "tests" / "data" / "gsm8k_sample.jsonl"


def problems() -> list[dict[str, Any]]:
    return [json.loads(line) for line in SAMPLE.read_text().splitlines()]


@pytest.fixture
def script() -> dict[str, Any]:
    return runpy.run_path(str(ROOT / "pipelines" / "make_gsm8k.py"))


def test_the_sample_is_right() -> None:
    assert len(problems()) == 8
    for problem in problems():
        equations = re.findall(r"<<([-+*/.\d]+)=([-.\d]+)>>", problem["answer"])
        assert len(equations) >= 2
        for expression, result in equations:
            assert eval(expression) == pytest.approx(float(result))
        assert problem["answer"].split("#### ")[1].replace(",", "") == equations[-1][1]


def test_a_problem_becomes_a_chat_that_asks_for_the_mark(script: dict[str, Any]) -> None:
    row = script["prompt_row"]("train-0000", **problems()[0])
    assert [message["role"] for message in row["prompt"]] == ["system", "user"]
    assert "####" in row["prompt"][0]["content"]
    assert row["prompt"][1]["content"] == problems()[0]["question"]
    assert row["answer"] == problems()[0]["answer"]


def test_without_a_network_one_line_says_what_to_do(
    script: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def offline(*arguments: Any, **options: Any) -> None:
        raise ConnectionError("no route")

    monkeypatch.setattr("datasets.load_dataset", offline)
    with pytest.raises(
        click.ClickException, match=r"^openai/gsm8k, part test: .* Run this once .*"
    ):
        script["problems"]("test")


def test_the_reward_knows_right_from_wrong() -> None:
    answers = [problem["answer"] for problem in problems()]
    others = answers[1:] + answers[:1]
    assert gsm8k_answer(completions=answers, answer=answers) == [1.0] * 8
    assert gsm8k_answer(completions=others, answer=answers) == [0.0] * 8


def test_the_files_are_those_that_the_pipeline_names(
    script: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    # Of the download alone something else stands in its place.
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, split: problems())
    script["main"].callback(tmp_path)
    settings = tomllib.loads((ROOT / "pipelines" / "gsm8k.toml").read_text())
    named = (
        settings["generate"]["prompts"],
        settings["generate"]["eval"]["prompts"],
        settings["finetune"]["anchor"],
    )
    assert {Path(path).name for path in named} == {path.name for path in tmp_path.iterdir()}
    for solved in read_prompts(tmp_path / "anchor.jsonl", "prompt_id", "prompt"):
        assert equation_key(solved.columns["completion"])
        assert gsm8k_answer([solved.columns["completion"]], [solved.columns["answer"]]) == [1.0]


def test_the_selection_keeps_one_wording_of_a_calculation_and_no_wrong_one(tmp_path: Path) -> None:
    rules = tomllib.loads((ROOT / "pipelines" / "gsm8k.toml").read_text())["select"]
    rows = []
    for number, problem in enumerate(problems()):
        answer = problem["answer"]
        texts = [
            answer,
            f"Let us see. {answer}",
            # The right number after a wrong calculation, and a wrong number.
            re.sub(r"=([-.\d]+)>>", r"=1\1>>", answer, count=1),
            re.sub(r"#### .*", "#### 123456", answer),
        ]
        scores = gsm8k_answer(texts, [answer] * 4)
        assert scores == [1.0, 1.0, 1.0, 0.0]
        rows.append(scored(f"p{number}", *scores, completion=texts))
    made_round(tmp_path, rows)
    manifest = select(SelectSettings(round_dir=tmp_path, **rules))
    assert manifest["reasons"] == {
        "top_k": 8,
        "below_min_score": 8,
        "duplicate": 8,
        "banned": 8,
    }
