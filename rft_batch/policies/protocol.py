"""What a policy takes and gives: the Protocol of every family."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

from rft_batch.randomness import SampleNoise


@dataclass(frozen=True)
class Completions:
    """What a policy wrote, one entry for each sample."""

    prompt_ids: list[list[int]]
    """Token ids of each prompt as the model got it; empty where it has none."""
    ids: list[NDArray[np.int32]]
    """Token ids of each completion."""
    texts: list[str | None]
    """Each completion as text; None without a tokenizer."""
    finish_reasons: list[str]
    """`stop` where it ended by itself, `length` where a limit cut it."""
    logprobs: list[float | None]
    """Log-probability of each completion under the sampling policy, in nats."""


def join_completions(parts: Iterable[Completions]) -> Completions:
    """Several batches of completions as one."""
    listed = list(parts)
    return Completions(
        **{
            f.name: [item for part in listed for item in getattr(part, f.name)]
            for f in fields(Completions)
        }
    )


@dataclass(frozen=True)
class TrainingBatch:
    """Rows ready for the loss."""

    tensors: dict[str, Tensor]
    """By name, on the CPU, with the rows as first dimension."""
    num_targets: int
    """How many tokens the loss sums over."""


Sampler = Callable[[Sequence[Any], Sequence[SampleNoise]], Completions]


class Policy(Protocol):
    """A family's way to generate, to collate and to compute the loss, around one model."""

    model: nn.Module
    display: dict[str, Any] | None
    """How a report can show a completion; None: not as a picture."""
    sampling_options: tuple[str, ...]
    """Names of the fields of `GenerateSettings` that this family's sampler takes."""

    def encode_prompt(self, content: Any) -> Any:
        """The prompt as the model takes it; raises InputError where it cannot."""
        ...

    def sampler(self, **options: Any) -> Sampler:
        """The function that generates one completion for each prompt and its noise."""
        ...

    def collate(
        self, rows: Sequence[Mapping[str, Any]], noises: Sequence[SampleNoise], epoch: int
    ) -> TrainingBatch:
        """Rows of a sample shard as a training batch."""
        ...

    def loss(self, model: nn.Module, tensors: Mapping[str, Tensor]) -> Tensor:
        """Sum of the loss over the batch's targets."""
        ...

    def save(self, folder: Path, tensors: dict[str, Tensor]) -> None:
        """Publishes the policy with other weights."""
        ...
