"""A token-model folder: `policy.json` and `model.safetensors`, read, checked and written.

The folder holds no code and no pickle. `policy.json` names the class that builds the model; a name
outside this package runs only when the user trusts it.
"""

import json
from dataclasses import MISSING, asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from rft_batch.errors import InputError, joined_problems
from rft_batch.files import files_digest, publish_folder
from rft_batch.import_strings import import_callable

POLICY_FILE = "policy.json"
WEIGHTS_FILE = "model.safetensors"

T = TypeVar("T")


@dataclass(frozen=True)
class ClassCondition:
    """How a class label enters the model."""

    num_classes: int
    null_class: int | None = None
    """The label that means "no condition"; needed for guidance and for condition dropout."""
    argument: str = "class_labels"
    """The keyword of the model's `forward` that takes `[batch]` int64 labels."""


@dataclass(frozen=True)
class Recipe:
    """How the checkpoint was trained, which its fine-tuning follows."""

    label_smoothing: float = 0.0
    condition_dropout: float = 0.0


@dataclass(frozen=True)
class Display:
    """How to show a completion as a picture of grey levels, row by row."""

    height: int
    width: int
    levels: int


@dataclass(frozen=True)
class TokenModelSpec:
    """The content of `policy.json`."""

    family: str
    model: str
    """Import string `module:callable` of what builds the `nn.Module`."""
    vocab_size: int
    """Ids 0 to vocab_size-1 can come out; the mask id lies outside or is banned."""
    mask_id: int
    seq_len: int
    model_arguments: dict[str, Any] = field(default_factory=dict)
    banned_ids: tuple[int, ...] = ()
    condition: ClassCondition | None = None
    recipe: Recipe = Recipe()
    display: Display | None = None

    @property
    def allowed_ids(self) -> list[int]:
        """The token ids that can come out, ascending."""
        return sorted(set(range(self.vocab_size)) - set(self.banned_ids))


def policy_digest(folder: Path) -> str:
    """Digest of a policy: the bytes of its two files.

    Raises:
        InputError: one of them is missing.
    """
    paths = [folder / POLICY_FILE, folder / WEIGHTS_FILE]
    missing = [path.name for path in paths if not path.is_file()]
    if missing:
        raise InputError(
            f"policy {folder}: {' and '.join(missing)} not found. "
            f"A policy folder holds {POLICY_FILE} and {WEIGHTS_FILE}."
        )
    return files_digest(paths)


def read_spec(folder: Path) -> TokenModelSpec:
    """The checked content of `policy.json`.

    Raises:
        InputError: the file is missing or not JSON, a key is unknown, missing or of the wrong
            type, or the numbers contradict each other.
    """
    path = folder / POLICY_FILE
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise InputError(f"policy {folder}: {POLICY_FILE} not found.") from error
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: not JSON: {error}.") from error
    spec = _parse(TokenModelSpec, content, str(path))
    nested: dict[str, tuple[Any, Any]] = {
        "condition": (ClassCondition, spec.condition),
        "recipe": (Recipe, spec.recipe),
        "display": (Display, spec.display),
    }
    parsed = {
        name: _parse(kind, value, f"{path}: {name}")
        for name, (kind, value) in nested.items()
        if isinstance(value, dict)
    }
    banned = _int_tuple(spec.banned_ids, f"{path}: banned_ids")
    spec = replace(spec, **parsed, banned_ids=banned)
    problems = list(_contradictions(spec))
    if problems:
        raise InputError(joined_problems(f"{path}: {problem}" for problem in problems))
    return spec


