"""The settings of `rft-batch select`."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from rft_batch.settings.options import Settings, name_problems, option


@dataclass(frozen=True, kw_only=True)
class SelectSettings(Settings):
    """Settings of `rft-batch select`."""

    round_dir: Path = option(help="Folder of the round.", argument=True, identity=False)
    top_k: int = option(2, help="Samples to keep of every prompt.", minimum=1)
    min_score: float | None = option(None, help="Lowest score that may be kept.")
    strategy: str = option(
        "best",
        help="best, or random: the matched control, as many of every prompt but drawn.",
        choices=("best", "random"),
    )
    seed: int = option(0, help="Seed of --strategy random.", minimum=0)
    keep_truncated: bool = option(False, help="Let samples be kept that a limit cut off.")
    into: str = option("selection", help="Folder in ROUND to write.")
    strict_k: bool = option(
        False, help="Fail when a prompt has fewer than --top-k samples to keep.", identity=False
    )
    require_nonempty: bool = option(False, help="Fail when nothing is selected.", identity=False)

    def contradictions(self) -> Iterator[str]:
        """The name of the folder to write."""
        yield from name_problems("into", self.into)
        if self.min_score is not None and self.min_score != self.min_score:
            yield "--min-score nan: not a number."
