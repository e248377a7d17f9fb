"""The `maskgit` family: generate by unmasking, fine-tune on masked positions (arXiv 2202.04200).

Letters: `batch` samples, `seq_len` positions, `vocab` ids of the codebook.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from rft_batch.errors import DataError, InputError
from rft_batch.policies.protocol import Completions, Sampler, TrainingBatch, in_batches
from rft_batch.policies.token_model import (
    TokenModelSpec,
    load_model,
    read_spec,
    save_policy,
    token_logits,
)
from rft_batch.policies.unmasking import unmask
from rft_batch.randomness import SampleNoise, Stream


@dataclass(frozen=True)
class TokenPrompt:
    """A prompt as the model takes it."""

    class_label: int
    """The class; the null class where there is no condition; 0 where the policy has no classes."""
    known_ids: NDArray[np.int64]
    """`[seq_len]`: the token where it is given, the mask id elsewhere."""


class MaskGITPolicy:
    """A MaskGIT over a token-model folder.

    Args:
        folder: the policy folder.
        trust_policy_code: whether a model class outside this package may run.
        dtype: of the weights.

    Raises:
        InputError: as `token_model.read_spec` and `token_model.load_model`.
    """

    family: str = "maskgit"
    sampling_options: tuple[str, ...] = (
        "order",
        "steps",
        "schedule",
        "temperature",
        "top_k",
        "top_p",
        "choice_temperature",
        "guidance_scale",
    )
    training_options: tuple[str, ...] = ()

    def __init__(
        self,
        folder: Path,
        trust_policy_code: bool = False,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.spec: TokenModelSpec = read_spec(folder)
        self.model: nn.Module = load_model(folder, self.spec, trust_policy_code).to(dtype)
        self.display = asdict(self.spec.display) if self.spec.display else None

    def encode_prompt(self, content: Any, **_: Any) -> TokenPrompt:
        """A prompt's content as label and known tokens.

        Args:
            content: a class label; or an object with `label` (null: no condition) and
                `known_ids` (one entry for each position, null where unknown), each optional.

        Raises:
            InputError: it is neither, the label is out of range, or the known tokens do not fit.
        """
        spec = self.spec
        given = content if isinstance(content, dict) else {"label": content}
        unknown_keys = given.keys() - {"label", "known_ids"}
        if unknown_keys:
            raise InputError(f"unknown keys {sorted(unknown_keys)} (known: label, known_ids)")
        return TokenPrompt(
            _class_label(given.get("label"), spec), _known_ids(given.get("known_ids"), spec)
        )

    def encode_row(
        self, content: Any, columns: Mapping[str, Any], **options: Any
    ) -> dict[str, Any]:
        """A row for `collate` from a prompt and its column `completion_ids`.

        Raises:
            InputError: the column is missing.
        """
        if "completion_ids" not in columns:
            raise InputError('column "completion_ids" is missing')
        return {"prompt": json.dumps(content), "completion_ids": columns["completion_ids"]}

    def facts(self) -> dict[str, Any]:
        """What the manifest records besides the settings: nothing."""
        return {}

    def trained(self, **options: Any) -> nn.Module:
        """The module to train, in train mode."""
        return self.model.train()

    def sampler(self, **options: Any) -> Sampler:
        """The function that generates one completion for each prompt and its noise.

        Args:
            options: one value for each of `sampling_options`; see `GenerateSettings`.

        Raises:
            InputError: guidance is asked of a policy without a null class.
        """
        condition = self.spec.condition
        if options["guidance_scale"] != 1 and (condition is None or condition.null_class is None):
            raise InputError(
                f"--guidance-scale {options['guidance_scale']}: this policy has no null class. "
                "Leave the scale at 1."
            )

        def generate(prompts: Sequence[Any], noises: Sequence[SampleNoise]) -> Completions:
            encoded = [self.encode_prompt(prompt) for prompt in prompts]
            x = np.stack([prompt.known_ids for prompt in encoded])
            labels = np.array([prompt.class_label for prompt in encoded])
            return unmask(self.model, self.spec, x, labels, noises, **options)

        return in_batches(generate)

    def first_batch_size(self, device: str) -> int:
        """Measured on two cores: 16 to 64 are fastest, more fall out of the caches."""
        return 32 if device == "cpu" else 2048

    def collate(
        self, rows: Sequence[Mapping[str, Any]], noises: Sequence[SampleNoise], epoch: int
    ) -> TrainingBatch:
        """Selected rows as a training batch, masked anew for each epoch.

        Per row the mask ratio is cos(pi u / 2) of a uniform u, and exactly max(1, round(ratio *
        n)) of its n unknown positions are masked (arXiv 2202.04200, section 3.1).

        Args:
            rows: with the columns `prompt_id`, `prompt` and `completion_ids`.
            noises: the noise of each row's sample.
            epoch: which epoch's masks to draw.

        Returns:
            Tensors on the CPU: `x` and `targets` `[batch, seq_len]` int64, targets -100 where
            nothing is to be predicted; `class_labels` `[batch]` int64. And the number of targets.

        Raises:
            DataError: a row's completion is not `seq_len` token ids of the codebook.
        """
        spec = self.spec
        prompts = [self.encode_prompt(json.loads(row["prompt"])) for row in rows]
        x = np.stack([_completion(row, spec) for row in rows])
        targets = np.full_like(x, -100)
        labels = np.array([prompt.class_label for prompt in prompts])
        for row, (prompt, noise) in enumerate(zip(prompts, noises, strict=True)):
            unknown = np.flatnonzero(prompt.known_ids == spec.mask_id)
            ratio = math.cos(math.pi / 2 * noise.uniform(Stream.TRAIN_RATIO, epoch))
            num_masked = max(1, round(ratio * len(unknown))) if len(unknown) else 0
            order = noise.permutation(Stream.TRAIN_MASK, epoch, len(unknown))
            masked = unknown[order[:num_masked]]
            targets[row, masked] = x[row, masked]
            x[row, masked] = spec.mask_id
            dropped = noise.uniform(Stream.CONDITION_DROP, epoch) < spec.recipe.condition_dropout
            if dropped and spec.condition and spec.condition.null_class is not None:
                labels[row] = spec.condition.null_class
        tensors = {"x": x, "targets": targets, "class_labels": labels}
        return TrainingBatch(
            {name: torch.from_numpy(array) for name, array in tensors.items()},
            int((targets != -100).sum()),
        )

    def loss(self, model: nn.Module, tensors: Mapping[str, Tensor]) -> Tensor:
        """Sum of the cross-entropy over the batch's targets, float32 scalar, in nats.

        Args:
            model: the policy's model, wrapped for training or not.
            tensors: those of a `TrainingBatch`, on the model's device.
        """
        logits = token_logits(model, self.spec, tensors["x"], tensors["class_labels"])
        return cross_entropy(
            logits.flatten(0, 1),
            tensors["targets"].flatten(),
            ignore_index=-100,
            reduction="sum",
            label_smoothing=self.spec.recipe.label_smoothing,
        )

    def save(self, folder: Path, tensors: dict[str, Tensor]) -> None:
        """Publishes the policy with other weights as a folder that loads like this one."""
        save_policy(folder, self.spec, tensors)


def _class_label(label: Any, spec: TokenModelSpec) -> int:
    if spec.condition is None:
        if label is not None:
            raise InputError(f"label {label!r}: this policy has no classes")
        return 0
    if label is None:
        if spec.condition.null_class is None:
            raise InputError("label is missing, and this policy has no null class")
        return spec.condition.null_class
    if type(label) is not int or not 0 <= label < spec.condition.num_classes:
        raise InputError(
            f"label {label!r} is not a whole number from 0 to {spec.condition.num_classes - 1}"
        )
    return label


def _known_ids(known: Any, spec: TokenModelSpec) -> NDArray[np.int64]:
    if known is None:
        return np.full(spec.seq_len, spec.mask_id)
    allowed = spec.allowed_ids
    if not isinstance(known, list) or len(known) != spec.seq_len:
        raise InputError(f"known_ids must be a list of {spec.seq_len} entries")
    wrong = [item for item in known if item is not None and item not in allowed]
    if wrong:
        raise InputError(f"known_ids has {wrong[0]!r}, which is neither null nor a token id")
    return np.array([spec.mask_id if item is None else item for item in known])


def _completion(row: Mapping[str, Any], spec: TokenModelSpec) -> NDArray[np.int64]:
    ids = np.asarray(row["completion_ids"])
    fits = ids.shape == (spec.seq_len,) and ids.dtype.kind in "iu"
    if not fits or ids.min() < 0 or ids.max() >= spec.vocab_size:
        raise DataError(
            f'prompt "{row["prompt_id"]}": completion_ids must be {spec.seq_len} token ids from 0 '
            f"to {spec.vocab_size - 1}, found {ids.tolist()!r:.80}."
        )
    return ids.astype(np.int64)