def load_model(folder: Path, spec: TokenModelSpec, trust_policy_code: bool) -> nn.Module:
    """The model of a policy folder on the CPU, in float32 and eval mode.

    Args:
        folder: the policy folder.
        spec: its checked `policy.json`.
        trust_policy_code: whether an import string outside this package may run.

    Raises:
        InputError: the code is not trusted or not importable, the arguments do not fit, the
            weights are damaged or of other names or shapes, or the model does not keep the
            contract (`check_model`).
    """
    path = folder / POLICY_FILE
    if not spec.model.startswith("rft_batch.") and not trust_policy_code:
        raise InputError(
            f'{path}: the model "{spec.model}" is code from outside rft_batch. '
            "If you trust it, pass --trust-policy-code."
        )
    build = import_callable(spec.model, f"{path}: model")
    try:
        model = build(**spec.model_arguments)
    except TypeError as error:
        raise InputError(f"{path}: model_arguments do not fit {spec.model}: {error}.") from error
    weights = folder / WEIGHTS_FILE
    try:
        tensors = load_file(weights)
    except (SafetensorError, OSError) as error:
        raise InputError(f"{weights}: cannot be read: {error}.") from error
    problems = list(_differences(model.state_dict(), tensors))
    if problems:
        raise InputError(joined_problems(f"{weights}: {problem}" for problem in problems))
    model.load_state_dict(tensors)
    model = model.float().eval()
    check_model(model, spec, path)
    return model  # type: ignore[no-any-return]


def save_policy(folder: Path, spec: TokenModelSpec, tensors: dict[str, Tensor]) -> None:
    """Publishes a policy folder, whole or not at all.

    Args:
        folder: its final name.
        spec: what becomes `policy.json`.
        tensors: the state of the unwrapped model, by name.
    """
    content = {
        name: value
        for name, value in asdict(spec).items()
        if value is not None and value != () and value != {}
    }

    def write(temporary: Path) -> None:
        text = json.dumps(content, indent=2) + "\n"
        (temporary / POLICY_FILE).write_text(text, encoding="utf-8")
        save_file(
            {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()},
            temporary / WEIGHTS_FILE,
        )

    publish_folder(folder, write)


def token_logits(
    model: nn.Module, spec: TokenModelSpec, x: Tensor, class_labels: Tensor | None
) -> Tensor:
    """Logits of the codebook alone, float32.

    Args:
        model: the model, wrapped or not.
        spec: its spec.
        x: `[batch, seq_len]` int64, the mask id where unknown.
        class_labels: `[batch]` int64; None where the policy has no classes.

    Returns:
        `[batch, seq_len, vocab_size]` float32.
    """
    arguments = {spec.condition.argument: class_labels} if spec.condition else {}
    out = model(x, **arguments)
    logits: Tensor = out if isinstance(out, Tensor) else out.logits
    return logits[..., : spec.vocab_size].float()


