from typing import Any

import pytest

from rft_batch import progress
from rft_batch.progress import Progress, say
from rft_batch.tables import columns_table, figures_table


def test_lines_come_now_and_then_where_there_is_no_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    clock = iter([0.0, 4.0, 11.0, 11.0, 12.0])
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(clock))
    with Progress(100, "samples", done=10) as bar:
        bar.advance(5)
        bar.show(score=0.51234)
        bar.advance(5)
        bar.advance(5)
    assert capsys.readouterr().err == "20 of 100 samples, score 0.512\n"


def test_only_one_process_speaks(capsys: Any) -> None:
    say("a", speaks=False)
    say("b")
    with Progress(3, "steps", speaks=False) as bar:
        bar.advance(3)
    assert capsys.readouterr().err == "b\n"


def test_figures_are_aligned() -> None:
    assert figures_table({"long_name": 1234, "b": 0.5, "c": None}).splitlines() == [
        "  long name  1,234",
        "  b          0.500",
        "  c              -",
    ]
    assert columns_table(["a", "bbb"], [[1, 2.0], ["x", None]]).splitlines() == [
        "a    bbb",
        "1  2.000",
        "x      -",
    ]
