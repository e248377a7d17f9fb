"""Completions of a causal language model: a batch whose finished rows are refilled at once.

A prompt is run through the model once for all its samples, and its keys and values are copied to
each. A row that ends makes place for the next sample, so a long completion holds up no other; when
nothing waits any more, finished rows are dropped. transformers' own continuous batching works like
this too, but draws all rows of a step from one generator, and a sample would depend on its
neighbours.

Letters: `rows` sequences in progress, `vocab` token ids.
"""

import inspect
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import DynamicCache

from rft_batch.policies.lm_cache import KeysValues, RowsCache
from rft_batch.policies.lm_sampling import Sampling, draw
from rft_batch.randomness import SampleNoise

# Prompts are run together up to so many tokens, padding included.
_PREFILL_TOKENS = 2048
# Rows are moved together when fewer than this share is in progress and nothing waits.
_CROWDED = 0.75
# Steps after which the caller hears from the engine even if no row has ended.
_QUIET_STEPS = 16

Stops = Callable[[Sequence[int]], bool]
"""Whether a completion of these token ids ends here by a stop string."""


@dataclass
class Written:
    """One sample's completion, in progress or ended."""

    place: int
    """Of its prompt among those that were asked for."""
    budget: int
    """Tokens that it may have."""
    noise: SampleNoise
    ids: list[int] = field(default_factory=list)
    logprob: float = 0.0
    """Under the distribution it was drawn from, in nats."""
    loss: float = 0.0
    """Of the policy itself, summed over `ids`, in nats."""
    finish_reason: str = ""
    """Empty while it is in progress."""


@dataclass
class _Prefilled:
    """A prompt that went through the model, with the samples that still wait for a row."""

    length: int
    keys_values: KeysValues
    logits: Tensor
    """`[1, vocab]` after its last token."""
    seen: Tensor | None
    waiting: deque[Written]


@torch.inference_mode()
def complete(
    model: nn.Module,
    prompts: Sequence[Sequence[int]],
    budgets: Sequence[int],
    noises: Sequence[SampleNoise],
    rows: int,
    sampling: Sampling,
    end_ids: Collection[int],
    stops: Stops | None = None,
) -> Iterator[list[Written]]:
    """Writes one completion for each prompt and its noise.

    Args:
        model: any of `AutoModelForCausalLM` with keys and values as its only state.
        prompts: token ids, at least one each; equal ones are run once.
        budgets: most tokens of each completion, at least 1.
        noises: that of each sample.
        rows: sequences in progress at most.
        sampling: how tokens are drawn.
        end_ids: token ids that end a completion and are its last.
        stops: whether a completion ends by its text.

    Yields:
        Samples as they end, in no order; an empty list now and then.
    """
    engine = _Engine(model, prompts, budgets, noises, rows, sampling, end_ids, stops)
    steps = 0
    while True:
        ended = engine.admit()
        if ended or steps % _QUIET_STEPS == 0:
            yield ended
        if not engine.step():
            return
        steps += 1


