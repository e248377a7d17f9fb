"""The settings of every command: one definition per option.

A field holds its type, default, help and checks; `cli` turns fields into options, the library uses
the same classes, and a stage's fingerprint is computed from every field that changes its result, so
it cannot forget one.
"""

import json
import re
from collections.abc import Collection, Iterator, Mapping
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
    hub: bool = False,
    family: bool = False,
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
        hub: whether a path that is not there may be the name of a model on a hub.
        family: whether only some families of policies take it.
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
        "hub": hub,
        "family": family,
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

    def family_options(self, taken: Collection[str], family: str) -> dict[str, Any]:
        """The options that a family takes, by field name.

        Args:
            taken: names of the fields that it takes.
            family: its name, for the error's text.

        Raises:
            InputError: an option was set that this family does not take.
        """
        own = [f for f in fields(self) if f.metadata["family"]]
        foreign = [f for f in own if f.name not in taken and getattr(self, f.name) != f.default]
        if foreign:
            raise InputError(
                joined_problems(
                    f"{option_name(f.name)} {getattr(self, f.name)}: a policy of the family "
                    f"{family} does not take this option. Leave it out."
                    for f in foreign
                )
            )
        return {name: getattr(self, name) for name in taken}

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


def name_problems(field_name: str, value: str) -> Iterator[str]:
    """What is wrong with a value that becomes the name of a folder."""
    if not _NAME.fullmatch(value):
        yield (
            f"{option_name(field_name)} {value!r}: a name has up to 100 of "
            "A-Z a-z 0-9 . _ - and does not begin with . or -."
        )
