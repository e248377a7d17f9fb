"""Tiny real language models with a character tokenizer, made on the spot."""

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from tokenizers.processors import TemplateProcessing
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    LlamaConfig,
    PreTrainedTokenizerFast,
)

CHARACTERS = "abcdefghijklmnopqrstuvwxyz0123456789 .,+-=?:#<>/\n"
SPECIAL = ["<pad>", "<bos>", "<eos>", "<end>"]
PAD, BOS, EOS, END = range(4)
VOCAB_SIZE = len(SPECIAL) + len(CHARACTERS)
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ message['role'][0] }}:{{ message['content'] }}"
    "{% if message.name is defined %}({{ message.name }}){% endif %}"
    "<end>{% endfor %}{% if add_generation_prompt %}a:{% endif %}"
)


def make_tokenizer(adds_bos: bool = False, pad: str = "<pad>") -> PreTrainedTokenizerFast:
    """One token for each character; optionally with a begin that the tokenizer adds itself."""
    vocabulary = {token: i for i, token in enumerate([*SPECIAL, *CHARACTERS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    if adds_bos:
        tokenizer.post_processor = TemplateProcessing(
            single="<bos> $A", special_tokens=[("<bos>", BOS)]
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<bos>",
        eos_token="<eos>",
        pad_token=pad,
        additional_special_tokens=["<end>"],
        chat_template=TEMPLATE,
    )


def save_tiny_lm(
    folder: Path,
    kind: str = "llama",
    *,
    adds_bos: bool = False,
    pad: str = "<pad>",
    eos: Any = EOS,
    seed: int = 0,
    sharpness: float = 20.0,
    **changes: Any,
) -> Path:
    """A language model of two layers with random weights, sharp enough that prompts matter."""
    common = {"vocab_size": VOCAB_SIZE, "bos_token_id": BOS, "pad_token_id": PAD}
    if kind == "gpt2":
        config: Any = GPT2Config(
            **(common | {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 128} | changes)
        )
    else:
        size = {
            "hidden_size": 16,
            "intermediate_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "max_position_embeddings": 128,
        }
        config = LlamaConfig(**(common | size | changes))
    config.eos_token_id = eos
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim >= 2:
                parameter.mul_(sharpness**0.5)
    model.generation_config.eos_token_id = eos
    model.save_pretrained(folder)
    make_tokenizer(adds_bos, pad).save_pretrained(folder)
    return folder
