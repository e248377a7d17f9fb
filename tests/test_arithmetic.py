"""The data of the arithmetic pipeline: its prompts, its tokenizer, its policy."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import ROOT

from rft_batch.prompts import Prompt, read_prompts
from rft_batch.reporting import read_rounds

transformers = pytest.importorskip("transformers")

DATA = ROOT / "data" / "arithmetic"


def sums(name: str) -> list[Prompt]:
    return read_prompts(DATA / name, "prompt_id", "prompt")


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return transformers.AutoTokenizer.from_pretrained(DATA / "policy", local_files_only=True)


@pytest.fixture(scope="module")
def model() -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(DATA / "policy", local_files_only=True)


def test_training_and_held_out_prompts_do_not_overlap() -> None:
    train, held_out = sums("prompts.jsonl"), sums("held_out.jsonl")
    assert (len(train), len(held_out)) == (1024, 200)
    assert len({p.content for p in train + held_out}) == 1224
    assert len({p.prompt_id for p in train + held_out}) == 1224


@pytest.mark.parametrize("name", ["prompts.jsonl", "held_out.jsonl"])
def test_every_answer_is_right(name: str) -> None:
    for prompt in sums(name):
        a, sign, b = (
            prompt.content.removesuffix("=").replace("-", " - ").replace("+", " + ").split()
        )
        right = int(a) + int(b) if sign == "+" else int(a) - int(b)
        assert prompt.columns["answer"] == str(right)


def test_the_tokenizer_gives_every_character_one_token_and_gets_the_text_back(
    tokenizer: Any,
) -> None:
    text = "0123+456-789="
    ids = tokenizer(text)["input_ids"]
    assert len(ids) == 1 + len(text)
    assert ids[0] == tokenizer.bos_token_id
    assert tokenizer.decode(ids, skip_special_tokens=True) == text
    assert tokenizer.decode(tokenizer("7<eos>")["input_ids"]) == "<bos>7<eos>"
    assert len({tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id}) == 3


def test_the_policy_is_a_small_llama_with_tied_embeddings(model: Any, tokenizer: Any) -> None:
    assert sum(p.numel() for p in model.parameters()) == 991_616
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    assert model.dtype == torch.float32
    for config in (model.config, model.generation_config):
        assert config.eos_token_id == tokenizer.eos_token_id
        assert config.pad_token_id == tokenizer.pad_token_id
    assert (DATA / "policy" / "model.safetensors").stat().st_size < 4.5e6


def test_the_policy_is_often_wrong(model: Any, tokenizer: Any) -> None:
    torch.manual_seed(0)
    held_out = sums("held_out.jsonl")
    batch = tokenizer([p.content for p in held_out], return_tensors="pt", padding=True)
    ids = model.generate(**batch, do_sample=True, top_k=0, max_new_tokens=6)
    completions = tokenizer.batch_decode(
        ids[:, batch["input_ids"].shape[1] :], skip_special_tokens=True
    )
    right = [c == p.columns["answer"] for c, p in zip(completions, held_out, strict=True)]
    assert 0.25 < sum(right) / len(right) < 0.55


def test_the_chat_sums_are_right_and_do_not_overlap() -> None:
    seen = set()
    for name, count in (("prompts.jsonl", 96), ("held_out.jsonl", 64)):
        lines = (ROOT / "data" / "smollm2" / name).read_text().splitlines()
        assert len(lines) == count
        for row in map(json.loads, lines):
            (message,) = row["prompt"]
            assert message["role"] == "user"
            words = message["content"].replace("?", "").split()
            assert row["answer"] == str(int(words[2]) + int(words[4]))
            seen.add(frozenset((words[2], words[4])))
    assert len(seen) == 160


@pytest.mark.slow
def test_three_rounds_improve_the_policy_and_the_control_does_not(tmp_path: Path) -> None:
    means = {}
    for select in ("best", "random"):
        subprocess.run(
            [
                "make", "-C", str(ROOT / "pipelines"), "rounds", "PIPELINE=arithmetic",
                f"SELECT={select}", f"RUN={tmp_path / select}",
                f"VENV={sys.prefix}", f"INSTALLED={sys.prefix}",
            ],
            check=True,
        )  # fmt: skip
        means[select] = [figures.mean for figures in read_rounds(tmp_path / select)]
    assert means["best"][3] > means["best"][0] + 0.25
    assert means["random"][3] < means["random"][0] + 0.02
