"""All rounds of a run as a table, pictures and a page.

    rft-batch report runs/digits --control runs/digits-random

Reads the evaluation of every round (`round-0/eval` is the base policy) and, where it is there, the
manifest of its training. Writes `index.html`, `rounds.parquet` and the pictures.
"""

import base64
import html
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from rft_batch.drawing import draw_rewards, draw_samples, has_matplotlib
from rft_batch.errors import DataError
from rft_batch.files import publish, publish_text
from rft_batch.progress import say
from rft_batch.settings import ReportSettings
from rft_batch.shards import manifest_shards, read_columns, read_manifest
from rft_batch.tables import columns_table, figure

_ROUND = re.compile(r"round-(\d+)")
_STYLE = """
:root { color-scheme: light dark }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem }
div { overflow-x: auto }
table { border-collapse: collapse; font-variant-numeric: tabular-nums }
th, td { padding: .3rem .7rem; text-align: right; border-bottom: 1px solid #8886 }
img { max-width: 100%; background: white; border-radius: .5rem }
"""


@dataclass(frozen=True)
class RoundFigures:
    """What is known of one round's policy on the held-out prompts."""

    round: int
    samples: int
    mean: float
    standard_error: float
    """Of the mean, over prompts."""
    q10: float
    q50: float
    q90: float
    best_of_k: float
    """Mean over prompts of the best of their samples."""
    distinct: float
    """Distinct completions among all."""
    own_loss: float | None
    """Nats per token of the policy on its own samples."""
    anchor_loss: float | None
    """Nats per token of the policy on the anchor."""
    trained_on: int | None
    """Rows that the policy was fine-tuned on."""
    train_loss: float | None
    """Mean loss of the last epoch."""


def report(settings: ReportSettings) -> str:
    """Writes the report of a run.

    Args:
        settings: see `ReportSettings`.

    Returns:
        The table as text.

    Raises:
        DataError: no round has been evaluated, or a file is damaged.
    """
    folder = settings.run_dir / settings.into
    rounds = read_rounds(settings.run_dir)
    runs = {settings.run_dir.name: rounds}
    if settings.control:
        runs[settings.control.name] = read_rounds(settings.control)
    table = pa.table(
        {
            "run": [name for name, figures in runs.items() for _ in figures],
            **_columns([figures for listed in runs.values() for figures in listed]),
        }
    )
    publish(folder / "rounds.parquet", lambda temporary: pq.write_table(table, temporary))
    pictures = []
    if has_matplotlib():
        pictures.append(folder / "reward.png")
        publish(pictures[0], lambda temporary: draw_rewards(temporary, _curves(runs)))
        titles, images = _images(settings.run_dir, [figures.round for figures in rounds])
        if images:
            pictures.append(folder / "samples.png")
            publish(pictures[1], lambda temporary: draw_samples(temporary, images, titles))
    else:
        say('No pictures: matplotlib is not installed. pip install "rft-batch[report]"')
    publish_text(folder / "index.html", _page(settings.run_dir.name, runs, pictures))
    texts = [f"{name}\n{columns_table(_HEADS, _cells(figures))}" for name, figures in runs.items()]
    return "\n\n".join([*texts, f"Report: {folder / 'index.html'}"])


def read_rounds(run_dir: Path) -> list[RoundFigures]:
    """The figures of every evaluated round, by number.

    Raises:
        DataError: there is none, or a file is damaged.
    """
    numbers = sorted(
        int(match.group(1))
        for path in run_dir.glob("round-*/eval/manifest.json")
        if (match := _ROUND.fullmatch(path.parent.parent.name))
    )
    if not numbers:
        raise DataError(
            f"{run_dir}: no round has been evaluated. "
            "Run rft-batch generate with held-out prompts and --into eval."
        )
    return [_round_figures(run_dir / f"round-{number}", number) for number in numbers]


