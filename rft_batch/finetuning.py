"""Stage two: selected rows -> training loop -> policy folder.

    rft-batch finetune runs/digits/round-1 --policy data/digits/policy --epochs 4

Everything random is a function of (seed, epoch or step, sample): the order of the rows, the masks,
the dropout. So a run that was killed ends with the weights of one that was not. A batch is rows per
optimizer step, of all processes and micro-batches together, and the loss of a step is the sum over
all of them divided by their true number of targets; neither changes with the number of processes.
"""

import math
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow.compute as pc
import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from numpy.typing import NDArray
from torch import Tensor, nn
from torch_ema import ExponentialMovingAverage

from rft_batch.anchors import anchor_digest, with_anchor
from rft_batch.checkpoints import (
    TrainingState,
    checkpoint_steps,
    ema_tensors,
    keep_newest,
    own_tensors,
    restore_newest,
    save_checkpoint,
)
from rft_batch.errors import DataError, InputError
from rft_batch.files import publish_json
from rft_batch.metrics import append_metrics, read_metrics
from rft_batch.policies import Policy, TrainingBatch, load_policy, policy_digest
from rft_batch.progress import Progress, say
from rft_batch.randomness import SampleNoise, Stream
from rft_batch.selected_rows import (
    count_selected,
    load_selected,
    over_limit_left_out,
    selection_digest,
)
from rft_batch.settings import FinetuneSettings, refuse_other_identity
from rft_batch.shards import read_manifest
from rft_batch.versions import versions

if TYPE_CHECKING:
    from datasets import Dataset


def finetune(settings: FinetuneSettings) -> dict[str, Any]:
    """Fine-tunes a policy on the selected rows of a round and exports it to `ROUND/policy`.

    `ROUND/policy` holds the averaged weights, `ROUND/policy-raw` those of the last step; without
    averaging both are the same.

    Args:
        settings: see `FinetuneSettings`.

    Returns:
        The manifest, which also stands in `ROUND/training/manifest.json`.

    Raises:
        InputError: bad settings; or the folder was begun with others.
        DataError: a stage is not complete, nothing is selected, or a loss is not finite.
    """
    round_dir, folder = settings.round_dir, settings.round_dir / "training"
    accelerator = _accelerator(settings)
    speaks = accelerator.is_main_process
    digest = policy_digest(settings.policy)
    rounds = [round_dir, *settings.also]
    identity = settings.identity(
        policy=digest,
        rows=selection_digest(rounds, settings.selection),
        anchor=anchor_digest(settings.anchor) if settings.anchor else None,
    )
    refuse_other_identity(
        folder,
        identity,
        f"Nothing was touched. Use the recorded settings, or remove {folder} to train anew.",
    )
    if (folder / "manifest.json").exists():
        say(f"{folder}: complete already, nothing to do", speaks)
        return read_manifest(folder, f"rft-batch finetune {round_dir}")

    policy = load_policy(settings.policy, settings.trust_policy_code)
    options = settings.family_options(policy.training_options, policy.family)
    with accelerator.main_process_first():
        rows = load_selected(rounds, settings.selection, folder, settings.max_per_prompt)
    num_selected = len(rows)
    if settings.anchor is not None:
        rows = with_anchor(rows, settings.anchor, policy)
    if speaks and not (folder / "settings.json").exists():
        publish_json(folder / "settings.json", identity)
    run = _Run(settings, accelerator, policy, options, rows, folder)
    anchored = f" and {len(rows) - num_selected} of the anchor" if settings.anchor else ""
    say(
        f"{folder}: {num_selected} selected rows{anchored}, "
        f"{run.total_steps} steps of {settings.batch_size} rows, {accelerator.num_processes} "
        f"process(es), {accelerator.device.type}, mixed precision {accelerator.mixed_precision}",
        speaks,
    )
    try:
        state = run.train()
    except torch.OutOfMemoryError as error:
        raise InputError(
            f"out of memory with --micro-batch-size {run.micro_batch_size}. Pass a smaller one: "
            "the result stays the same, and the run goes on after its last checkpoint."
        ) from error
    if speaks:
        raw = own_tensors(state.model)
        policy.save(round_dir / "policy-raw", raw)
        policy.save(round_dir / "policy", ema_tensors(state) if state.ema is not None else raw)
        steps = read_metrics(run.metrics_path)
        over_limit = over_limit_left_out(
            rounds, settings.selection, folder, settings.max_per_prompt
        )
        selected = count_selected(rounds, settings.selection)
        last_epoch = [s["loss"] for s in steps if s["epoch"] == steps[-1]["epoch"]]
        manifest = {
            "stage": "finetune",
            "identity": identity,
            "policy": {"path": str(settings.policy), "digest": digest},
            "counts": {
                "rows": len(rows),
                "anchor_rows": len(rows) - num_selected,
                "repeats_left_out": selected - num_selected - over_limit,
                "over_limit_left_out": over_limit,
                "steps": state.step,
                "skipped_steps": sum(s["skipped"] for s in steps),
                "attempts": run.attempt,
            },
            "last_epoch_loss": sum(last_epoch) / len(last_epoch),
            "exported": {
                name: policy_digest(round_dir / name) for name in ("policy", "policy-raw")
            },
            "versions": versions(),
        }
        publish_json(folder / "manifest.json", manifest)
    accelerator.wait_for_everyone()
    accelerator.end_training()
    return read_manifest(folder, f"rft-batch finetune {round_dir}")


