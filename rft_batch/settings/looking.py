"""The settings of the commands that only look: `rft-batch report` and `rft-batch inspect`."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from rft_batch.settings.options import Settings, name_problems, option


@dataclass(frozen=True, kw_only=True)
class ReportSettings(Settings):
    """Settings of `rft-batch report`."""

    run_dir: Path = option(help="Folder of the run.", argument=True, identity=False)
    control: Path | None = option(
        None, help="Run folder of a control, drawn beside it.", identity=False, path=True
    )
    into: str = option("report", help="Folder in RUN to write.", identity=False)

    def contradictions(self) -> Iterator[str]:
        """The name of the folder to write."""
        yield from name_problems("into", self.into)


@dataclass(frozen=True, kw_only=True)
class InspectSettings(Settings):
    """Settings of `rft-batch inspect`."""

    round_dir: Path = option(help="Folder of the round.", argument=True, identity=False)
    into: str = option("samples", help="Folder in ROUND to look at: samples, eval, ...")
    best: int = option(0, help="Show the samples of the highest scores, this many.", minimum=0)
    worst: int = option(0, help="Show the samples of the lowest scores, this many.", minimum=0)
    prompt: str | None = option(None, help="Show all samples of the prompt of this id.")
    verify: bool = option(False, help="Read everything in ROUND and compare it with the manifests.")

    def contradictions(self) -> Iterator[str]:
        """The name of the folder to look at."""
        yield from name_problems("into", self.into)
