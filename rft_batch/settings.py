"""The settings of every command: one definition per option.

A field holds its type, default, help and checks; `cli` turns fields into options, the library uses
the same classes, and a stage's fingerprint is computed from every field that changes its result, so
it cannot forget one.
"""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields
from pathlib import Path
from typing import Any

from rft_batch.errors import InputError, joined_problems
from rft_batch.files import read_json, text_digest

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,99}")


def option(
    default: Any = MISSING,
    *,
    help: str,
    identity: bool = True,
    minimum: float | None = None,
    above: float | None = None,
    maximum: float | None = None,
    choices: tuple[str, ...] = (),
    argument: bool = False,
    path: bool = False,
) -> Any:
    """A dataclass field that is also a command-line option.

    Args:
        default: its default; none makes the option required.
        help: one sentence for `--help`; units at its end.
        identity: whether another value may give another result.
        minimum: lowest allowed value.
        above: value that must be exceeded.
        maximum: highest allowed value.
        choices: the allowed words; none: any.
        argument: whether it is a positional argument.
        path: whether a relative value in a TOML file is relative to that file.
    """
    metadata = {
        "help": help,
        "identity": identity,
        "minimum": minimum,
        "above": above,
        "maximum": maximum,
        "choices": choices,
        "argument": argument,
        "path": path,
    }
    return field(default=default, metadata=metadata)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What all commands' settings can do."""

    def __post_init__(self) -> None:
        """Checks every field by its metadata, then what `contradictions` finds.

        Raises:
            InputError: a value is out of range; all problems are named at once.
        """
        problems = [p for f in fields(self) for p in _field_problems(f, getattr(self, f.name))]
        problems += self.contradictions()
        if problems:
            raise InputError(joined_problems(problems))

    def contradictions(self) -> Iterator[str]:
        """Problems of several fields together, or of one beyond its range."""
        yield from ()

    def identity(self, **contents: Any) -> dict[str, Any]:
        """Everything that decides the result: the identity fields, and digests of the inputs.

        Args:
            contents: digests of what the fields that are paths hold.
        """
        own = {f.name: getattr(self, f.name) for f in fields(self) if f.metadata["identity"]}
        plain: dict[str, Any] = json.loads(json.dumps(own | contents, default=str))
        return plain


def option_name(field_name: str) -> str:
    """`min_score` as `--min-score`."""
    return "--" + field_name.replace("_", "-")


def fingerprint(identity: Mapping[str, Any]) -> str:
    """Digest of an identity."""
    return text_digest(json.dumps(identity, sort_keys=True))


def refuse_other_identity(folder: Path, now: Mapping[str, Any], way_out: str) -> None:
    """Refuses to continue in a folder what other settings began.

    Args:
        folder: of a stage; its `manifest.json` or else its `settings.json` holds the identity that
            it was made with, and where neither is there nothing is refused.
        now: the identity of this call.
        way_out: what the user can do, for the error's text.

    Raises:
        InputError: they differ; every differing key is named with both values.
        DataError: the file is damaged.
    """
    where = folder / "manifest.json"
    if where.exists():
        recorded = read_json(where)["identity"]
    elif (where := folder / "settings.json").exists():
        recorded = read_json(where)
    else:
        return
    absent = "absent"
    differing = [
        f"  {key}: recorded {recorded.get(key, absent)!r}, now {now.get(key, absent)!r}"
        for key in sorted(recorded.keys() | now.keys())
        if recorded.get(key, absent) != now.get(key, absent)
    ]
    if differing:
        lines = joined_problems(differing)
        raise InputError(f"{where}: made with other settings:\n{lines}\n{way_out}")


@dataclass(frozen=True, kw_only=True)
class GenerateSettings(Settings):
    """Settings of `rft-batch generate`."""

    round_dir: Path = option(help="Folder of the round.", argument=True, identity=False)
    policy: Path = option(help="Policy folder to sample.", identity=False, path=True)
    prompts: Path = option(help="Prompts: a .jsonl or .parquet file.", identity=False, path=True)
    reward: tuple[str, ...] = option(
        (),
        help="module:function or file.py:function; repeat it for a weighted sum.",
        path=True,
        identity=False,
    )
    reward_weight: tuple[float, ...] = option((), help="Weight of each --reward; default 1 each.")
    samples_per_prompt: int = option(8, help="K, the samples of every prompt.", minimum=1)
    seed: int = option(0, help="Seed of every draw.", minimum=0)
    round_number: int | None = option(
        None, help="Round number in the draws' keys; default: the number at ROUND's end.", minimum=0
    )
    into: str = option("samples", help="Folder in ROUND to write: samples, eval, ...")
    order: str = option(
        "random",
        help="Order of unmasking: random samples the policy itself; confidence is for showing.",
        choices=("random", "confidence"),
    )
    steps: int = option(32, help="Forward passes per completion, at most.", minimum=1)
    schedule: str = option(
        "linear",
        help="How the masked share falls over the steps.",
        choices=("cosine", "linear", "square", "cubic", "root", "arccos"),
    )
    temperature: float = option(1.0, help="Temperature of the tokens; 0: likeliest.", minimum=0)
    top_k: int = option(0, help="Keep the k likeliest tokens; 0: all.", minimum=0)
    top_p: float = option(
        1.0, help="Keep the likeliest tokens up to this mass; 1: all.", above=0, maximum=1
    )
    choice_temperature: float = option(
        4.5, help="Noise on the confidences of --order confidence.", minimum=0
    )
    guidance_scale: float = option(
        1.0, help="Classifier-free guidance u + s(c-u); 1: none.", minimum=0
    )
    id_column: str = option("prompt_id", help="Column of the prompts' ids.", identity=False)
    prompt_column: str = option("prompt", help="Column of the prompts.", identity=False)
    prompts_per_shard: int = option(
        256, help="Prompts per shard, the unit of work and of resumption.", minimum=1
    )
    limit: int | None = option(
        None,
        help="Stop after this many prompts, rounded up to whole shards; the stage stays partial.",
        identity=False,
        minimum=1,
    )
    anchor: Path | None = option(
        None,
        help="Rows with completion_ids whose loss is recorded beside that of the samples.",
        identity=False,
        path=True,
    )
    max_error_rate: float = option(
        0.1,
        help="Share of unscored rows above which the stage fails.",
        identity=False,
        minimum=0,
        maximum=1,
    )
    batch_size: int | None = option(
        None, help="Samples per forward pass; default: found by itself.", identity=False, minimum=1
    )
    device: str = option("auto", help="auto, cpu, cuda, mps.", identity=False)
    dtype: str = option(
        "auto",
        help="Of the weights; auto: bfloat16 on a GPU that has it, else float32.",
        choices=("auto", "float32", "bfloat16", "float16"),
    )
    trust_policy_code: bool = option(
        False, help="Run model code that the policy names outside rft_batch.", identity=False
    )

    def contradictions(self) -> Iterator[str]:
        """The name of the folder to write."""
        yield from _name_problems("into", self.into)

    @property
    def key_round(self) -> int:
        """The round number in the draws' keys."""
        if self.round_number is not None:
            return self.round_number
        digits = re.search(r"\d+$", self.round_dir.resolve().name)
        return int(digits.group()) if digits else 0


