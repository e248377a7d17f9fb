"""Samples that are there, scored by other rewards.

    rft-batch generate runs/mine/round-1 --rescore samples --into by-length \
        --prompts prompts.jsonl --reward "rft_batch.rewards.text:length_window(maximum=200)"

Nothing is generated and no policy is loaded. The folder that is written has the shape of the one
that is read: the same shards with the same samples, in the order of their new ranks. So every
later stage and every look at a round takes it as it takes what was generated.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from rft_batch.errors import DataError, InputError
from rft_batch.files import file_digest, publish_json
from rft_batch.processes import this_process
from rft_batch.progress import Progress, say
from rft_batch.prompts import prompts_digest
from rft_batch.rewards import ready_rewards
from rft_batch.schema import SAMPLES
from rft_batch.scored_shards import (
    RunningScores,
    ShardPlan,
    close_stage,
    make_own_shards,
    read_inputs,
    score_and_publish,
    stored_loss,
)
from rft_batch.settings import GenerateSettings, fingerprint, refuse_other_identity
from rft_batch.shards import (
    manifest_shards,
    read_columns,
    read_manifest,
)

_KEPT = ["prompt_ids", "completion", "completion_ids", "finish_reason", "logprob"]


@dataclass(frozen=True)
class _Source:
    """The stage whose samples are scored."""

    manifest: dict[str, Any]
    digest: str
    """Of its manifest, which holds the digests of all its shards."""
    paths: list[Path]


def rescore(settings: GenerateSettings) -> dict[str, Any]:
    """Scores the samples of `settings.rescore` anew and publishes them in `settings.into`.

    What made the samples is taken from their manifest; of the settings only those count that say
    which prompts, rewards, folders and limits there are.

    Args:
        settings: see `GenerateSettings`.

    Returns:
        The manifest; without the key `shards` where the stage is not complete yet, because of
        `limit` or because other processes are still at work.

    Raises:
        InputError: bad settings or input, or other prompts than those of the samples, before any
            work; or the folder was begun with others.
        DataError: the samples are not complete or damaged, or a reward returned a wrong number of
            scores.
        TooManyRowErrors: more rows were not scored than `max_error_rate` allows.
    """
    if settings.rescore is None:
        raise InputError("--rescore: none given. Pass the folder of ROUND with the samples.")
    folder = settings.round_dir / settings.into
    process = this_process(settings.device)
    rewards, prompts = read_inputs(settings, process.device)
    source = _read_source(settings.round_dir / settings.rescore)
    made_with = source.manifest["identity"]
    if prompts_digest(prompts) != made_with["prompts"]:
        raise InputError(
            f"--prompts {settings.prompts}: not the prompts that {settings.round_dir}/"
            f"{settings.rescore} was made of (digest {prompts_digest(prompts)}, recorded "
            f"{made_with['prompts']}). Pass the same rows, in the same order."
        )
    identity = made_with | {
        "into": settings.into,
        "rewards": {reward.name: reward.digest for reward in rewards},
        "reward_weight": list(settings.reward_weight),
        "rescored": {"folder": settings.rescore, "manifest": source.digest},
    }
    refuse_other_identity(
        folder,
        identity,
        "Nothing was touched. Use the recorded settings or another --into; "
        "or remove the folder if its scores are not needed.",
    )
    if (folder / "manifest.json").exists():
        say(f"{folder}: complete already, nothing to do", process.is_main)
        return read_manifest(folder, "rft-batch generate --rescore")

    with ready_rewards(
        rewards, [p.content for p in prompts], settings.reward_workers, settings.reward_timeout
    ) as call_rewards:
        plan = ShardPlan(
            folder=folder,
            prompts=prompts,
            samples_per_prompt=made_with["samples_per_prompt"],
            prompts_per_shard=made_with["prompts_per_shard"],
            rewards=rewards,
            call_rewards=call_rewards,
            metadata={
                "fingerprint": fingerprint(identity),
                "policy": source.manifest["policy"]["digest"],
            },
            max_error_rate=settings.max_error_rate,
        )
        if process.is_main and not (folder / "settings.json").exists():
            publish_json(folder / "settings.json", identity)
        say(
            f"{folder}: {plan.num_samples} samples of {settings.rescore} in {plan.num_shards} "
            f"shards to score, {process.count} process(es)",
            process.is_main,
        )
        unscored = make_own_shards(
            plan, settings.limit, process, partial(_make_shards, plan, source)
        )
    return close_stage(
        plan,
        unscored,
        identity,
        source.manifest["policy"],
        lambda: source.manifest["anchor_loss"],
        process.index,
    )


def _read_source(folder: Path) -> _Source:
    manifest = read_manifest(folder, f"rft-batch generate {folder.parent} --into {folder.name}")
    if manifest["stage"] != "generate":
        raise InputError(
            f"--rescore {folder.name}: {folder} holds no samples, it was made by the stage "
            f"{manifest['stage']}."
        )
    digest = file_digest(folder / "manifest.json")
    return _Source(manifest, digest, manifest_shards(folder, manifest))


def _make_shards(
    plan: ShardPlan, source: _Source, numbers: Sequence[int], progress: Progress
) -> int:
    """Scores and publishes shards; returns how many rows got no score.

    Above `plan.max_unscored` not all shards are made.
    """
    running = RunningScores()
    for number in numbers:
        if running.unscored > plan.max_unscored:
            break
        path = source.paths[number]
        columns, errors = _read_rows(plan, path, number)
        scores = score_and_publish(plan, number, columns, errors, stored_loss(path))
        running.add(scores, progress)
        progress.advance(len(scores))
    return running.unscored


def _read_rows(
    plan: ShardPlan, path: Path, number: int
) -> tuple[dict[str, list[Any]], list[str | None]]:
    """The columns that stay, with the rows in the order of the prompts, and why rows have none."""
    table = read_columns(path, SAMPLES.names)
    keys = zip(table["prompt_id"].to_pylist(), table["sample_index"].to_pylist(), strict=True)
    row_of = {key: row for row, key in enumerate(keys)}
    wanted = [(prompt.prompt_id, index) for prompt, index in plan.samples(number)]
    if len(row_of) != len(table) or row_of.keys() != set(wanted):
        raise DataError(
            f"{path}: does not hold every sample of its prompts once. Restore it, or make its "
            "stage again."
        )
    table = table.take([row_of[key] for key in wanted])
    errors = [
        error if reason == "error" else None
        for reason, error in zip(
            table["finish_reason"].to_pylist(), table["score_error"].to_pylist(), strict=True
        )
    ]
    return {name: table[name].to_pylist() for name in _KEPT}, errors
