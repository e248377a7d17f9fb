from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from rft_batch.errors import DataError, InputError
from rft_batch.rewards import Score, load_rewards, score_completions


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
        ([], [], "--reward: none given. Pass module:function or path/to/file.py:function."),
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
