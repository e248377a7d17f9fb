"""Stage one, first half: prompts + policy + rewards -> sample shards and a manifest.

    rft-batch generate runs/digits/round-1 --policy data/digits/policy \
        --prompts data/digits/prompts.jsonl --reward pipelines/digits_reward.py:class_probability

A shard under its final name is whole and is never written again; a run that was stopped does only
the shards that are missing. The manifest is written last, by the process that finishes last, so its
existence means that the stage is complete.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch

from rft_batch.errors import InputError, TooManyRowErrors, joined_problems
from rft_batch.files import publish_json
from rft_batch.policies import Policy, TrainingBatch, load_policy, policy_digest
from rft_batch.processes import Process, this_process
from rft_batch.progress import Progress, say
from rft_batch.prompts import Prompt, prompts_digest, read_prompts
from rft_batch.randomness import SampleNoise
from rft_batch.rewards import load_rewards
from rft_batch.sampling import SampleJob, batch_loss, make_shards, stored_loss
from rft_batch.settings import GenerateSettings, fingerprint, refuse_other_identity
from rft_batch.shards import (
    read_columns,
    read_manifest,
    shard_entries,
    unfinished_shards,
)
from rft_batch.versions import versions

_ANCHOR_BATCH = 32


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
    options = settings.family_options(policy.sampling_options, policy.family)
    _check_prompts(prompts, policy, options)
    anchor = _anchor_batches(settings, policy, options)
    sampler = policy.sampler(**options)
    policy.model.to(process.device, dtype)
    job = SampleJob(
        folder=folder,
        prompts=prompts,
        samples_per_prompt=settings.samples_per_prompt,
        prompts_per_shard=settings.prompts_per_shard,
        seed=settings.seed,
        round_number=settings.key_round,
        policy=policy,
        sampler=sampler,
        rewards=rewards,
        metadata={"fingerprint": fingerprint(identity), "policy": digest},
        batch_size=settings.batch_size or policy.first_batch_size(process.device),
        max_unscored=settings.max_error_rate * len(prompts) * settings.samples_per_prompt,
    )
    if process.is_main and not (folder / "settings.json").exists():
        publish_json(folder / "settings.json", identity)
    say(
        f"{folder}: {len(prompts)} prompts x {settings.samples_per_prompt} samples in "
        f"{job.num_shards} shards, {process.count} process(es), {process.device}, "
        f"{identity['dtype']}, policy {digest[:8]}",
        process.is_main,
    )
    _refuse_too_many_errors(job, settings, _make_own_shards(job, settings.limit, process))
    missing = unfinished_shards(folder, job.metadata["fingerprint"], job.num_shards)
    if missing:
        return {"stage": "generate", "folder": str(folder), "unfinished_shards": len(missing)}
    counts, scores = _tally(job)
    _refuse_too_many_errors(job, settings, counts["unscored"])
    collapsed = counts["prompts_with_one_completion"]
    if collapsed and settings.temperature > 0:
        say(
            f"warning: the {settings.samples_per_prompt} samples of {collapsed} of {len(prompts)} "
            "prompts are all the same completion; nothing can be selected among them"
        )
    manifest = {
        "stage": "generate",
        "identity": identity,
        "policy": {
            "path": str(settings.policy),
            "digest": digest,
            "display": policy.display,
            **policy.facts(),
        },
        "counts": counts,
        "scores": scores,
        "own_loss": _mean_loss(map(stored_loss, job.paths)),
        "anchor_loss": _mean_loss(batch_loss(policy, batch) for batch in anchor),
        "shards": shard_entries(job.paths),
        "versions": versions(),
    }
    publish_json(folder / "manifest.json", manifest, writer=str(process.index))
    return manifest


def _check_prompts(prompts: Sequence[Prompt], policy: Policy, options: Mapping[str, Any]) -> None:
    problems = []
    for prompt in prompts:
        try:
            policy.encode_prompt(prompt.content, **options)
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


def _make_own_shards(job: SampleJob, limit: int | None, process: Process) -> int:
    """Makes this process's missing shards; returns how many of their rows got no score."""
    wanted = len(job.prompts) if limit is None else limit
    planned = range(min(job.num_shards, -(-wanted // job.prompts_per_shard)))
    owned = process.share(planned)
    missing = set(unfinished_shards(job.folder, job.metadata["fingerprint"], job.num_shards))
    sizes = {number: sum(1 for _ in job.samples(number)) for number in owned}
    done = sum(size for number, size in sizes.items() if number not in missing)
    if done:
        say(f"{done} samples are there already", process.is_main)
    with Progress(sum(sizes.values()), "samples", done, process.is_main) as progress:
        return make_shards(job, [number for number in owned if number in missing], progress)


def _refuse_too_many_errors(job: SampleJob, settings: GenerateSettings, unscored: int) -> None:
    if unscored <= job.max_unscored:
        return
    raise TooManyRowErrors(
        f"{job.folder}: {unscored} of {job.num_samples} samples could not be scored, "
        f"--max-error-rate {settings.max_error_rate} allows {job.max_unscored:g}.\n"
        + "\n".join(f"  {error}" for error in _first_errors(job))
        + "\nThe samples are kept. Mend the reward, or raise --max-error-rate."
    )


def _first_errors(job: SampleJob, shown: int = 3) -> list[str]:
    errors: list[str] = []
    for path in job.paths:
        if path.exists():
            table = read_columns(path, ["prompt_id", "sample_index", "score_error"])
            rows = table.filter(table["score_error"].is_valid()).slice(0, shown).to_pylist()
            errors += [
                f"{r['prompt_id']} sample {r['sample_index']}: {r['score_error']}" for r in rows
            ]
        if len(errors) >= shown:
            break
    return errors[:shown]


def _tally(job: SampleJob) -> tuple[dict[str, int], dict[str, float | None]]:
    """Counts and means over all shards; only ranks and scores are held of all at once."""
    table = pa.concat_tables([read_columns(path, ["rank", "score"]) for path in job.paths])
    scored = table.filter(table["score"].is_valid())
    score = scored["score"].to_numpy().astype(np.float64)
    best = score[scored["rank"].to_numpy() == 0]
    counts = {
        "prompts": len(job.prompts),
        "samples": len(table),
        "scored": len(scored),
        "unscored": len(table) - len(scored),
        "prompts_with_one_completion": sum(map(_prompts_with_one_completion, job.paths)),
    }
    return counts, {
        "mean": float(score.mean()) if len(score) else None,
        "mean_of_best": float(best.mean()) if len(best) else None,
    }


def _prompts_with_one_completion(path: Path) -> int:
    """Prompts of a shard with several samples that are all equal, whatever gave them."""
    table = read_columns(path, ["prompt_id", "completion_ids", "finish_reason"])
    table = table.filter(pc.not_equal(table["finish_reason"].cast(pa.string()), "error"))
    samples: Counter[str] = Counter()
    found: dict[str, set[bytes]] = {}
    for prompt_id, ids in zip(
        table["prompt_id"].to_pylist(), table["completion_ids"].to_pylist(), strict=True
    ):
        samples[prompt_id] += 1
        found.setdefault(prompt_id, set()).add(np.array(ids, dtype=np.int32).tobytes())
    return sum(samples[prompt_id] > 1 and len(ids) == 1 for prompt_id, ids in found.items())


def _mean_loss(parts: Iterable[tuple[float, int]]) -> float | None:
    """Nats per token from sums and counts; None where there is nothing to sum."""
    sums, counts = zip(*parts, strict=True) if (parts := list(parts)) else ((), ())
    return sum(sums) / sum(counts) if sum(counts) else None


def _anchor_batches(
    settings: GenerateSettings, policy: Policy, options: Mapping[str, Any]
) -> list[TrainingBatch]:
    """The anchor's rows, with the same masks for every policy and round; none without one."""
    if settings.anchor is None:
        return []
    rows = []
    for prompt in read_prompts(settings.anchor, settings.id_column, settings.prompt_column):
        try:
            row = policy.encode_row(prompt.content, prompt.columns, **options)
        except InputError as error:
            raise InputError(f"--anchor {prompt.where}: {error}.") from error
        rows.append({"prompt_id": prompt.prompt_id, **row})
    return [
        policy.collate(part, [SampleNoise("anchor", row["prompt_id"]) for row in part], epoch=0)
        for part in (rows[i : i + _ANCHOR_BATCH] for i in range(0, len(rows), _ANCHOR_BATCH))
    ]
