"""Reward models: sequence classifiers that read prompt and completion as text.

Only text goes in, never the policy's token ids: the model has its own tokenizer and chat template.
The one place where rewards know `transformers`, imported when a model is looked at.
"""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rft_batch.errors import InputError
from rft_batch.files import files_digest
from rft_batch.processes import usual_dtype
from rft_batch.rewards.calls import NotScored, RewardModels

_FILES = ("*.json", "*.safetensors", "*.jinja", "*.txt", "*.model")
_OUTPUT = re.compile(r"(softmax:)?(\d{1,9})")
_NO_LIMIT = 1 << 40


def find_models(models: RewardModels) -> "list[RewardModel]":
    """The models that the settings name, digested but not loaded.

    Args:
        models: their folders or names on the hub, from which what is not here is brought.

    Raises:
        InputError: there is no such model, or the outputs do not fit the number of models.
    """
    count = len(models.references)
    outputs: list[str | None] = [*models.outputs] or [None]
    for output in models.outputs:
        if not _OUTPUT.fullmatch(output):
            raise InputError(
                f"--reward-output {output}: write the number of an output as 0, or the probability "
                "of a class as softmax:1."
            )
    if len(outputs) not in (1, count):
        raise InputError(
            f"--reward-output: {len(outputs)} given for {count} reward models. "
            "Give one for each, or one for all."
        )
    if len(outputs) == 1:
        outputs *= count
    return [
        RewardModel(reference, output, models.batch_size, models.device)
        for reference, output in zip(models.references, outputs, strict=True)
    ]


class RewardModel:
    """A sequence classifier as a reward function.

    Args:
        reference: its folder, or its name on the Hugging Face hub.
        output: which of its outputs is the score, `0` or `softmax:1`; None: it has one.
        batch_size: texts per forward pass.
        device: where it runs; in bfloat16 on a GPU that has it, else in float32.

    Raises:
        InputError: there is no such model.
    """

    def __init__(self, reference: str, output: str | None, batch_size: int, device: str) -> None:
        self._reference = reference
        self._folder = _folder(reference)
        is_local = Path(reference).is_dir()
        self.name = self._folder.resolve().name if is_local else reference
        self._output = output
        self._batch_size = batch_size
        self._device = device
        self._dtype = usual_dtype(device)
        self._model: Any = None
        self._tokenizer: Any = None

    @property
    def digest(self) -> str:
        """Digest of its files, and how its score is read from it."""
        files = [p for p in self._folder.iterdir() if p.is_file() and not p.name.startswith(".")]
        dtype = str(self._dtype).removeprefix("torch.")
        output = "" if self._output is None else f", output {self._output}"
        return f"{files_digest(sorted(files))}, {dtype}{output}"

    def load(self, for_chats: bool) -> None:
        """Brings the model to its device.

        Args:
            for_chats: whether it is to score chats.

        Raises:
            InputError: it is no whole sequence classifier, or does not say which output is the
                score, or has no chat template for chats.
        """
        if self._model is not None:
            return
        model = _load_model(self._folder, self._reference, self._dtype)
        self._check_output(model.config.num_labels)
        self._tokenizer = _load_tokenizer(self._folder, self._reference)
        if for_chats and not self._tokenizer.chat_template:
            raise InputError(
                f"--reward-model {self._reference}: its tokenizer has no chat template, and there "
                "are prompts that are chats. Add chat_template.jinja to the model's folder."
            )
        self._limit = _limit(model, self._tokenizer)
        self._model = model.to(self._device).eval()

    def __call__(self, prompts: Sequence[Any], completions: Sequence[Any]) -> list[Any]:
        """As a reward function: a float for each completion, or why there is none."""
        ids = [self._ids(p, c) for p, c in zip(prompts, completions, strict=True)]
        scores: list[Any] = [row if isinstance(row, NotScored) else None for row in ids]
        # By length: a batch is padded to its longest.
        places = sorted(
            (i for i, score in enumerate(scores) if score is None), key=lambda i: len(ids[i])
        )
        for start in range(0, len(places), self._batch_size):
            batch = places[start : start + self._batch_size]
            for place, score in zip(batch, self._scores([ids[i] for i in batch]), strict=True):
                scores[place] = score
        return scores

    def _check_output(self, count: int) -> None:
        where = f"--reward-model {self._reference}"
        if self._output is None:
            if count > 1:
                raise InputError(
                    f"{where}: it has {count} outputs. Say which one is the score: --reward-output "
                    "0 for the first as it is, or --reward-output softmax:1 for the probability of "
                    "the second class."
                )
            return
        softmax, index = _parsed(self._output)
        if index >= count or (softmax and count == 1):
            raise InputError(
                f"--reward-output {self._output}: {where} has {count} output(s), "
                f"numbered from 0{'; one alone has no softmax' if softmax and count == 1 else ''}."
            )

    def _ids(self, prompt: Any, completion: Any) -> Any:
        """The token ids of a row's text, or why there are none."""
        if isinstance(prompt, list):
            chat = [*prompt, *completion]
            if completion[0]["content"] is None:
                return NotScored("the completion has no text")
            text = self._tokenizer.apply_chat_template(chat, tokenize=False)
            # The template writes its special tokens itself.
            ids = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        elif isinstance(prompt, str) and isinstance(completion, str):
            ids = self._tokenizer(prompt + completion)["input_ids"]
        else:
            return NotScored("the prompt or the completion has no text")
        if not ids:
            return NotScored("there is no text")
        if len(ids) > self._limit:
            return NotScored(f"{len(ids)} tokens, {self.name} reads up to {self._limit}")
        return ids

    @torch.inference_mode()
    def _scores(self, rows: Sequence[Sequence[int]]) -> list[float]:
        """Scores of a batch: the last token that is not padding is the last of the text."""
        logits = torch.cat([self._logits(part, pad) for part, pad in self._padded(rows)]).float()
        if self._output is None:
            return [float(score) for score in logits[:, 0]]
        softmax, index = _parsed(self._output)
        return [float(s) for s in (logits.softmax(-1) if softmax else logits)[:, index]]

    def _padded(
        self, rows: Sequence[Sequence[int]]
    ) -> Iterator[tuple[Sequence[Sequence[int]], int | None]]:
        """The rows with an id to pad them with, or one by one.

        The heads of decoders look for the last id that is not `pad_token_id`. Where that is an id
        of the text, as the end of a turn often is, they read another place (transformers#35352).
        """
        used = {token for row in rows for token in row}
        vocabulary = self._model.get_input_embeddings().num_embeddings
        free = next((token for token in range(vocabulary) if token not in used), None)
        if free is None:
            yield from (([row], None) for row in rows)
        else:
            yield rows, free

    def _logits(self, rows: Sequence[Sequence[int]], pad: int | None) -> Tensor:
        length = max(map(len, rows))
        # On the right: on the left, absolute positions would begin too late.
        padding = [length - len(row) for row in rows]
        ids = [[*row, *[pad or 0] * n] for row, n in zip(rows, padding, strict=True)]
        mask = [[1] * len(row) + [0] * n for row, n in zip(rows, padding, strict=True)]
        for config in (self._model.config, self._model.config.get_text_config()):
            config.pad_token_id = pad
        logits: Tensor = self._model(
            input_ids=torch.tensor(ids, device=self._device),
            attention_mask=torch.tensor(mask, device=self._device),
        ).logits
        return logits


