"""Policies: models with a family's way to generate and to learn."""

from pathlib import Path

from rft_batch.errors import InputError
from rft_batch.policies.maskgit import MaskGITPolicy
from rft_batch.policies.protocol import (
    Completions,
    Policy,
    Sampler,
    TrainingBatch,
    join_completions,
)
from rft_batch.policies.token_model import policy_digest, read_spec

__all__ = [
    "Completions",
    "Policy",
    "Sampler",
    "TrainingBatch",
    "join_completions",
    "load_policy",
    "policy_digest",
]


def load_policy(folder: Path, trust_policy_code: bool = False) -> Policy:
    """The policy of a folder, on the CPU, in eval mode.

    Args:
        folder: a token-model folder.
        trust_policy_code: whether model code outside this package may run.

    Raises:
        InputError: the folder is not a policy, or its family is unknown.
    """
    family = read_spec(folder).family
    match family:
        case "maskgit":
            return MaskGITPolicy(folder, trust_policy_code)
    raise InputError(f'{folder}/policy.json: unknown family "{family}" (known: maskgit).')
