"""The settings of `rft-batch finetune`."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from rft_batch.settings.options import Settings, name_problems, option


@dataclass(frozen=True, kw_only=True)
class FinetuneSettings(Settings):
    """Settings of `rft-batch finetune`."""

    round_dir: Path = option(help="Folder of the round.", argument=True, identity=False)
    policy: Path = option(
        help="Policy to start from: a folder, or a hub id.", identity=False, path=True, hub=True
    )
    also: tuple[Path, ...] = option(
        (),
        help="Other round whose selected rows are added; repeat it, the newest first.",
        identity=False,
        path=True,
    )
    selection: str = option("selection", help="Folder in ROUND with the flags.", identity=False)
    max_per_prompt: int | None = option(
        None,
        help="Rows of a prompt to train on, of all rounds together; the best ones. Default: all.",
        minimum=1,
    )
    anchor: Path | None = option(
        None,
        help="Original rows to train on beside the selected ones: prompt_id, prompt, completion "
        "(or completion_ids), a .jsonl or .parquet file.",
        identity=False,
        path=True,
    )
    seed: int = option(0, help="Seed of order and masks.", minimum=0)
    epochs: int = option(4, help="Passes over the selected rows.", minimum=1)
    max_steps: int | None = option(
        None, help="Stop after this many optimizer steps; default: all epochs.", minimum=1
    )
    learning_rate: float = option(1e-4, help="Peak learning rate of AdamW.", above=0)
    lr_schedule: str = option(
        "cosine", help="Decay after warm-up.", choices=("cosine", "linear", "constant")
    )
    warmup_ratio: float = option(
        0.1, help="Share of the optimizer steps that warm up.", minimum=0, maximum=1
    )
    weight_decay: float = option(
        0.01, help="Of weight matrices; never of biases, norms, embeddings.", minimum=0
    )
    max_grad_norm: float = option(1.0, help="Gradient norm to clip to.", above=0)
    batch_size: int = option(
        32, help="Rows per optimizer step, of all processes together.", minimum=1
    )
    micro_batch_size: int | None = option(
        None,
        help="Rows per forward pass of a process; default: --batch-size over the processes.",
        identity=False,
        minimum=1,
    )
    ema_decay: float = option(
        0.999,
        help="Decay of the averaged weights per step; 0: no averaging.",
        minimum=0,
        maximum=1,
    )
    packing: bool = option(
        False, help="Put the rows of a forward pass into one, without padding.", family=True
    )
    gradient_checkpointing: bool = option(
        False, help="Compute activations twice to save memory.", family=True, identity=False
    )
    lora_rank: int = option(0, help="Rank of LoRA adapters; 0: train all.", minimum=0, family=True)
    lora_alpha: float = option(32.0, help="Scale of LoRA, over its rank.", above=0, family=True)
    lora_dropout: float = option(
        0.0, help="Dropout before LoRA adapters.", minimum=0, maximum=1, family=True
    )
    lora_targets: tuple[str, ...] = option(
        (), help="Module to adapt; repeat it; default: every linear layer.", family=True
    )
    mixed_precision: str = option(
        "no", help="Autocast of the forward pass.", choices=("no", "bf16", "fp16")
    )
    save_every: int = option(
        50, help="Optimizer steps between checkpoints.", identity=False, minimum=1
    )
    keep_checkpoints: int = option(2, help="Checkpoints to keep.", identity=False, minimum=1)
    device: str = option("auto", help="auto, or cpu.", choices=("auto", "cpu"), identity=False)
    trust_policy_code: bool = option(
        False, help="Run model code that the policy names outside rft_batch.", identity=False
    )

    def contradictions(self) -> Iterator[str]:
        """The name of the selection, a round twice, an averaging that would never move."""
        yield from name_problems("selection", self.selection)
        rounds = [path.resolve() for path in (self.round_dir, *self.also)]
        if len(set(rounds)) < len(rounds):
            yield "--also: a round is given twice."
        if self.ema_decay == 1:
            yield "--ema-decay 1: the average would never move. Choose a value below 1."
