"""What a long stage says while it runs: a bar on a terminal, else a line now and then."""

import sys
import time
from types import TracebackType

_SECONDS_BETWEEN_LINES = 10.0


def say(text: str, speaks: bool = True) -> None:
    """One line on standard error, above a running bar.

    Args:
        text: the line.
        speaks: False for all but one of several processes.
    """
    if speaks:
        from tqdm import tqdm

        tqdm.write(text, file=sys.stderr)


class Progress:
    """Counts work done.

    Args:
        total: amount of work.
        unit: what is counted, in the plural.
        done: how much of it is done already.
        speaks: False for all but one of several processes.
    """

    def __init__(self, total: int, unit: str, done: int = 0, speaks: bool = True) -> None:
        from tqdm import tqdm

        self._unit = unit
        self._plain = speaks and not sys.stderr.isatty()
        self._last_line = time.monotonic()
        self._bar = tqdm(
            total=total,
            initial=done,
            unit=f" {unit}",
            file=sys.stderr,
            disable=not speaks or self._plain,
            dynamic_ncols=True,
        )
        self._done, self._total = done, total
        self._figures: dict[str, str] = {}

    def show(self, **figures: float) -> None:
        """Changes the figures that stand beside the count."""
        self._figures = {name: f"{value:.3f}" for name, value in figures.items()}
        self._bar.set_postfix(self._figures, refresh=False)

    def advance(self, amount: int) -> None:
        """Adds work done."""
        self._done += amount
        self._bar.update(amount)
        if self._plain and time.monotonic() - self._last_line >= _SECONDS_BETWEEN_LINES:
            self._last_line = time.monotonic()
            shown = "".join(f", {name} {value}" for name, value in self._figures.items())
            print(f"{self._done} of {self._total} {self._unit}{shown}", file=sys.stderr, flush=True)

    def __enter__(self) -> "Progress":
        """The bar itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Closes the bar, also after an error."""
        self._bar.close()
