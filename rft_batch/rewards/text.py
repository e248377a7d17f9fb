"""Rewards of text, ready to use: `--reward rft_batch.rewards.text:number_answer`.

All follow the signature of TRL's reward functions and take completions as texts or as chats. Where
the answer of a row is missing or cannot be understood, that row is not scored (None); what the
completion lacks is scored 0.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from decimal import Decimal
from typing import Any

from rft_batch.errors import InputError

_NUMBER = re.compile(
    r"""
    (?P<sign> (?<![\w)\]]) - )? \$? (?P<inner> (?<=\$) - )?
    (?P<digits> (?: (?<![\d.,]) \d{1,3} (?:,\d{3})+ (?!\d) | \d+ ) (?:\.\d+)? | \.\d+ )
    (?P<exponent> [eE][+-]?\d{1,4} (?!\w) )?
    """,
    re.VERBOSE,
)
_MARK = "####"


def exact_answer(
    completions: Sequence[Any], answer: Sequence[Any], **columns: Any
) -> list[float | None]:
    """1 where the completion is the answer, apart from white space around both; else 0.

    Args:
        completions: texts or chats.
        answer: the right texts.
        columns: not used.
    """
    return [
        None if right is None else float(text.strip() == str(right).strip())
        for text, right in zip(_texts(completions), answer, strict=True)
    ]


def number_answer(
    completions: Sequence[Any], answer: Sequence[Any], **columns: Any
) -> list[float | None]:
    """1 where the last number of the completion equals the last number of the answer; else 0.

    Understood are signs, decimals, exponents, commas between thousands and a dollar sign before
    the digits: `-1,234.50` and `$-1234.5` are equal. A minus after a letter or a digit subtracts.

    Args:
        completions: texts or chats.
        answer: numbers, or texts that hold one.
        columns: not used.
    """
    return [
        _equal(_last(_numbers(text)), _last(_numbers(right)))
        for text, right in zip(_texts(completions), answer, strict=True)
    ]


def gsm8k_answer(
    completions: Sequence[Any], answer: Sequence[Any], **columns: Any
) -> list[float | None]:
    """1 where the number after the last `####` equals that of the answer; else 0, also without one.

    The form of the answers of GSM8K (Cobbe et al. 2021, arXiv:2110.14168), read as in the dataset's
    own `grade_school_math/dataset.py` in openai/grade-school-math, but compared as numbers.

    Args:
        completions: texts or chats.
        answer: solutions that end in `#### number`, or plain numbers.
        columns: not used.
    """
    scores = []
    for text, right in zip(_texts(completions), answer, strict=True):
        _, mark, end = text.rpartition(_MARK)
        found = next(_numbers(end), None) if mark else None
        _, mark, end = str(right).rpartition(_MARK)
        wanted = next(_numbers(end), None) if mark else _last(_numbers(right))
        scores.append(_equal(found, wanted))
    return scores


def math_answer(
    completions: Sequence[Any], answer: Sequence[Any], **columns: Any
) -> list[float | None]:
    r"""1 where the completion's final expression equals the answer, by huggingface/Math-Verify.

    A comparison that takes more than 5 seconds leaves the row unscored.

    Args:
        completions: texts or chats, the result in `\boxed{}`, in `$ $`, or a plain expression.
        answer: LaTeX with or without `$`.
        columns: not used.

    Raises:
        InputError: math-verify is not installed.
    """
    try:
        from math_verify import parse, verify
        from math_verify.errors import TimeoutException
    except ImportError as error:
        raise InputError(
            "math_answer: math-verify is not installed. Run pip install 'rft-batch[math]'."
        ) from error

    def score(text: str, right: Any) -> float | None:
        # Math-Verify finds LaTeX between delimiters alone, and in a bare \frac{1}{2} the number 2.
        plain = not any(mark in right for mark in ("$", r"\boxed", r"\(", r"\["))
        wanted = parse(f"${right}$" if plain else right)
        found = parse(text)
        if not wanted:
            return None
        try:
            return float(verify(wanted, found, raise_on_error=True)) if found else 0.0
        except TimeoutException:  # not an Exception: nothing else would stop it
            return None

    return [
        None if right is None else score(text, str(right))
        for text, right in zip(_texts(completions), answer, strict=True)
    ]


def matches(completions: Sequence[Any], pattern: str, **columns: Any) -> list[float]:
    r"""1 where the whole completion matches a regular expression; else 0.

    For instance `rft_batch.rewards.text:matches(pattern='<think>.*</think><answer>.*</answer>')`,
    the format reward of DeepSeek-R1 (arXiv:2501.12948).

    Args:
        completions: texts or chats.
        pattern: as of `re`; a dot also matches the end of a line.
        columns: not used.
    """
    wanted = re.compile(pattern, re.DOTALL)
    return [float(wanted.fullmatch(text) is not None) for text in _texts(completions)]


def length_window(
    completions: Sequence[Any],
    completion_ids: Sequence[Sequence[int]],
    maximum: int,
    minimum: int = 0,
    unit: str = "characters",
    **columns: Any,
) -> list[float]:
    """1 where the completion's length is from `minimum` to `maximum`; else 0.

    For instance `rft_batch.rewards.text:length_window(maximum=200, unit='words')`.

    Args:
        completions: texts or chats.
        completion_ids: their token ids.
        maximum: the longest that is good.
        minimum: the shortest that is good.
        unit: `characters`, `words` (between white space) or `tokens` (of the policy).
        columns: not used.

    Raises:
        ValueError: there is no such unit.
    """
    match unit:
        case "characters":
            lengths = [len(text) for text in _texts(completions)]
        case "words":
            lengths = [len(text.split()) for text in _texts(completions)]
        case "tokens":
            lengths = [len(ids) for ids in completion_ids]
        case _:
            raise ValueError(f"unit={unit!r}: choose characters, words or tokens")
    return [float(minimum <= length <= maximum) for length in lengths]


def _texts(completions: Sequence[Any]) -> list[str]:
    """The texts of completions, each a text or a chat of one message."""
    return [c if isinstance(c, str) else str(c[0]["content"]) for c in completions]


def _numbers(text: Any) -> Iterator[Decimal]:
    for found in _NUMBER.finditer(str(text).replace("\N{MINUS SIGN}", "-")):
        sign = "-" if found["sign"] or found["inner"] else ""
        digits = found["digits"].replace(",", "")
        yield Decimal(f"{sign}{digits}{found['exponent'] or ''}")


def _last(numbers: Iterable[Decimal]) -> Decimal | None:
    return next(reversed(list(numbers)), None)


def _equal(found: Decimal | None, wanted: Decimal | None) -> float | None:
    if wanted is None:
        return None
    return float(found == wanted)
