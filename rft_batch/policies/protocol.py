"""What a policy takes and gives: the Protocol of every family."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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
    """Log-probability of each completion under the distribution it was drawn from, in nats."""
    losses: list[float | None]
    """The policy's own loss on each completion, summed over its tokens, in nats; None: the sampler
    does not know it, and it is to be computed from the rows."""
    errors: list[str | None]
    """Why a prompt could not be completed; None where it was."""


def join_completions(parts: Iterable[Completions], places: Iterable[int]) -> Completions:
    """Several batches of completions as one, each at its place.

    Args:
        parts: the batches.
        places: of each completion of all parts, one after the other: 0 to their number - 1.
    """
    listed = list(parts)
    order = np.argsort(list(places)).tolist()
    columns = {
        f.name: [item for part in listed for item in getattr(part, f.name)]
        for f in fields(Completions)
    }
    return Completions(**{name: [column[i] for i in order] for name, column in columns.items()})


@dataclass(frozen=True)
class TrainingBatch:
    """Rows ready for the loss."""

    tensors: dict[str, Tensor]
    """By name, on the CPU, with the rows as first dimension."""
    num_targets: int
    """How many tokens the loss sums over."""


Sampler = Callable[
    [Sequence[Any], Sequence[SampleNoise], int], Iterator[tuple[Sequence[int], Completions]]
]
"""`(prompts, noises, batch_size)` -> samples as they are finished, each once, with their places."""


def in_batches(complete: Callable[[Sequence[Any], Sequence[SampleNoise]], Completions]) -> Sampler:
    """The sampler that completes one batch after the other.

    Args:
        complete: one completion for each prompt and its noise, all in one batch.
    """

    def sample(
        prompts: Sequence[Any], noises: Sequence[SampleNoise], batch_size: int
    ) -> Iterator[tuple[Sequence[int], Completions]]:
        for start in range(0, len(prompts), batch_size):
            places = range(len(prompts))[start : start + batch_size]
            part = slice(start, start + batch_size)
            yield places, complete(prompts[part], noises[part])

    return sample


class Policy(Protocol):
    """A family's way to generate, to collate and to compute the loss, around one model."""

    model: nn.Module
    display: dict[str, Any] | None
    """How a report can show a completion; None: not as a picture."""
    family: str
    """Its name, as in errors and manifests."""
    sampling_options: tuple[str, ...]
    """Names of the fields of `GenerateSettings` that this family's sampler takes."""

    def first_batch_size(self, device: str) -> int:
        """Samples to generate at once at first; halved when memory ends."""
        ...

    training_options: tuple[str, ...]
    """Names of the fields of `FinetuneSettings` that only this family's training takes."""

    def encode_prompt(self, content: Any, **options: Any) -> Any:
        """The prompt as the model takes it; raises InputError where it cannot.

        The options are those that `sampler` takes.
        """
        ...

    def encode_row(
        self, content: Any, columns: Mapping[str, Any], **options: Any
    ) -> dict[str, Any]:
        """A row for `collate` from one that was not sampled; raises InputError where it cannot."""
        ...

    def facts(self) -> dict[str, Any]:
        """What else the manifest is to record of the policy."""
        ...

    def trained(self, **options: Any) -> nn.Module:
        """The module to train, in train mode; `training_options` come with their values."""
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
        """Publishes the policy with other weights, those of what `trained` gave, by name."""
        ...
