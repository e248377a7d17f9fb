"""Rewards: the user's functions and models, called, checked and weighed.

The convention is that of TRL: `reward(prompts, completions, completion_ids, **columns)` gives one
score for each completion. A score that is missing or not finite, and an exception, is the state of
a row and never a number.
"""

import copy
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from rft_batch.errors import InputError, joined_problems
from rft_batch.import_strings import ImportString, import_callable
from rft_batch.progress import say
from rft_batch.rewards.calls import (
    NotScored,
    Outcome,
    Reward,
    RewardModels,
    as_float32,
    call_here,
)
from rft_batch.rewards.workers import RewardWorkers

if TYPE_CHECKING:
    from rft_batch.rewards.model import RewardModel

__all__ = [
    "CallRewards",
    "NotScored",
    "Outcome",
    "Reward",
    "RewardModels",
    "Score",
    "check_columns",
    "load_rewards",
    "ready_rewards",
    "score_completions",
]

CallRewards = Callable[
    [Sequence[Reward], Mapping[str, list[Any]], int], Sequence[Sequence[Outcome]]
]
"""`(rewards, arguments, count)` -> for each reward the outcomes of all rows."""


@dataclass(frozen=True)
class Score:
    """What the rewards said of one completion."""

    score: float | None
    """Weighted sum; None where a reward gave no finite score."""
    error: str | None
    terms: tuple[tuple[str, float | None], ...]
    """Each reward's own score, by name."""


def load_rewards(
    references: Sequence[str],
    weights: Sequence[float],
    models: RewardModels | None = None,
) -> list[Reward]:
    """The reward functions that `--reward` names, and the models that `--reward-model` names.

    A model's files are digested; its weights are not loaded before `ready_rewards`.

    Args:
        references: import strings.
        weights: one for each of them and then for each model, or none for 1.0 each.
        models: the models.

    Raises:
        InputError: none is named, one cannot be imported or found, two have the same name, or the
            number of weights differs.
    """
    found_models = _find_models(models) if models and models.references else []
    count = len(references) + len(found_models)
    if not count:
        raise InputError(
            "--reward: none given. Pass module:function or path/to/file.py:function, "
            "or a model with --reward-model."
        )
    if weights and len(weights) != count:
        raise InputError(
            f"--reward-weight: {len(weights)} given for {count} rewards. "
            "Give one for each, or none."
        )
    found: list[tuple[str, Callable[..., Any], str | None]] = [
        (_short_name(r), import_callable(r, "--reward"), r) for r in references
    ]
    found += [(model.name, model, None) for model in found_models]
    names = [name for name, _, _ in found]
    if len(set(names)) < len(names):
        raise InputError(f"--reward: two of {', '.join(names)} have the same name.")
    return [
        Reward(name, function, weight, reference)
        for (name, function, reference), weight in zip(found, weights or [1.0] * count, strict=True)
    ]


def check_columns(rewards: Sequence[Reward], found: Collection[str], where: Any) -> None:
    """Refuses rewards that cannot be called with the columns that there are.

    Args:
        rewards: the functions.
        found: names of the columns of the prompts.
        where: the prompts' file, for the error's text.

    Raises:
        InputError: a function has an argument without default that is no column.
    """
    problems = [
        f'--reward {reward.name}: it needs the column "{name}", which no prompt of {where} has '
        f"(found: {', '.join(sorted(found)) or 'none'}). Add it to the prompts' rows, or give it "
        f"as an argument: {reward.name.partition('(')[0]}({name}=...)."
        for reward in rewards
        for name in reward.columns
        if name not in found
    ]
    if problems:
        raise InputError(joined_problems(problems))


