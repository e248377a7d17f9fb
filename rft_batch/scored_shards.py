"""Shards of scored samples, whether their completions are new or were there already.

What generating and rescoring have in common: which shards there are and whose, the columns that
come from scores, the publication, and what is said of a whole stage.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from rft_batch.errors import TooManyRowErrors
from rft_batch.files import publish_json
from rft_batch.processes import Process
from rft_batch.progress import Progress, say
from rft_batch.prompts import Prompt, read_prompts
from rft_batch.ranking import UNRANKED, rank_samples
from rft_batch.rewards import (
    CallRewards,
    Reward,
    RewardModels,
    Score,
    check_columns,
    load_rewards,
    score_completions,
)
from rft_batch.schema import SAMPLES
from rft_batch.settings import GenerateSettings
from rft_batch.shards import (
    ids_as_bytes,
    read_columns,
    shard_entries,
    shard_info,
    shard_name,
    unfinished_shards,
    write_samples,
)
from rft_batch.versions import versions


@dataclass(frozen=True)
class ShardPlan:
    """What the shards of a stage hold, and how they are scored."""

    folder: Path
    prompts: Sequence[Prompt]
    samples_per_prompt: int
    prompts_per_shard: int
    rewards: Sequence[Reward]
    call_rewards: CallRewards
    metadata: dict[str, str]
    """For every shard."""
    max_error_rate: float
    """Share of rows without a score from which on nothing more is begun."""

    @property
    def num_samples(self) -> int:
        """Of the whole stage."""
        return len(self.prompts) * self.samples_per_prompt

    @property
    def num_shards(self) -> int:
        """Of the whole stage."""
        return -(-len(self.prompts) // self.prompts_per_shard)

    @property
    def max_unscored(self) -> float:
        """Rows without a score that are too many when there is one more."""
        return self.max_error_rate * self.num_samples

    @property
    def paths(self) -> list[Path]:
        """Where the shards of the whole stage are published, by number."""
        return [self.folder / shard_name(number) for number in range(self.num_shards)]

    def samples(self, number: int) -> Iterator[tuple[Prompt, int]]:
        """Prompt and sample index of every sample of a shard, by prompt."""
        first = number * self.prompts_per_shard
        for prompt in self.prompts[first : first + self.prompts_per_shard]:
            for sample_index in range(self.samples_per_prompt):
                yield prompt, sample_index


class RunningScores:
    """What became of the scores so far, as progress shows it."""

    def __init__(self) -> None:
        self.unscored = 0
        """Rows that got no score."""
        self._scored, self._sum = 0, 0.0

    def add(self, scores: Sequence[Score], progress: Progress) -> None:
        """Counts a shard's scores and shows the mean of all."""
        good = [s.score for s in scores if s.score is not None]
        self.unscored += len(scores) - len(good)
        self._scored, self._sum = self._scored + len(good), self._sum + sum(good)
        progress.show(score=self._sum / max(1, self._scored))


def read_inputs(settings: GenerateSettings, device: str) -> tuple[list[Reward], list[Prompt]]:
    """The rewards and the prompts that a command's settings name, made for each other.

    Raises:
        InputError: one cannot be read, or a reward needs a column that no prompt has.
    """
    models = RewardModels(
        settings.reward_model, settings.reward_output, settings.reward_batch_size, device
    )
    rewards = load_rewards(settings.reward, settings.reward_weight, models)
    prompts = read_prompts(settings.prompts, settings.id_column, settings.prompt_column)
    check_columns(rewards, {name for p in prompts for name in p.columns}, settings.prompts)
    return rewards, prompts


