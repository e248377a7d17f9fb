"""Makes `data/arithmetic`: sums as prompts, and a small language model that often gets them wrong.

    python pipelines/make_arithmetic.py

The model reads and writes single characters. Its pretraining on other sums stops early on purpose,
so that rejection fine-tuning has something to improve.
"""

import json
import random
import shutil
import sys
from pathlib import Path

import click
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

SEED = 0
LARGEST = 99
NUM_TRAIN, NUM_HELD_OUT = 1024, 200
SPECIAL = ("<pad>", "<bos>", "<eos>")
CHARACTERS = "0123456789+-="


@click.command(help=__doc__)
@click.option("--steps", default=480, help="Optimizer steps of the pretraining.")
@click.option("--batch-size", default=256, help="Sums per step.")
@click.option("--learning-rate", default=1e-3)
@click.option(
    "--folder",
    default=Path(__file__).resolve().parent.parent / "data" / "arithmetic",
    type=click.Path(file_okay=False, path_type=Path),
)
def main(steps: int, batch_size: int, learning_rate: float, folder: Path) -> None:
    """Writes every file of the folder."""
    # The order in which numbers are added up, and so their last bits, follows the threads.
    torch.set_num_threads(1)
    draw = random.Random(SEED)
    sums = distinct_sums(draw, NUM_TRAIN + NUM_HELD_OUT)
    train, held_out = sums[:NUM_TRAIN], sums[NUM_TRAIN:]
    folder.mkdir(parents=True, exist_ok=True)
    write_prompts(folder / "prompts.jsonl", "train", train)
    write_prompts(folder / "held_out.jsonl", "held-out", held_out)
    tokenizer = character_tokenizer()
    model = new_model(tokenizer)
    pretrain(model, tokenizer, draw, set(sums), steps, batch_size, learning_rate)
    save(folder / "policy", model)
    print(f"policy: {accuracy(model, tokenizer, held_out):.3f} of 800 samples right")


def new_sum(draw: random.Random) -> str:
    """An addition, or a subtraction whose result is not negative, up to its equals sign."""
    a, b = draw.randint(0, LARGEST), draw.randint(0, LARGEST)
    return f"{a}+{b}=" if draw.random() < 0.5 else f"{max(a, b)}-{min(a, b)}="


def answer(prompt: str) -> str:
    """The right completion of a sum."""
    sign = "+" if "+" in prompt else "-"
    a, b = (int(part) for part in prompt[:-1].split(sign))
    return str(a + b if sign == "+" else a - b)


def distinct_sums(draw: random.Random, count: int) -> list[str]:
    """So many sums, each once, in the order in which they were drawn."""
    found: dict[str, None] = {}
    while len(found) < count:
        found[new_sum(draw)] = None
    return list(found)


def write_prompts(path: Path, prefix: str, sums: list[str]) -> None:
    """One row per sum: its id, its text, and the right answer for the reward."""
    rows = [
        {"prompt_id": f"{prefix}-{i:04}", "prompt": text, "answer": answer(text)}
        for i, text in enumerate(sums)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def character_tokenizer() -> PreTrainedTokenizerFast:
    """One token per character, `<bos>` before every text, and no spaces when it is decoded."""
    vocabulary = {token: i for i, token in enumerate([*SPECIAL, *CHARACTERS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.post_processor = processors.TemplateProcessing(
        "<bos> $A", special_tokens=[("<bos>", vocabulary["<bos>"])]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        padding_side="left",
        clean_up_tokenization_spaces=False,
        model_input_names=["input_ids", "attention_mask"],
        model_max_length=32,
    )


def new_model(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """A Llama of 991,616 random weights; the output layer shares those of the input."""
    torch.manual_seed(SEED)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=128,
            intermediate_size=344,
            num_hidden_layers=5,
            num_attention_heads=4,
            max_position_embeddings=32,
            tie_word_embeddings=True,
            pad_token_id=tokenizer.pad_token_id,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
        )
    )


def pretrain(
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    draw: random.Random,
    taken: set[str],
    steps: int,
    batch_size: int,
    learning_rate: float,
) -> None:
    """Trains on fresh sums that are no prompts, with the loss of the answers alone."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, weight_decay=0.01)
    for step in range(steps):
        sums: list[str] = []
        while len(sums) < batch_size:
            text = new_sum(draw)
            if text not in taken:
                sums.append(text)
        whole = [f"{text}{answer(text)}<eos>" for text in sums]
        batch = tokenizer(whole, return_tensors="pt", padding=True, padding_side="right")
        labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
        for row, text in zip(labels, sums, strict=True):
            row[: 1 + len(text)] = -100
        for group in optimizer.param_groups:
            group["lr"] = learning_rate * min(1.0, (step + 1) / 50)
        loss = model(**batch, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if (step + 1) % 20 == 0:
            print(f"step {step + 1}/{steps}: loss {loss.item():.3f}", file=sys.stderr)
    model.eval()


def save(folder: Path, model: LlamaForCausalLM) -> None:
    """Writes the policy's folder, or replaces it, as a whole."""
    unfinished = folder.with_name(folder.name + ".tmp")
    shutil.rmtree(unfinished, ignore_errors=True)
    # A new one: one that was used would save how it padded last.
    character_tokenizer().save_pretrained(unfinished)
    model.save_pretrained(unfinished)
    shutil.rmtree(folder, ignore_errors=True)
    unfinished.rename(folder)


def accuracy(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, sums: list[str]) -> float:
    """Share of right answers among four samples of each sum at temperature 1."""
    torch.manual_seed(SEED)
    texts = [text for text in sums for _ in range(4)]
    batch = tokenizer(texts, return_tensors="pt", padding=True)
    ids = model.generate(**batch, do_sample=True, top_k=0, max_new_tokens=6)
    completions = tokenizer.batch_decode(
        ids[:, batch["input_ids"].shape[1] :], skip_special_tokens=True
    )
    right = [c == answer(text) for c, text in zip(completions, texts, strict=True)]
    return sum(right) / len(right)


if __name__ == "__main__":
    main()
