"""Problems in the form of GSM8K, written for these tests, and what the pipeline makes of them."""

import json
import re
import runpy
from typing import Any

import click
import pytest
from conftest import ROOT

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
    text = pytest.importorskip("rft_batch.rewards.text")
    answers = [problem["answer"] for problem in problems()]
    others = answers[1:] + answers[:1]
    assert text.gsm8k_answer(completions=answers, answer=answers) == [1.0] * 8
    assert text.gsm8k_answer(completions=others, answer=answers) == [0.0] * 8
