"""What a round holds, for people: counts, scores, settings, and samples to look at.

rft-batch inspect runs/digits/round-1 --best 4 --worst 4 --verify
"""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from rft_batch.errors import DataError, joined_problems
from rft_batch.settings import InspectSettings
from rft_batch.shards import manifest_shards, read_columns, read_manifest, read_rows
from rft_batch.tables import figures_table
from rft_batch.verification import verify_round

_SHADES = " ░▒▓█"
_SHOWN = ["prompt_id", "sample_index", "rank", "score", "score_error", "prompt"]
_SHOWN += ["completion", "completion_ids", "finish_reason"]


def inspect(settings: InspectSettings) -> str:
    """The text that describes a round's samples.

    Args:
        settings: see `InspectSettings`.

    Returns:
        A table of figures, the settings, and the samples that were asked for.

    Raises:
        DataError: the stage is not complete; or, with `verify`, a file is not what its manifest
            says.
    """
    folder = settings.round_dir / settings.into
    manifest = read_manifest(folder, f"rft-batch generate {settings.round_dir}")
    paths = manifest_shards(folder, manifest)
    columns = [
        read_columns(path, ["prompt_id", "sample_index", "score", "score_error"]) for path in paths
    ]
    parts = [figures_table(_figures(manifest, pa.concat_tables(columns)))]
    parts.append("Settings\n" + figures_table(manifest["identity"]))
    for title, wanted in _wanted(settings, columns).items():
        shown = _samples(paths, wanted, manifest["policy"].get("display"))
        parts.append(f"{title}\n\n" + "\n\n".join(shown))
    if settings.verify:
        problems, checked = verify_round(settings.round_dir)
        if problems:
            raise DataError(joined_problems(problems))
        parts.append(f"Verified: {checked} files are what their manifests say.")
    return "\n\n".join(parts)


def picture(ids: list[int], display: dict[str, int]) -> str:
    """A completion as characters, two for each pixel, darker for higher levels.

    Args:
        ids: `height * width` grey levels.
        display: `height`, `width` and `levels` of the policy.
    """
    levels = np.array(ids).reshape(display["height"], display["width"])
    shades = levels * (len(_SHADES) - 1) // max(1, display["levels"] - 1)
    return "\n".join("".join(_SHADES[shade] * 2 for shade in row) for row in shades)


def printable(text: str) -> str:
    """Text that cannot move the cursor or change colours: control characters as escapes."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def _figures(manifest: dict[str, Any], table: pa.Table) -> dict[str, Any]:
    score = table["score"].drop_null().to_numpy().astype(np.float64)
    quantiles = {"lowest": 0, "q10": 0.1, "median": 0.5, "q90": 0.9, "highest": 1}
    errors = Counter(table["score_error"].drop_null().to_pylist())
    return {
        **manifest["counts"],
        "samples per prompt": manifest["identity"]["samples_per_prompt"],
        **{
            f"score, {name}": float(np.quantile(score, q)) if len(score) else None
            for name, q in quantiles.items()
        },
        **{f"not scored: {printable(error)}": count for error, count in errors.most_common(5)},
        "own loss": manifest["own_loss"],
        "anchor loss": manifest["anchor_loss"],
        "bytes": sum(entry["bytes"] for entry in manifest["shards"]),
        "shards": len(manifest["shards"]),
        "policy": f"{manifest['policy']['path']} {manifest['policy']['digest'][:8]}",
    }


def _wanted(settings: InspectSettings, columns: list[pa.Table]) -> dict[str, list[tuple[int, int]]]:
    """By title: shard number and row number of the samples to show, in the order to show them."""
    starts = np.cumsum([0, *map(len, columns)])
    whole = pa.concat_tables(columns)
    score = whole["score"].to_numpy()
    order = np.argsort(-score, kind="stable")
    ordered = order[: int(np.isfinite(score).sum())]
    wanted = {
        f"Best {settings.best}": ordered[: settings.best],
        f"Worst {settings.worst}": ordered[::-1][: settings.worst],
    }
    if settings.prompt is not None:
        of_prompt = np.flatnonzero(pc.equal(whole["prompt_id"], settings.prompt).to_numpy())
        if not len(of_prompt):
            raise DataError(f"--prompt {settings.prompt}: there is no prompt of that id.")
        wanted[f"Prompt {settings.prompt}"] = of_prompt

    def places(rows: NDArray[np.int64]) -> list[tuple[int, int]]:
        shards = np.searchsorted(starts, rows, side="right") - 1
        return list(zip(shards.tolist(), (rows - starts[shards]).tolist(), strict=True))

    return {title: places(rows) for title, rows in wanted.items() if len(rows)}


def _samples(
    paths: list[Path], places: list[tuple[int, int]], display: dict[str, int] | None
) -> list[str]:
    shown, last_prompt = [], None
    for number, row in places:
        (sample,) = read_rows(paths[number], np.array([row]), _SHOWN).to_pylist()
        score = sample["score_error"] if sample["score"] is None else f"{sample['score']:.4f}"
        head = printable(
            f"{sample['prompt_id']} sample {sample['sample_index']}, score {score}, "
            f"rank {sample['rank']}, {sample['finish_reason']}"
        )
        # All samples of a prompt may be shown, and a chat can be long.
        prompt = [] if sample["prompt"] == last_prompt else _prompt_lines(sample["prompt"])
        last_prompt = sample["prompt"]
        body = str(sample["completion_ids"])
        if sample["completion"] is not None:
            body = sample["completion"]
        text = picture(sample["completion_ids"], display) if display else printable(body)
        shown.append("\n".join([head, *prompt, text]))
    return shown


def _prompt_lines(prompt: str) -> list[str]:
    """A prompt as it is, a chat as one line for each message."""
    try:
        content = json.loads(prompt)
    except ValueError:
        content = prompt
    is_chat = isinstance(content, list) and all(isinstance(one, dict) for one in content)
    messages = [f"{one.get('role')}: {one.get('content')}" for one in content] if is_chat else []
    return [printable(line) for line in messages or [f"prompt: {prompt}"]]
