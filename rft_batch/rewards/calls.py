"""One call of reward functions, and what it said of each row.

Used in the main thread and in the worker processes, so it imports nothing that is slow to load.
"""

import asyncio
import inspect
import math
import traceback
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from rft_batch.errors import DataError, RftError
from rft_batch.import_strings import accepted_arguments, given_arguments, source_digest

BATCH_ARGUMENTS = ("prompts", "completions", "completion_ids")
"""What every reward can ask for, besides the columns of the prompts."""

_MAX_ERROR_LENGTH = 200


@dataclass(frozen=True)
class Reward:
    """A reward function with its weight."""

    name: str
    """The import string that it came from, a file without its folder; or the name of a model."""
    function: Callable[..., Any]
    weight: float
    reference: str | None = None
    """The whole import string, from which a worker process loads it; None for a model."""

    @property
    def digest(self) -> str:
        """Digest of a function's source file, not of what that reads or imports; or of a model."""
        return str(getattr(self.function, "digest", None) or source_digest(self.function))

    @property
    def columns(self) -> list[str]:
        """The columns of the prompts without which it cannot be called."""
        try:
            parameters = inspect.signature(self.function).parameters.values()
        except ValueError:  # some builtins have no signature
            return []
        return [
            parameter.name
            for parameter in parameters
            if parameter.default is parameter.empty
            and parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
            and parameter.name not in BATCH_ARGUMENTS
        ]


@dataclass(frozen=True)
class RewardModels:
    """Sequence classifiers that score, as the settings name them."""

    references: Sequence[str]
    """Folders, or names on the Hugging Face hub."""
    outputs: Sequence[str] = ()
    """Which output is the score: `0`, or `softmax:1`; one for each model, one for all, or none."""
    batch_size: int = 16
    """Texts per forward pass."""
    device: str = "cpu"


@dataclass(frozen=True)
class NotScored:
    """What a reward may return in a score's place: why there is none."""

    reason: str


@dataclass(frozen=True)
class Outcome:
    """What one reward said of one completion."""

    score: float | None
    error: str | None = None
    """Why there is no score."""
    trace: str | None = None
    """The traceback of an exception."""


def call_here(
    rewards: Sequence[Reward], arguments: Mapping[str, list[Any]], count: int
) -> list[list[Outcome]]:
    """Calls every reward once with all rows, in this thread; coroutines are awaited together.

    A reward that raises is called again with each row alone, so that only the rows that make it
    raise are in error.

    Args:
        rewards: the functions.
        arguments: by name, each with `count` values.
        count: how many rows there are.

    Returns:
        For each reward the outcomes of all rows.

    Raises:
        DataError: a function returned another number of scores than there are rows.
        RftError: a function of this package says what is to be done.
    """
    returned = _run([partial(_call, reward, arguments) for reward in rewards])
    outcomes = []
    for reward, result in zip(rewards, returned, strict=True):
        if isinstance(result, BaseException) and count > 1:
            singles = [{name: [v[i]] for name, v in arguments.items()} for i in range(count)]
            results = _run([partial(_call, reward, single) for single in singles])
            outcomes.append([_outcomes(reward, single, 1)[0] for single in results])
        else:
            outcomes.append(_outcomes(reward, result, count))
    return outcomes


def as_float32(value: Any) -> float:
    """As the column `score` holds it: what overflows there is not finite."""
    with np.errstate(over="ignore"):
        return float(np.float32(value))


def _run(calls: Sequence[Callable[[], Any]]) -> list[Any]:
    """What each call returned, or the exception that it raised."""
    results: list[Any] = []
    for call in calls:
        try:
            results.append(call())
        except RftError:
            raise
        except Exception as error:  # user code: anything can be raised
            results.append(error)
    waiting = [i for i, result in enumerate(results) if inspect.isawaitable(result)]
    if waiting:
        awaited = asyncio.run(_together([results[i] for i in waiting]))
        for i, result in zip(waiting, awaited, strict=True):
            results[i] = result
    return results


async def _together(awaitables: Sequence[Awaitable[Any]]) -> list[Any]:
    return await asyncio.gather(*awaitables, return_exceptions=True)


def _call(reward: Reward, arguments: Mapping[str, list[Any]]) -> Any:
    """Gives the function what it takes: all if it takes `**columns`, else what it names."""
    given = given_arguments(reward.function)
    # The import string's own argument wins over a column that happens to bear its name.
    offered = {name: values for name, values in arguments.items() if name not in given}
    return reward.function(**accepted_arguments(reward.function, offered))


def _outcomes(reward: Reward, returned: Any, count: int) -> list[Outcome]:
    """A finite score or a reason for each row."""
    if isinstance(returned, BaseException):
        error = _shortened(f"{type(returned).__name__}: {returned}")
        return [Outcome(None, error, _trace(returned))] * count
    scores = _as_list(returned)
    if scores is None or len(scores) != count:
        found = type(returned).__name__ if scores is None else f"{len(scores)} scores"
        raise DataError(
            f"reward {reward.name}: returned {found} for {count} completions. "
            "It must return exactly one score for each, None where it cannot score."
        )
    return [_checked(score) for score in scores]


def _trace(error: BaseException) -> str:
    """The traceback from the reward's own first line on."""
    start = error.__traceback__
    while start is not None and start.tb_next and start.tb_frame.f_code.co_filename == __file__:
        start = start.tb_next
    return "".join(traceback.format_exception(type(error), error, start)).rstrip()


def _as_list(returned: Any) -> list[Any] | None:
    """A list, tuple, tensor or array as a list, `[count, 1]` flattened; None for anything else."""
    if hasattr(returned, "tolist"):
        returned = returned.tolist()
    if not isinstance(returned, list | tuple):
        return None
    return [
        item[0] if isinstance(item, list | tuple) and len(item) == 1 else item for item in returned
    ]


def _checked(score: Any) -> Outcome:
    if isinstance(score, NotScored):
        return Outcome(None, _shortened(score.reason))
    if score is None:
        return Outcome(None, "the reward returned None")
    try:
        value = as_float32(score)
    except (TypeError, ValueError, OverflowError):
        return Outcome(None, _shortened(f"the reward returned {score!r}"))
    return Outcome(value) if math.isfinite(value) else Outcome(None, f"the reward returned {score}")


def _shortened(text: str) -> str:
    one_line = " ".join(text.split())
    return one_line[:_MAX_ERROR_LENGTH]
