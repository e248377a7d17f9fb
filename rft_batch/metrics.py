"""`metrics.jsonl`: one line for each optimizer step, appended as it happens.

A run that was stopped repeats the steps after its last checkpoint under a higher `attempt`; the
reader takes a step's last line.
"""

import json
from pathlib import Path
from typing import Any


def append_metrics(path: Path, figures: dict[str, Any]) -> None:
    """Adds a line. A line that a kill cut short is ended first, so that only that one is lost."""
    with path.open("a+b") as stream:
        if stream.tell() > 0:
            stream.seek(-1, 2)
            if stream.read(1) != b"\n":
                stream.write(b"\n")
        stream.write(json.dumps(figures).encode() + b"\n")


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The last record of every step, by step; lines that are not whole are left out."""
    steps: dict[int, dict[str, Any]] = {}
    for line in path.read_bytes().split(b"\n"):
        try:
            figures = json.loads(line)
        except ValueError:
            continue
        steps[figures["step"]] = figures
    return [steps[step] for step in sorted(steps)]
