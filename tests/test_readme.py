"""The README is true: its examples run, its tree is that of the code, and so are the options.

`python tests/test_readme.py` writes the options in `pipelines/README.md` anew.
"""

import os
import re
import shlex
import subprocess
import sys
from dataclasses import MISSING, fields
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from conftest import COMMANDS  # noqa: E402

from rft_batch.cli import cli  # noqa: E402
from rft_batch.settings import option_name  # noqa: E402

README = ROOT / "README.md"
OPTIONS = ROOT / "pipelines" / "README.md"
PARTS = ("policies", "rewards", "settings")
START = "<!-- options: written by `python tests/test_readme.py`, checked by the tests -->"
END = "<!-- end of options -->"


def options_section() -> str:
    parts = []
    for command, settings in COMMANDS.items():
        lines = [f"\n**`rft-batch {command}`**\n", "| option | default | what |", "|---|---|---|"]
        for f in fields(settings):
            if f.metadata["argument"]:
                continue
            shown = "required" if f.default is MISSING else f"`{f.default}`"
            if f.default in (None, ()):
                shown = ""
            text = f.metadata["help"].replace("|", "\\|")
            lines.append(f"| `{option_name(f.name)}` | {shown} | {text} |")
        parts.append("\n".join(lines))
    return "\n".join(parts) + "\n"


def blocks() -> dict[str, str]:
    """Titled code blocks of the README, by title."""
    found = re.findall(r"```\w+ title=(\S+)\n(.*?)```", README.read_text(), flags=re.S)
    return dict(found)


def shell_lines() -> list[str]:
    text = "\n".join(re.findall(r"```sh[^\n]*\n(.*?)```", README.read_text(), flags=re.S))
    return [line for line in text.replace("\\\n", " ").splitlines() if line.strip()]


def test_the_options_are_those_of_the_code() -> None:
    written = OPTIONS.read_text().split(START)[1].split(END)[0]
    assert written == options_section(), "run python tests/test_readme.py"


def test_the_own_example_runs_and_improves(tmp_path: Path) -> None:
    for title, text in blocks().items():
        (tmp_path / title).write_text(text)
    environment = os.environ | {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        ["bash", "-e", "my_round.sh"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    means = [float(line.split()[2]) for line in lines if re.match(r" *(base|1) +\d+ ", line)]
    assert len(means) == 2
    assert means[1] > means[0] + 0.1


def test_the_library_example_runs(tmp_path: Path) -> None:
    for name in ("data", "pipelines"):
        (tmp_path / name).symlink_to(ROOT / name)
    done = subprocess.run(
        [sys.executable, "-c", blocks()["my_rounds.py"]],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("'selected': 100") == 2
    assert (tmp_path / "runs/library/round-2/policy/model.safetensors").is_file()


def test_every_command_line_is_one_that_exists(tmp_path: Path) -> None:
    lines = shell_lines()
    commands = [shlex.split(line) for line in lines if line.startswith("rft-batch")]
    targets = [shlex.split(line) for line in lines if line.startswith("make -C pipelines")]
    assert len(commands) >= 6
    assert len(targets) >= 6
    for _, name, *arguments in commands:
        command = cli.commands[name]
        context = command.context_class(command)
        command.make_parser(context).parse_args(list(arguments))
    for target in targets:
        dry = subprocess.run(
            [*target, "--dry-run", f"RUN={tmp_path}"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
        )
        assert dry.returncode == 0, dry.stderr


def test_the_tree_is_that_of_the_folder() -> None:
    tree = README.read_text().split("## Files of the project")[1].split("## Develop")[0]
    named = set(re.findall(r"\b(\w+\.(?:py|toml))\b", tree)) | set(
        re.findall(r"^ +(\w+)/", tree, re.M)
    )
    there = {
        path.name
        for folder in ("rft_batch", *(f"rft_batch/{name}" for name in PARTS), "pipelines")
        for path in (ROOT / folder).iterdir()
        if path.suffix in (".py", ".toml") or (path.is_dir() and path.name in PARTS)
    } - {"__init__.py", "__main__.py"}
    assert there <= named
    assert {name for name in named if name.endswith(".py")} <= there


def test_the_readme_is_short_enough_to_be_read() -> None:
    assert len(README.read_text().splitlines()) < 400


@pytest.mark.parametrize("path", re.findall(r"!\[[^\]]*\]\(([^)]+)\)", README.read_text()))
def test_pictures_are_there(path: str) -> None:
    assert (ROOT / path).read_bytes().startswith(b"\x89PNG")


if __name__ == "__main__":
    before, rest = OPTIONS.read_text().split(START)
    OPTIONS.write_text(before + START + options_section() + END + rest.split(END)[1])
