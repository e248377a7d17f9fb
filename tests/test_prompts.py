import json
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from conftest import write_jsonl

from rft_batch.errors import InputError
from rft_batch.prompts import prompts_digest, read_prompts


def read(path: Path, id_column: str = "prompt_id", prompt_column: str = "prompt") -> Any:
    return read_prompts(path, id_column, prompt_column)


def refusal(path: Path) -> str:
    with pytest.raises(InputError) as error:
        read(path)
    return str(error.value)


def test_rows_keep_their_order_and_other_columns(tmp_path: Path) -> None:
    path = write_jsonl(
        tmp_path / "p.jsonl",
        [{"prompt_id": "b", "prompt": 3, "answer": "x"}, {"prompt_id": 7, "prompt": {"label": 1}}],
    )
    first, second = read(path)
    assert (first.prompt_id, first.content, first.columns) == ("b", 3, {"answer": "x"})
    assert (second.prompt_id, second.text) == ("7", '{"label": 1}')


def test_text_stands_as_it_is(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "p.jsonl", [{"prompt_id": "a", "prompt": "3"}])
    assert read(path)[0].text == "3"


def test_lines_end_at_line_feeds_alone(tmp_path: Path) -> None:
    texts = ["a\u2028b", "c\u2029d\u0085e", "f\r\tg\x0b\x1c", "\U0001f600"]
    lines = [
        json.dumps({"prompt_id": str(i), "prompt": text}, ensure_ascii=False)
        for i, text in enumerate(texts)
    ]
    path = tmp_path / "p.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + "\r\n".join(lines).encode())
    assert [prompt.content for prompt in read(path)] == texts


def test_parquet_of_polars_and_pyarrow_reads_alike(tmp_path: Path) -> None:
    columns = {"prompt_id": ["a", "b"], "prompt": ["x", "y"], "ids": [[1], [2, 3]]}
    pq.write_table(pa.table(columns), tmp_path / "arrow.parquet")
    pl.DataFrame(columns).write_parquet(tmp_path / "polars.parquet")
    one, other = read(tmp_path / "arrow.parquet"), read(tmp_path / "polars.parquet")
    assert prompts_digest(one) == prompts_digest(other)
    assert one[1].columns == {"ids": [2, 3]}


def test_other_column_names_can_be_given(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "p.jsonl", [{"id": "a", "question": "x"}])
    assert read(path, "id", "question")[0].content == "x"


def test_the_digest_is_of_the_content(tmp_path: Path) -> None:
    rows = [{"prompt_id": "a", "prompt": 1, "answer": 2}]
    one = prompts_digest(read(write_jsonl(tmp_path / "1.jsonl", rows)))
    same = prompts_digest(read(write_jsonl(tmp_path / "2.jsonl", rows)))
    rows[0]["answer"] = 3
    assert one == same != prompts_digest(read(write_jsonl(tmp_path / "3.jsonl", rows)))


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "none.jsonl"
    assert refusal(path) == f"{path}: there is no such file. Pass one with --prompts."


def test_an_empty_file_and_another_kind_are_refused(tmp_path: Path) -> None:
    empty, csv = tmp_path / "p.jsonl", tmp_path / "p.csv"
    empty.write_text("\n\n")
    csv.write_text("a")
    assert refusal(empty) == f"{empty}: there are no prompts in it."
    assert refusal(csv) == f'{csv}: ".csv" is not a kind of prompt file (.jsonl, .parquet).'


def test_every_fault_is_named_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text(
        '{"prompt_id": "a", "prompt": 1}\n'
        "not json\n"
        '{"prompt_id": "a", "prompt": 2}\n'
        '{"id": "c", "prompt": 3}\n'
        '{"prompt_id": "d", "question": 4}\n'
        "[1]\n"
        '{"prompt_id": null, "prompt": 5}\n'
    )
    assert refusal(path).splitlines() == [
        f"{path} line 2: not JSON: Expecting value: line 1 column 1 (char 0).",
        f'{path} line 3: prompt id "a" stands at line 1 already. Ids must be unique.',
        f'{path} line 4: column "prompt_id" is missing (found: id, prompt). '
        "Rename it, or pass --id-column.",
        f'{path} line 5: column "prompt" is missing (found: prompt_id, question). '
        "Rename it, or pass --prompt-column.",
        f"{path} line 6: expected an object, found list.",
        f'{path} line 7: the id in column "prompt_id" is None, not text.',
    ]


def test_only_the_first_ten_faults_are_shown(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text("x\n" * 13)
    assert refusal(path).splitlines()[-1] == "... and 3 more"


def test_a_broken_parquet_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "p.parquet"
    path.write_bytes(b"PAR1")
    assert refusal(path).startswith(f"{path}: cannot be read as Parquet: ")
