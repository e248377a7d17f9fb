"""Which process this is, which work is its own, and how a stop by a signal ends."""

import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from types import FrameType
from typing import TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class Process:
    """This process among those that a launcher started."""

    index: int = 0
    count: int = 1
    device: str = "cpu"

    @property
    def is_main(self) -> bool:
        """Whether this process prints and shows progress."""
        return self.index == 0

    def share(self, work: Sequence[T]) -> Sequence[T]:
        """Every `count`-th piece of work from `index` on; empty is normal."""
        return work[self.index :: self.count]


def this_process(device: str) -> Process:
    """This process as Accelerate sees it: alone, or one of those of `torchrun`.

    Args:
        device: `auto`, or a torch device such as `cpu` or `cuda`.
    """
    import torch
    from accelerate import PartialState

    cpu = device == "cpu" or (device == "auto" and not torch.accelerator.is_available())
    state = PartialState(cpu=cpu)
    chosen = str(state.device) if device in ("auto", "cpu", state.device.type) else device
    return Process(state.process_index, state.num_processes, chosen)


def is_main_process() -> bool:
    """Whether this is the process that prints, known before anything is imported."""
    return os.environ.get("RANK", "0") == "0"


def exit_on_sigterm() -> None:
    """Makes SIGTERM end the process with 143 through `finally` blocks; what is published stays."""

    def stop(number: int, frame: FrameType | None) -> None:
        sys.exit(128 + number)

    signal.signal(signal.SIGTERM, stop)