@dataclass(frozen=True, kw_only=True)
class SelectSettings(Settings):
    """Settings of `rft-batch select`."""

    round_dir: Path = option(help="Folder of the round.", argument=True, identity=False)
    top_k: int = option(2, help="Samples to keep of every prompt.", minimum=1)
    min_score: float | None = option(None, help="Lowest score that may be kept.")
    strategy: str = option(
        "best",
        help="best, or random: the matched control, as many of every prompt but drawn.",
        choices=("best", "random"),
    )
    seed: int = option(0, help="Seed of --strategy random.", minimum=0)
    keep_truncated: bool = option(False, help="Let samples be kept that a limit cut off.")
    into: str = option("selection", help="Folder in ROUND to write.")
    strict_k: bool = option(
        False, help="Fail when a prompt has fewer than --top-k samples to keep.", identity=False
    )
    require_nonempty: bool = option(False, help="Fail when nothing is selected.", identity=False)

    def contradictions(self) -> Iterator[str]:
        """The name of the folder to write."""
        yield from _name_problems("into", self.into)
        if self.min_score is not None and self.min_score != self.min_score:
            yield "--min-score nan: not a number."


@dataclass(frozen=True, kw_only=True)
class FinetuneSettings(Settings):
    """Settings of `rft-batch finetune`."""

    round_dir: Path = option(help="Folder of the round.", argument=True, identity=False)
    policy: Path = option(help="Policy folder to start from.", identity=False, path=True)
    also: tuple[Path, ...] = option(
        (),
        help="Other round whose selected rows are added; repeat it, the newest first.",
        identity=False,
        path=True,
    )
    selection: str = option("selection", help="Folder in ROUND with the flags.", identity=False)
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
        yield from _name_problems("selection", self.selection)
        rounds = [path.resolve() for path in (self.round_dir, *self.also)]
        if len(set(rounds)) < len(rounds):
            yield "--also: a round is given twice."
        if self.ema_decay == 1:
            yield "--ema-decay 1: the average would never move. Choose a value below 1."


@dataclass(frozen=True, kw_only=True)
class ReportSettings(Settings):
    """Settings of `rft-batch report`."""

    run_dir: Path = option(help="Folder of the run.", argument=True, identity=False)
    control: Path | None = option(
        None, help="Run folder of a control, drawn beside it.", identity=False, path=True
    )
    into: str = option("report", help="Folder in RUN to write.", identity=False)

    def contradictions(self) -> Iterator[str]:
        """The name of the folder to write."""
        yield from _name_problems("into", self.into)


@dataclass(frozen=True, kw_only=True)
class InspectSettings(Settings):
    """Settings of `rft-batch inspect`."""

    round_dir: Path = option(help="Folder of the round.", argument=True, identity=False)
    into: str = option("samples", help="Folder in ROUND to look at: samples, eval, ...")
    best: int = option(0, help="Show the samples of the highest scores, this many.", minimum=0)
    worst: int = option(0, help="Show the samples of the lowest scores, this many.", minimum=0)
    prompt: str | None = option(None, help="Show all samples of the prompt of this id.")
    verify: bool = option(False, help="Read everything in ROUND and compare it with the manifests.")

    def contradictions(self) -> Iterator[str]:
        """The name of the folder to look at."""
        yield from _name_problems("into", self.into)


def _field_problems(f: "Field[Any]", value: Any) -> Iterator[str]:
    if value is None:
        return
    name, rules = option_name(f.name), f.metadata
    if rules["choices"] and value not in rules["choices"]:
        yield f"{name} {value!r}: choose one of {', '.join(rules['choices'])}."
    if rules["minimum"] is not None and not value >= rules["minimum"]:
        yield f"{name} {value}: must be at least {rules['minimum']}."
    if rules["above"] is not None and not value > rules["above"]:
        yield f"{name} {value}: must be above {rules['above']}."
    if rules["maximum"] is not None and not value <= rules["maximum"]:
        yield f"{name} {value}: must be at most {rules['maximum']}."


def _name_problems(field_name: str, value: str) -> Iterator[str]:
    if not _NAME.fullmatch(value):
        yield (
            f"{option_name(field_name)} {value!r}: a name has up to 100 of "
            "A-Z a-z 0-9 . _ - and does not begin with . or -."
        )
