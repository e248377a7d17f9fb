"""`module:function` and `path/to/file.py:function` as callables, and their source.

Both may end in keyword arguments, `file.py:function(pattern='a+', minimum=3)`: Python literals, and
nothing else, because an import string may come from a file of settings.
"""

import ast
import importlib
import importlib.util
import inspect
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

from rft_batch.errors import InputError
from rft_batch.files import file_digest

_FORM = re.compile(r"(?P<place>.+?):(?P<name>[^\W\d]\w*)(?P<call>\(.*\))?", re.DOTALL)
_HOW_TO = "Write module:function or path/to/file.py:function."


@dataclass(frozen=True)
class ImportString:
    """The parts of an import string."""

    place: str
    """A module, or the path of a file that ends in .py."""
    name: str
    call: str
    """Its arguments with their brackets, as written; empty without any."""

    @classmethod
    def parse(cls, text: str) -> "ImportString | None":
        """The parts of a text; None where it is not an import string."""
        found = _FORM.fullmatch(text)
        return cls(found["place"], found["name"], found["call"] or "") if found else None

    @property
    def is_file(self) -> bool:
        """Whether a file is named, not a module."""
        return self.place.endswith(".py")

    @property
    def short(self) -> str:
        """The text without the folder of its file: what it is called in tables and manifests."""
        return f"{self.place.rpartition('/')[2]}:{self.name}{self.call}"

    def seen_from(self, folder: Path) -> str:
        """The text with a relative file as seen from a folder; a module stays as it is."""
        place = str(folder / self.place) if self.is_file else self.place
        return f"{place}:{self.name}{self.call}"


def import_callable(reference: str, option: str) -> Callable[..., Any]:
    """The callable that `reference` names, with the arguments that it gives.

    Args:
        reference: `module:function`, or `path/to/file.py:function`, and then `(name=literal, ...)`.
        option: the option or key that the reference came from, for the error's text.

    Raises:
        InputError: the text is not of that form, the module or file cannot be imported, it has no
            such callable, or that one does not name such an argument.
    """
    parts = ImportString.parse(reference)
    if parts is None:
        raise InputError(f'{option}: "{reference}" is not an import string. {_HOW_TO}')
    arguments = _arguments(parts.call, reference, option)
    found = _import(parts.place, parts.name, reference, option)
    if not parts.call:
        return found
    known = [
        parameter.name
        for parameter in inspect.signature(found).parameters.values()
        if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
    ]
    # Also where it takes any keyword: a misspelt name would vanish among the columns.
    for name in arguments:
        if name not in known:
            raise InputError(
                f'{option}: {parts.name} of "{reference}" has no argument "{name}" '
                f"(found: {', '.join(known) or 'none'})."
            )
    return partial(found, **arguments)


def given_arguments(function: Callable[..., Any]) -> dict[str, Any]:
    """The arguments that an import string gave to a callable."""
    return function.keywords if isinstance(function, partial) else {}


def accepted_arguments(function: Callable[..., Any], arguments: dict[str, Any]) -> dict[str, Any]:
    """Those of some keyword arguments that a function takes: all if it takes `**others`."""
    parameters = inspect.signature(function).parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return arguments
    named = {parameter.name for parameter in parameters}
    return {name: value for name, value in arguments.items() if name in named}


def source_digest(function: Callable[..., Any]) -> str:
    """Digest of the file that defines `function`; empty where there is no such file."""
    while isinstance(function, partial):
        function = function.func
    try:
        source = inspect.getsourcefile(inspect.unwrap(function))
    except TypeError:
        return ""
    return file_digest(Path(source)) if source and Path(source).exists() else ""


def _arguments(call: str, reference: str, option: str) -> dict[str, Any]:
    """The keyword arguments of `(name=literal, ...)`."""
    if not call:
        return {}
    try:
        # Not with the function's own name, which could be a keyword of the language.
        parsed = ast.parse(f"f{call}", mode="eval").body
        if not isinstance(parsed, ast.Call) or not isinstance(parsed.func, ast.Name) or parsed.args:
            raise ValueError
        names = [str(keyword.arg) for keyword in parsed.keywords if keyword.arg]
        if len(set(names)) < len(parsed.keywords):
            raise ValueError
        values = [ast.literal_eval(keyword.value) for keyword in parsed.keywords]
    except (SyntaxError, ValueError, TypeError, MemoryError, RecursionError) as error:
        raise InputError(
            f'{option}: the arguments of "{reference}" are not name=value with numbers, texts, '
            "True, False, None, lists or dictionaries. Write them as in function(name='text')."
        ) from error
    return dict(zip(names, values, strict=True))


def _import(place: str, name: str, reference: str, option: str) -> Callable[..., Any]:
    try:
        module = (
            _import_file(Path(place)) if place.endswith(".py") else importlib.import_module(place)
        )
    except ModuleNotFoundError as error:
        raise InputError(
            f'{option}: "{reference}" cannot be imported: {error}. '
            "Install the package, or give the file as path/to/file.py:function."
        ) from error
    except FileNotFoundError as error:
        raise InputError(f'{option}: the file of "{reference}" does not exist.') from error
    except Exception as error:  # the user's module ran, and anything can happen there
        raise InputError(
            f'{option}: importing "{reference}" failed: {type(error).__name__}: {error}'
        ) from error
    found = getattr(module, name, None)
    if not callable(found):
        callables = [n for n, v in vars(module).items() if inspect.isfunction(v) and n[0] != "_"]
        raise InputError(
            f'{option}: {place} has no callable "{name}" (found: {", ".join(callables) or "none"}).'
        )
    return found  # type: ignore[no-any-return]


def _import_file(path: Path) -> Any:
    if not path.is_file():
        raise FileNotFoundError(path)
    return _run_file(path.resolve(), file_digest(path))


@lru_cache
def _run_file(path: Path, digest: str) -> Any:
    """The module of a file; run once for all functions that are named of it, while it is equal."""
    name = f"_rft_user_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    # Last on the path: the file may import its neighbours, and shadows nothing.
    sys.path.append(str(path.parent))
    spec.loader.exec_module(module)
    return module
