"""The equations of a written solution, checked: the key of `--distinct-by equations`.

The rule of rejection-sampling fine-tuning (Yuan et al. 2023, arXiv 2308.01825): two solutions are
the same way of reasoning when they calculate the same equations in the same order, and one with a
wrong equation is left out although its answer is right. The paper knows the calculator annotations
of GSM8K, `<<48/2=24>>`; free text is read here where there are none.

What is read was written by a model, so nothing of it is run: an expression is parsed and walked
over a list of allowed nodes, there is no power, and lengths are bounded.
"""

import ast
import math
import operator
import re
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise

_TOLERANCE = 1e-3
_MAX_ANNOTATION = 300
# Depth is bounded with it: every level of an expression needs a token.
_MAX_TOKENS = 64
_MAX_DIGITS = 30

# Neither can run into a part that it must then leave again, so both take linear time.
_ANNOTATION = re.compile(r"<<([^<>]*)>>")
_TIMES = re.compile(r"(?<=[0-9)%])[ \t]*[xX][ \t]*(?=[0-9(.-])")
_TOKEN = re.compile(
    r"(?P<number>(?:[0-9]{1,3}(?:,[0-9]{3}){1,9}(?![0-9])|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+)"
    r"(?P<percent>[ ]?%(?![ ]?[0-9(]))?"
    r"|(?P<operator>[-+*/])|(?P<equals>=+)|(?P<left>\()|(?P<right>\))|(?P<space>[ \t]+)"
    r"|(?P<other>[^-+*/=()0-9. \t]+|.)",
    re.DOTALL,
)
# Markdown's bold; a power has its operands on both sides alike.
_BOLD = re.compile(r"(?<!\S)\*\*(?=\S)|(?<=\S)\*\*(?=[\s.,;:]|\Z)")
_SIGNS = str.maketrans(
    {
        "\N{MULTIPLICATION SIGN}": "*",
        "\N{MIDDLE DOT}": "*",
        "\N{DOT OPERATOR}": "*",
        "\N{ASTERISK OPERATOR}": "*",
        "\N{DIVISION SIGN}": "/",
        "\N{MINUS SIGN}": "-",
        "\N{EN DASH}": "-",
        "$": "",
    }
)
# What an operand can be a part of when it stands right before it: `2^3`, `x2`, `)!`.
_GLUED = re.compile(r"(?:[\w)%][^\s\w]*|[\^√]\s*)\Z")
_OPERATIONS: dict[type[ast.operator], Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


def equation_key(text: str) -> str | None:
    """The equations of a solution in their order, joined by `|` and without spaces.

    Every one must hold to within 1e-3. An annotation that is not arithmetic does not hold; in free
    text what is not arithmetic, such as `2x + 3 = 9` or `5 apples + 3 = 8`, is no equation.

    Args:
        text: the solution.

    Returns:
        The key, empty where there is no equation; None where one is wrong.
    """
    annotations = _ANNOTATION.findall(text)
    if annotations:
        right = all(map(_annotation_holds, annotations))
        return "|".join(annotations).replace(" ", "") if right else None
    if "=" not in text:
        return ""
    found = []
    for left, right_side in _free_equations(text):
        if not _holds(left, right_side):
            return None
        found.append("".join(left) + "=" + "".join(right_side))
    return "|".join(found)


def _annotation_holds(annotation: str) -> bool:
    if len(annotation) > _MAX_ANNOTATION:
        return False
    sides = [_tokens(side) for side in _plain(annotation).split("=")]
    return len(sides) > 1 and all(_holds(a, b) for a, b in pairwise(sides))


def _plain(text: str) -> str:
    """With one sign for each operation, without currency and without bold print."""
    return _TIMES.sub("*", _BOLD.sub("", text).translate(_SIGNS))


def _tokens(side: str) -> list[str]:
    """The tokens of one side of an equation, also those that no expression can have."""
    found = (_token_text(match) for match in _TOKEN.finditer(side))
    return [token for token in found if token]


def _token_text(match: re.Match[str]) -> str:
    """A token in one way of writing it: numbers without separators and trailing zeros."""
    number = match["number"]
    if number is None:
        return match[0].strip()
    if len(number) > _MAX_DIGITS:
        return "?"
    return f"{float(number.replace(',', '')):.12g}" + ("%" if match["percent"] else "")


def _free_equations(text: str) -> Iterator[tuple[list[str], list[str]]]:
    """The two sides of every equation in free text; of a chain `a = b = c` both of its pairs."""
    for sides in _chains(_plain(text)):
        for left, right in pairwise(sides):
            says_something = len(left) > 1 or len(right) > 1
            if says_something and _value(left) is not None and _value(right) is not None:
                yield left, right


def _chains(text: str) -> Iterator[list[list[str]]]:
    """Sides that stand between signs of equality, cut where arithmetic ends."""
    sides: list[list[str]] = [[]]
    depth, ended_operand = 0, False
    for match in _TOKEN.finditer(text):
        kind, token = match.lastgroup, _token_text(match)
        if kind == "percent":
            kind = "number"
        if kind == "space":
            continue
        starts_operand = kind in ("number", "left")
        closes_nothing = kind == "right" and depth == 0
        if kind == "other" or closes_nothing or (starts_operand and ended_operand):
            if token.startswith("^"):
                sides[-1].append(token)
            yield _trimmed(sides)
            sides, depth, ended_operand = [[]], 0, False
            if kind == "other" or closes_nothing:
                continue
        if sides == [[]]:
            sides[0] += _before_first(text[max(0, match.start() - 8) : match.start()], match, text)
        if kind == "equals":
            sides.append([])
            depth, ended_operand = 0, False
            continue
        depth += (kind == "left") - (kind == "right")
        ended_operand = kind in ("number", "right")
        # One token too many says as well as a million that this is no expression.
        if len(sides[-1]) <= _MAX_TOKENS:
            sides[-1].append(token)
    yield _trimmed(sides)


def _before_first(before: str, match: re.Match[str], text: str) -> list[str]:
    """A token that no expression can have, where the first side is a part of something else."""
    dashes = match["operator"] == "-" and not before.rstrip()[-1:].isalnum()
    unary = dashes and text[match.end() : match.end() + 1].isdigit()
    if _GLUED.search(before) or (match["operator"] and not unary):
        return ["?"]
    return []


def _trimmed(sides: list[list[str]]) -> list[list[str]]:
    """Without the brackets around the whole: `(5 + 3 = 8)`."""
    if len(sides) == 1:
        return []
    first, last = sides[0], sides[-1]
    opened = max(0, first.count("(") - first.count(")"))
    closed = max(0, last.count(")") - last.count("("))
    if first[:opened] == ["("] * opened:
        first = first[opened:]
    if closed and last[-closed:] == [")"] * closed:
        last = last[:-closed]
    return [first, *sides[1:-1], last]


def _holds(left: Sequence[str], right: Sequence[str]) -> bool:
    """Whether two sides are equal; a side that is a percentage alone may also mean its number."""
    return any(
        a is not None and b is not None and abs(a - b) < _TOLERANCE
        for a, b in (
            (_value(left), _value(right)),
            (_value(_bare(left)), _value(right)),
            (_value(left), _value(_bare(right))),
        )
    )


def _bare(side: Sequence[str]) -> Sequence[str]:
    return [side[0].rstrip("%")] if len(side) == 1 else side


def _value(tokens: Sequence[str]) -> float | None:
    """What an expression comes to; None where it is none, or has no finite value."""
    if not 0 < len(tokens) <= _MAX_TOKENS:
        return None
    parts = [f"({t[:-1]}/100)" if t[-1] == "%" and len(t) > 1 else t for t in tokens]
    try:
        value = _evaluated(ast.parse(" ".join(parts), mode="eval").body)
    except (SyntaxError, ValueError, ArithmeticError):
        return None
    return value if math.isfinite(value) else None


def _evaluated(node: ast.expr) -> float:
    """The value of a parsed expression of numbers, + - * / and unary minus.

    Raises:
        ValueError: it has anything else.
        ArithmeticError: it divides by zero.
    """
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        return float(node.value)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_evaluated(node.operand)
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATIONS:
        return _OPERATIONS[type(node.op)](_evaluated(node.left), _evaluated(node.right))
    raise ValueError(f"{type(node).__name__} is not arithmetic")
