"""A language model's folder: found on disk or on the hub, loaded whole, and exported.

What is exported loads with plain `AutoModelForCausalLM.from_pretrained`: tokenizer, chat template
and generation config are the files of the folder it came from, byte for byte.
"""

import inspect
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rft_batch.errors import InputError
from rft_batch.files import file_digest, publish_folder, text_digest
from rft_batch.progress import say

_HUB_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*(@[\w./-]+)?")
_CONFIGS = ("config.json", "adapter_config.json")
# All that decides what a model writes; a folder's README and pictures do not.
_SUFFIXES = {".json", ".safetensors", ".jinja", ".model", ".txt", ".py"}
# Layers of transformers' caches; a dummy stands for one that uses the keys and values of another.
_KEYS_AND_VALUES = {"DynamicLayer", "DynamicSlidingWindowLayer", "DummyLayer"}
_WEIGHTS = re.compile(r".*\.safetensors(\.index\.json)?")


def is_hub_id(text: str) -> bool:
    """Whether it can be a model of the hub: `owner/name`, or `owner/name@revision`."""
    return _HUB_ID.fullmatch(text) is not None


def locate(policy: Path) -> Path:
    """The folder of a policy; one that is not on this machine is fetched from the hub.

    Args:
        policy: a folder, or a hub id with or without `@revision`.

    Raises:
        InputError: it is neither, or cannot be fetched.
    """
    if policy.is_dir() or not is_hub_id(str(policy)):
        return policy
    from huggingface_hub import snapshot_download

    name, _, revision = str(policy).partition("@")
    patterns = [f"*{suffix}" for suffix in sorted(_SUFFIXES)]
    try:
        return Path(snapshot_download(name, revision=revision or None, allow_patterns=patterns))
    except Exception as error:  # the hub's client raises a dozen kinds
        raise InputError(
            f"policy {policy}: there is no such folder, and it cannot be fetched from the hub: "
            f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"
        ) from error


def is_language_model(folder: Path) -> bool:
    """Whether a folder is one that transformers can load."""
    return any((folder / name).is_file() for name in _CONFIGS)


def language_model_digest(folder: Path) -> str:
    """Digest of names and bytes of the files that decide what the model writes."""
    files = sorted(path for path in folder.iterdir() if path.suffix in _SUFFIXES)
    return text_digest("\n".join(f"{path.name} {file_digest(path)}" for path in files))


def load_language_model(
    folder: Path, trust_code: bool, dtype: torch.dtype
) -> tuple[nn.Module, Any]:
    """Model and tokenizer of a folder, the model on the CPU and in eval mode.

    Args:
        folder: with `config.json`, safetensors and a tokenizer.
        trust_code: whether Python files of the folder may run.
        dtype: of the weights.

    Raises:
        InputError: there are no safetensors or adapters alone, weights are missing or of another
            shape, the code is not trusted, or the model keeps another state than keys and values.
    """
    if not (folder / "config.json").is_file():
        raise InputError(
            f"policy {folder}: holds adapters alone. Give the folder of the model that they are "
            "merged into: finetune exports it beside them."
        )
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    try:
        model, info = AutoModelForCausalLM.from_pretrained(
            folder,
            # Here and not by `.to`, which would round the frequencies of rotary positions too.
            dtype=dtype,
            use_safetensors=True,
            trust_remote_code=trust_code,
            # They are refused below, by name.
            ignore_mismatched_sizes=True,
            output_loading_info=True,
        )
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_code)
    except Exception as error:  # transformers raises what its many parts raise
        hint = (
            "" if trust_code else " If it has code of its own that you trust: --trust-policy-code."
        )
        raise InputError(
            f"policy {folder}: cannot be loaded: {type(error).__name__}: "
            f"{' '.join(str(error).split()):.300}.{hint}"
        ) from error
    left_over, *lacking = (
        # With mismatched ones stand their two shapes.
        sorted(key if isinstance(key, str) else key[0] for key in info.get(kind, ()))
        for kind in ("unexpected_keys", "missing_keys", "mismatched_keys")
    )
    for kind, names in zip(("missing", "of another shape"), lacking, strict=True):
        if names:
            raise InputError(
                f"policy {folder}: weights {kind}: {_some(names)}. They are not those of its "
                "config.json, and a model with parameters drawn at random would write noise."
            )
    if left_over:
        say(f"policy {folder}: weights that the model does not use: {_some(left_over)}")
    if not _keeps_keys_and_values_alone(model):
        raise InputError(
            f"policy {folder}: {type(model).__name__} keeps another state than keys and values "
            "(recurrent, convolutional, or of its own), and only models without are supported."
        )
    return model.eval(), tokenizer


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:5]) + (" ..." if len(names) > 5 else "")


def _keeps_keys_and_values_alone(model: Any) -> bool:
    from transformers.cache_utils import DynamicCache

    # transformers 5.24 renamed it.
    if not {"cache", "past_key_values"} & inspect.signature(model.forward).parameters.keys():
        return False
    kinds = {type(layer).__name__ for layer in DynamicCache(config=model.config).layers}
    return not getattr(model, "_is_stateful", False) and kinds <= _KEYS_AND_VALUES


def context_length(config: Any) -> int | None:
    """Most tokens that prompt and completion may have together; None: nothing says so.

    Args:
        config: of a transformers model.
    """
    text = config.get_text_config()
    length: int | None = getattr(text, "max_position_embeddings", None)
    rope = getattr(text, "rope_parameters", None) or {}
    for one in [rope, *(value for value in rope.values() if isinstance(value, dict))]:
        # With LongRoPE one long row changes the frequencies of its whole batch, and a row that
        # grows long those of its own first tokens, which stand in the cache with the old ones.
        if one.get("rope_type") == "longrope":
            original: int = one["original_max_position_embeddings"]
            length = min(length or original, original)
    return length


def end_ids(model: nn.Module, tokenizer: Any) -> frozenset[int]:
    """All ids that end a text: a chat model's turn ends with another than its documents do.

    Args:
        model: a transformers model; its configuration and its generation config may say some.
        tokenizer: its tokenizer, which may say another.
    """
    configs = (getattr(model, "generation_config", None), model.config, tokenizer)
    found: set[int] = set()
    for config in configs:
        ids = getattr(config, "eos_token_id", None)
        found |= set(ids if isinstance(ids, list | tuple) else [] if ids is None else [ids])
    return frozenset(found)


def export_language_model(
    folder: Path, source: Path, model: nn.Module, tensors: Mapping[str, Tensor]
) -> None:
    """Publishes a folder like `source` with other weights, whole or not at all.

    Args:
        folder: its final name.
        source: where the model came from.
        model: transformers model, for its configuration and the names of its parameters.
        tensors: by the model's own names; of tied ones the first name counts.
    """
    names = {name for name, _ in model.named_parameters()}
    tied = model.state_dict().keys() - names - {name for name, _ in model.named_buffers()}
    kept = {name: tensor for name, tensor in tensors.items() if name not in tied}

    def write(temporary: Path) -> None:
        model.save_pretrained(temporary, state_dict=kept)  # type: ignore[operator]
        for path in sorted(source.iterdir()):
            is_config = path.name == "config.json"
            if path.suffix in _SUFFIXES and not is_config and not _WEIGHTS.fullmatch(path.name):
                shutil.copyfile(path, temporary / path.name)

    publish_folder(folder, write)
