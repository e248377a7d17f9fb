import builtins
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from conftest import save_tiny_policy

from rft_batch import reporting
from rft_batch.errors import DataError
from rft_batch.finetuning import finetune
from rft_batch.generation import generate
from rft_batch.policies.token_model import Display
from rft_batch.reporting import read_rounds, report
from rft_batch.selection import select
from rft_batch.settings import (
    FinetuneSettings,
    GenerateSettings,
    ReportSettings,
    SelectSettings,
)


@pytest.fixture
def run_dir(settings: GenerateSettings) -> Path:
    """A base evaluation and one round."""
    run_dir = settings.round_dir.parent
    save_tiny_policy(settings.policy, display=Display(height=2, width=3, levels=7))
    generate(replace(settings, round_dir=run_dir / "round-0", into="eval"))
    generate(settings)
    select(SelectSettings(round_dir=settings.round_dir, top_k=1))
    finetune(FinetuneSettings(round_dir=settings.round_dir, policy=settings.policy, epochs=1))
    policy = settings.round_dir / "policy"
    generate(replace(settings, policy=policy, into="eval"))
    return run_dir


def test_figures_are_those_of_the_samples(run_dir: Path) -> None:
    base, first = read_rounds(run_dir)

    rows = [
        row
        for path in sorted((run_dir / "round-1" / "eval").glob("shard-*.parquet"))
        for row in pq.read_table(path).to_pylist()
    ]
    scores = [row["score"] for row in rows]
    assert (base.round, first.round) == (0, 1)
    assert first.samples == 28
    assert first.mean == pytest.approx(sum(scores) / 28)
    best = [max(r["score"] for r in rows if r["prompt_id"] == f"p{i}") for i in range(7)]
    assert first.best_of_k == pytest.approx(sum(best) / 7)
    assert first.distinct == len({tuple(row["completion_ids"]) for row in rows}) / 28
    means = [sum(r["score"] for r in rows if r["prompt_id"] == f"p{i}") / 4 for i in range(7)]
    spread = sum((m - sum(means) / 7) ** 2 for m in means) / 6
    assert first.standard_error == pytest.approx((spread / 7) ** 0.5)
    assert (base.trained_on, first.trained_on) == (None, 7)
    assert first.train_loss > 0
    assert first.q10 <= first.q50 <= first.q90


def test_table_page_pictures_and_parquet_are_written(run_dir: Path) -> None:
    text = report(ReportSettings(run_dir=run_dir))

    folder = run_dir / "report"
    assert {path.name for path in folder.iterdir()} == {
        "index.html",
        "reward.png",
        "rounds.parquet",
        "samples.png",
    }
    lines = text.splitlines()
    assert lines[0] == "run"
    assert lines[1].split()[:4] == ["round", "n", "mean", "±se"]
    assert [line.split()[0] for line in lines[2:4]] == ["base", "1"]
    assert lines[-1] == f"Report: {folder / 'index.html'}"
    for name in ("reward.png", "samples.png"):
        assert (folder / name).read_bytes().startswith(b"\x89PNG")
    table = pq.read_table(folder / "rounds.parquet").to_pylist()
    assert [row["round"] for row in table] == [0, 1]
    page = (folder / "index.html").read_text()
    assert page.count("data:image/png;base64,") == 2
    assert "http" not in page.replace("http-equiv", "")


def test_a_control_is_shown_beside_the_run(run_dir: Path) -> None:
    (run_dir.parent / "control").mkdir()
    (run_dir / "round-0").rename(run_dir.parent / "control" / "round-0")
    text = report(ReportSettings(run_dir=run_dir, control=run_dir.parent / "control"))
    assert [line for line in text.splitlines() if line in ("run", "control")] == ["run", "control"]
    table = pq.read_table(run_dir / "report" / "rounds.parquet").to_pylist()
    assert [(row["run"], row["round"]) for row in table] == [("run", 1), ("control", 0)]


def test_a_run_without_an_evaluation_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no round has been evaluated"):
        report(ReportSettings(run_dir=tmp_path))


def test_names_are_text_and_not_markup(run_dir: Path) -> None:
    hostile = run_dir.parent / "<script>alert(1)</script>".replace("/", "_")
    run_dir.rename(hostile)
    report(ReportSettings(run_dir=hostile))
    page = (hostile / "report" / "index.html").read_text()
    assert "<script" not in page
    assert "&lt;script&gt;" in page


def test_without_matplotlib_there_are_no_pictures_and_a_hint(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    original: Callable[..., Any] = builtins.__import__

    def refuse(name: str, *args: Any, **kwargs: Any) -> Any:
        assert not name.startswith("matplotlib")
        return original(name, *args, **kwargs)

    monkeypatch.setattr(reporting, "has_matplotlib", lambda: False)
    monkeypatch.setattr(builtins, "__import__", refuse)
    report(ReportSettings(run_dir=run_dir))
    assert 'pip install "rft-batch[report]"' in capsys.readouterr().err
    assert not list((run_dir / "report").glob("*.png"))


def test_unscored_samples_are_left_out_of_the_means(
    settings: GenerateSettings, reward_file: Callable[[str], str]
) -> None:
    reference = reward_file("return [None if level == 2 else 0.5 for level in columns['level']]")
    folder = settings.round_dir.parent / "round-0"
    generate(
        replace(settings, round_dir=folder, into="eval", reward=(reference,), max_error_rate=1.0)
    )
    (figures,) = read_rounds(folder.parent)
    assert (figures.mean, figures.samples, figures.best_of_k) == (0.5, 28, 0.5)
    manifest = json.loads((folder / "eval" / "manifest.json").read_text())
    assert manifest["counts"]["unscored"] == 4
