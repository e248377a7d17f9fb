"""The `maskgit` family: generate by unmasking, fine-tune on masked positions (arXiv 2202.04200).

Two departures from the paper. Training samples are unmasked in uniformly random order by default,
because the paper's confidence order is not sampling from the policy, and a policy that is
fine-tuned on such samples drifts away from its data. And every draw is keyed by the sample, not by
the batch.

Letters: `batch` samples, `seq_len` positions, `vocab` ids of the codebook.
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from rft_batch.errors import DataError, InputError
from rft_batch.policies.protocol import Completions, TrainingBatch
from rft_batch.policies.token_model import (
    TokenModelSpec,
    load_model,
    read_spec,
    save_policy,
    token_logits,
)
from rft_batch.policies.token_sampling import guide, masked_counts, warp
from rft_batch.randomness import SampleNoise, Stream, gumbel


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

    Raises:
        InputError: as `token_model.read_spec` and `token_model.load_model`.
    """

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

    def __init__(self, folder: Path, trust_policy_code: bool = False) -> None:
        self.spec: TokenModelSpec = read_spec(folder)
        self.model: nn.Module = load_model(folder, self.spec, trust_policy_code)
        self.display = asdict(self.spec.display) if self.spec.display else None

    def encode_prompt(self, content: Any) -> TokenPrompt:
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

    def prompt_ids(self, content: Any) -> list[int]:
        """What stands in the column `prompt_ids`: the known tokens, none where none is known."""
        known = self.encode_prompt(content).known_ids
        return known.tolist() if (known != self.spec.mask_id).any() else []

    def sampler(
        self, **options: Any
    ) -> Callable[[Sequence[Any], Sequence[SampleNoise]], Completions]:
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
        return partial(sample, self.model, self.spec, self.encode_prompt, **options)

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


@torch.inference_mode()
def sample(
    model: nn.Module,
    spec: TokenModelSpec,
    encode_prompt: Callable[[Any], TokenPrompt],
    prompts: Sequence[Any],
    noises: Sequence[SampleNoise],
    *,
    order: str,
    steps: int,
    schedule: str,
    temperature: float,
    top_k: int,
    top_p: float,
    choice_temperature: float,
    guidance_scale: float,
) -> Completions:
    """Unmasks every prompt's unknown positions in at most `steps` forward passes.

    `order="random"` commits a uniformly random set of positions in every step, which are the
    conditionals of the policy itself. `order="confidence"` is the paper's decoding (section 3.2;
    google-research/maskgit libml/parallel_decode.py): it draws all masked positions and keeps the
    most confident, by log-probability before any warp plus `choice_temperature * (1 - progress)`
    Gumbel noise. In both, known and committed positions never change, rows that have finished
    leave the batch, and no banned id comes out.

    Args:
        model: in eval mode.
        spec: the policy's spec.
        encode_prompt: content to `TokenPrompt`.
        prompts: contents, one for each sample.
        noises: the noise of each sample.
        order: `random` or `confidence`.
        steps: largest number of forward passes.
        schedule: one of `token_sampling.SCHEDULES`.
        temperature: of the tokens; 0 takes the likeliest.
        top_k: 0 keeps all tokens.
        top_p: 1 keeps all tokens.
        choice_temperature: scale of the noise on confidences.
        guidance_scale: 1 is no guidance.

    Returns:
        The completions. `logprobs` are sums of log-probabilities under the warped policy at the
        moment of commitment; None for confidence order and temperature 0, whose choices have
        none.
    """
    device = next(model.parameters()).device
    encoded = [encode_prompt(prompt) for prompt in prompts]
    x = np.stack([prompt.known_ids for prompt in encoded])
    labels = np.array([prompt.class_label for prompt in encoded])
    unknown = x == spec.mask_id
    plans = [masked_counts(schedule, steps, int(row.sum())) for row in unknown]
    turns = _turns(unknown, noises) if order == "random" else None
    logprobs = np.zeros(len(x))
    for step in range(max(map(len, plans), default=0)):
        rows = np.array([row for row, plan in enumerate(plans) if step < len(plan)])
        keep = np.array([plans[row][step] for row in rows])
        drawn = unknown[rows] if turns is None else unknown[rows] & (turns[rows] >= keep[:, None])
        at_row, at_position = np.nonzero(drawn)
        logits = _conditionals(model, spec, x[rows], labels[rows], drawn, guidance_scale, device)
        if not (logits < torch.inf).all():  # also false for NaN; -inf is a banned id
            raise DataError(
                f"the policy's logits at sampling step {step} are not finite. "
                "Its weights may be damaged, or --dtype too narrow for them."
            )
        # In random order a position is drawn once, so its noise needs no step.
        noise_step = step if turns is None else 0
        words = [
            noises[row].token_words(noise_step, np.flatnonzero(drawn[i]), spec.vocab_size)
            for i, row in enumerate(rows)
        ]
        tokens, token_logprobs = _draw(logits, np.concatenate(words), temperature, top_k, top_p)
        if turns is None:
            progress = (step + 1) / steps
            confidence = logits.log_softmax(-1).gather(-1, tokens[:, None])[:, 0].cpu().numpy()
            scale = choice_temperature * (1 - progress)
            noise = _confidence_noise(noises, rows, step, spec.seq_len)[at_row, at_position]
            committed = _most_confident(confidence + scale * noise, at_row, drawn, keep)
        else:
            committed = np.ones(len(at_row), dtype=bool)
            np.add.at(logprobs, rows[at_row], token_logprobs.cpu().numpy())
        chosen = rows[at_row[committed]], at_position[committed]
        x[chosen] = tokens.cpu().numpy()[committed]
        unknown[chosen] = False
    has_logprob = order == "random" and temperature > 0
    return Completions(
        ids=list(x.astype(np.int32)),
        finish_reasons=["stop"] * len(x),
        logprobs=[float(value) if has_logprob else None for value in logprobs],
    )


