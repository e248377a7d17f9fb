"""Figures as lines of text for a terminal."""

from collections.abc import Mapping, Sequence
from typing import Any


def figures_table(figures: Mapping[str, Any]) -> str:
    """Names and values, a line each, values aligned at the right."""
    shown = {name.replace("_", " "): figure(value) for name, value in figures.items()}
    name_width = max(map(len, shown), default=0)
    value_width = max(map(len, shown.values()), default=0)
    return "\n".join(
        f"  {name:<{name_width}}  {value:>{value_width}}" for name, value in shown.items()
    )


def columns_table(heads: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Rows under heads, every column aligned at the right."""
    lines = [list(heads), *([figure(value) for value in row] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(text.rjust(width) for text, width in zip(line, widths, strict=True))
        for line in lines
    )


def figure(value: Any) -> str:
    """A number as people read it: thousands apart, three decimals, `-` for none."""
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.3f}"
    return f"{value:,}" if isinstance(value, int) else str(value)
