"""Which process this is, which work is its own, and how a stop by a signal ends."""

import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from types import FrameType
from typing import TYPE_CHECKING, TypeVar

from rft_batch.errors import InputError

if TYPE_CHECKING:
    import torch

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
        device: `auto`, or a kind of device such as `cpu` or `cuda`; a launcher gives each process
            its own.

    Raises:
        InputError: there is no such device.
    """
    import torch
    from accelerate import PartialState

    here = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if device not in ("auto", "cpu") and (here is None or device != here.type):
        found = f"cpu, {here.type}" if here else "cpu"
        raise InputError(f"--device {device}: not on this machine (found: {found}).")
    cpu = device == "cpu" or here is None
    state = PartialState(cpu=cpu)
    # Under a launcher Accelerate numbers the one CPU: "cpu:0".
    chosen = "cpu" if cpu else str(state.device)
    return Process(state.process_index, state.num_processes, chosen)


def usual_dtype(device: str) -> "torch.dtype":
    """What models run in where nothing else is asked for: bfloat16 on a GPU that has it."""
    import torch

    has_bfloat16 = device.startswith("cuda") and torch.cuda.is_bf16_supported()
    return torch.bfloat16 if has_bfloat16 else torch.float32


def is_main_process() -> bool:
    """Whether this is the process that prints, known before anything is imported."""
    return os.environ.get("RANK", "0") == "0"


def exit_on_sigterm() -> None:
    """Makes SIGTERM end the process with 143 through `finally` blocks; what is published stays."""

    def stop(number: int, frame: FrameType | None) -> None:
        sys.exit(128 + number)

    signal.signal(signal.SIGTERM, stop)