@contextmanager
def ready_rewards(
    rewards: Sequence[Reward],
    prompts: Sequence[Any],
    workers: int = 0,
    timeout: float | None = None,
) -> Iterator[CallRewards]:
    """Loads the models, starts the worker processes, and ends those whatever happens.

    Args:
        rewards: functions and models.
        prompts: contents that are to be scored, which the models must be able to render.
        workers: processes that the functions run in; 0: they run in the calling thread.
        timeout: seconds that a function may take for one completion; with it there is one worker
            at least.

    Yields:
        What calls the rewards, for `score_completions`.

    Raises:
        InputError: a model cannot be loaded, or cannot score such prompts.
    """
    for reward in rewards:
        if reward.reference is None:
            reward.function.load(any(map(_is_chat, prompts)))  # type: ignore[attr-defined]
    references = [reward.reference for reward in rewards if reward.reference is not None]
    count = max(workers, 0 if timeout is None else 1)
    if not count or not references:
        yield _saying_the_first_trace(call_here)
        return
    with RewardWorkers(references, count, timeout) as pool:
        yield _saying_the_first_trace(pool.call)


def score_completions(
    rewards: Sequence[Reward],
    prompts: Sequence[Any],
    completions: Sequence[str | None],
    completion_ids: Sequence[Sequence[int] | NDArray[np.int32]],
    columns: Mapping[str, Sequence[Any]],
    call: CallRewards = call_here,
) -> list[Score]:
    """The weighted scores of a batch.

    As in TRL, where a prompt is a list of chat messages its completion is one too, of a single
    message of the assistant; else both are what they are.

    Args:
        rewards: the functions.
        prompts: contents, one for each completion.
        completions: texts, None without a tokenizer.
        completion_ids: token ids.
        columns: the prompts' other columns, each with one value for each completion.
        call: what calls the rewards, from `ready_rewards`.

    Raises:
        DataError: a function returned another number of scores than there are completions.
    """
    if not prompts:
        return []
    arguments: dict[str, list[Any]] = {
        **{name: list(values) for name, values in columns.items()},
        # Copies: a reward that takes a message off its prompt must not take it off the others'.
        "prompts": [copy.deepcopy(p) if _is_chat(p) else p for p in prompts],
        "completions": [
            [{"role": "assistant", "content": text}] if _is_chat(prompt) else text
            for prompt, text in zip(prompts, completions, strict=True)
        ],
        "completion_ids": [list(map(int, ids)) for ids in completion_ids],
    }
    by_reward = call(rewards, arguments, len(prompts))
    return [_combine(rewards, [terms[row] for terms in by_reward]) for row in range(len(prompts))]


def _find_models(models: RewardModels) -> "list[RewardModel]":
    from rft_batch.rewards.model import find_models

    return find_models(models)


def _saying_the_first_trace(call: CallRewards) -> CallRewards:
    """`call`, which also tells once where in a reward an exception came from.

    A row keeps one line of its exception, and that seldom says what to mend.
    """
    said = False

    def called(
        rewards: Sequence[Reward], arguments: Mapping[str, list[Any]], count: int
    ) -> Sequence[Sequence[Outcome]]:
        nonlocal said
        by_reward = call(rewards, arguments, count)
        for reward, outcomes in zip(rewards, by_reward, strict=True):
            trace = next((outcome.trace for outcome in outcomes if outcome.trace), None)
            if trace and not said:
                say(f"reward {reward.name} raised, here for the first time:\n{trace}")
                said = True
        return by_reward

    return called


def _short_name(reference: str) -> str:
    parts = ImportString.parse(reference)
    return parts.short if parts else reference


def _is_chat(content: Any) -> bool:
    return (
        isinstance(content, list)
        and bool(content)
        and all(isinstance(m, dict) and "role" in m and "content" in m for m in content)
    )


def _combine(rewards: Sequence[Reward], outcomes: Sequence[Outcome]) -> Score:
    named = tuple((r.name, o.score) for r, o in zip(rewards, outcomes, strict=True))
    errors = [
        f"{reward.name}: {outcome.error}" if len(rewards) > 1 else outcome.error
        for reward, outcome in zip(rewards, outcomes, strict=True)
        if outcome.error is not None
    ]
    if errors:
        return Score(None, "; ".join(errors), named)
    total = as_float32(
        sum(r.weight * (o.score or 0.0) for r, o in zip(rewards, outcomes, strict=True))
    )
    if not math.isfinite(total):
        return Score(None, f"the weighted sum of the rewards is {total}", named)
    return Score(total, None, named)
