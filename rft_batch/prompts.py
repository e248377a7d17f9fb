"""Prompt files, read whole and refused before any work when a row is wrong."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from rft_batch.errors import InputError, joined_problems
from rft_batch.files import text_digest


@dataclass(frozen=True)
class Prompt:
    """One record to complete."""

    prompt_id: str
    content: Any
    """Text, a class label, chat messages, or an object with known tokens."""
    columns: dict[str, Any]
    """The other columns of its row, which the rewards receive."""
    where: str
    """File and row, for errors."""

    @property
    def text(self) -> str:
        """What stands in the column `prompt` of a sample shard: text as it is, else its JSON."""
        if isinstance(self.content, str):
            return self.content
        return json.dumps(self.content, ensure_ascii=False, sort_keys=True)


def prompts_digest(prompts: Sequence[Prompt]) -> str:
    """Digest of what the prompts say, whatever the file's name, kind and time."""
    plain = [[prompt.prompt_id, prompt.content, prompt.columns] for prompt in prompts]
    return text_digest(json.dumps(plain, sort_keys=True, default=str))


def read_prompts(path: Path, id_column: str, prompt_column: str) -> list[Prompt]:
    """All prompts of a JSONL or Parquet file, in its order.

    Args:
        path: a file ending in `.jsonl` or `.parquet`.
        id_column: column of the ids, text or whole numbers, each once.
        prompt_column: column of the contents.

    Raises:
        InputError: the file is missing, empty or of another kind, a row cannot be read, a column
            is missing, or an id is repeated. The first ten faults are named, with file and row.
    """
    prompts: list[Prompt] = []
    first_seen: dict[str, str] = {}
    problems: list[str] = []
    for where, row in _rows(path, problems):
        missing = [column for column in (id_column, prompt_column) if column not in row]
        if missing:
            option = "--id-column" if missing[0] == id_column else "--prompt-column"
            problems.append(
                f'{where}: column "{missing[0]}" is missing (found: {", ".join(row) or "none"}). '
                f"Rename it, or pass {option}."
            )
            continue
        prompt_id, content = row[id_column], row[prompt_column]
        if type(prompt_id) not in (str, int) or prompt_id == "":
            problems.append(f'{where}: the id in column "{id_column}" is {prompt_id!r}, not text.')
            continue
        prompt_id = str(prompt_id)
        if prompt_id in first_seen:
            problems.append(
                f'{where}: prompt id "{prompt_id}" stands at {first_seen[prompt_id]} already. '
                "Ids must be unique."
            )
            continue
        first_seen[prompt_id] = where.removeprefix(f"{path} ")
        others = {k: v for k, v in row.items() if k not in (id_column, prompt_column)}
        prompts.append(Prompt(prompt_id, content, others, where))
    if problems:
        raise InputError(joined_problems(problems))
    if not prompts:
        raise InputError(f"{path}: there are no prompts in it.")
    return prompts


def _rows(path: Path, problems: list[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    if not path.is_file():
        raise InputError(f"{path}: there is no such file. Pass one with --prompts.")
    if path.suffix == ".parquet":
        yield from _parquet_rows(path)
    elif path.suffix == ".jsonl":
        yield from _jsonl_rows(path, problems)
    else:
        raise InputError(
            f'{path}: "{path.suffix}" is not a kind of prompt file (.jsonl, .parquet).'
        )


def _parquet_rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    try:
        rows = pq.read_table(path).to_pylist()
    except (pa.ArrowException, OSError) as error:
        raise InputError(f"{path}: cannot be read as Parquet: {error}.") from error
    for number, row in enumerate(rows, start=1):
        yield f"{path} row {number}", row


def _jsonl_rows(path: Path, problems: list[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    # Split at LF bytes only: str.splitlines also cuts at U+2028 and others that JSON text may hold.
    lines = path.read_bytes().removeprefix(b"\xef\xbb\xbf").split(b"\n")
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        where = f"{path} line {number}"
        try:
            row = json.loads(line)
        except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
            problems.append(f"{where}: not JSON: {error}.")
            continue
        if not isinstance(row, dict):
            problems.append(f"{where}: expected an object, found {type(row).__name__}.")
            continue
        yield where, row