def _round_figures(round_dir: Path, number: int) -> RoundFigures:
    folder = round_dir / "eval"
    manifest = read_manifest(folder, f"rft-batch generate {round_dir} --into eval")
    table = pa.concat_tables(
        read_columns(path, ["prompt_id", "rank", "score", "completion_ids"])
        for path in manifest_shards(folder, manifest)
    )
    completions = {np.asarray(ids).tobytes() for ids in table["completion_ids"].to_pylist()}
    scored = table.filter(table["score"].is_valid())
    if not len(scored):
        raise DataError(f"{folder}: none of its {len(table)} samples has a score.")
    score = scored["score"].to_numpy().astype(np.float64)
    of_prompt = scored.group_by("prompt_id").aggregate([("score", "mean")])["score_mean"].to_numpy()
    q10, q50, q90 = np.quantile(score, [0.1, 0.5, 0.9])
    training = _optional(round_dir / "training")
    return RoundFigures(
        round=number,
        samples=len(table),
        mean=float(score.mean()),
        standard_error=float(of_prompt.std(ddof=1) / np.sqrt(len(of_prompt)))
        if len(of_prompt) > 1
        else 0.0,
        q10=float(q10),
        q50=float(q50),
        q90=float(q90),
        best_of_k=float(score[scored["rank"].to_numpy() == 0].mean()),
        distinct=len(completions) / len(table),
        own_loss=manifest["own_loss"],
        anchor_loss=manifest["anchor_loss"],
        trained_on=training["counts"]["rows"] if training else None,
        train_loss=training["last_epoch_loss"] if training else None,
    )


def _optional(folder: Path) -> dict[str, Any] | None:
    return read_manifest(folder, "") if (folder / "manifest.json").exists() else None


def _columns(rounds: Sequence[RoundFigures]) -> dict[str, list[Any]]:
    listed = [asdict(figures) for figures in rounds]
    return {f.name: [row[f.name] for row in listed] for f in fields(RoundFigures)}


_HEADS = (
    "round",
    "n",
    "mean",
    "±se",
    "q10",
    "q50",
    "q90",
    "best of K",
    "distinct",
    "own loss",
    "anchor loss",
    "trained on",
    "train loss",
)


def _cells(rounds: Sequence[RoundFigures]) -> list[list[Any]]:
    return [
        ["base" if figures.round == 0 else str(figures.round), *list(asdict(figures).values())[1:]]
        for figures in rounds
    ]


def _curves(
    runs: dict[str, list[RoundFigures]],
) -> dict[str, tuple[list[int], list[float], list[float]]]:
    return {
        name: (
            [figures.round for figures in rounds],
            [figures.mean for figures in rounds],
            [1.96 * figures.standard_error for figures in rounds],
        )
        for name, rounds in runs.items()
    }


def _images(
    run_dir: Path, numbers: Sequence[int], shown: int = 20
) -> tuple[list[str], dict[str, Any]]:
    """The first prompts, and of every round sample 0 of each as `[shown, height, width]`.

    Empty where the policy's completions are not pictures.
    """
    prompts: list[str] = []
    images = {}
    for number in numbers:
        folder = run_dir / f"round-{number}" / "eval"
        manifest = read_manifest(folder, "")
        display = manifest["policy"].get("display")
        if not display:
            return [], {}
        wanted: list[dict[str, Any]] = []
        for path in manifest_shards(folder, manifest):
            table = read_columns(path, ["prompt_id", "sample_index", "prompt", "completion_ids"])
            rows = [row for row in table.to_pylist() if row["sample_index"] == 0]
            wanted += sorted(rows, key=itemgetter("prompt_id"))
            if len(wanted) >= shown:
                break
        prompts = [row["prompt"] for row in wanted[:shown]]
        grid = np.array([row["completion_ids"] for row in wanted[:shown]])
        grid = grid.reshape(-1, display["height"], display["width"])
        images["base" if number == 0 else f"round {number}"] = grid / (display["levels"] - 1)
    return prompts, images


def _page(title: str, runs: dict[str, list[RoundFigures]], pictures: Sequence[Path]) -> str:
    """One self-contained HTML page."""
    tables = "".join(
        f"<h2>{html.escape(name)}</h2><div><table><tr>{_html_row('th', _HEADS)}</tr>"
        + "".join(f"<tr>{_html_row('td', row)}</tr>" for row in _cells(rounds))
        + "</table></div>"
        for name, rounds in runs.items()
    )
    drawn = "".join(
        f'<p><img alt="{html.escape(path.stem)}" src="data:image/png;base64,'
        f'{base64.b64encode(path.read_bytes()).decode()}"></p>'
        for path in pictures
    )
    name = html.escape(title)
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{name}</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<style>{_STYLE}</style><h1>{name}</h1>"
        "<p>Rewards of samples from held-out prompts; losses in nats per token. An own loss far "
        "below the anchor loss means that the samples are not what the policy believes.</p>"
        f"{tables}{drawn}</html>\n"
    )


def _html_row(tag: str, cells: Sequence[Any]) -> str:
    return "".join(f"<{tag}>{html.escape(figure(cell))}</{tag}>" for cell in cells)
