"""Sample shards, made: completions from the policy, one shard scored while the next is generated.

The unit of work is a shard: all K samples of some prompts. Rows, seeds and scores are joined by
(prompt_id, sample_index), never by a place in a batch.
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from threading import Event

import torch
from accelerate.utils.memory import clear_device_cache, should_reduce_batch_size

from rft_batch.policies import Completions, Policy, Sampler, TrainingBatch, join_completions
from rft_batch.progress import Progress, say
from rft_batch.prompts import Prompt
from rft_batch.randomness import SampleNoise
from rft_batch.rewards import Score
from rft_batch.scored_shards import RunningScores, ShardPlan, score_and_publish


@dataclass(frozen=True)
class SampleJob:
    """Everything that the shards of a stage are made from."""

    plan: ShardPlan
    seed: int
    round_number: int
    policy: Policy
    sampler: Sampler
    batch_size: int
    """Samples per forward pass at first; halved when memory ends."""


@dataclass(frozen=True)
class CompletedShard:
    """A shard's completions before they are scored."""

    number: int
    completions: Completions
    loss_sum: float
    """Of the policy's own loss on them, in nats."""
    loss_count: int
    """Tokens that it sums over."""


def make_shards(job: SampleJob, numbers: Sequence[int], progress: Progress) -> int:
    """Generates, scores and publishes shards.

    One is scored here while a thread generates the next. Rewards stay in the calling thread,
    because many limit their time by a signal, which works in the main thread alone.

    Args:
        job: what they are made from.
        numbers: which shards to make.
        progress: counts samples.

    Returns:
        How many rows got no score. Above `job.plan.max_unscored` not all shards were made.

    Raises:
        DataError: a reward returned a wrong number of scores; its shard is not published.
    """
    todo = iter(numbers)
    stopping = Event()
    running = RunningScores()
    complete = _completer(job, progress, stopping)
    with ThreadPoolExecutor(1) as generator:

        def submit_next() -> Future[CompletedShard] | None:
            number = next(todo, None)
            return None if number is None else generator.submit(complete, number)

        try:
            pending = submit_next()
            while pending is not None:
                shard = pending.result()
                # What is in work when there are too many errors is still published.
                pending = submit_next() if running.unscored <= job.plan.max_unscored else None
                running.add(_score_and_write(job, shard), progress)
        finally:
            stopping.set()
    return running.unscored


@torch.inference_mode()
def batch_loss(policy: Policy, batch: TrainingBatch) -> tuple[float, int]:
    """Sum of the family's own loss over a batch in nats, and the tokens it sums over."""
    device = next(policy.model.parameters()).device
    tensors = {name: tensor.to(device) for name, tensor in batch.tensors.items()}
    return float(policy.loss(policy.model, tensors)), batch.num_targets


def _completer(
    job: SampleJob, progress: Progress, stopping: Event
) -> Callable[[int], CompletedShard]:
    """The function that generates a shard by number; it remembers the batch size that fits."""
    batch_size = job.batch_size

    def complete(number: int) -> CompletedShard:
        nonlocal batch_size
        samples = list(job.plan.samples(number))
        parts: list[Completions] = []
        places: list[int] = []
        losses: list[tuple[float, int]] = []
        while len(places) < len(samples) and not stopping.is_set():
            todo = sorted(set(range(len(samples))) - set(places))
            try:
                for finished, part in _run_sampler(job, [samples[i] for i in todo], batch_size):
                    own = [todo[i] for i in finished]
                    losses.append(_own_loss(job, [samples[i] for i in own], part))
                    parts.append(part)
                    places += own
                    progress.advance(len(own))
                    if stopping.is_set():
                        break
            except Exception as error:
                if batch_size == 1 or not should_reduce_batch_size(error):
                    raise
                batch_size = max(1, batch_size // 2)
                clear_device_cache(garbage_collection=True)
                say(f"out of memory: --batch-size {batch_size} from here on")
        loss_sum, loss_count = sum(s for s, _ in losses), sum(n for _, n in losses)
        return CompletedShard(number, join_completions(parts, places), loss_sum, loss_count)

    return complete


def _run_sampler(
    job: SampleJob, samples: Sequence[tuple[Prompt, int]], batch_size: int
) -> Iterator[tuple[Sequence[int], Completions]]:
    contents = [prompt.content for prompt, _ in samples]
    return job.sampler(contents, [_noise(job, *sample) for sample in samples], batch_size)


def _noise(job: SampleJob, prompt: Prompt, sample_index: int) -> SampleNoise:
    return SampleNoise.for_sample(job.seed, job.round_number, prompt.prompt_id, sample_index)


def _own_loss(
    job: SampleJob, samples: Sequence[tuple[Prompt, int]], completions: Completions
) -> tuple[float, int]:
    """Sum of the policy's loss on what it wrote, and the tokens that it sums over."""
    known = [
        (loss, len(ids))
        for loss, ids in zip(completions.losses, completions.ids, strict=True)
        if loss is not None
    ]
    if known:
        return sum(loss for loss, _ in known), sum(count for _, count in known)
    rows, noises = [], []
    for sample, ids, error in zip(samples, completions.ids, completions.errors, strict=True):
        if error is None:
            prompt = sample[0]
            row = {"prompt_id": prompt.prompt_id, "prompt": prompt.text, "completion_ids": ids}
            rows.append(row)
            noises.append(_noise(job, *sample))
    return batch_loss(job.policy, job.policy.collate(rows, noises, epoch=0)) if rows else (0.0, 0)


def _score_and_write(job: SampleJob, shard: CompletedShard) -> list[Score]:
    completions = shard.completions
    columns = {
        "prompt_ids": completions.prompt_ids,
        "completion": completions.texts,
        "completion_ids": completions.ids,
        "finish_reason": completions.finish_reasons,
        "logprob": completions.logprobs,
    }
    own_loss = (shard.loss_sum, shard.loss_count)
    return score_and_publish(job.plan, shard.number, columns, completions.errors, own_loss)
