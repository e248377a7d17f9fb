from pathlib import Path

from rft_batch.metrics import append_metrics, read_metrics


def test_the_last_record_of_a_step_counts(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    for attempt, step in [(1, 1), (1, 2), (1, 3), (2, 2), (2, 3)]:
        append_metrics(path, {"attempt": attempt, "step": step})
    assert len(path.read_text().splitlines()) == 5
    assert read_metrics(path) == [
        {"attempt": 1, "step": 1},
        {"attempt": 2, "step": 2},
        {"attempt": 2, "step": 3},
    ]


def test_a_line_cut_short_is_lost_alone(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    append_metrics(path, {"step": 1})
    with path.open("a") as stream:
        stream.write('{"step": 2, "lo')
    append_metrics(path, {"step": 3})
    assert read_metrics(path) == [{"step": 1}, {"step": 3}]
