"""Original data beside what the policy wrote: its loss is recorded, or it is trained on.

The rows are prompts with a completion: column `completion` (text) for a language model,
`completion_ids` for a token generator.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from rft_batch.errors import InputError
from rft_batch.policies import Policy
from rft_batch.prompts import prompts_digest, read_prompts
from rft_batch.selected_rows import SCHEMA

if TYPE_CHECKING:
    from datasets import Dataset

_NUMBER = -1
"""Stands for sample index and round number, which original data has none of."""


def anchor_digest(path: Path) -> str:
    """Digest of what the rows of a file say.

    Raises:
        InputError: as `prompts.read_prompts`.
    """
    return prompts_digest(read_prompts(path, "prompt_id", "prompt"))


def anchor_rows(
    path: Path,
    policy: Policy,
    options: Mapping[str, Any],
    id_column: str = "prompt_id",
    prompt_column: str = "prompt",
) -> list[dict[str, Any]]:
    """The rows of a file as `Policy.collate` takes them.

    Args:
        path: a `.jsonl` or `.parquet` file with ids, prompts and completions.
        policy: encodes them.
        options: for `Policy.encode_row`.
        id_column: column of the ids.
        prompt_column: column of the prompts.

    Raises:
        InputError: the file or a row cannot be read, or a row has no completion.
    """
    rows = []
    for prompt in read_prompts(path, id_column, prompt_column):
        try:
            row = policy.encode_row(prompt.content, prompt.columns, **options)
        except InputError as error:
            raise InputError(f"--anchor {prompt.where}: {error}.") from error
        rows.append({"prompt_id": prompt.prompt_id, "prompt": prompt.text, **row})
    return rows


def with_anchor(selected: "Dataset", path: Path, policy: Policy) -> "Dataset":
    """Selected rows and after them the original ones.

    Args:
        selected: from `selected_rows.load_selected`.
        path: as of `anchor_rows`.
        policy: encodes them.

    Raises:
        InputError: as `anchor_rows`.
    """
    from datasets import Dataset, concatenate_datasets
    from datasets.table import InMemoryTable

    filled: dict[str, Any] = {
        "sample_index": _NUMBER,
        "round_number": _NUMBER,
        "score": None,
        "prompt_ids": [],
    }
    rows = [filled | row for row in anchor_rows(path, policy, {})]
    table = pa.Table.from_pylist(rows, schema=SCHEMA.remove_metadata())
    return concatenate_datasets([selected, Dataset(InMemoryTable(table))])
