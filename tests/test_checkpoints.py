import json
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch_ema import ExponentialMovingAverage

from rft_batch.checkpoints import (
    TrainingState,
    checkpoint_steps,
    ema_tensors,
    keep_newest,
    restore_newest,
    save_checkpoint,
)
from rft_batch.errors import DataError


def state(width: int = 3) -> TrainingState:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(width, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    return TrainingState(model, optimizer, ExponentialMovingAverage(model.parameters(), 0.9))


def train(found: TrainingState, steps: int) -> None:
    for _ in range(steps):
        x = torch.randn(5, 3, generator=torch.Generator().manual_seed(found.step))
        found.optimizer.zero_grad()
        found.model(x).pow(2).mean().backward()
        found.optimizer.step()
        found.ema.update()
        found.step += 1


def everything(found: TrainingState) -> list[list[float]]:
    tensors = [*found.model.state_dict().values(), *ema_tensors(found).values()]
    return [tensor.flatten().tolist() for tensor in tensors]


def test_training_goes_on_bit_for_bit(tmp_path: Path) -> None:
    whole = state()
    train(whole, 7)
    begun = state()
    train(begun, 4)
    save_checkpoint(tmp_path, begun)

    resumed = state()
    assert restore_newest(tmp_path, resumed)
    assert resumed.step == 4
    train(resumed, 3)

    assert everything(resumed) == everything(whole)


def test_saving_changes_nothing(tmp_path: Path) -> None:
    plain, saving = state(), state()
    for _ in range(3):
        train(plain, 1)
        train(saving, 1)
        save_checkpoint(tmp_path, saving)
    assert everything(plain) == everything(saving)


def test_the_average_has_the_formula_and_moves_in_float32() -> None:
    found = state()
    parameter = next(found.model.parameters())
    expected = parameter.detach().double().clone()
    for n in range(1, 21):
        with torch.no_grad():
            parameter.add_(0.01 * n)
        found.ema.update()
        decay = min(0.9, (1 + n) / (10 + n))
        expected = decay * expected + (1 - decay) * parameter.detach().double()
    averaged = ema_tensors(found)["0.weight"]
    torch.testing.assert_close(averaged.double(), expected, rtol=0, atol=1e-6)


def test_the_averaged_export_has_the_live_buffers() -> None:
    found = state()
    train(found, 3)
    tensors = ema_tensors(found)
    assert tensors.keys() == found.model.state_dict().keys()
    assert torch.equal(tensors["1.running_mean"], found.model[1].running_mean)
    assert int(tensors["1.num_batches_tracked"]) == 3
    assert not torch.equal(tensors["0.weight"], found.model[0].weight)


def damage_weights(folder: Path) -> None:
    path = folder / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-3] ^= 1
    path.write_bytes(content)


DAMAGES: dict[str, Any] = {
    "flipped bit": damage_weights,
    "half the weights": lambda f: (f / "model.safetensors").write_bytes(b"1234"),
    "no averages": lambda f: (f / "ema.safetensors").unlink(),
    "empty": lambda f: [path.unlink() for path in f.iterdir()],
    "no state": lambda f: (f / "state.json").write_text("{"),
    "other state": lambda f: (f / "state.json").write_text("[]"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_the_newest_good_checkpoint_wins(tmp_path: Path, capsys: Any, damage: str) -> None:
    found = state()
    for _ in range(2):
        train(found, 1)
        save_checkpoint(tmp_path, found)
    DAMAGES[damage](tmp_path / "step-00000002")
    (tmp_path / "step-00000003.tmp").mkdir()
    (tmp_path / "step-00000004").touch()
    (tmp_path / "5").mkdir()

    resumed = state()
    assert restore_newest(tmp_path, resumed)

    assert resumed.step == 1
    assert (
        f"{tmp_path / 'step-00000002'}: damaged or not whole, passed over"
        in capsys.readouterr().err
    )


def test_no_checkpoint_is_no_error(tmp_path: Path) -> None:
    assert not restore_newest(tmp_path / "none", state())


@pytest.mark.parametrize(
    "name", ["model.safetensors", "optimizer.safetensors", "ema.safetensors", "state.json"]
)
def test_a_pickle_is_never_loaded(tmp_path: Path, name: str) -> None:
    marker = tmp_path / "marker"

    class Hostile:
        def __reduce__(self) -> Any:
            return Path.touch, (marker,)

    found = state()
    train(found, 1)
    save_checkpoint(tmp_path / "c", found)
    folder = tmp_path / "c" / "step-00000001"
    (folder / name).write_bytes(pickle.dumps(Hostile()))

    assert not restore_newest(tmp_path / "c", state())

    assert not marker.exists()
    pickle.loads((folder / name).read_bytes())  # shows that the file would have run
    assert marker.exists()


def test_a_hostile_file_with_a_right_digest_runs_nothing(tmp_path: Path) -> None:
    from rft_batch.files import file_digest

    found = state()
    train(found, 1)
    save_checkpoint(tmp_path, found)
    folder = tmp_path / "step-00000001"
    (folder / "model.safetensors").write_bytes(pickle.dumps({"a": 1}))
    plain = json.loads((folder / "state.json").read_text())
    plain["digests"]["model.safetensors"] = file_digest(folder / "model.safetensors")
    (folder / "state.json").write_text(json.dumps(plain))
    with pytest.raises(DataError, match="cannot be read"):
        restore_newest(tmp_path, state())


def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path) -> None:
    found = state()
    train(found, 1)
    save_checkpoint(tmp_path, found)
    with pytest.raises(DataError, match="do not have the names and shapes of the model's"):
        restore_newest(tmp_path, state(width=5))


def test_the_newest_are_kept_by_number(tmp_path: Path) -> None:
    for step in [8, 9, 10, 98, 99, 100, 101]:
        (tmp_path / f"step-{step:08}").mkdir()
    keep_newest(tmp_path, 3)
    assert checkpoint_steps(tmp_path) == [99, 100, 101]
    shutil.rmtree(tmp_path)
    assert checkpoint_steps(tmp_path) == []
