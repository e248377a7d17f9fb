import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import TINY, save_tiny_policy
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from rft_batch.errors import InputError
from rft_batch.policies import load_policy, policy_digest
from rft_batch.policies.token_model import check_model, read_spec


def change(folder: Path, **keys: Any) -> None:
    path = folder / "policy.json"
    content = json.loads(path.read_text()) | keys
    path.write_text(json.dumps({k: v for k, v in content.items() if v != "REMOVED"}))


def refusal(folder: Path, trust: bool = False) -> str:
    with pytest.raises(InputError) as error:
        load_policy(folder, trust)
    return str(error.value)


def test_a_saved_policy_is_the_same_policy(policy: Path, tmp_path: Path) -> None:
    loaded = load_policy(policy)
    loaded.save(tmp_path / "copy", loaded.model.state_dict())
    assert read_spec(tmp_path / "copy") == TINY
    assert policy_digest(tmp_path / "copy") == policy_digest(policy)


def test_the_digest_follows_weights_and_spec(policy: Path) -> None:
    before = policy_digest(policy)
    change(policy, recipe={"label_smoothing": 0.1})
    after = policy_digest(policy)
    save_tiny_policy(policy, seed=1)
    assert len({before, after, policy_digest(policy)}) == 3


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"mask_id": 3}, "mask_id 3 is one of the 7 ids that can come out. "
         "Choose one outside the codebook, or list it in banned_ids."),
        ({"mask_id": -1}, "mask_id -1 is negative."),
        ({"mask_idd": 7}, 'unknown key "mask_idd" (known: family, model, vocab_size, mask_id, '
         "seq_len, model_arguments, banned_ids, condition, recipe, display)."),
        ({"mask_id": "REMOVED"}, 'key "mask_id" is missing.'),
        ({"mask_id": "7"}, 'key "mask_id" must be of type int, found \'7\'.'),
        ({"mask_id": True}, 'key "mask_id" must be of type int, found True.'),
        ({"banned_ids": [9]}, "banned_ids [9] lie outside 0 to 6."),
        ({"banned_ids": list(range(7))}, "banned_ids leave no token that can come out."),
        ({"condition": {"num_classes": 3}}, "condition_dropout needs a condition with a "
         "null_class."),
        ({"display": {"height": 2, "width": 2, "levels": 7}}, "display height x width must be "
         "seq_len 6."),
    ],
)  # fmt: skip
def test_a_spec_that_cannot_be_right_is_refused(
    policy: Path, keys: dict[str, Any], message: str
) -> None:
    change(policy, **keys)
    assert refusal(policy) == f"{policy / 'policy.json'}: {message}"


def test_a_mask_id_outside_the_embedding_is_refused(policy: Path) -> None:
    change(policy, mask_id=8)
    assert refusal(policy) == (
        f"{policy / 'policy.json'}: an id lies outside the model's embedding (mask_id 8, "
        "vocab_size 7; embeddings of the model have 4 or 8 rows). "
        "Ids count from 0, so mask_id must be less than the rows of the token embedding."
    )


def test_a_mask_id_inside_the_codebook_is_allowed_when_it_is_banned(policy: Path) -> None:
    change(policy, mask_id=6, banned_ids=[6])
    assert load_policy(policy).spec.banned_ids == (6,)


def test_missing_files_are_named(policy: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError) as error:
        policy_digest(tmp_path)
    assert str(error.value) == (
        f"policy {tmp_path}: policy.json and model.safetensors not found. "
        "A policy folder holds policy.json and model.safetensors."
    )


def test_an_unknown_family_is_refused(policy: Path) -> None:
    change(policy, family="gan")
    assert refusal(policy) == f'{policy}/policy.json: unknown family "gan" (known: maskgit).'


def test_weights_of_another_model_are_refused(policy: Path) -> None:
    tensors = load_file(policy / "model.safetensors")
    tensors["extra"] = torch.zeros(1)
    tensors["head.bias"] = torch.zeros(9)
    del tensors["norm.bias"]
    save_file(tensors, policy / "model.safetensors")
    path = policy / "model.safetensors"
    assert refusal(policy).splitlines() == [
        f'{path}: tensor "norm.bias" is missing',
        f'{path}: tensor "extra" is not in the model',
        f'{path}: tensor "head.bias" has shape (9,), the model has (7,)',
    ]


@pytest.mark.parametrize("content", [b"", b"\x80\x04junk", b"PK\x03\x04"])
def test_weights_that_are_not_safetensors_are_refused(policy: Path, content: bytes) -> None:
    (policy / "model.safetensors").write_bytes(content)
    assert refusal(policy).startswith(f"{policy / 'model.safetensors'}: cannot be read: ")


def test_foreign_code_runs_only_when_trusted(policy: Path, tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    (tmp_path / "foreign.py").write_text(
        f"import pathlib\npathlib.Path({str(marker)!r}).touch()\n"
        "from rft_batch.policies.token_transformer import TokenTransformer as Model\n"
    )
    change(policy, model=f"{tmp_path / 'foreign.py'}:Model")
    assert "If you trust it, pass --trust-policy-code." in refusal(policy)
    assert not marker.exists()
    load_policy(policy, trust_policy_code=True)
    assert marker.exists()


class Blind(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.zeros(*x.shape, 7)


class Mixing(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.nn.functional.one_hot(x, 8).double().cumsum(1)[..., :7] + x.sum() / 10


class Narrow(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.zeros(*x.shape, 3)


class NotFinite(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.full((*x.shape, 7), torch.nan)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (Blind(), "the logits of a masked position do not depend on a visible token"),
        (Mixing(), "the logits of one row depend on another row of the batch"),
        (Narrow(), r"the model gave logits of shape \(2, 6, 3\), expected \(2, 6, 7\)"),
        (NotFinite(), "the model gave logits that are not finite"),
    ],
)
def test_a_model_that_breaks_the_contract_is_refused(model: nn.Module, message: str) -> None:
    spec = replace(TINY, condition=None)
    with pytest.raises(InputError, match=message):
        check_model(model, spec, Path("policy.json"))
