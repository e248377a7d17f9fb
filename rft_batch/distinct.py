"""What makes two samples of a prompt the same: the keys of `--distinct-by`.

`completion`: equal token ids. `equations`: the same calculation, see `equations`. An import string:
whatever the user's function returns. A key is a number here, the same for equal keys; a sample
without one is banned.
"""

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from numbers import Number
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from rft_batch.equations import equation_key
from rft_batch.errors import DataError, InputError
from rft_batch.import_strings import accepted_arguments, import_callable, source_digest
from rft_batch.shards import ids_as_bytes

NO_KEY = -1
_OPTION = "--distinct-by"
_ARGUMENTS = ("completion", "completion_ids", "prompt_id")


@dataclass(frozen=True)
class Distinct:
    """One rule of what is the same."""

    name: str
    """As it is recorded: a file without its folder."""
    digest: str
    """Of the function's source file; empty for the rules of this project."""
    columns: tuple[str, ...]
    """Columns of the samples that it reads, beside the keys of the sample."""
    keys: Callable[[pa.Table], NDArray[np.int64]]
    """The keys of some samples, `[rows]`; equal keys are equal numbers, `NO_KEY` where none."""
    prefers_far: bool = False
    """Whether of equal keys with equal scores the text that is farthest from others is kept."""


def load_distinct(reference: str) -> Distinct:
    """The rule that `--distinct-by` names.

    Args:
        reference: `completion`, `equations` or an import string.

    Raises:
        InputError: the function cannot be imported, names none of the arguments, or a package is
            missing.
    """
    if reference == "completion":
        return Distinct(reference, "", ("completion_ids",), _completion_keys)
    if reference == "equations":
        if find_spec("rapidfuzz") is None:
            raise InputError(
                f"{_OPTION} equations: rapidfuzz is not installed. pip install 'rft-batch[lm]'"
            )
        return Distinct(reference, "", ("completion",), _equation_keys, prefers_far=True)
    function = import_callable(reference, _OPTION)
    name = reference.rpartition("/")[2]
    taken = accepted_arguments(function, dict.fromkeys(_ARGUMENTS))
    if not taken:
        raise InputError(
            f"{_OPTION} {name}: the function names none of {', '.join(_ARGUMENTS)}. "
            "It is called with those that it names."
        )
    columns = tuple(column for column in taken if column != "prompt_id")

    def keys(samples: pa.Table) -> NDArray[np.int64]:
        return _numbered(_called(function, name, tuple(taken), samples))

    return Distinct(name, source_digest(function), columns, keys)


def far_repeats(
    group: NDArray[np.int64],
    key: NDArray[np.int64],
    rank: NDArray[np.int32],
    score: NDArray[np.float32],
    texts: Sequence[str],
) -> NDArray[np.bool_]:
    """Which samples repeat the key of a kept one, where the far wording is preferred.

    The sequential rule of the code of Yuan et al. 2023: samples are met by rank; the first of a
    key is kept; a later one with the same score takes its place if the sum of its Levenshtein
    distances to the other kept texts of the prompt is greater. A lower score never does.

    Args:
        group: `[rows]`.
        key: `[rows]`, none negative.
        rank: `[rows]`.
        score: `[rows]`.
        texts: `[rows]`.

    Returns:
        `[rows]`, True for those that are not kept.
    """
    from rapidfuzz.distance.Levenshtein import distance

    kept_of_group: dict[int, dict[int, int]] = {}
    for row in np.lexsort((rank, group)).tolist():
        kept = kept_of_group.setdefault(int(group[row]), {})
        first = kept.setdefault(int(key[row]), row)
        if first == row or score[first] != score[row]:
            continue
        others = [texts[other] for other in kept.values() if other != first]
        if sum(distance(texts[row], o) for o in others) > sum(
            distance(texts[first], o) for o in others
        ):
            kept[int(key[row])] = row
    repeated = np.ones(len(group), dtype=bool)
    repeated[[row for kept in kept_of_group.values() for row in kept.values()]] = False
    return repeated


def _completion_keys(samples: pa.Table) -> NDArray[np.int64]:
    indices = ids_as_bytes(samples["completion_ids"]).dictionary_encode().indices
    codes: NDArray[np.int64] = indices.to_numpy().astype(np.int64)
    return codes


def _equation_keys(samples: pa.Table) -> NDArray[np.int64]:
    texts = samples["completion"].to_pylist()
    if None in texts:
        row = texts.index(None)
        raise InputError(
            f'{_OPTION} equations: prompt "{samples["prompt_id"][row]}" sample '
            f"{samples['sample_index'][row]} has no text. "
            "Use --distinct-by completion for policies without a tokenizer."
        )
    return _numbered(map(equation_key, texts))


def _called(
    function: Callable[..., Any], name: str, arguments: Sequence[str], samples: pa.Table
) -> Iterable[Hashable]:
    columns = [samples[column].to_pylist() for column in arguments]
    identities = zip(*(samples[c].to_pylist() for c in ("prompt_id", "sample_index")), strict=True)
    for (prompt_id, sample_index), values in zip(
        identities, zip(*columns, strict=True), strict=True
    ):
        where = f'{_OPTION} {name}: prompt "{prompt_id}" sample {sample_index}'
        try:
            key = function(**dict(zip(arguments, values, strict=True)))
            hash(key)
        except Exception as error:  # user code: anything can be raised
            raise DataError(f"{where}: {type(error).__name__}: {error}") from error
        if not isinstance(key, str | Number | tuple | None):
            raise DataError(
                f"{where}: returned {type(key).__name__}. "
                "A key is text, a number or a tuple; None leaves the sample out."
            )
        yield key


def _numbered(keys: Iterable[Hashable]) -> NDArray[np.int64]:
    """Equal keys as equal numbers, None as `NO_KEY`."""
    numbers: dict[Hashable, int] = {}
    found = [NO_KEY if key is None else numbers.setdefault(key, len(numbers)) for key in keys]
    return np.array(found, dtype=np.int64)
