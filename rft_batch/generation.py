"""Stage one, first half: prompts + policy + rewards -> sample shards and a manifest.

    rft-batch generate runs/digits/round-1 --policy data/digits/policy \
        --prompts data/digits/prompts.jsonl --reward pipelines/digits_reward.py:class_probability

A shard under its final name is whole and is never written again; a run that was stopped does only
the shards that are missing. The manifest is written last, by the process that finishes last, so its
existence means that the stage is complete.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch

from rft_batch.anchors import anchor_rows
from rft_batch.errors import InputError, joined_problems
from rft_batch.files import publish_json
from rft_batch.policies import Policy, TrainingBatch, load_policy, policy_digest
from rft_batch.processes import this_process, usual_dtype
from rft_batch.progress import say
from rft_batch.prompts import Prompt, prompts_digest
from rft_batch.randomness import SampleNoise
from rft_batch.rewards import ready_rewards
from rft_batch.sampling import SampleJob, batch_loss, make_shards
from rft_batch.scored_shards import (
    ShardPlan,
    close_stage,
    make_own_shards,
    mean_loss,
    read_inputs,
)
from rft_batch.settings import GenerateSettings, fingerprint, refuse_other_identity
from rft_batch.shards import read_manifest

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
    if settings.policy is None or settings.rescore is not None:
        raise InputError("--rescore: nothing is to be generated; rescoring.rescore does this.")
    folder = settings.round_dir / settings.into
    process = this_process(settings.device)
    rewards, prompts = read_inputs(settings, process.device)
    digest = policy_digest(settings.policy)
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

    policy = load_policy(settings.policy, settings.trust_policy_code, dtype)
    options = settings.family_options(policy.sampling_options, policy.family)
    _check_prompts(prompts, policy, options)
    anchor = _anchor_batches(settings, policy, options)
    sampler = policy.sampler(**options)
    policy.model.to(process.device)
    with ready_rewards(
        rewards, [p.content for p in prompts], settings.reward_workers, settings.reward_timeout
    ) as call_rewards:
        plan = ShardPlan(
            folder=folder,
            prompts=prompts,
            samples_per_prompt=settings.samples_per_prompt,
            prompts_per_shard=settings.prompts_per_shard,
            rewards=rewards,
            call_rewards=call_rewards,
            metadata={"fingerprint": fingerprint(identity), "policy": digest},
            max_error_rate=settings.max_error_rate,
        )
        job = SampleJob(
            plan=plan,
            seed=settings.seed,
            round_number=settings.key_round,
            policy=policy,
            sampler=sampler,
            batch_size=settings.batch_size or policy.first_batch_size(process.device),
        )
        if process.is_main and not (folder / "settings.json").exists():
            publish_json(folder / "settings.json", identity)
        say(
            f"{folder}: {len(prompts)} prompts x {settings.samples_per_prompt} samples in "
            f"{plan.num_shards} shards, {process.count} process(es), {process.device}, "
            f"{identity['dtype']}, policy {digest[:8]}",
            process.is_main,
        )
        unscored = make_own_shards(plan, settings.limit, process, partial(make_shards, job))
    recorded = {
        "path": str(settings.policy),
        "digest": digest,
        "display": policy.display,
        **policy.facts(),
    }
    manifest = close_stage(
        plan,
        unscored,
        identity,
        recorded,
        lambda: mean_loss(batch_loss(policy, batch) for batch in anchor),
        process.index,
    )
    collapsed = manifest.get("counts", {}).get("prompts_with_one_completion")
    if collapsed and settings.temperature > 0:
        say(
            f"warning: the {settings.samples_per_prompt} samples of {collapsed} of {len(prompts)} "
            "prompts are all the same completion; nothing can be selected among them"
        )
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
    return usual_dtype(device)


def _anchor_batches(
    settings: GenerateSettings, policy: Policy, options: Mapping[str, Any]
) -> list[TrainingBatch]:
    """The anchor's rows, with the same masks for every policy and round; none without one."""
    if settings.anchor is None:
        return []
    rows = anchor_rows(settings.anchor, policy, options, settings.id_column, settings.prompt_column)
    return [
        policy.collate(part, [SampleNoise("anchor", row["prompt_id"]) for row in part], epoch=0)
        for part in (rows[i : i + _ANCHOR_BATCH] for i in range(0, len(rows), _ANCHOR_BATCH))
    ]
