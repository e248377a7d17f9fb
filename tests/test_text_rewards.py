"""The shipped rewards, for texts and for chats."""

import sys
from typing import Any

import pytest

from rft_batch.errors import InputError
from rft_batch.rewards import load_rewards, score_completions
from rft_batch.rewards.text import (
    exact_answer,
    gsm8k_answer,
    length_window,
    matches,
    math_answer,
    number_answer,
)


def as_chats(texts: list[str]) -> list[Any]:
    return [[{"role": "assistant", "content": text}] for text in texts]


def test_an_exact_answer_is_the_whole_text() -> None:
    texts = ["yes", " yes\n", "Yes", "yes.", "yes", "7"]
    answers = ["yes", "yes", "yes", "yes", None, 7]
    expected = [1.0, 1.0, 0.0, 0.0, None, 1.0]
    assert exact_answer(texts, answers) == expected
    assert exact_answer(completions=as_chats(texts), answer=answers, level=[0] * 6) == expected


@pytest.mark.parametrize(
    ("text", "answer", "expected"),
    [
        ("The answer is 42.", 42, 1.0),
        ("first 41, then 42", "42", 1.0),
        ("first 42, then 41", "42", 0.0),
        ("It costs $1,234.50.", "1234.5", 1.0),
        ("-5", -5, 1.0),
        ("x=-5", -5, 1.0),
        ("\N{MINUS SIGN}5", -5, 1.0),
        ("-$5", "$-5", 1.0),
        ("10-5", 5, 1.0),
        ("10 - 5", 5, 1.0),
        ("(3)-5", 5, 1.0),
        ("5", -5, 0.0),
        ("0.50", 0.5, 1.0),
        (".5", 0.5, 1.0),
        ("1e-5", 0.00001, 1.0),
        ("1,2,3", 3, 1.0),
        ("12,345,678", 12345678, 1.0),
        ("1.2.3", "none", None),
        ("no number", 3, 0.0),
        ("", 3, 0.0),
        ("3", None, None),
        ("3", "three", None),
        ("50%", "50", 1.0),
        ("0.1", 0.1, 1.0),
        ("0.30000000000000004", 0.3, 0.0),
        ("\N{ARABIC-INDIC DIGIT THREE}", 3, 1.0),
    ],
)
def test_the_last_number_is_compared_as_a_number(
    text: str, answer: object, expected: float | None
) -> None:
    assert number_answer([text], [answer]) == [expected]
    assert number_answer(as_chats([text]), [answer]) == [expected]


@pytest.mark.parametrize(
    ("text", "answer", "expected"),
    [
        ("2 + 3 = 5\n#### 5", "so\n#### 5", 1.0),
        ("#### 5 apples and 3 pears", "#### 5", 1.0),
        ("#### 4\nno: #### $1,000.00.", "#### 1,000", 1.0),
        ("#### 4", "so 9\n#### 5", 0.0),
        ("the answer is 5", "#### 5", 0.0),
        ("#### five", "#### 5", 0.0),
        ("#### 5", "5", 1.0),
        ("#### 5", 5, 1.0),
        ("#### 5", "#### five", None),
        ("#### 5", None, None),
    ],
)
def test_the_number_after_the_mark_is_that_of_gsm8k(
    text: str, answer: object, expected: float | None
) -> None:
    assert gsm8k_answer([text], [answer]) == [expected]
    assert gsm8k_answer(as_chats([text]), [answer]) == [expected]


def test_mathematics_is_compared_by_value() -> None:
    rows = [
        (r"It is $\boxed{\frac{2}{4}}$.", r"\frac{1}{2}", 1.0),
        (r"It is $\boxed{0.5}$", r"$\frac12$", 1.0),
        (r"$2$", r"\frac{1}{2}", 0.0),
        ("the answer is 42", 42, 1.0),
        (r"$x+1$", "1 + x", 1.0),
        ("I do not know", "42", 0.0),
        ("", "42", 0.0),
        ("42", "", None),
        ("42", None, None),
    ]
    texts, answers, expected = map(list, zip(*rows, strict=True))
    assert math_answer(texts, answers) == expected
    assert math_answer(as_chats(texts), answers) == expected


def test_mathematics_without_its_package_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "math_verify", None)
    with pytest.raises(InputError, match=r"^math_answer: .* pip install 'rft-batch\[math\]'\.$"):
        math_answer(["1"], ["1"])


def test_a_pattern_matches_the_whole_text_over_lines() -> None:
    pattern = "<think>.*</think>\\s*<answer>.*</answer>"
    texts = ["<think>a\nb</think>\n<answer>c</answer>", "<think>a</think>", "x <answer>"]
    assert matches(texts, pattern) == [1.0, 0.0, 0.0]
    assert matches(as_chats(texts), pattern=pattern, prompts=[0, 1, 2]) == [1.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"maximum": 5}, [1.0, 0.0, 1.0]),
        ({"maximum": 5, "minimum": 1}, [1.0, 0.0, 0.0]),
        ({"maximum": 2, "minimum": 2, "unit": "words"}, [0.0, 1.0, 0.0]),
        ({"maximum": 2, "unit": "tokens"}, [0.0, 1.0, 1.0]),
    ],
)
def test_a_length_is_within_its_window(arguments: dict[str, Any], expected: list[float]) -> None:
    texts, ids = ["three", "three more", ""], [[1, 2, 3], [4, 5], []]
    assert length_window(texts, ids, **arguments) == expected
    assert length_window(as_chats(texts), ids, **arguments) == expected


def test_a_unit_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ValueError, match="unit='lines': choose characters, words or tokens"):
        length_window(["a"], [[1]], 3, unit="lines")


def test_they_are_used_by_import_strings_and_get_their_arguments() -> None:
    place = "rft_batch.rewards.text"
    rewards = load_rewards(
        [
            f"{place}:number_answer",
            f"{place}:matches(pattern='[^/:]+: [0-9]+')",
            f"{place}:length_window(maximum=4, unit='words')",
        ],
        [1.0, 0.5, 0.25],
    )
    found = score_completions(
        rewards,
        ["q", [{"role": "user", "content": "q"}], "q"],
        ["it is: 3", "3", "no / at all, never, not"],
        [[1], [2], [3]],
        {"answer": [3, 3, 3]},
    )
    assert [s.score for s in found] == [1.75, 1.25, 0.0]
    assert [name for name, _ in found[0].terms] == [
        "rft_batch.rewards.text:number_answer",
        "rft_batch.rewards.text:matches(pattern='[^/:]+: [0-9]+')",
        "rft_batch.rewards.text:length_window(maximum=4, unit='words')",
    ]