def _turns(unknown: NDArray[np.bool_], noises: Sequence[SampleNoise]) -> NDArray[np.int64]:
    """`[batch, seq_len]`: how many unknown positions are committed after this one."""
    turns = np.full(unknown.shape, -1)
    for row, noise in enumerate(noises):
        positions = np.flatnonzero(unknown[row])
        turns[row, positions] = noise.permutation(Stream.ORDER, 0, len(positions)).argsort()
    return turns


def _conditionals(
    model: nn.Module,
    spec: TokenModelSpec,
    x: NDArray[np.int64],
    labels: NDArray[np.int64],
    drawn: NDArray[np.bool_],
    guidance_scale: float,
    device: torch.device,
) -> Tensor:
    """Guided logits `[count, vocab]` float64 at the drawn positions, -inf for banned ids."""
    ids, classes = torch.from_numpy(x).to(device), torch.from_numpy(labels).to(device)
    where = torch.from_numpy(drawn).to(device)
    if guidance_scale == 1:
        logits = _double(token_logits(model, spec, ids, classes)[where])
    else:
        assert spec.condition is not None
        assert spec.condition.null_class is not None
        null = torch.full_like(classes, spec.condition.null_class)
        both = token_logits(model, spec, ids.repeat(2, 1), torch.cat([null, classes]))
        u, c = _double(both[where.repeat(2, 1)]).chunk(2)
        logits = guide(c, u, guidance_scale)
    if spec.banned_ids:
        logits[:, list(spec.banned_ids)] = -torch.inf
    return logits


def _double(logits: Tensor) -> Tensor:
    # Apple's GPUs have no float64, so there the few positions that are drawn go to the CPU.
    return logits.to("cpu" if logits.device.type == "mps" else logits.device, torch.float64)


def _draw(
    logits: Tensor, words: NDArray[np.uint64], temperature: float, top_k: int, top_p: float
) -> tuple[Tensor, Tensor]:
    """Tokens `[count]` by Gumbel-max, and their log-probabilities after the warp.

    Noise belongs to the token id, so logits that differ in their last bits give the same token;
    an inverse cumulative distribution would not.
    """
    if temperature == 0:
        tokens = logits.argmax(-1)
        return tokens, torch.zeros_like(tokens, dtype=logits.dtype)
    warped = warp(logits, temperature, top_k, top_p)
    tokens = (warped + torch.from_numpy(gumbel(words)).to(logits.device)).argmax(-1)
    return tokens, warped.log_softmax(-1).gather(-1, tokens[:, None])[:, 0]


def _confidence_noise(
    noises: Sequence[SampleNoise], rows: NDArray[np.int64], step: int, seq_len: int
) -> NDArray[np.float64]:
    """`[len(rows), seq_len]` Gumbel noise, by position."""
    words = [noises[row].words(Stream.CONFIDENCE, step, seq_len) for row in rows]
    return gumbel(np.stack(words))


def _most_confident(
    confidence: NDArray[np.float64],
    at_row: NDArray[np.int64],
    drawn: NDArray[np.bool_],
    keep_masked: NDArray[np.int64],
) -> NDArray[np.bool_]:
    """Which of the drawn positions to commit: all but the `keep_masked` least confident of a row.

    Ties go by position: the sort is stable and positions ascend.
    """
    order = np.lexsort((confidence, at_row))
    starts = np.concatenate([[0], np.cumsum(drawn.sum(1))[:-1]])
    place = np.empty(len(order), dtype=np.int64)
    place[order] = np.arange(len(order)) - np.repeat(starts, drawn.sum(1))
    committed: NDArray[np.bool_] = place >= keep_masked[at_row]
    return committed


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
    allowed = set(range(spec.vocab_size)) - set(spec.banned_ids)
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
