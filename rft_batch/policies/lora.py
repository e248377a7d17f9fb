"""LoRA through peft: a module with adapters, and its weights with the adapters merged in."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor, nn

from rft_batch.errors import InputError
from rft_batch.files import publish_folder


def add_lora(
    model: nn.Module, rank: int, alpha: float, dropout: float, targets: Sequence[str]
) -> nn.Module:
    """Puts adapters beside the model's linear layers (Hu et al. 2021, arXiv 2106.09685).

    Args:
        model: a transformers model; its own weights are frozen.
        rank: of the adapters.
        alpha: their scale is alpha / rank.
        dropout: share of the adapters' inputs that is dropped.
        targets: names of the modules; none for every linear layer but the head.

    Raises:
        InputError: peft is not installed, or no module bears one of the names.
    """
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError as error:
        raise InputError("--lora-rank: needs peft: pip install 'rft-batch[lm]'.") from error
    config = LoraConfig(
        r=rank,
        lora_alpha=alpha,
        lora_dropout=dropout,
        target_modules=list(targets) or "all-linear",
        task_type="CAUSAL_LM",
    )
    try:
        return get_peft_model(model, config)  # type: ignore[no-any-return]
    except ValueError as error:
        raise InputError(f"--lora-targets {', '.join(targets)}: {error}") from error


@torch.no_grad()
def merge_lora(plain: nn.Module, trained: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Adds adapters to the weights of a model without them, in place.

    Args:
        plain: the model that `add_lora` was given, loaded anew.
        trained: what `add_lora` gave back.
        tensors: the adapters' weights, by their names in `trained`.
    """
    with _adapters_set(trained, tensors):
        for name, module in trained.get_base_model().named_modules():  # type: ignore[operator]
            if getattr(module, "lora_A", None):
                weight = plain.get_parameter(f"{name}.weight")
                weight.add_(module.get_delta_weight("default").to(weight))


def save_adapter(folder: Path, trained: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Publishes the adapters alone, as a folder of peft.

    Args:
        folder: its final name.
        trained: what `add_lora` gave back.
        tensors: the adapters' weights, by their names in `trained`.
    """
    with _adapters_set(trained, tensors):
        publish_folder(folder, lambda temporary: trained.save_pretrained(temporary))  # type: ignore[operator]


@contextmanager
def _adapters_set(trained: nn.Module, tensors: Mapping[str, Tensor]) -> Iterator[None]:
    """The adapters hold `tensors` inside, and what they held before afterwards."""
    names = [name for name, parameter in trained.named_parameters() if parameter.requires_grad]
    before = {name: trained.get_parameter(name).detach().clone() for name in names}
    trained.load_state_dict({name: tensors[name] for name in names}, strict=False)
    try:
        yield
    finally:
        trained.load_state_dict(before, strict=False)
