"""Keys and values of a decoder's rows in progress, kept so that rows can come and go.

All rows end at the same column, whatever their length: a row of n tokens owns the last n columns.
So a mask made of the lengths alone fits every row, a new row is written over a finished one, and
what no row needs falls off the left end.

Letters: `rows` sequences in progress, `heads` and `size` of keys and values.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer

# Columns to spare at the right end: after so many tokens the rows are moved to the left again.
_SPARE = 64

KeysValues = list[tuple[Tensor, Tensor]]
"""Per layer, keys and values of one prompt, `[heads, length, size]` each."""


class _Layer(DynamicLayer):  # type: ignore[misc]
    """One layer; the columns from `start` to `end` are in use."""

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        super().__init__()
        self.keys, self.values = keys, values
        self.dtype, self.device = keys.dtype, keys.device
        self.is_initialized = True
        self.start = self.end = 0

    def update(self, keys: Tensor, values: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Writes one more column and gives those in use."""
        self.keys[:, :, self.end : self.end + 1] = keys
        self.values[:, :, self.end : self.end + 1] = values
        self.end += 1
        return self.keys[:, :, self.start : self.end], self.values[:, :, self.start : self.end]

    def get_seq_length(self) -> int:
        """Columns in use."""
        return self.end - self.start


class RowsCache:
    """The keys and values of some rows.

    Args:
        like: those of any prompt; give the number of layers, heads, sizes and dtypes.
        rows: how many sequences to hold.
        longest_prompt: in tokens; no longer one will be written.
    """

    def __init__(self, like: KeysValues, rows: int, longest_prompt: int) -> None:
        self._longest_prompt = longest_prompt
        capacity = longest_prompt + _SPARE
        self._layers = [
            _Layer(_zeros(k, rows, capacity), _zeros(v, rows, capacity)) for k, v in like
        ]
        self._move(longest_prompt, longest_prompt)

    def write(self, rows: Sequence[int], prompt: KeysValues) -> None:
        """Makes each of `rows` hold a prompt."""
        at = torch.tensor(rows, device=self._layers[0].device)
        for layer, (keys, values) in zip(self._layers, prompt, strict=True):
            columns = slice(layer.end - keys.shape[1], layer.end)
            layer.keys[at, :, columns] = keys
            layer.values[at, :, columns] = values

    def for_step(self, longest: int) -> Cache:
        """What the model takes as `past_key_values` to write one more column.

        Args:
            longest: tokens that the longest row holds; the columns left of them are dropped.
        """
        end, capacity = self._layers[0].end, self._layers[0].keys.shape[2]
        if end == capacity:
            new_end = max(longest, self._longest_prompt)
            for layer in self._layers:
                layer.keys = _shifted(layer.keys, longest, new_end)
                layer.values = _shifted(layer.values, longest, new_end)
            end = new_end
        self._move(end - longest, end)
        return Cache(layers=list(self._layers))

    def keep(self, rows: Sequence[int]) -> None:
        """Drops all rows but these, which are numbered anew in this order."""
        at = torch.tensor(rows, device=self._layers[0].device)
        for layer in self._layers:
            layer.keys, layer.values = layer.keys[at], layer.values[at]

    def _move(self, start: int, end: int) -> None:
        for layer in self._layers:
            layer.start, layer.end = start, end


def _zeros(like: Tensor, rows: int, columns: int) -> Tensor:
    # Not `empty`: what a mask hides is still multiplied by 0, and a NaN would come through.
    heads, _, size = like.shape
    return like.new_zeros(rows, heads, columns, size)


def _shifted(full: Tensor, longest: int, new_end: int) -> Tensor:
    """The last `longest` columns of `full` so that they end at `new_end`, with columns to spare."""
    moved = full[:, :, full.shape[2] - longest :]
    if new_end + _SPARE <= full.shape[2]:
        full[:, :, new_end - longest : new_end] = moved.clone()
        return full
    # Grown by half, so that a long completion is moved a few times and not every `_SPARE` tokens.
    rows, heads, _, size = full.shape
    wider = full.new_zeros(rows, heads, new_end + max(_SPARE, new_end // 2), size)
    wider[:, :, new_end - longest : new_end] = moved
    return wider