@torch.inference_mode()
def check_model(model: nn.Module, spec: TokenModelSpec, path: Path) -> None:
    """Two forward passes over two rows that show whether the model keeps the contract.

    Args:
        model: on the CPU, in eval mode.
        spec: its spec.
        path: the policy's file, for the error's text.

    Raises:
        InputError: the mask id lies outside the embedding; the logits have another shape, are
            not finite, or ignore the visible tokens; or a row depends on its neighbour.
    """
    x = torch.full((2, spec.seq_len), spec.mask_id)
    allowed = spec.allowed_ids
    x[:, : spec.seq_len // 2] = allowed[0]
    labels = torch.zeros(2, dtype=torch.int64) if spec.condition else None
    try:
        logits = token_logits(model, spec, x, labels)
    except IndexError as error:
        sizes = {m.num_embeddings for m in model.modules() if isinstance(m, nn.Embedding)}
        raise InputError(
            f"{path}: an id lies outside the model's embedding (mask_id {spec.mask_id}, "
            f"vocab_size {spec.vocab_size}; embeddings of the model have "
            f"{' or '.join(map(str, sorted(sizes)))} rows). "
            "Ids count from 0, so mask_id must be less than the rows of the token embedding."
        ) from error
    expected = (2, spec.seq_len, spec.vocab_size)
    if tuple(logits.shape) != expected:
        raise InputError(
            f"{path}: the model gave logits of shape {tuple(logits.shape)}, "
            f"expected {expected} (batch, seq_len, at least vocab_size)."
        )
    if not torch.isfinite(logits).all():
        raise InputError(f"{path}: the model gave logits that are not finite.")
    if spec.seq_len < 2:
        return
    changed = x.clone()
    changed[1, 0] = allowed[-1]
    other = token_logits(model, spec, changed, labels)
    # A batched matrix product may round rows differently, so equality is up to that rounding.
    if not torch.allclose(logits[0], other[0], rtol=1e-3, atol=1e-4):
        raise InputError(f"{path}: the logits of one row depend on another row of the batch.")
    if len(allowed) > 1 and torch.equal(logits[1, -1], other[1, -1]):
        raise InputError(
            f"{path}: the logits of a masked position do not depend on a visible token. "
            "The model may use its mask as an attention mask."
        )


def _parse(kind: type[T], content: Any, where: str) -> T:
    if not isinstance(content, dict):
        raise InputError(f"{where}: expected an object, found {type(content).__name__}.")
    known = {f.name: f for f in fields(kind)}  # type: ignore[arg-type]
    problems = [
        f'unknown key "{name}" (known: {", ".join(known)})' for name in content if name not in known
    ]
    problems += [
        f'key "{f.name}" is missing'
        for f in known.values()
        if f.name not in content and f.default is MISSING and f.default_factory is MISSING
    ]
    types: dict[Any, tuple[type, ...]] = {int: (int,), str: (str,), float: (int, float)}
    for name, value in content.items():
        wanted = types.get(known[name].type) if name in known else None
        if wanted and (not isinstance(value, wanted) or isinstance(value, bool)):
            problems.append(f'key "{name}" must be of type {wanted[-1].__name__}, found {value!r}')
    if problems:
        raise InputError(joined_problems(f"{where}: {problem}." for problem in problems))
    return kind(**content)


def _int_tuple(value: Any, where: str) -> tuple[int, ...]:
    if not isinstance(value, list | tuple) or not all(type(item) is int for item in value):
        raise InputError(f"{where}: expected a list of token ids, found {value!r}.")
    return tuple(value)


def _contradictions(spec: TokenModelSpec) -> Any:
    if spec.seq_len < 1 or spec.vocab_size < 1:
        yield f"seq_len {spec.seq_len} and vocab_size {spec.vocab_size} must be at least 1."
    if spec.mask_id < 0:
        yield f"mask_id {spec.mask_id} is negative."
    elif spec.mask_id < spec.vocab_size and spec.mask_id not in spec.banned_ids:
        yield (
            f"mask_id {spec.mask_id} is one of the {spec.vocab_size} ids that can come out. "
            "Choose one outside the codebook, or list it in banned_ids."
        )
    outside = [i for i in spec.banned_ids if not 0 <= i < spec.vocab_size]
    if outside:
        yield f"banned_ids {outside} lie outside 0 to {spec.vocab_size - 1}."
    if len(set(spec.banned_ids)) >= spec.vocab_size > 0:
        yield "banned_ids leave no token that can come out."
    null = spec.condition.null_class if spec.condition else None
    if spec.recipe.condition_dropout and null is None:
        yield "condition_dropout needs a condition with a null_class."
    if not 0 <= spec.recipe.condition_dropout < 1 or not 0 <= spec.recipe.label_smoothing < 1:
        yield "condition_dropout and label_smoothing must be at least 0 and below 1."
    if spec.display and spec.display.height * spec.display.width != spec.seq_len:
        yield f"display height x width must be seq_len {spec.seq_len}."


def _differences(expected: dict[str, Tensor], found: dict[str, Tensor]) -> Any:
    for name in expected.keys() - found.keys():
        yield f'tensor "{name}" is missing'
    for name in found.keys() - expected.keys():
        yield f'tensor "{name}" is not in the model'
    for name in sorted(expected.keys() & found.keys()):
        if expected[name].shape != found[name].shape:
            yield (
                f'tensor "{name}" has shape {tuple(found[name].shape)}, '
                f"the model has {tuple(expected[name].shape)}"
            )
