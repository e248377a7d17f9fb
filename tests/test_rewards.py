from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from rft_batch.errors import DataError, InputError
from rft_batch.rewards import Score, check_columns, load_rewards, score_completions


def scores(reference: str, count: int = 3, **columns: list[object]) -> list[Score]:
    rewards = load_rewards([reference], [])
    prompts = list(range(count))
    ids = [[i, i] for i in range(count)]
    return score_completions(rewards, prompts, [None] * count, ids, columns)


def test_a_trl_style_function_gets_what_it_names(reward_file: Callable[[str], str]) -> None:
    reference = reward_file(
        "assert len(prompts) == len(completions) == len(completion_ids) == 3\n"
        "return [p + a for p, a in zip(prompts, columns['answer'])]"
    )
    assert [s.score for s in scores(reference, answer=[10, 20, 30])] == [10.0, 21.0, 32.0]


def test_a_function_without_columns_gets_only_what_it_names(tmp_path: Path) -> None:
    path = tmp_path / "r.py"
    path.write_text("def r(completion_ids):\n    return [sum(ids) for ids in completion_ids]\n")
    assert [s.score for s in scores(f"{path}:r", answer=[1, 2, 3])] == [0.0, 2.0, 4.0]


def test_states_of_a_row_are_never_numbers(reward_file: Callable[[str], str]) -> None:
    reference = reward_file(
        "return [0.2, float('nan'), None, float('inf'), -float('inf'), 'x', 1e300, 0.9]"
    )
    found = scores(reference, 8)
    assert [s.score for s in found] == pytest.approx([0.2, *[None] * 6, 0.9])
    assert [s.error for s in found] == [
        None,
        "the reward returned nan",
        "the reward returned None",
        "the reward returned inf",
        "the reward returned -inf",
        "the reward returned 'x'",
        "the reward returned 1e+300",
        None,
    ]


def test_an_exception_is_the_state_of_its_own_row(reward_file: Callable[[str], str]) -> None:
    reference = reward_file("return [1 / p for p in prompts]")
    found = scores(reference)
    assert [s.score for s in found] == [None, 1.0, 0.5]
    assert found[0].error == "ZeroDivisionError: division by zero"


@pytest.mark.parametrize(
    ("body", "found"),
    [("return [1.0]", "1 scores"), ("return 1.0", "float"), ("return None", "NoneType")],
)
def test_a_wrong_number_of_scores_stops(
    reward_file: Callable[[str], str], body: str, found: str
) -> None:
    with pytest.raises(DataError) as error:
        scores(reward_file(body))
    assert str(error.value) == (
        f"reward user_reward.py:reward: returned {found} for 3 completions. "
        "It must return exactly one score for each, None where it cannot score."
    )


@pytest.mark.parametrize(
    "returned",
    [
        torch.tensor([1.0, 2.0, 3.0]),
        torch.tensor([[1.0], [2.0], [3.0]]),
        np.array([1, 2, 3]),
        (1, 2, 3),
        [torch.tensor(1.0), np.float32(2), 3],
    ],
    ids=["tensor", "column", "array", "tuple", "list of scalars"],
)
def test_tensors_arrays_and_columns_are_lists(returned: object) -> None:
    rewards = load_rewards(["math:sqrt"], [])
    rewards = [replace(rewards[0], function=lambda prompts: returned)]
    found = score_completions(rewards, [0, 0, 0], [None] * 3, [[1]] * 3, {})
    assert [s.score for s in found] == [1.0, 2.0, 3.0]


def test_several_rewards_are_weighed_and_kept(tmp_path: Path) -> None:
    path = tmp_path / "r.py"
    path.write_text(
        "def a(prompts):\n    return [1.0, 2.0]\n\ndef b(prompts):\n    return [0.5, None]\n"
    )
    rewards = load_rewards([f"{path}:a", f"{path}:b"], [2.0, -1.0])
    first, second = score_completions(rewards, [0, 1], [None] * 2, [[1]] * 2, {})
    assert first == Score(1.5, None, (("r.py:a", 1.0), ("r.py:b", 0.5)))
    assert second.score is None
    assert second.error == "r.py:b: the reward returned None"
    assert second.terms == (("r.py:a", 2.0), ("r.py:b", None))


