"""The report's pictures. matplotlib is an optional dependency and is imported only here."""

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray


def has_matplotlib() -> bool:
    """Whether pictures can be drawn."""
    return find_spec("matplotlib") is not None


def draw_rewards(
    path: Path, curves: Mapping[str, tuple[list[int], list[float], list[float]]]
) -> None:
    """Mean reward by round as a PNG.

    Args:
        path: the file to write.
        curves: by run: rounds, means, and half widths of their 95 % intervals.
    """
    figure, axes = _figure(6.4, 3.6)
    for name, (rounds, means, halves) in curves.items():
        axes.errorbar(rounds, means, halves, marker="o", capsize=3, label=name)
    every_round = sorted({number for rounds, _, _ in curves.values() for number in rounds})
    axes.set_xticks(every_round, ["base" if n == 0 else str(n) for n in every_round])
    axes.set_xlabel("round")
    axes.set_ylabel("mean reward, held-out prompts")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, format="png", dpi=150, bbox_inches="tight")


def draw_samples(
    path: Path, images: Mapping[str, NDArray[np.float64]], prompts: Sequence[str]
) -> None:
    """A strip of pictures for every round as a PNG, the prompts above it.

    Args:
        path: the file to write.
        images: by title: `[count, height, width]`, 0 white to 1 black.
        prompts: what each picture was asked to be; long ones are cut.
    """
    strips = {title: _strip(pictures) for title, pictures in images.items()}
    height, width = next(iter(strips.values())).shape
    figure, _ = _figure(12, 12 * len(strips) * (height + 4) / width)
    figure.clear()
    for place, (title, strip) in enumerate(strips.items(), start=1):
        axes = figure.add_subplot(len(strips), 1, place)
        axes.imshow(strip, cmap="gray_r", vmin=0, vmax=1, interpolation="nearest")
        axes.set_ylabel(title, rotation=0, ha="right", va="center")
        axes.set_xticks([])
        if place == 1:
            centres = (np.arange(len(prompts)) + 0.5) * width / len(prompts) - 0.5
            axes.set_xticks(centres, [prompt[:8] for prompt in prompts])
            axes.xaxis.tick_top()
            axes.tick_params(length=0)
        axes.set_yticks([])
        axes.spines[:].set_visible(False)
    figure.savefig(path, format="png", dpi=100, bbox_inches="tight")


def _strip(pictures: NDArray[np.float64]) -> NDArray[np.float64]:
    """`[count, height, width]` side by side, two columns of white between them."""
    padded = np.pad(pictures, ((0, 0), (0, 0), (1, 1)))
    return np.concatenate(list(padded), axis=1)


def _figure(width: float, height: float) -> tuple[Any, Any]:
    # Not pyplot: a figure of its own needs no display and leaves the user's pyplot alone.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height))
    return figure, figure.add_subplot()