def _parsed(output: str) -> tuple[bool, int]:
    """Whether it is a probability, and the number of the output."""
    found = _OUTPUT.fullmatch(output)
    assert found is not None
    return bool(found[1]), int(found[2])


def _folder(reference: str) -> Path:
    if Path(reference).is_dir():
        return Path(reference)
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(reference, allow_patterns=list(_FILES)))
    except Exception as error:  # of the network, of the hub, of the name
        raise InputError(
            f"--reward-model {reference}: there is no such folder, and the hub does not give it: "
            f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        ) from error


def _load_model(folder: Path, reference: str, dtype: torch.dtype) -> Any:
    try:
        from transformers import AutoModelForSequenceClassification
    except ImportError as error:
        raise InputError(
            "--reward-model: transformers is not installed. Run pip install 'rft-batch[lm]'."
        ) from error
    try:
        model, info = AutoModelForSequenceClassification.from_pretrained(
            folder,
            # Here and not by `.to`, which would round the frequencies of rotary positions too.
            dtype=dtype,
            local_files_only=True,
            use_safetensors=True,
            output_loading_info=True,
        )
    except Exception as error:  # whatever a damaged or foreign folder makes it raise
        raise InputError(
            f"--reward-model {reference}: not a sequence classifier with safetensors weights: "
            f"{type(error).__name__}: {' '.join(str(error).split())[:500]}"
        ) from error
    missing = sorted(info["missing_keys"])
    if missing:
        raise InputError(
            f"--reward-model {reference}: weights are missing and would be random: "
            f"{', '.join(missing[:5])}{', ...' if len(missing) > 5 else ''}. "
            "It is not a reward model, or not a whole one."
        )
    return model


def _load_tokenizer(folder: Path, reference: str) -> Any:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # whatever a damaged or foreign folder makes it raise
        raise InputError(
            f"--reward-model {reference}: its tokenizer cannot be loaded: "
            f"{type(error).__name__}: {' '.join(str(error).split())[:500]}"
        ) from error


def _limit(model: Any, tokenizer: Any) -> int:
    """How many tokens the model reads."""
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    # RoBERTa's positions begin after that of the padding.
    used = [
        module.padding_idx + 1
        for name, module in model.named_modules()
        if name.endswith("position_embeddings") and getattr(module, "padding_idx", None) is not None
    ]
    own = _NO_LIMIT if positions is None else int(positions) - sum(used)
    return min(own, int(tokenizer.model_max_length))
