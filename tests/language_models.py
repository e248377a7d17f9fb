"""Tiny real language models with a character tokenizer, made on the spot."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from conftest import write_jsonl
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from tokenizers.processors import TemplateProcessing
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from rft_batch.policies.causal_lm import CausalLMPolicy
from rft_batch.randomness import SampleNoise
from rft_batch.settings import GenerateSettings

CHARACTERS = "abcdefghijklmnopqrstuvwxyz0123456789 .,+-=?:#<>/\n"
SPECIAL = ["<pad>", "<bos>", "<eos>", "<end>"]
PAD, BOS, EOS, END = range(4)
VOCAB_SIZE = len(SPECIAL) + len(CHARACTERS)
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ message['role'][0] }}:{{ message['content'] }}"
    "{% if message.name is defined %}/{{ message.name }}{% endif %}"
    "<end>{% endfor %}{% if add_generation_prompt %}a:{% endif %}"
)

# Untied: with tied embeddings and so few layers a model repeats its last token for ever.
_COMMON = {
    "vocab_size": VOCAB_SIZE,
    "bos_token_id": BOS,
    "pad_token_id": PAD,
    "tie_word_embeddings": False,
}
_SIZE = _COMMON | {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 512,
}
# Two queries share the keys of one head.
_GROUPED = _SIZE | {"num_key_value_heads": 1}
# Shorter than most texts of the tests.
_WINDOW = {"sliding_window": 7}
_GPT2 = _COMMON | {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 512}
_BLOOM = _COMMON | {"hidden_size": 16, "n_layer": 2, "n_head": 2}
_OPT = {name: value for name, value in _SIZE.items() if name != "intermediate_size"}
_MIXED = {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}

KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", _GROUPED),
    "gpt2": ("GPT2Config", _GPT2),
    "mistral": ("MistralConfig", _GROUPED | _WINDOW),
    "qwen2": ("Qwen2Config", _GROUPED),
    "qwen3": ("Qwen3Config", _GROUPED | {"head_dim": 8}),
    "gemma2": ("Gemma2Config", _GROUPED | _WINDOW | {"head_dim": 8}),
    "gemma3": (
        "Gemma3TextConfig",
        _GROUPED | _WINDOW | _MIXED | {"head_dim": 8, "num_hidden_layers": 3},
    ),
    "neox": ("GPTNeoXConfig", _SIZE | {"rotary_pct": 0.5}),
    "phi": ("PhiConfig", _SIZE),
    "opt": ("OPTConfig", _OPT | {"ffn_dim": 32, "word_embed_proj_dim": 16}),
    "bloom": ("BloomConfig", _BLOOM),
    "llama4": (
        "Llama4TextConfig",
        _GROUPED
        | {"head_dim": 8, "attention_chunk_size": 7}
        | {"num_local_experts": 2, "intermediate_size_mlp": 32},
    ),
    "mixtral": ("MixtralConfig", _GROUPED | {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "lfm2": ("Lfm2Config", _GROUPED | {"full_attn_idxs": [1]}),
    "mamba": ("MambaConfig", _COMMON | {"hidden_size": 16, "num_hidden_layers": 2}),
    "xlnet": ("XLNetConfig", _COMMON | {"d_model": 16, "n_layer": 2, "n_head": 2, "d_inner": 32}),
}


def make_tokenizer(
    adds_bos: bool = False,
    pad: str = "<pad>",
    template: str | None = TEMPLATE,
    words: Sequence[str] = (),
) -> PreTrainedTokenizerFast:
    """One token for each character; optionally with a begin that the tokenizer adds itself.

    Args:
        adds_bos: whether text begins with a begin token.
        pad: the token to pad with.
        template: of chats.
        words: texts of several characters that are a token of their own, the longest part of a
            text that is one; their ids stand behind all others.
    """
    vocabulary = {token: i for i, token in enumerate([*SPECIAL, *CHARACTERS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    if adds_bos:
        tokenizer.post_processor = TemplateProcessing(
            single="<bos> $A", special_tokens=[("<bos>", BOS)]
        )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<bos>",
        eos_token="<eos>",
        pad_token=pad,
        additional_special_tokens=["<end>"],
        chat_template=template,
    )
    fast.add_tokens(list(words))
    return fast


def make_tiny_lm(
    kind: str = "llama", seed: int = 0, sharpness: float = 20.0, **changes: Any
) -> Any:
    """A language model of few layers with random weights, sharp enough that prompts matter."""
    name, settings = KINDS[kind]
    config = getattr(transformers, name)(**(settings | {"eos_token_id": EOS} | changes))
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim >= 2:
                parameter.mul_(sharpness**0.5)
    return model.eval()


def save_tiny_lm(
    folder: Path,
    kind: str = "llama",
    *,
    adds_bos: bool = False,
    pad: str = "<pad>",
    template: str | None = TEMPLATE,
    words: Sequence[str] = (),
    eos: Any = EOS,
    **changes: Any,
) -> Path:
    """A folder of a tiny language model; see `make_tiny_lm` and `make_tokenizer`."""
    size = {"max_position_embeddings": 128} if kind == "llama" else {}
    size["vocab_size"] = VOCAB_SIZE + len(words)
    model = make_tiny_lm(kind, eos_token_id=eos, **(size | changes))
    model.generation_config.eos_token_id = eos
    model.save_pretrained(folder)
    make_tokenizer(adds_bos, pad, template, words).save_pretrained(folder)
    return folder


def save_chain_lm(folder: Path, following: dict[str, str], **options: Any) -> Path:
    """A GPT-2 whose every token follows from the one before it; the end follows where none does.

    Its layers add nothing, its embeddings are unit vectors, and its head knows which follows which.

    Args:
        folder: where to save it.
        following: token by token; `options["words"]` and special tokens are tokens too.
        options: as for `save_tiny_lm`.
    """
    width = 64
    zeros = {"n_embd": width, "sharpness": 0.0}
    save_tiny_lm(folder, "gpt2", **(zeros | options))
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        model.transformer.wte.weight.copy_(torch.eye(len(tokenizer), width))
        # The last norm moves what is 0 to below 0; back, so that a token's column alone counts.
        model.transformer.ln_f.bias.fill_((width - 1) ** -0.5)
        model.lm_head.weight[EOS] = 1.0
        for token, successor in following.items():
            column = tokenizer.convert_tokens_to_ids(token)
            model.lm_head.weight[EOS, column] = 0.0
            model.lm_head.weight[tokenizer.convert_tokens_to_ids(successor), column] = 1.0
        # About 30 more than any other logit.
        model.lm_head.weight.mul_(4.0)
    model.save_pretrained(folder)
    return folder


def noises(count: int, start: int = 0) -> list[SampleNoise]:
    return [SampleNoise("test", number) for number in range(start, start + count)]


def count_tokens(model: nn.Module) -> list[int]:
    """Rows x columns of every forward pass from now on."""
    seen: list[int] = []
    model.register_forward_pre_hook(
        lambda _, __, named: seen.append(named["input_ids"].numel()), with_kwargs=True
    )
    return seen


def record_training(patch: pytest.MonkeyPatch) -> list[tuple[list[int], list[int]]]:
    """Ids and labels of each row that is trained on from now on, its padding cut off."""
    seen: list[tuple[list[int], list[int]]] = []
    original = CausalLMPolicy.loss

    def loss(self: CausalLMPolicy, model: Any, tensors: Any) -> Any:
        if model.training:
            for ids, labels in zip(tensors["input_ids"], tensors["labels"], strict=True):
                end = 1 + int((labels != -100).nonzero()[-1])
                seen.append((ids[:end].tolist(), labels[:end].tolist()))
        return original(self, model, tensors)

    patch.setattr(CausalLMPolicy, "loss", loss)
    return seen


REWARD = """
def length_and_letters(completions):
    texts = [one if isinstance(one, str) else one[0]["content"] for one in completions]
    return [len(text) + len(set(text)) / 100 for text in texts]
"""


def lm_settings(
    folder: Path, policy: Path, prompts: Sequence[Any], **changes: Any
) -> GenerateSettings:
    """Settings that sample prompts p0, p1, ... to `folder/run/round-1`, files written for it.

    Args:
        folder: for prompts, reward and round.
        policy: the language model's folder.
        prompts: texts, chats, or whole rows with a `prompt_id`.
        changes: of the settings.
    """
    rows = [
        one if isinstance(one, dict) else {"prompt_id": f"p{i}", "prompt": one}
        for i, one in enumerate(prompts)
    ]
    (folder / "reward.py").write_text(REWARD)
    few = {"samples_per_prompt": 4, "prompts_per_shard": 2, "max_new_tokens": 12}
    return GenerateSettings(
        round_dir=folder / "run" / "round-1",
        policy=policy,
        prompts=write_jsonl(folder / "prompts.jsonl", rows),
        reward=(f"{folder / 'reward.py'}:length_and_letters",),
        **(few | changes),
    )