def score_and_publish(
    plan: ShardPlan,
    number: int,
    columns: dict[str, Any],
    errors: Sequence[str | None],
    own_loss: tuple[float, int],
) -> list[Score]:
    """Scores the rows of a shard and publishes it.

    Args:
        plan: of the stage.
        number: of the shard.
        columns: those of `SAMPLES` that do not come from scores, with the rows in the order of
            `plan.samples(number)`.
        errors: why a row has no completion to score; None where it has one.
        own_loss: of the policy on the rows: sum in nats, and the tokens that it sums over.

    Raises:
        DataError: a reward returned a wrong number of scores; nothing is published.
    """
    samples = list(plan.samples(number))
    scores = _scores(plan, [prompt for prompt, _ in samples], columns, errors)
    group = np.arange(len(samples)) // plan.samples_per_prompt
    sample_index = np.array([index for _, index in samples], dtype=np.int32)
    whole = {
        **columns,
        "prompt_id": [prompt.prompt_id for prompt, _ in samples],
        "sample_index": sample_index,
        "prompt": [prompt.text for prompt, _ in samples],
        **_score_columns(scores, group, sample_index),
    }
    metadata = {
        **plan.metadata,
        "shard": str(number),
        "own_loss": json.dumps({"sum": own_loss[0], "count": own_loss[1]}),
    }
    write_samples(plan.paths[number], pa.table(whole, schema=SAMPLES), metadata)
    return scores