@pytest.mark.parametrize(
    ("references", "weights", "message"),
    [
        ([], [], "--reward: none given. Pass module:function or path/to/file.py:function, "
         "or a model with --reward-model."),
        (["math:sqrt"], [1, 2], "--reward-weight: 2 given for 1 rewards. "
         "Give one for each, or none."),
        (["math:sqrt"] * 2, [], "--reward: two of math:sqrt, math:sqrt have the same name."),
    ],
)  # fmt: skip
def test_rewards_that_do_not_fit_are_refused(
    references: list[str], weights: list[float], message: str
) -> None:
    with pytest.raises(InputError) as error:
        load_rewards(references, weights)
    assert str(error.value) == message


def test_long_errors_are_one_short_line(reward_file: Callable[[str], str]) -> None:
    (found,) = scores(reward_file("raise ValueError('a\\n' * 1000)"), 1)
    assert len(found.error) == 200
    assert "\n" not in found.error


# Reward functions as the documentation of TRL writes them (docs/source/grpo_trainer.md).
TRL = r"""
import asyncio
import re


def format_reward_func(completions, **kwargs):
    pattern = r"^<think>.*?</think><answer>.*?</answer>$"
    completion_contents = [completion[0]["content"] for completion in completions]
    matches = [re.match(pattern, content) for content in completion_contents]
    return [1.0 if match else 0.0 for match in matches]


def boxed_reward_func(completions, ground_truth, **kwargs):
    matches = [re.search(r"\\boxed\{(.*?)\}", completion) for completion in completions]
    contents = [match.group(1) if match else "" for match in matches]
    return [1.0 if c == gt else 0.0 for c, gt in zip(contents, ground_truth)]


def math_reward_func(prompts, completions, task, **kwargs):
    rewards = []
    for prompt, completion, t in zip(prompts, completions, task):
        rewards.append(float("4" in completion) if t == "math" else None)
    return rewards


async def slow_reward_func(prompts, completions, completion_ids, **kwargs):
    await asyncio.sleep(0)
    return [float(len(ids)) for ids in completion_ids]


running = 0
most = 0


async def overlapping(completions, **kwargs):
    global running, most
    running += 1
    most = max(most, running)
    for _ in range(5):
        await asyncio.sleep(0)
    running -= 1
    return [most for _ in completions]


async def overlapping_too(completions, **kwargs):
    return await overlapping(completions)


async def raises_for_bad(completions, **kwargs):
    if "bad" in completions:
        raise ValueError("bad")
    return [1.0 for _ in completions]


def takes_a_message_off(prompts, **kwargs):
    return [len(p.pop()["content"]) + len(p) for p in prompts]
"""


@pytest.fixture
def trl(tmp_path: Path) -> Callable[..., list[Score]]:
    """Scores by the functions above of those names."""
    path = tmp_path / "trl_rewards.py"
    path.write_text(TRL)

    def scored(
        *names: str, prompts: list[object], texts: list[str], **columns: list[object]
    ) -> list[Score]:
        rewards = load_rewards([f"{path}:{name}" for name in names], [])
        check_columns(rewards, columns, "prompts.jsonl")
        ids = [[1] * len(text) for text in texts]
        return score_completions(rewards, prompts, texts, ids, columns)

    return scored


def chat(text: str) -> list[dict[str, str]]:
    return [{"role": "system", "content": "Be short."}, {"role": "user", "content": text}]


