"""The `causal_lm` family: any causal language model of transformers.

Letters: `batch` rows, `seq_len` tokens of prompt and completion, `vocab` token ids.
"""

import inspect
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from rft_batch.errors import DataError, InputError
from rft_batch.policies.chat import Rendering, prompt_ids
from rft_batch.policies.lm_engine import Written, complete
from rft_batch.policies.lm_folder import (
    context_length,
    end_ids,
    export_language_model,
    load_language_model,
)
from rft_batch.policies.lm_sampling import Sampling
from rft_batch.policies.lm_text import Stops, text_of
from rft_batch.policies.lora import add_lora, merge_lora, save_adapter
from rft_batch.policies.protocol import Completions, Sampler, TrainingBatch
from rft_batch.policies.vllm_engine import vllm_sampler
from rft_batch.randomness import SampleNoise

_IGNORED = -100


class CausalLMPolicy:
    """A language model with its tokenizer.

    Args:
        folder: a folder of transformers.
        trust_policy_code: whether Python files of the folder may run.
        dtype: of the weights.

    Raises:
        InputError: as `lm_folder.load_language_model`; or nothing says which token ends a text.
    """

    family: str = "causal_lm"
    sampling_options: tuple[str, ...] = (
        "temperature",
        "top_k",
        "top_p",
        "min_p",
        "repetition_penalty",
        "max_new_tokens",
        "stop",
        "system",
        "chat",
        "chat_template_arguments",
        "samples_per_prompt",
        "engine",
        "engine_arguments",
    )
    training_options: tuple[str, ...] = (
        "packing",
        "gradient_checkpointing",
        "lora_rank",
        "lora_alpha",
        "lora_dropout",
        "lora_targets",
    )
    display: dict[str, Any] | None = None

    def __init__(
        self,
        folder: Path,
        trust_policy_code: bool = False,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.folder, self._trusts_code = folder, trust_policy_code
        self.model: nn.Module
        self.model, self.tokenizer = load_language_model(folder, trust_policy_code, dtype)
        self.end_ids = end_ids(self.model, self.tokenizer)
        if not self.end_ids:
            raise InputError(
                f"policy {folder}: neither tokenizer nor generation_config.json has an "
                "eos_token_id, so no completion could ever end. Add one."
            )
        self.context = context_length(self.model.config)
        config = getattr(self.model, "generation_config", None)
        self._generation_config: dict[str, Any] = config.to_diff_dict() if config else {}
        self._keeps_logits = "logits_to_keep" in inspect.signature(self.model.forward).parameters
        self._packing = False
        self._lora: nn.Module | None = None

    def first_batch_size(self, device: str) -> int:
        """Sequences in progress: measured on two cores, 32; on a GPU more is faster."""
        return 32 if device == "cpu" else 256

    def encode_prompt(self, content: Any, **options: Any) -> list[int]:
        """The token ids of a prompt, the one way for both stages.

        Args:
            content: text, or chat messages; see `chat.prompt_ids`.
            options: `system`, `chat` and `chat_template_arguments` of `GenerateSettings`.

        Raises:
            InputError: as `chat.prompt_ids`.
        """
        return prompt_ids(self.tokenizer, content, _rendering(options))

    def encode_prompts(self, prompts: Sequence[Any], options: Mapping[str, Any]) -> list[list[int]]:
        """The token ids of every sample's prompt; the samples of one share it, and its rendering.

        Args:
            prompts: contents, the same object for the samples of one prompt.
            options: as of `encode_prompt`.
        """
        different = {id(prompt): prompt for prompt in prompts}
        ids = {key: self.encode_prompt(prompt, **options) for key, prompt in different.items()}
        return [ids[id(prompt)] for prompt in prompts]

    def encode_row(
        self, content: Any, columns: Mapping[str, Any], **options: Any
    ) -> dict[str, Any]:
        """A row for `collate` from a prompt and its column `completion`, with an end.

        Raises:
            InputError: the column is missing or not text.
        """
        text = columns.get("completion")
        if not isinstance(text, str):
            raise InputError('column "completion" with text is missing')
        ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        end = self.tokenizer.eos_token_id
        ending = [min(self.end_ids) if end is None else end]
        return {
            "prompt_ids": self.encode_prompt(content, **options),
            "completion_ids": [*ids, *ending],
        }

    def sampler(self, **options: Any) -> Sampler:
        """The function that generates one completion for each prompt and its noise.

        Args:
            options: one value for each of `sampling_options`; see `GenerateSettings`.

        Raises:
            InputError: the options contradict each other, or the engine is not installed.
        """
        if options["temperature"] == 0 and options["samples_per_prompt"] > 1:
            raise InputError(
                f"--temperature 0 with --samples-per-prompt {options['samples_per_prompt']}: all "
                "samples of a prompt would be the same. Pass --samples-per-prompt 1."
            )
        if options["engine"] == "vllm":
            return vllm_sampler(self, options)
        if options["engine_arguments"]:
            raise InputError("--engine-arguments: only --engine vllm takes them. Leave them out.")

        def sample(
            prompts: Sequence[Any], noises: Sequence[SampleNoise], batch_size: int
        ) -> Iterator[tuple[Sequence[int], Completions]]:
            encoded = self.encode_prompts(prompts, options)
            fitting, refused = self.split_by_room(encoded)
            if refused:
                yield refused, self.refusals([encoded[place] for place in refused])
            parts = complete(
                self.model,
                [encoded[place] for place in fitting],
                [self.room(encoded[p], options["max_new_tokens"]) for p in fitting],
                [noises[place] for place in fitting],
                batch_size,
                Sampling(
                    temperature=options["temperature"],
                    top_k=options["top_k"],
                    top_p=options["top_p"],
                    min_p=options["min_p"],
                    repetition_penalty=options["repetition_penalty"],
                ),
                self.end_ids,
                Stops(self.tokenizer, options["stop"]).ends if options["stop"] else None,
            )
            drawn = options["temperature"] > 0
            for part in parts:
                places = [fitting[written.place] for written in part]
                yield places, self._completions(encoded, places, part, options["stop"], drawn)

        return sample

    def split_by_room(self, encoded: Sequence[Sequence[int]]) -> tuple[list[int], list[int]]:
        """Places of the prompts that leave room for a completion, and of those that do not."""
        fits = [self.context is None or len(ids) < self.context for ids in encoded]
        places = range(len(encoded))
        return [p for p in places if fits[p]], [p for p in places if not fits[p]]

    def room(self, ids: Sequence[int], max_new_tokens: int) -> int:
        """Tokens that a completion may have after a prompt."""
        return min(max_new_tokens, (self.context or len(ids) + max_new_tokens) - len(ids))

    def refusals(self, encoded: Sequence[Sequence[int]]) -> Completions:
        """What stands for the completions of prompts that leave no room for one."""
        count = len(encoded)
        return Completions(
            prompt_ids=[list(ids) for ids in encoded],
            ids=[np.empty(0, dtype=np.int32)] * count,
            texts=[None] * count,
            finish_reasons=["error"] * count,
            logprobs=[None] * count,
            losses=[None] * count,
            errors=[
                f"prompt too long: {len(ids)} tokens, the model has room for {self.context}"
                for ids in encoded
            ],
        )

    def _completions(
        self,
        encoded: Sequence[Sequence[int]],
        places: Sequence[int],
        part: Sequence[Written],
        stop: Sequence[str],
        drawn: bool,
    ) -> Completions:
        return Completions(
            prompt_ids=[list(encoded[place]) for place in places],
            ids=[np.array(written.ids, dtype=np.int32) for written in part],
            texts=[text_of(self.tokenizer, written.ids, stop) for written in part],
            finish_reasons=[written.finish_reason for written in part],
            logprobs=[written.logprob if drawn else None for written in part],
            losses=[written.loss for written in part],
            errors=[None] * len(part),
        )

    def facts(self) -> dict[str, Any]:
        """What the manifest records: the generation config that is not applied by itself."""
        return {
            "end_ids": sorted(self.end_ids),
            "context": self.context,
            "generation_config": self._generation_config,
        }

    def trained(self, **options: Any) -> nn.Module:
        """The module to train, in train mode.

        Args:
            options: one value for each of `training_options`; see `FinetuneSettings`.

        Raises:
            InputError: the model cannot keep packed rows apart, peft is not installed, or no
                module bears a name of `lora_targets`.
        """
        self._packing = options["packing"]
        if self._packing and not _keeps_packed_rows_apart(self.model):
            raise InputError(
                f"--packing: with {type(self.model).__name__} of this transformers, a row would "
                "attend to those packed before it. Leave --packing out."
            )
        module = self.model.train()
        if options["gradient_checkpointing"]:
            _save_memory(module)
        if options["lora_rank"]:
            lora = {
                name: options[f"lora_{name}"] for name in ("rank", "alpha", "dropout", "targets")
            }
            self._lora = module = add_lora(module, **lora)
        return module.train()

    def collate(
        self, rows: Sequence[Mapping[str, Any]], noises: Sequence[SampleNoise], epoch: int
    ) -> TrainingBatch:
        """Selected rows as a training batch; what was sampled is what is trained on, id for id.

        Args:
            rows: with the columns `prompt_id`, `prompt_ids` and `completion_ids`.
            noises: not used; nothing is drawn.
            epoch: not used.

        Returns:
            `input_ids` and `labels` `[batch, seq_len]` int64, padded on the right; labels are -100
            but for the completion's tokens, its end among them. With packing one row, and
            `position_ids` that begin anew at each sequence.

        Raises:
            DataError: a row has no prompt or no completion.
        """
        sequences = [_sequence(row) for row in rows]
        if self._packing:
            ids = np.concatenate([s for s, _ in sequences])[None]
            labels = np.concatenate([_labels(s, start) for s, start in sequences])[None]
            positions = np.concatenate([np.arange(len(s)) for s, _ in sequences])[None]
            arrays = {"input_ids": ids, "labels": labels, "position_ids": positions}
        else:
            width = max(len(s) for s, _ in sequences)
            # Any id will do: nothing attends to what stands on its right.
            ids = np.zeros((len(rows), width), dtype=np.int64)
            labels = np.full((len(rows), width), _IGNORED)
            for row, (sequence, start) in enumerate(sequences):
                ids[row, : len(sequence)] = sequence
                labels[row, : len(sequence)] = _labels(sequence, start)
            arrays = {"input_ids": ids, "labels": labels}
        tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
        return TrainingBatch(tensors, int((labels != _IGNORED).sum()))

    def loss(self, model: nn.Module, tensors: Mapping[str, Tensor]) -> Tensor:
        """Sum of the cross-entropy over the completions' tokens, float32 scalar, in nats.

        Args:
            model: the policy's model, wrapped for training or not.
            tensors: those of a `TrainingBatch`, on the model's device.
        """
        targets = tensors["labels"][:, 1:]
        # The columns with a target: logits over the vocabulary are the largest tensor there is.
        columns = (targets != _IGNORED).any(0).nonzero()[:, 0]
        arguments = {name: t for name, t in tensors.items() if name != "labels"}
        if self._keeps_logits:
            logits = model(**arguments, use_cache=False, logits_to_keep=columns).logits
        else:
            logits = model(**arguments, use_cache=False).logits[:, columns]
        return cross_entropy(
            logits.flatten(0, 1).float(),
            targets[:, columns].flatten(),
            ignore_index=_IGNORED,
            reduction="sum",
        )

    def save(self, folder: Path, tensors: dict[str, Tensor]) -> None:
        """Publishes the policy with other weights as a folder that loads like this one.

        Args:
            folder: its final name. With LoRA the adapter is merged into the weights here, and
                stands by itself in `folder` with `-adapter` at its end.
            tensors: the state of the module that `trained` gave, by name.
        """
        if self._lora is None:
            export_language_model(folder, self.folder, self.model, tensors)
            return
        save_adapter(folder.with_name(folder.name + "-adapter"), self._lora, tensors)
        plain, _ = load_language_model(self.folder, self._trusts_code, torch.float32)
        merge_lora(plain, self._lora, tensors)
        export_language_model(folder, self.folder, plain, plain.state_dict())


@torch.no_grad()
def _keeps_packed_rows_apart(model: nn.Module) -> bool:
    """Whether rows in one line, told apart by their positions alone, are as each by itself.

    Many models build their masks so, but not all, and those that do not say nothing.
    """
    if "position_ids" not in inspect.signature(model.forward).parameters:
        return False
    device = next(model.parameters()).device
    rows = [torch.arange(start, start + 8, device=device)[None] for start in (0, 8)]
    positions = torch.arange(8, device=device).repeat(2)[None]
    apart = torch.cat([model(input_ids=row, use_cache=False).logits for row in rows], dim=1)
    packed = model(input_ids=torch.cat(rows, dim=1), position_ids=positions, use_cache=False)
    # Rounding differs by about a millionth; a row that sees another differs by percents.
    return bool((packed.logits - apart).abs().max() <= 1e-3 * apart.abs().max())


def _save_memory(module: nn.Module) -> None:
    # transformers 5.24 renamed it; the default there is not reentrant, as it is here.
    enable: Any = getattr(module, "activation_checkpointing_enable", None)
    if enable is not None:
        enable()
    else:
        module.gradient_checkpointing_enable(  # type: ignore[operator]
            gradient_checkpointing_kwargs={"use_reentrant": False}
        )


def _rendering(options: Mapping[str, Any]) -> Rendering:
    text = options.get("chat_template_arguments") or "{}"
    try:
        arguments = json.loads(text)
    except json.JSONDecodeError as error:
        raise InputError(f"--chat-template-arguments {text!r}: not JSON: {error}") from error
    if not isinstance(arguments, dict):
        raise InputError(f"--chat-template-arguments {text!r}: expected an object of JSON")
    return Rendering(options.get("system"), options.get("chat", False), arguments)


def _sequence(row: Mapping[str, Any]) -> tuple[np.ndarray[Any, np.dtype[np.int64]], int]:
    """Prompt and completion as one array, and where the completion begins."""
    prompt, completion = row["prompt_ids"], row["completion_ids"]
    if not len(prompt) or not len(completion):
        raise DataError(
            f'prompt "{row.get("prompt_id")}": a row needs prompt_ids and completion_ids, found '
            f"{len(prompt)} and {len(completion)} token ids."
        )
    return np.concatenate([prompt, completion]).astype(np.int64), len(prompt)


def _labels(sequence: Any, start: int) -> Any:
    labels = sequence.copy()
    labels[:start] = _IGNORED
    return labels
