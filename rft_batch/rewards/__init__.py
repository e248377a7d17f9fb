"""Rewards: the user's functions, called, checked and weighed.

The convention is that of TRL: `reward(prompts, completions, completion_ids, **columns)` gives one
score for each completion. A score that is missing or not finite, and an exception, is the state of
a row and never a number.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rft_batch.errors import DataError, InputError
from rft_batch.import_strings import accepted_arguments, import_callable, source_digest

_MAX_ERROR_LENGTH = 200


@dataclass(frozen=True)
class Reward:
    """A reward function with its weight."""

    name: str
    """The import string that it came from, a file without its folder."""
    function: Callable[..., Any]
    weight: float

    @property
    def digest(self) -> str:
        """Digest of the source file; not of what that file reads or imports."""
        return source_digest(self.function)


@dataclass(frozen=True)
class Score:
    """What the rewards said of one completion."""

    score: float | None
    """Weighted sum; None where a reward gave no finite score."""
    error: str | None
    terms: tuple[tuple[str, float | None], ...]
    """Each reward's own score, by name."""


def load_rewards(references: Sequence[str], weights: Sequence[float]) -> list[Reward]:
    """The reward functions that `--reward` names.

    Args:
        references: import strings, at least one.
        weights: one for each, or none for 1.0 each.

    Raises:
        InputError: none is named, one cannot be imported, or the number of weights differs.
    """
    if not references:
        raise InputError("--reward: none given. Pass module:function or path/to/file.py:function.")
    if weights and len(weights) != len(references):
        raise InputError(
            f"--reward-weight: {len(weights)} given for {len(references)} rewards. "
            "Give one for each, or none."
        )
    names = [reference.rpartition("/")[2] for reference in references]
    if len(set(names)) < len(names):
        raise InputError(f"--reward: two of {', '.join(names)} have the same name.")
    return [
        Reward(reference.rpartition("/")[2], import_callable(reference, "--reward"), weight)
        for reference, weight in zip(references, weights or [1.0] * len(references), strict=True)
    ]


def score_completions(
    rewards: Sequence[Reward],
    prompts: Sequence[Any],
    completions: Sequence[str | None],
    completion_ids: Sequence[Sequence[int] | NDArray[np.int32]],
    columns: Mapping[str, Sequence[Any]],
) -> list[Score]:
    """The weighted scores of a batch.

    Args:
        rewards: the functions.
        prompts: contents, one for each completion.
        completions: texts, None without a tokenizer.
        completion_ids: token ids.
        columns: the prompts' other columns, each with one value for each completion.

    Raises:
        DataError: a function returned another number of scores than there are completions.
    """
    arguments: dict[str, list[Any]] = {
        **{name: list(values) for name, values in columns.items()},
        "prompts": list(prompts),
        "completions": list(completions),
        "completion_ids": [list(map(int, ids)) for ids in completion_ids],
    }
    by_reward = [_call(reward, arguments, len(prompts)) for reward in rewards]
    return [_combine(rewards, [terms[row] for terms in by_reward]) for row in range(len(prompts))]


def _call(reward: Reward, arguments: dict[str, list[Any]], count: int) -> list[float | str]:
    """A finite score or an error's text for each row."""
    try:
        returned = reward.function(**accepted_arguments(reward.function, arguments))
    except Exception as error:  # user code: anything can be raised
        if count == 1:
            return [_shortened(f"{type(error).__name__}: {error}")]
        singles = [{name: [v[i]] for name, v in arguments.items()} for i in range(count)]
        return [_call(reward, single, 1)[0] for single in singles]
    scores = _as_list(returned)
    if scores is None or len(scores) != count:
        found = type(returned).__name__ if scores is None else f"{len(scores)} scores"
        raise DataError(
            f"reward {reward.name}: returned {found} for {count} completions. "
            "It must return exactly one score for each, None where it cannot score."
        )
    return [_checked(score) for score in scores]


def _as_list(returned: Any) -> list[Any] | None:
    """A list, tuple, tensor or array as a list, `[count, 1]` flattened; None for anything else."""
    if hasattr(returned, "tolist"):
        returned = returned.tolist()
    if not isinstance(returned, list | tuple):
        return None
    return [
        item[0] if isinstance(item, list | tuple) and len(item) == 1 else item for item in returned
    ]


def _checked(score: Any) -> float | str:
    if score is None:
        return "the reward returned None"
    try:
        value = _as_float32(score)
    except (TypeError, ValueError, OverflowError):
        return _shortened(f"the reward returned {score!r}")
    return value if math.isfinite(value) else f"the reward returned {score}"


def _combine(rewards: Sequence[Reward], terms: Sequence[float | str]) -> Score:
    named = tuple(
        (reward.name, term if isinstance(term, float) else None)
        for reward, term in zip(rewards, terms, strict=True)
    )
    errors = [
        f"{reward.name}: {term}" if len(rewards) > 1 else term
        for reward, term in zip(rewards, terms, strict=True)
        if isinstance(term, str)
    ]
    if errors:
        return Score(None, "; ".join(errors), named)
    total = _as_float32(
        sum(r.weight * t for r, t in zip(rewards, terms, strict=True) if isinstance(t, float))
    )
    if not math.isfinite(total):
        return Score(None, f"the weighted sum of the rewards is {total}", named)
    return Score(total, None, named)


def _as_float32(value: Any) -> float:
    """As the column `score` holds it: what overflows there is not finite."""
    with np.errstate(over="ignore"):
        return float(np.float32(value))


def _shortened(text: str) -> str:
    one_line = " ".join(text.split())
    return one_line[:_MAX_ERROR_LENGTH]
