"""The errors that the project raises on purpose, each with the exit code it ends a command with.

A message has three parts: what was wrong (with the value), where (file, row, column, option) and
what to do. `cli` is the only place that turns them into text and an exit code.
"""

from collections.abc import Iterable


class RftError(Exception):
    """Anything that the user can act on; never a traceback."""

    exit_code = 1


class InputError(RftError):
    """Bad input or settings, found before any work was done."""

    exit_code = 2


class DataError(RftError):
    """Data that contradicts itself, is damaged, or that a user's function did not return right."""

    exit_code = 3


class TooManyRowErrors(RftError):
    """More rows in error than `--max-error-rate` allows; everything generated is kept."""

    exit_code = 4


def joined_problems(problems: Iterable[str], shown: int = 10) -> str:
    """Several faults as one message: the first `shown` of them, a line each, then how many more."""
    lines = list(problems)
    more = [f"... and {len(lines) - shown} more"] if len(lines) > shown else []
    return "\n".join(lines[:shown] + more)