class _Engine:
    def __init__(
        self,
        model: nn.Module,
        prompts: Sequence[Sequence[int]],
        budgets: Sequence[int],
        noises: Sequence[SampleNoise],
        rows: int,
        sampling: Sampling,
        end_ids: Collection[int],
        stops: Stops | None,
    ) -> None:
        self.model, self.sampling, self.end_ids, self.stops = model, sampling, end_ids, stops
        self.device = next(model.parameters()).device
        accepted = inspect.signature(model.forward).parameters
        self.takes_positions = "position_ids" in accepted
        # transformers 5.24 renamed it.
        self.cache_name = "cache" if "cache" in accepted else "past_key_values"
        self.keeps_logits: dict[str, Any] = (
            {"logits_to_keep": 1} if "logits_to_keep" in accepted else {}
        )
        samples: dict[tuple[int, ...], deque[Written]] = {}
        for place, (prompt, budget, noise) in enumerate(zip(prompts, budgets, noises, strict=True)):
            written = Written(place, budget, noise)
            samples.setdefault(tuple(prompt), deque()).append(written)
        # The longest first: those of like length are run together, and the end has short ones.
        self.waiting = deque(sorted(samples.items(), key=lambda item: -len(item[0])))
        self.longest_prompt = max(map(len, samples), default=0)
        self.prefilled: deque[_Prefilled] = deque()
        self.in_row: list[Written | None] = [None] * min(rows, len(prompts))
        self.lengths = [0] * len(self.in_row)
        self.cache: RowsCache | None = None
        self.seen: Tensor | None = None
        self.ended: list[Written] = []

    def admit(self) -> list[Written]:
        """Fills free rows with samples that wait; gives those that ended since the last call."""
        free = [row for row, written in enumerate(self.in_row) if written is None]
        while free and (self.prefilled or self.waiting):
            if not self.prefilled:
                self._prefill()
            prompt = self.prefilled[0]
            count = min(len(free), len(prompt.waiting))
            chosen = [prompt.waiting.popleft() for _ in range(count)]
            if not prompt.waiting:
                self.prefilled.popleft()
            seen = None if prompt.seen is None else prompt.seen.expand(count, -1).clone()
            self._append(chosen, prompt.logits.expand(count, -1), seen)
            # A sample that ended with its first token has not taken its row.
            going = [i for i, written in enumerate(chosen) if not written.finish_reason]
            taken, free = free[: len(going)], free[len(going) :]
            self._seat([chosen[i] for i in going], taken, prompt, seen, going)
        ended, self.ended = self.ended, []
        return ended

    def step(self) -> bool:
        """One token for each row in progress; returns whether there was any."""
        going = [row for row, written in enumerate(self.in_row) if written is not None]
        if not going:
            return False
        if not (self.prefilled or self.waiting) and len(going) <= _CROWDED * len(self.in_row):
            going = self._drop_finished(going)
        assert self.cache is not None
        longest = max(self.lengths[row] for row in going)
        lengths = torch.tensor(
            [n if w is not None else 0 for n, w in zip(self.lengths, self.in_row, strict=True)],
            device=self.device,
        )
        last = [written.ids[-1] if written is not None else 0 for written in self.in_row]
        columns = torch.arange(longest + 1, device=self.device)
        logits = self._forward(
            torch.tensor(last, device=self.device)[:, None],
            (columns >= longest - lengths[:, None]).long(),
            lengths[:, None],
            self.cache.for_step(longest),
        )
        at = torch.tensor(going, device=self.device)
        seen = None if self.seen is None else self.seen[at]
        samples = [written for written in self.in_row if written is not None]
        self._append(samples, logits[at], seen)
        if self.seen is not None and seen is not None:
            self.seen[at] = seen
        for row, written in zip(going, samples, strict=True):
            self.lengths[row] += 1
            if written.finish_reason:
                self.in_row[row] = None
        return True

    def _append(self, samples: Sequence[Written], logits: Tensor, seen: Tensor | None) -> None:
        """Draws a token for each sample and marks those that it ends."""
        noises = [written.noise for written in samples]
        steps = [len(written.ids) for written in samples]
        drawn = draw(logits, noises, steps, self.sampling, seen)
        if seen is not None:
            seen.scatter_(1, drawn.tokens[:, None], True)
        columns = (drawn.tokens, drawn.logprobs, drawn.policy_logprobs)
        values = zip(*(column.tolist() for column in columns), strict=True)
        for written, (token, logprob, policy_logprob) in zip(samples, values, strict=True):
            written.ids.append(token)
            written.logprob += logprob
            written.loss -= policy_logprob
            if token in self.end_ids or (self.stops is not None and self.stops(written.ids)):
                written.finish_reason = "stop"
            elif len(written.ids) == written.budget:
                written.finish_reason = "length"
            if written.finish_reason:
                self.ended.append(written)

    def _seat(
        self,
        samples: Sequence[Written],
        rows: Sequence[int],
        prompt: _Prefilled,
        seen: Tensor | None,
        seen_rows: Sequence[int],
    ) -> None:
        if not samples:
            return
        if self.cache is None:
            self.cache = RowsCache(prompt.keys_values, len(self.in_row), self.longest_prompt)
        self.cache.write(rows, prompt.keys_values)
        for row, written in zip(rows, samples, strict=True):
            self.in_row[row], self.lengths[row] = written, prompt.length
        if seen is not None:
            if self.seen is None:
                self.seen = seen.new_zeros(len(self.in_row), seen.shape[1])
            self.seen[list(rows)] = seen[list(seen_rows)]

    def _drop_finished(self, going: Sequence[int]) -> list[int]:
        assert self.cache is not None
        self.cache.keep(going)
        self.in_row = [self.in_row[row] for row in going]
        self.lengths = [self.lengths[row] for row in going]
        if self.seen is not None:
            self.seen = self.seen[list(going)]
        return list(range(len(going)))

    def _prefill(self) -> None:
        """Runs the next prompts that wait through the model, padded on the left."""
        group = [self.waiting.popleft()]
        width = len(group[0][0])
        while self.waiting and (len(group) + 1) * width <= _PREFILL_TOKENS:
            group.append(self.waiting.popleft())
        ids = torch.zeros(len(group), width, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, (prompt, _) in enumerate(group):
            ids[row, width - len(prompt) :] = torch.tensor(prompt)
            mask[row, width - len(prompt) :] = 1
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        cache = DynamicCache()
        ids, mask, positions = (t.to(self.device) for t in (ids, mask, positions))
        logits = self._forward(ids, mask, positions, cache)
        for row, (prompt, samples) in enumerate(group):
            own = slice(width - len(prompt), width)
            seen = None
            if self.sampling.repetition_penalty != 1:
                seen = torch.zeros_like(logits[:1], dtype=torch.bool)
                seen[0, list(prompt)] = True
            keys_values = [
                (layer.keys[row, :, own], layer.values[row, :, own]) for layer in cache.layers
            ]
            self.prefilled.append(
                _Prefilled(len(prompt), keys_values, logits[row : row + 1], seen, samples)
            )

    def _forward(self, ids: Tensor, mask: Tensor, positions: Tensor, cache: Any) -> Tensor:
        """Logits after the last token, `[rows, vocab]`."""
        where = {"position_ids": positions} if self.takes_positions else {}
        out = self.model(
            input_ids=ids,
            attention_mask=mask,
            use_cache=True,
            **{self.cache_name: cache},
            **where,
            **self.keeps_logits,
        )
        logits: Tensor = out.logits[:, -1]
        return logits