def make_own_shards(
    plan: ShardPlan,
    limit: int | None,
    process: Process,
    make: Callable[[Sequence[int], Progress], int],
) -> int:
    """Makes this process's missing shards.

    Args:
        plan: of the stage.
        limit: prompts after which to stop, rounded up to whole shards; None: all.
        process: this one.
        make: makes shards by number, and returns how many of their rows got no score.

    Returns:
        How many rows got no score.
    """
    wanted = len(plan.prompts) if limit is None else limit
    planned = range(min(plan.num_shards, -(-wanted // plan.prompts_per_shard)))
    owned = process.share(planned)
    missing = set(unfinished_shards(plan.folder, plan.metadata["fingerprint"], plan.num_shards))
    sizes = {number: sum(1 for _ in plan.samples(number)) for number in owned}
    done = sum(size for number, size in sizes.items() if number not in missing)
    if done:
        say(f"{done} samples are there already", process.is_main)
    with Progress(sum(sizes.values()), "samples", done, process.is_main) as progress:
        return make([number for number in owned if number in missing], progress)


def close_stage(
    plan: ShardPlan,
    unscored: int,
    identity: Mapping[str, Any],
    policy: Mapping[str, Any],
    anchor_loss: Callable[[], float | None],
    writer: int,
) -> dict[str, Any]:
    """Publishes the manifest where every shard is there.

    Args:
        plan: of the stage.
        unscored: rows to which this process could give no score.
        identity: of the stage.
        policy: what is recorded of it.
        anchor_loss: computed only where the stage is complete.
        writer: number of this process.

    Returns:
        The manifest; without the key `shards` where other shards are missing.

    Raises:
        TooManyRowErrors: more rows were not scored than allowed.
    """
    _refuse_too_many_errors(plan, unscored)
    missing = unfinished_shards(plan.folder, plan.metadata["fingerprint"], plan.num_shards)
    if missing:
        return {"stage": "generate", "folder": str(plan.folder), "unfinished_shards": len(missing)}
    counts, scores = _tally(plan)
    _refuse_too_many_errors(plan, counts["unscored"])
    manifest = {
        "stage": "generate",
        "identity": identity,
        "policy": policy,
        "counts": counts,
        "scores": scores,
        "own_loss": mean_loss(map(stored_loss, plan.paths)),
        "anchor_loss": anchor_loss(),
        "shards": shard_entries(plan.paths),
        "versions": versions(),
    }
    publish_json(plan.folder / "manifest.json", manifest, writer=str(writer))
    return manifest


def _refuse_too_many_errors(plan: ShardPlan, unscored: int) -> None:
    """Raises TooManyRowErrors where more rows got no score than allowed."""
    if unscored <= plan.max_unscored:
        return
    raise TooManyRowErrors(
        f"{plan.folder}: {unscored} of {plan.num_samples} samples could not be scored, "
        f"--max-error-rate {plan.max_error_rate} allows {plan.max_unscored:g}.\n"
        + "\n".join(f"  {error}" for error in _first_errors(plan))
        + "\nThe samples are kept. Mend the reward, or raise --max-error-rate."
    )


def _tally(plan: ShardPlan) -> tuple[dict[str, int], dict[str, float | None]]:
    """Counts and means over all shards; only ranks and scores are held of all at once."""
    table = pa.concat_tables([read_columns(path, ["rank", "score"]) for path in plan.paths])
    scored = table.filter(table["score"].is_valid())
    score = scored["score"].to_numpy().astype(np.float64)
    best = score[scored["rank"].to_numpy() == 0]
    counts = {
        "prompts": len(plan.prompts),
        "samples": len(table),
        "scored": len(scored),
        "unscored": len(table) - len(scored),
        "prompts_with_one_completion": sum(map(_prompts_with_one_completion, plan.paths)),
    }
    return counts, {
        "mean": float(score.mean()) if len(score) else None,
        "mean_of_best": float(best.mean()) if len(best) else None,
    }


def _prompts_with_one_completion(path: Path) -> int:
    """Prompts of a shard with several samples that are all equal, whatever gave them."""
    table = read_columns(path, ["prompt_id", "completion_ids", "finish_reason"])
    table = table.filter(pc.not_equal(table["finish_reason"].cast(pa.string()), "error"))
    codes = ids_as_bytes(table["completion_ids"]).dictionary_encode().indices
    prompts = pa.table({"prompt": table["prompt_id"], "code": codes}).group_by("prompt")
    found = prompts.aggregate([("code", "count"), ("code", "count_distinct")])
    equal = pc.equal(found["code_count_distinct"], 1)
    return int(pc.sum(pc.and_(equal, pc.greater(found["code_count"], 1))).as_py() or 0)


def mean_loss(parts: Iterable[tuple[float, int]]) -> float | None:
    """Nats per token from sums and counts; None where there is nothing to sum."""
    sums, counts = zip(*parts, strict=True) if (parts := list(parts)) else ((), ())
    return sum(sums) / sum(counts) if sum(counts) else None


def stored_loss(path: Path) -> tuple[float, int]:
    """What a shard's metadata says of the policy's loss on its samples: sum and tokens."""
    stored = json.loads(shard_info(path).metadata["own_loss"])
    return stored["sum"], stored["count"]


def _scores(
    plan: ShardPlan,
    prompts: Sequence[Prompt],
    columns: dict[str, Any],
    errors: Sequence[str | None],
) -> list[Score]:
    """Of every row; one without a completion keeps its reason."""
    good = [place for place, error in enumerate(errors) if error is None]
    kept = [prompts[place] for place in good]
    names = sorted({name for prompt in kept for name in prompt.columns})
    scored = score_completions(
        plan.rewards,
        [prompt.content for prompt in kept],
        [columns["completion"][place] for place in good],
        [columns["completion_ids"][place] for place in good],
        {name: [prompt.columns.get(name) for prompt in kept] for name in names},
        plan.call_rewards,
    )
    of_place = dict(zip(good, scored, strict=True))
    return [of_place.get(place) or Score(None, error, ()) for place, error in enumerate(errors)]


def _score_columns(
    scores: Sequence[Score], group: NDArray[np.int64], sample_index: NDArray[np.int32]
) -> dict[str, Any]:
    score = np.array([np.nan if s.score is None else s.score for s in scores], dtype=np.float32)
    rank = rank_samples(group, score, sample_index)
    return {
        "rank": pa.array(rank, mask=rank == UNRANKED),
        "score": pa.array(score, mask=rank == UNRANKED),
        "score_error": [s.error for s in scores],
        "reward_terms": [
            [{"reward": name, "score": term} for name, term in s.terms] for s in scores
        ],
    }


def _first_errors(plan: ShardPlan, shown: int = 3) -> list[str]:
    errors: list[str] = []
    for path in plan.paths:
        if path.exists():
            table = read_columns(path, ["prompt_id", "sample_index", "score_error"])
            rows = table.filter(table["score_error"].is_valid()).slice(0, shown).to_pylist()
            errors += [
                f"{r['prompt_id']} sample {r['sample_index']}: {r['score_error']}" for r in rows
            ]
        if len(errors) >= shown:
            break
    return errors[:shown]
