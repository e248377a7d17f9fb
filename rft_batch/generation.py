"""Stage one, first half: prompts + policy + rewards -> sample shards and a manifest.

    rft-batch generate runs/digits/round-1 --policy data/digits/policy \
        --prompts data/digits/prompts.jsonl --reward pipelines/digits_reward.py:class_probability

The unit of work is a shard: all K samples of some prompts. A shard under its final name is whole
and is never written again; a run that was stopped does only the shards that are missing. The
manifest is written last, by the process that finishes last, so its existence means that the stage
is complete.
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from accelerate.utils.memory import clear_device_cache, should_reduce_batch_size

from rft_batch.errors import InputError, TooManyRowErrors, joined_problems
from rft_batch.files import publish_json
from rft_batch.policies import (
    Completions,
    Policy,
    Sampler,
    TrainingBatch,
    load_policy,
    policy_digest,
)
from rft_batch.processes import Process, this_process
from rft_batch.progress import Progress, say
from rft_batch.prompts import Prompt, prompts_digest, read_prompts
from rft_batch.randomness import SampleNoise
from rft_batch.ranking import UNRANKED, rank_samples
from rft_batch.rewards import Reward, Score, load_rewards, score_completions
from rft_batch.schema import SAMPLES
from rft_batch.settings import GenerateSettings, fingerprint, refuse_other_identity
from rft_batch.shards import (
    read_columns,
    read_manifest,
    shard_entries,
    shard_info,
    shard_name,
    unfinished_shards,
    write_samples,
)
from rft_batch.versions import versions

# Measured on two cores: 16 to 64 samples are fastest, more fall out of the caches. On a GPU more
# is faster until memory ends, and then the number is halved.
_FIRST_BATCH = {"cpu": 32}
_FIRST_GPU_BATCH = 2048


@dataclass(frozen=True)
class _Stage:
    """Everything that a shard's work needs."""

    settings: GenerateSettings
    folder: Path
    prompts: list[Prompt]
    rewards: list[Reward]
    policy: Policy
    sampler: Sampler
    metadata: dict[str, str]

    @property
    def num_shards(self) -> int:
        return -(-len(self.prompts) // self.settings.prompts_per_shard)

    def shard_prompts(self, number: int) -> list[Prompt]:
        size = self.settings.prompts_per_shard
        return self.prompts[number * size : (number + 1) * size]


def generate(settings: GenerateSettings) -> dict[str, Any]:
    """Samples every prompt K times, scores the samples and publishes them as shards.

    Args:
        settings: see `GenerateSettings`.

    Returns:
        The manifest; without the key `shards` where the stage is not complete yet, because of
        `limit` or because other processes are still at work.

    Raises:
        InputError: bad settings or input, before any work; or the folder was begun with others.
        DataError: a shard is damaged, or a reward returned a wrong number of scores.
        TooManyRowErrors: more rows were not scored than `max_error_rate` allows.
    """
    folder = settings.round_dir / settings.into
    rewards = load_rewards(settings.reward, settings.reward_weight)
    digest = policy_digest(settings.policy)
    prompts = read_prompts(settings.prompts, settings.id_column, settings.prompt_column)
    process = this_process(settings.device)
    dtype = _dtype(settings.dtype, process.device)
    identity = settings.identity(
        policy=digest,
        prompts=prompts_digest(prompts),
        rewards={reward.name: reward.digest for reward in rewards},
        round_number=settings.key_round,
        dtype=str(dtype).removeprefix("torch."),
    )
    refuse_other_identity(
        folder,
        identity,
        "Nothing was touched. Use the recorded settings, another ROUND or another --into; "
        "or remove the folder if its samples are not needed.",
    )
    if (folder / "manifest.json").exists():
        say(f"{folder}: complete already, nothing to do", process.is_main)
        return read_manifest(folder, "rft-batch generate")

    policy = load_policy(settings.policy, settings.trust_policy_code)
    _check_prompts(prompts, policy)
    anchor = _anchor_batches(settings, policy) if settings.anchor else []
    options = {name: getattr(settings, name) for name in policy.sampling_options}
    sampler = policy.sampler(**options)
    policy.model.to(process.device, dtype)
    metadata = {"fingerprint": fingerprint(identity), "policy": digest}
    stage = _Stage(settings, folder, prompts, rewards, policy, sampler, metadata)
    if process.is_main and not (folder / "settings.json").exists():
        publish_json(folder / "settings.json", identity)
    say(
        f"{folder}: {len(prompts)} prompts x {settings.samples_per_prompt} samples in "
        f"{stage.num_shards} shards, {process.count} process(es), {process.device}, "
        f"{identity['dtype']}, policy {digest[:8]}",
        process.is_main,
    )
    _make_shards(stage, process)

    missing = unfinished_shards(folder, metadata["fingerprint"], stage.num_shards)
    if missing:
        return {"stage": "generate", "folder": str(folder), "unfinished_shards": len(missing)}
    counts, scores = _tally(stage)
    _refuse_too_many_errors(stage, counts["unscored"])
    manifest = {
        "stage": "generate",
        "identity": identity,
        "policy": {"path": str(settings.policy), "digest": digest, "display": policy.display},
        "counts": counts,
        "scores": scores,
        "own_loss": _mean_loss(_shard_loss(stage, n) for n in range(stage.num_shards)),
        "anchor_loss": _mean_loss(_loss(policy, batch) for batch in anchor),
        "shards": shard_entries(folder, stage.num_shards),
        "versions": versions(),
    }
    publish_json(folder / "manifest.json", manifest, writer=str(process.index))
    return manifest


def _check_prompts(prompts: Sequence[Prompt], policy: Policy) -> None:
    problems = []
    for prompt in prompts:
        try:
            policy.encode_prompt(prompt.content)
        except InputError as error:
            problems.append(f'{prompt.where}: prompt "{prompt.prompt_id}": {error}.')
    if problems:
        raise InputError(joined_problems(problems))


def _dtype(name: str, device: str) -> torch.dtype:
    if name != "auto":
        chosen: torch.dtype = getattr(torch, name)
        return chosen
    has_bfloat16 = device.startswith("cuda") and torch.cuda.is_bf16_supported()
    return torch.bfloat16 if has_bfloat16 else torch.float32


def _make_shards(stage: _Stage, process: Process) -> None:
    """Generates this process's missing shards; one is scored while the next is generated."""
    settings = stage.settings
    limit = len(stage.prompts) if settings.limit is None else settings.limit
    planned = range(min(stage.num_shards, -(-limit // settings.prompts_per_shard)))
    owned = process.share(planned)
    missing = set(unfinished_shards(stage.folder, stage.metadata["fingerprint"], stage.num_shards))
    samples_of = {n: len(stage.shard_prompts(n)) * settings.samples_per_prompt for n in owned}
    done = sum(size for number, size in samples_of.items() if number not in missing)
    if done:
        say(f"{done} samples are there already", process.is_main)
    batch_size = settings.batch_size or _FIRST_BATCH.get(process.device, _FIRST_GPU_BATCH)
    unscored = scored = 0
    score_sum = 0.0
    with (
        Progress(sum(samples_of.values()), "samples", done, process.is_main) as progress,
        ThreadPoolExecutor(1) as scorer,
    ):
        finished: Future[list[Score]] | None = None
        for number in (n for n in owned if n in missing):
            completions, batch_size, loss = _complete(stage, number, batch_size, progress)
            # Handed over before the one before is looked at: what was generated is never lost.
            before = finished
            finished = scorer.submit(_score_and_write, stage, number, completions, loss)
            if before is not None:
                scores = [s.score for s in before.result() if s.score is not None]
                unscored += len(before.result()) - len(scores)
                scored, score_sum = scored + len(scores), score_sum + sum(scores)
                progress.show(score=score_sum / max(1, scored))
                _refuse_too_many_errors(stage, unscored)
        if finished is not None:
            finished.result()


def _complete(
    stage: _Stage, number: int, batch_size: int, progress: Progress
) -> tuple[Completions, int, tuple[float, int]]:
    """All completions of a shard, the batch size that fitted, and the policy's loss on them."""
    samples = list(_samples(stage, number))
    parts: list[Completions] = []
    loss_sum, loss_count = 0.0, 0
    start = 0
    while start < len(samples):
        batch = samples[start : start + batch_size]
        try:
            part, part_sum, part_count = _complete_batch(stage, batch)
        except Exception as error:
            if batch_size == 1 or not should_reduce_batch_size(error):
                raise
            batch_size = max(1, batch_size // 2)
            clear_device_cache(garbage_collection=True)
            say(f"out of memory: --batch-size {batch_size} from here on")
            continue
        parts.append(part)
        loss_sum, loss_count = loss_sum + part_sum, loss_count + part_count
        start += len(batch)
        progress.advance(len(batch))
    completions = Completions(
        ids=[ids for part in parts for ids in part.ids],
        finish_reasons=[reason for part in parts for reason in part.finish_reasons],
        logprobs=[value for part in parts for value in part.logprobs],
    )
    return completions, batch_size, (loss_sum, loss_count)


def _samples(stage: _Stage, number: int) -> Iterator[tuple[Prompt, int]]:
    for prompt in stage.shard_prompts(number):
        for sample_index in range(stage.settings.samples_per_prompt):
            yield prompt, sample_index


def _complete_batch(
    stage: _Stage, batch: Sequence[tuple[Prompt, int]]
) -> tuple[Completions, float, int]:
    seed, round_number = stage.settings.seed, stage.settings.key_round
    noises = [
        SampleNoise.for_sample(seed, round_number, prompt.prompt_id, index)
        for prompt, index in batch
    ]
    completions = stage.sampler([prompt.content for prompt, _ in batch], noises)
    rows = [
        {"prompt_id": prompt.prompt_id, "prompt": prompt.text, "completion_ids": ids}
        for (prompt, _), ids in zip(batch, completions.ids, strict=True)
    ]
    loss, count = _loss(stage.policy, stage.policy.collate(rows, noises, epoch=0))
    return completions, loss, count


@torch.inference_mode()
def _loss(policy: Policy, batch: TrainingBatch) -> tuple[float, int]:
    """Sum of the family's own loss over a batch, and the number of tokens it sums over."""
    device = next(policy.model.parameters()).device
    tensors = {name: tensor.to(device) for name, tensor in batch.tensors.items()}
    return float(policy.loss(policy.model, tensors)), batch.num_targets


def _score_and_write(
    stage: _Stage, number: int, completions: Completions, loss: tuple[float, int]
) -> list[Score]:
    samples = list(_samples(stage, number))
    names = sorted({name for prompt, _ in samples for name in prompt.columns})
    scores = score_completions(
        stage.rewards,
        [prompt.content for prompt, _ in samples],
        [None] * len(samples),
        completions.ids,
        {name: [prompt.columns.get(name) for prompt, _ in samples] for name in names},
    )
    sample_index = np.array([index for _, index in samples], dtype=np.int32)
    score = np.array([np.nan if s.score is None else s.score for s in scores], dtype=np.float32)
    group = np.arange(len(samples)) // stage.settings.samples_per_prompt
    rank = rank_samples(group, score, sample_index)
    prompt_ids = {p.prompt_id: stage.policy.prompt_ids(p.content) for p, _ in samples}
    columns = {
        "prompt_id": [prompt.prompt_id for prompt, _ in samples],
        "sample_index": sample_index,
        "rank": pa.array(rank, mask=rank == UNRANKED),
        "score": pa.array(score, mask=rank == UNRANKED),
        "score_error": [s.error for s in scores],
        "prompt": [prompt.text for prompt, _ in samples],
        "prompt_ids": [prompt_ids[prompt.prompt_id] for prompt, _ in samples],
        "completion": [None] * len(samples),
        "completion_ids": completions.ids,
        "finish_reason": completions.finish_reasons,
        "reward_terms": [
            [{"reward": name, "score": term} for name, term in s.terms] for s in scores
        ],
        "logprob": completions.logprobs,
    }
    metadata = {
        **stage.metadata,
        "shard": str(number),
        "own_loss": json.dumps({"sum": loss[0], "count": loss[1]}),
    }
    table = pa.table(columns, schema=SAMPLES)
    write_samples(stage.folder / shard_name(number), table, metadata)
    return scores


def _refuse_too_many_errors(stage: _Stage, unscored: int) -> None:
    """Stops as soon as the stage can no longer stay below the allowed share."""
    settings = stage.settings
    total = len(stage.prompts) * settings.samples_per_prompt
    if unscored <= settings.max_error_rate * total:
        return
    examples = _first_errors(stage)
    raise TooManyRowErrors(
        f"{stage.folder}: {unscored} of {total} samples could not be scored, "
        f"--max-error-rate {settings.max_error_rate} allows {settings.max_error_rate * total:g}.\n"
        + "\n".join(f"  {error}" for error in examples)
        + "\nThe samples are kept. Mend the reward, or raise --max-error-rate."
    )


def _first_errors(stage: _Stage, shown: int = 3) -> list[str]:
    errors: list[str] = []
    for number in range(stage.num_shards):
        path = stage.folder / shard_name(number)
        if path.exists():
            table = read_columns(path, ["prompt_id", "sample_index", "score_error"])
            rows = table.filter(table["score_error"].is_valid()).slice(0, shown).to_pylist()
            errors += [
                f"{r['prompt_id']} sample {r['sample_index']}: {r['score_error']}" for r in rows
            ]
        if len(errors) >= shown:
            break
    return errors[:shown]


def _tally(stage: _Stage) -> tuple[dict[str, int], dict[str, float | None]]:
    """Counts and means over all shards."""
    paths = [stage.folder / shard_name(number) for number in range(stage.num_shards)]
    table = pa.concat_tables([read_columns(path, ["rank", "score"]) for path in paths])
    scored = table.filter(table["score"].is_valid())
    score = scored["score"].to_numpy().astype(np.float64)
    best = score[scored["rank"].to_numpy() == 0]
    counts = {
        "prompts": len(stage.prompts),
        "samples": len(table),
        "scored": len(scored),
        "unscored": len(table) - len(scored),
    }
    return counts, {
        "mean": float(score.mean()) if len(score) else None,
        "mean_of_best": float(best.mean()) if len(best) else None,
    }


def _shard_loss(stage: _Stage, number: int) -> tuple[float, int]:
    stored = json.loads(shard_info(stage.folder / shard_name(number)).metadata["own_loss"])
    return stored["sum"], stored["count"]


def _mean_loss(parts: Iterable[tuple[float, int]]) -> float | None:
    """Nats per token from sums and counts; None where there is nothing to sum."""
    sums, counts = zip(*parts, strict=True) if (parts := list(parts)) else ((), ())
    return sum(sums) / sum(counts) if sum(counts) else None


def _anchor_batches(settings: GenerateSettings, policy: Policy) -> list[TrainingBatch]:
    """The anchor's rows, with the same masks for every policy and round."""
    assert settings.anchor is not None
    rows = read_prompts(settings.anchor, settings.id_column, settings.prompt_column)
    _check_prompts(rows, policy)
    lacking = [row.where for row in rows if "completion_ids" not in row.columns]
    if lacking:
        raise InputError(f'{lacking[0]}: column "completion_ids" is missing in the anchor.')
    size = _FIRST_BATCH["cpu"]
    return [
        policy.collate(
            [{"prompt": r.text, **r.columns, "prompt_id": r.prompt_id} for r in part],
            [SampleNoise("anchor", r.prompt_id) for r in part],
            epoch=0,
        )
        for part in (rows[start : start + size] for start in range(0, len(rows), size))
    ]