def learning_rate(settings: FinetuneSettings, step: int, total_steps: int) -> float:
    """The learning rate of an optimizer step: linear warm-up to the peak, then decay.

    Args:
        settings: peak, share of warm-up and kind of decay.
        step: optimizer steps done before this one.
        total_steps: optimizer steps of the whole run.

    Returns:
        A value in (0, peak]; the peak is reached in the last step of the warm-up.
    """
    warm_up = math.ceil(settings.warmup_ratio * total_steps)
    if step < warm_up:
        return settings.learning_rate * (step + 1) / warm_up
    progress = (step - warm_up) / max(1, total_steps - warm_up)
    factor = {
        "cosine": (1 + math.cos(math.pi * progress)) / 2,
        "linear": 1 - progress,
        "constant": 1.0,
    }
    return settings.learning_rate * factor[settings.lr_schedule]


def decay_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Parameters in two groups: weight matrices decay; biases, norms and embeddings do not."""
    embeddings = {
        id(parameter)
        for module in model.modules()
        if isinstance(module, nn.Embedding)
        for parameter in module.parameters()
    }
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    decayed = [p for p in parameters if p.ndim >= 2 and id(p) not in embeddings]
    decayed_ids = {id(parameter) for parameter in decayed}
    others = [p for p in parameters if id(p) not in decayed_ids]
    return [
        {"params": decayed, "weight_decay": weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]


def _accelerator(settings: FinetuneSettings) -> Accelerator:
    cpu = settings.device == "cpu" or not torch.accelerator.is_available()
    if cpu and settings.mixed_precision == "fp16":
        raise InputError("--mixed-precision fp16: needs a GPU. Use no, or bf16.")
    accelerator = Accelerator(mixed_precision=settings.mixed_precision, cpu=cpu)
    supported = (DistributedType.NO, DistributedType.MULTI_GPU, DistributedType.MULTI_CPU)
    if accelerator.distributed_type not in supported:
        raise InputError(
            f"{accelerator.distributed_type.value}: not supported; one process or DDP is. "
            "Launch with torchrun, or without sharding in Accelerate's configuration."
        )
    return accelerator


class _Run:
    """One training: what stays the same over its steps."""

    def __init__(
        self,
        settings: FinetuneSettings,
        accelerator: Accelerator,
        policy: Policy,
        options: dict[str, Any],
        rows: "Dataset",
        folder: Path,
    ) -> None:
        self.settings, self.accelerator, self.policy = settings, accelerator, policy
        self.options, self.rows, self.folder = options, rows, folder
        self.steps_per_epoch = math.ceil(len(rows) / settings.batch_size)
        planned = settings.epochs * self.steps_per_epoch
        self.total_steps = min(planned, settings.max_steps or planned)
        self.metrics_path = folder / "metrics.jsonl"
        earlier = read_metrics(self.metrics_path) if self.metrics_path.exists() else []
        self.attempt = 1 + max((record["attempt"] for record in earlier), default=0)
        lengths = [
            pc.list_value_length(rows.data[name]) for name in ("prompt_ids", "completion_ids")
        ]
        self._lengths: NDArray[np.int64] = pc.add(*lengths).to_numpy()
        self._epoch_order: tuple[int, NDArray[np.int64]] = (-1, np.empty(0, dtype=np.int64))
        processes = accelerator.num_processes
        self.micro_batch_size = settings.micro_batch_size or -(-settings.batch_size // processes)

    def train(self) -> TrainingState:
        """Trains from the newest good checkpoint to the last step."""
        settings, accelerator = self.settings, self.accelerator
        # Adapters begin with random weights; a run that is begun anew begins with the same.
        noise = SampleNoise(settings.seed, "adapters")
        torch.manual_seed(int(noise.words(Stream.ADAPTERS, 0, 1)[0] >> np.uint64(1)))
        module = self.policy.trained(**self.options)
        optimizer = torch.optim.AdamW(
            decay_groups(module, settings.weight_decay), lr=settings.learning_rate
        )
        model, stepper = accelerator.prepare(module, optimizer)
        ema = None
        if settings.ema_decay:
            trained = [p for p in module.parameters() if p.requires_grad]
            ema = ExponentialMovingAverage(trained, settings.ema_decay)
        state = TrainingState(module, optimizer, ema, accelerator.scaler)
        if restore_newest(self.folder, state):
            say(f"{self.folder}: goes on after step {state.step}", accelerator.is_main_process)
        with Progress(
            self.total_steps, "steps", state.step, accelerator.is_main_process
        ) as progress:
            while state.step < self.total_steps:
                figures = self._step(state, model, stepper)
                if accelerator.is_main_process:
                    append_metrics(self.metrics_path, {"attempt": self.attempt, **figures})
                self._checkpoint(state)
                progress.show(loss=figures["loss"])
                progress.advance(1)
        return state

    def _step(self, state: TrainingState, model: nn.Module, stepper: Any) -> dict[str, Any]:
        """One optimizer step; returns what `metrics.jsonl` records of it."""
        accelerator, settings = self.accelerator, self.settings
        epoch, place = divmod(state.step, self.steps_per_epoch)
        numbers = self._order(epoch)[
            place * settings.batch_size : (place + 1) * settings.batch_size
        ]
        batches = self._micro_batches(numbers, epoch)
        own_targets = sum(batch.num_targets * weight for batch, weight in batches)
        num_targets = int(self._total(torch.tensor(own_targets)))
        rate = learning_rate(settings, state.step, self.total_steps)
        for group in state.optimizer.param_groups:
            group["lr"] = rate
        # Seeded for each step, so that dropout needs no state in a checkpoint.
        noise = SampleNoise(settings.seed, "dropout", accelerator.process_index)
        torch.manual_seed(int(noise.words(Stream.DROPOUT, state.step, 1)[0] >> np.uint64(1)))
        loss_sum = torch.zeros((), device=accelerator.device)
        for number, (batch, weight) in enumerate(batches):
            is_last = number == len(batches) - 1
            with nullcontext() if is_last else accelerator.no_sync(model):
                tensors = {name: t.to(accelerator.device) for name, t in batch.tensors.items()}
                with accelerator.autocast():
                    loss = self.policy.loss(model, tensors) * weight
                # DDP averages over processes, so their number undoes that.
                scale = accelerator.num_processes / max(1, num_targets)
                accelerator.backward(loss * scale)
                loss_sum += loss.detach()
        norm = float(accelerator.clip_grad_norm_(model.parameters(), settings.max_grad_norm))
        mean_loss = float(self._total(loss_sum)) / max(1, num_targets)
        if not math.isfinite(mean_loss) or (state.scaler is None and not math.isfinite(norm)):
            self._stop_not_finite(state, mean_loss, norm, numbers)
        if num_targets:
            stepper.step()
        skipped = not num_targets or accelerator.optimizer_step_was_skipped
        stepper.zero_grad()
        if state.ema is not None and not skipped:
            state.ema.update()
        state.step += 1
        return {
            "step": state.step,
            "epoch": epoch,
            "loss": mean_loss,
            "learning_rate": rate,
            "grad_norm": norm,
            "rows": len(numbers),
            "targets": num_targets,
            "skipped": bool(skipped),
        }

    def _order(self, epoch: int) -> NDArray[np.int64]:
        """The order of the rows in an epoch: a function of (seed, epoch) alone."""
        if self._epoch_order[0] != epoch:
            noise = SampleNoise(self.settings.seed, "order")
            order = noise.permutation(Stream.SHUFFLE, epoch, len(self.rows))
            self._epoch_order = (epoch, order)
        return self._epoch_order[1]

    def _micro_batches(
        self, numbers: NDArray[np.int64], epoch: int
    ) -> list[tuple[TrainingBatch, float]]:
        """This process's micro-batches of a step with their weights.

        Every process gets equally many, because DDP waits for all: where the rows do not go round,
        the last of a process is a row of the step again, with weight 0. Within the step rows stand
        by length, which saves padding and changes nothing: the step's loss is a sum over its rows.
        """
        processes, index = self.accelerator.num_processes, self.accelerator.process_index
        by_length = numbers[np.argsort(self._lengths[numbers], kind="stable")]
        own = by_length[index::processes]
        count = math.ceil(math.ceil(len(numbers) / processes) / self.micro_batch_size)
        parts = [
            own[i * self.micro_batch_size : (i + 1) * self.micro_batch_size] for i in range(count)
        ]
        return [
            (self._collate(part, epoch), 1.0)
            if len(part)
            else (self._collate(numbers[:1], epoch), 0.0)
            for part in parts
        ]

    def _collate(self, numbers: Sequence[int] | NDArray[np.int64], epoch: int) -> TrainingBatch:
        columns = self.rows[[int(number) for number in numbers]]
        rows = [
            dict(zip(columns, values, strict=True))
            for values in zip(*columns.values(), strict=True)
        ]
        noises = [
            SampleNoise.for_sample(
                self.settings.seed, row["round_number"], row["prompt_id"], row["sample_index"]
            )
            for row in rows
        ]
        return self.policy.collate(rows, noises, epoch)

    def _total(self, value: Tensor) -> Tensor:
        total: Tensor = self.accelerator.reduce(value.to(self.accelerator.device), "sum")
        return total

    def _checkpoint(self, state: TrainingState) -> None:
        settings = self.settings
        if state.step % settings.save_every or state.step == self.total_steps:
            return
        if self.accelerator.is_main_process:
            save_checkpoint(self.folder, state)
            keep_newest(self.folder, settings.keep_checkpoints)
        self.accelerator.wait_for_everyone()

    def _stop_not_finite(
        self, state: TrainingState, loss: float, norm: float, numbers: NDArray[np.int64]
    ) -> None:
        rows = self.rows[[int(number) for number in numbers]]
        named = [
            f"{prompt_id} sample {index}"
            for prompt_id, index in zip(rows["prompt_id"], rows["sample_index"], strict=True)
        ]
        steps = checkpoint_steps(self.folder)
        kept = f"step {steps[-1]} in {self.folder}" if steps else "none"
        raise DataError(
            f"step {state.step + 1}: loss {loss}, gradient norm {norm}: not finite. "
            f"Rows of the step: {', '.join(named[:10])}{' ...' if len(named) > 10 else ''}. "
            f"Last good checkpoint: {kept}. Lower --learning-rate, or leave out the rows."
        )
