"""Policies: models with a family's way to generate and to learn."""

from importlib.util import find_spec
from pathlib import Path

import torch

from rft_batch.errors import InputError
from rft_batch.policies.lm_folder import is_language_model, language_model_digest, locate
from rft_batch.policies.maskgit import MaskGITPolicy
from rft_batch.policies.protocol import (
    Completions,
    Policy,
    Sampler,
    TrainingBatch,
    join_completions,
)
from rft_batch.policies.token_model import policy_digest as token_digest
from rft_batch.policies.token_model import read_spec

__all__ = [
    "Completions",
    "Policy",
    "Sampler",
    "TrainingBatch",
    "join_completions",
    "load_policy",
    "policy_digest",
]


def policy_digest(policy: Path) -> str:
    """Digest of everything that decides what a policy writes.

    Raises:
        InputError: the folder is not a policy.
    """
    folder = locate(policy)
    return language_model_digest(folder) if is_language_model(folder) else token_digest(folder)


def load_policy(
    policy: Path, trust_policy_code: bool = False, dtype: torch.dtype = torch.float32
) -> Policy:
    """The policy of a folder, on the CPU, in eval mode.

    Args:
        policy: a token-model folder, a folder of transformers, or a hub id.
        trust_policy_code: whether model code outside this package may run.
        dtype: of its weights.

    Raises:
        InputError: the folder is not a policy, or its family is unknown.
    """
    folder = locate(policy)
    if is_language_model(folder):
        if find_spec("transformers") is None:
            raise InputError(
                f"policy {policy}: a language model needs transformers: "
                "pip install 'rft-batch[lm]'."
            )
        from rft_batch.policies.causal_lm import CausalLMPolicy

        return CausalLMPolicy(folder, trust_policy_code, dtype)
    family = read_spec(folder).family
    match family:
        case "maskgit":
            return MaskGITPolicy(folder, trust_policy_code, dtype)
    raise InputError(f'{folder}/policy.json: unknown family "{family}" (known: maskgit).')
