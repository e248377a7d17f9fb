"""Training state on disk: safetensors and JSON, checked by digest, name and shape. No pickle.

A checkpoint is a folder `step-00000010` that was renamed into place whole. `state.json` holds the
digests of its other files, so a damaged one is told from a good one and passed over.
"""

import json
import re
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch_ema import ExponentialMovingAverage

from rft_batch.errors import DataError
from rft_batch.files import file_digest, publish_folder
from rft_batch.progress import say

_NAME = re.compile(r"step-(\d{8})")


@dataclass
class TrainingState:
    """What changes while training; everything random is keyed and needs no state."""

    model: nn.Module
    """Unwrapped."""
    optimizer: torch.optim.Optimizer
    ema: ExponentialMovingAverage | None
    scaler: Any = None
    """Gradient scaler of fp16, None otherwise."""
    step: int = 0
    """Optimizer steps done."""


def save_checkpoint(folder: Path, state: TrainingState) -> None:
    """Publishes `folder/step-N`.

    Args:
        folder: of all checkpoints.
        state: what to save.
    """
    contents = {
        "model": _detached(own_tensors(state.model)),
        "optimizer": _optimizer_tensors(state),
    }
    if state.ema is not None:
        contents["ema"] = ema_tensors(state)
    plain: dict[str, Any] = {"step": state.step}
    if state.ema is not None:
        plain["ema_updates"] = state.ema.num_updates
    if state.scaler is not None:
        plain["scaler"] = state.scaler.state_dict()

    def write(temporary: Path) -> None:
        digests = {}
        for name, tensors in contents.items():
            path = temporary / f"{name}.safetensors"
            save_file(tensors, path)
            digests[path.name] = file_digest(path)
        (temporary / "state.json").write_text(json.dumps({**plain, "digests": digests}, indent=2))

    publish_folder(folder / f"step-{state.step:08}", write)


def restore_newest(folder: Path, state: TrainingState) -> bool:
    """Puts the newest good checkpoint into `state`.

    Args:
        folder: of all checkpoints.
        state: a fresh one; changed in place.

    Returns:
        Whether there was one. Damaged ones are passed over and named on standard error.

    Raises:
        DataError: a whole checkpoint does not fit the model.
    """
    for step in sorted(checkpoint_steps(folder), reverse=True):
        path = folder / f"step-{step:08}"
        plain = _verified(path)
        if plain is None:
            say(f"{path}: damaged or not whole, passed over")
            continue
        _restore(path, plain, state)
        return True
    return False


def checkpoint_steps(folder: Path) -> list[int]:
    """Steps of all checkpoints by name, ascending."""
    names = [path.name for path in folder.iterdir() if path.is_dir()] if folder.exists() else []
    return sorted(int(match.group(1)) for name in names if (match := _NAME.fullmatch(name)))


def keep_newest(folder: Path, count: int) -> None:
    """Removes all but the `count` newest checkpoints, by number and not by text."""
    for step in checkpoint_steps(folder)[:-count]:
        shutil.rmtree(folder / f"step-{step:08}")


def own_tensors(model: nn.Module) -> dict[str, Tensor]:
    """What training changes: parameters that are trained, tied ones once, and buffers, by name."""
    parameters = dict(model.named_parameters())
    every_name = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    return {
        name: tensor
        for name, tensor in model.state_dict().items()
        if (parameters[name].requires_grad if name in parameters else name not in every_name)
    }


def ema_tensors(state: TrainingState) -> dict[str, Tensor]:
    """The averaged parameters by name, and the buffers as they are."""
    assert state.ema is not None
    names = [name for name, parameter in _averaged(state.model)]
    averaged = dict(zip(names, state.ema.shadow_params, strict=True))
    return _detached({**own_tensors(state.model), **averaged})


def _averaged(model: nn.Module) -> Iterable[tuple[str, nn.Parameter]]:
    return [(name, p) for name, p in model.named_parameters() if p.requires_grad]


def _optimizer_tensors(state: TrainingState) -> dict[str, Tensor]:
    names = {id(parameter): name for name, parameter in state.model.named_parameters()}
    return _detached(
        {
            f"{names[id(parameter)]}/{key}": value
            for parameter, slots in state.optimizer.state.items()
            for key, value in slots.items()
        }
    )


def _detached(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}


def _verified(path: Path) -> dict[str, Any] | None:
    """The content of `state.json` where every file has the digest that it records."""
    try:
        plain: dict[str, Any] = json.loads((path / "state.json").read_text(encoding="utf-8"))
        digests = {name: file_digest(path / name) for name in plain["digests"]}
        return plain if digests == plain["digests"] and plain["step"] >= 0 else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _restore(path: Path, plain: Mapping[str, Any], state: TrainingState) -> None:
    device = next(state.model.parameters()).device
    model = _load(path / "model.safetensors", str(device))
    own = own_tensors(state.model)
    _refuse_other_tensors(path / "model.safetensors", own, model)
    state.model.load_state_dict(model, strict=False)
    parameters = dict(state.model.named_parameters())
    for name, tensor in _load(path / "optimizer.safetensors", "cpu").items():
        parameter, _, key = name.rpartition("/")
        # AdamW keeps its step count on the CPU unless it is fused or capturable.
        slot_device = "cpu" if key == "step" and not _steps_on_device(state.optimizer) else device
        state.optimizer.state[parameters[parameter]][key] = tensor.to(slot_device)
    if state.ema is not None:
        tensors = _load(path / "ema.safetensors", str(device))
        _refuse_other_tensors(path / "ema.safetensors", own, tensors)
        state.ema.shadow_params = [tensors[name] for name, _ in _averaged(state.model)]
        state.ema.num_updates = plain["ema_updates"]
    if state.scaler is not None:
        state.scaler.load_state_dict(plain["scaler"])
    state.step = plain["step"]


def _load(path: Path, device: str) -> dict[str, Tensor]:
    try:
        tensors: dict[str, Tensor] = load_file(path, device=device)
        return tensors
    except (SafetensorError, OSError) as error:
        raise DataError(f"{path}: cannot be read: {error}. Remove its folder.") from error


def _steps_on_device(optimizer: torch.optim.Optimizer) -> bool:
    return any(group.get("fused") or group.get("capturable") for group in optimizer.param_groups)


def _refuse_other_tensors(
    path: Path, expected: Mapping[str, Tensor], found: Mapping[str, Tensor]
) -> None:
    shapes = {name: tuple(tensor.shape) for name, tensor in expected.items()}
    if shapes != {name: tuple(tensor.shape) for name, tensor in found.items()}:
        raise DataError(
            f"{path}: its tensors do not have the names and shapes of the model's. "
            "It belongs to another policy; remove the folder to train anew."
        )