def test_chats_are_scored_as_in_trl(trl: Callable[..., list[Score]]) -> None:
    texts = ["<think>a</think><answer>b</answer>", "b"]
    found = trl("format_reward_func", prompts=[chat("1"), chat("2")], texts=texts)
    assert [s.score for s in found] == [1.0, 0.0]


def test_texts_are_scored_as_in_trl(trl: Callable[..., list[Score]]) -> None:
    texts = [r"It is \boxed{4}.", r"\boxed{5}", "4"]
    found = trl("boxed_reward_func", prompts=["q"] * 3, texts=texts, ground_truth=["4"] * 3)
    assert [s.score for s in found] == [1.0, 0.0, 0.0]


def test_rows_of_another_task_are_not_scored(trl: Callable[..., list[Score]]) -> None:
    found = trl("math_reward_func", prompts=["q"] * 3, texts=["4", "4", "5"],
                task=["math", "code", "math"])  # fmt: skip
    assert [s.score for s in found] == [1.0, None, 0.0]
    assert found[1].error == "the reward returned None"


def test_coroutines_are_awaited_together(trl: Callable[..., list[Score]]) -> None:
    found = trl("slow_reward_func", "overlapping", "overlapping_too", prompts=["q"] * 2,
                texts=["abc", ""])  # fmt: skip
    assert [[term for _, term in s.terms] for s in found] == [[3.0, 2.0, 2.0], [0.0, 2.0, 2.0]]


def test_an_exception_of_a_coroutine_is_the_state_of_its_own_row(
    trl: Callable[..., list[Score]],
) -> None:
    found = trl("raises_for_bad", prompts=["q"] * 3, texts=["a", "bad", "c"])
    assert [s.error for s in found] == [None, "ValueError: bad", None]


def test_a_reward_that_changes_a_prompt_changes_its_own(trl: Callable[..., list[Score]]) -> None:
    shared = chat("four")
    found = trl("takes_a_message_off", prompts=[shared, shared], texts=["a", "b"])
    assert [s.score for s in found] == [5.0, 5.0]
    assert shared == chat("four")


def test_a_column_that_is_not_there_is_refused(trl: Callable[..., list[Score]]) -> None:
    with pytest.raises(InputError) as error:
        trl("boxed_reward_func", prompts=["q"], texts=["a"], answer=["4"])
    assert str(error.value) == (
        '--reward trl_rewards.py:boxed_reward_func: it needs the column "ground_truth", which no '
        "prompt of prompts.jsonl has (found: answer). Add it to the prompts' rows, or give it as "
        "an argument: trl_rewards.py:boxed_reward_func(ground_truth=...)."
    )


def test_an_argument_of_the_reference_wins_over_a_column(tmp_path: Path) -> None:
    path = tmp_path / "r.py"
    path.write_text("def r(prompts, level, **columns):\n    return [level] * len(prompts)\n")
    assert [s.score for s in scores(f"{path}:r(level=5)", level=[1, 2, 3])] == [5.0] * 3
    (reward,) = load_rewards([f"{path}:r(level=5)"], [])
    assert reward.columns == []
    assert reward.name == "r.py:r(level=5)"
    assert reward.digest == load_rewards([f"{path}:r"], [])[0].digest != ""


def test_a_reward_may_say_why_it_does_not_score(tmp_path: Path) -> None:
    path = tmp_path / "r.py"
    path.write_text(
        "from rft_batch.rewards import NotScored\n\n"
        "def r(prompts):\n"
        "    return [NotScored('no answer there') if p else 1.0 for p in prompts]\n"
    )
    found = scores(f"{path}:r", 2)
    assert [(s.score, s.error) for s in found] == [(1.0, None), (None, "no answer there")]


def test_what_this_package_asks_for_is_no_state_of_a_row(
    reward_file: Callable[[str], str],
) -> None:
    reference = reward_file("from rft_batch.errors import InputError\nraise InputError('do this')")
    with pytest.raises(InputError, match=r"^do this$"):
        scores(reference)
