"""Whether a round is what its manifests say: every byte, every row, every rank, every flag."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from rft_batch.errors import DataError
from rft_batch.files import file_digest, read_json
from rft_batch.policies import policy_digest
from rft_batch.ranking import UNRANKED, rank_samples
from rft_batch.schema import FLAGS, KEPT_REASONS, SAMPLES
from rft_batch.settings import fingerprint
from rft_batch.shards import read_columns, samples_folder, shard_info


def verify_round(round_dir: Path) -> tuple[list[str], int]:
    """Reads every file of a round's complete stages and compares it with the manifests.

    Args:
        round_dir: the round.

    Returns:
        Problems, each with the file's name, and the number of files that were checked.
    """
    problems: list[str] = []
    checked = 0
    for path in sorted(round_dir.glob("*/manifest.json")):
        try:
            manifest = read_json(path)
            stage, folder = manifest["stage"], path.parent
            if stage == "finetune":
                found = list(_policy_problems(round_dir, manifest))
                checked += len(manifest["exported"])
            else:
                found = list(_shard_problems(folder, manifest))
                checked += len(manifest["shards"])
                if not found and stage == "generate":
                    found = list(_sample_problems(folder, manifest))
                elif not found:
                    found = list(_flag_problems(folder, manifest))
        except DataError as error:
            found = [str(error)]
        except (KeyError, TypeError, ValueError) as error:
            found = [f"{path}: damaged: {type(error).__name__} {error}."]
        problems += found
        checked += 1
    return problems, checked


def _shard_problems(folder: Path, manifest: dict[str, Any]) -> Iterator[str]:
    """Each shard's existence, digest, row count and fingerprint; then strangers beside them."""
    wanted = fingerprint(manifest["identity"])
    for entry in manifest["shards"]:
        path = folder / entry["name"]
        if not path.is_file():
            yield f"{path}: missing."
        elif file_digest(path) != entry["xxh3_128"]:
            yield f"{path}: damaged, its digest is not the one in the manifest."
        else:
            info = shard_info(path)
            if info.num_rows != entry["rows"] or info.metadata["fingerprint"] != wanted:
                yield f"{path}: the manifest is of other rows or settings."
    listed = {entry["name"] for entry in manifest["shards"]}
    for path in sorted(folder.glob("shard-*.parquet")):
        if path.name not in listed:
            yield f"{path}: the manifest does not list it."


def _sample_problems(folder: Path, manifest: dict[str, Any]) -> Iterator[str]:
    """Complete and unique keys, scores explained, ranks right."""
    per_prompt = manifest["identity"]["samples_per_prompt"]
    seen: set[str] = set()
    for entry in manifest["shards"]:
        path = folder / entry["name"]
        table = read_columns(path, SAMPLES.names)
        ids, index = table["prompt_id"].to_pylist(), table["sample_index"].to_numpy()
        keys = set(zip(ids, index.tolist(), strict=True))
        prompts = set(ids)
        if keys != {(p, i) for p in prompts for i in range(per_prompt)} or len(keys) != len(ids):
            yield f"{path}: not every prompt has its {per_prompt} samples once."
        if again := prompts & seen:
            yield f'{path}: prompt "{min(again)}" stands in an earlier shard too.'
        seen |= prompts
        score = table["score"].to_numpy()
        group = table["prompt_id"].combine_chunks().dictionary_encode().indices.to_numpy()
        rank = table["rank"].fill_null(UNRANKED).to_numpy()
        if not np.array_equal(rank, rank_samples(group, score, index)):
            yield f"{path}: the ranks do not follow from the scores."
        errors = table["score_error"].is_valid().to_numpy()
        if not np.array_equal(np.isfinite(score), ~errors):
            yield f"{path}: a sample has neither a finite score nor a reason, or both."
    if len(seen) != manifest["counts"]["prompts"]:
        yield f"{folder}: {len(seen)} prompts, the manifest counts {manifest['counts']['prompts']}."


def _flag_problems(folder: Path, manifest: dict[str, Any]) -> Iterator[str]:
    """Flags that stand row for row beside their samples, and agree with their reasons."""
    samples = folder.parent / samples_folder(manifest)
    for entry in manifest["shards"]:
        path, beside = folder / entry["name"], samples / entry["name"]
        if not beside.is_file() or shard_info(path).metadata["samples"] != file_digest(beside):
            yield f"{path}: its flags belong to other samples than {beside}."
            continue
        flags, keys = read_columns(path, FLAGS.names), ["prompt_id", "sample_index"]
        if flags.select(keys).to_pylist() != read_columns(beside, keys).to_pylist():
            yield f"{path}: not row for row as {beside}."
        kept = [reason in KEPT_REASONS for reason in flags["reason"].to_pylist()]
        if flags["selected"].to_pylist() != kept:
            yield f"{path}: a flag and its reason disagree."


def _policy_problems(round_dir: Path, manifest: dict[str, Any]) -> Iterator[str]:
    for name, digest in manifest["exported"].items():
        if policy_digest(round_dir / name) != digest:
            yield f"{round_dir / name}: not the policy that the training exported."
