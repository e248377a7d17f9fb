from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from conftest import write_jsonl
from language_models import EOS, lm_settings, record_training, save_tiny_lm

from rft_batch.anchors import with_anchor
from rft_batch.errors import InputError
from rft_batch.finetuning import finetune
from rft_batch.generation import generate
from rft_batch.policies import load_policy
from rft_batch.selected_rows import COLUMNS, load_selected
from rft_batch.selection import select
from rft_batch.settings import FinetuneSettings, SelectSettings

GOLD = [
    {"prompt_id": "gold", "prompt": "what is 2", "completion": "2"},
    {"prompt_id": "chat", "prompt": [{"role": "user", "content": "x"}], "completion": "yz"},
]


@pytest.fixture
def training(tmp_path: Path) -> FinetuneSettings:
    """Four selected rows of a language model, and two original ones."""
    policy = save_tiny_lm(tmp_path / "lm")
    settings = lm_settings(tmp_path, policy, ["a", "bcd"])
    generate(settings)
    select(SelectSettings(round_dir=settings.round_dir, keep_truncated=True))
    anchor = write_jsonl(tmp_path / "anchor.jsonl", GOLD)
    return FinetuneSettings(
        round_dir=settings.round_dir, policy=policy, anchor=anchor, epochs=2, batch_size=4
    )


def test_every_row_selected_or_original_is_trained_on_once_per_epoch(
    training: FinetuneSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = record_training(monkeypatch)
    counts = finetune(training)["counts"]
    assert (counts["rows"], counts["anchor_rows"], counts["repeats_left_out"]) == (6, 2, 0)
    assert counts["steps"] == 4
    for epoch in (seen[:6], seen[6:]):
        assert len({tuple(ids) for ids, _ in epoch}) == 6
    policy: Any = load_policy(training.policy)
    gold = policy.encode_prompt("what is 2"), policy.tokenizer("2")["input_ids"]
    (labels,) = [labels for ids, labels in seen[:6] if ids == [*gold[0], *gold[1], EOS]]
    assert labels == [-100] * len(gold[0]) + [*gold[1], EOS]


def test_original_rows_have_the_columns_of_the_selected_ones(training: FinetuneSettings) -> None:
    selected = load_selected([training.round_dir], "selection", training.round_dir / "cache")
    assert training.anchor is not None
    rows = with_anchor(selected, training.anchor, load_policy(training.policy))
    assert rows.column_names == COLUMNS
    assert rows.features == selected.features
    assert rows[:4] == selected[:]
    assert rows[4]["prompt_id"] == "gold"
    assert rows[4]["score"] is None


def test_token_generators_have_original_rows_too(selected: Path, settings: Any) -> None:
    rows = [{"prompt_id": "real", "prompt": 1, "completion_ids": [1, 2, 3, 4, 5, 6]}]
    anchor = write_jsonl(selected / "anchor.jsonl", rows)
    counts = finetune(
        FinetuneSettings(round_dir=selected, policy=settings.policy, anchor=anchor, epochs=1)
    )["counts"]
    assert (counts["rows"], counts["anchor_rows"]) == (15, 1)


def test_other_original_rows_are_another_training(training: FinetuneSettings) -> None:
    finetune(training)
    assert training.anchor is not None
    write_jsonl(training.anchor, GOLD[:1])
    with pytest.raises(InputError, match="made with other settings:\n  anchor: recorded "):
        finetune(training)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt_id": "a", "prompt": "b"}, 'line 1: column "completion" with text is missing.'),
        ({"prompt_id": "a", "completion": "b"}, 'line 1: column "prompt" is missing '),
        ({"prompt_id": "a", "prompt": 3, "completion": "b"}, "line 1: expected text or a list of"),
    ],
)
def test_rows_that_cannot_be_trained_on_are_named(
    training: FinetuneSettings, tmp_path: Path, row: dict[str, Any], message: str
) -> None:
    anchor = write_jsonl(tmp_path / "wrong.jsonl", [row])
    with pytest.raises(InputError) as error:
        finetune(replace(training, anchor=anchor))
    assert f"{anchor} {message}" in str(error.value)
    assert not (training.round_dir / "policy").exists()
