"""The only writer of final names: temporary name, fsync, rename, fsync of the folder.

Invariant: whatever stands under a final name is whole. A kill at any point leaves either the old
file, the new file, or a `*.tmp` that the next run overwrites.
"""

import json
import os
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import xxhash

from rft_batch.errors import DataError

_CHUNK_BYTES = 1 << 20


def publish(path: Path, write: Callable[[Path], None], writer: str = "") -> None:
    """Makes `path` hold what `write(temporary_path)` wrote, all of it or nothing.

    Args:
        path: the final name; its folder is made if it does not exist.
        write: writes one whole file under the name that it is given, in the same folder.
        writer: tells apart several processes that may publish the same file at once.
    """
    _make_folder(path.parent)
    temporary = path.with_name(f"{path.name}{writer}.tmp")
    write(temporary)
    _finish(temporary)
    os.replace(temporary, path)
    _fsync(path.parent)


def publish_folder(path: Path, write: Callable[[Path], None]) -> None:
    """Makes the folder `path` hold what `write(temporary_folder)` wrote in it.

    An older folder of that name is removed first: rename cannot replace a folder that holds
    files. So between the two there may be none, but never half of one.
    """
    _make_folder(path.parent)
    temporary = path.with_name(path.name + ".tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    write(temporary)
    for file in sorted(temporary.iterdir()):
        _finish(file)
    _fsync(temporary)
    if path.exists():
        shutil.rmtree(path)
    os.replace(temporary, path)
    _fsync(path.parent)


def publish_json(path: Path, content: Any, writer: str = "") -> None:
    """Publishes `content` as indented JSON with keys in the order given."""
    text = json.dumps(content, indent=2, ensure_ascii=False) + "\n"
    publish(path, lambda temporary: _write_text(temporary, text), writer)


def publish_text(path: Path, text: str) -> None:
    """Publishes `text` as UTF-8."""
    publish(path, lambda temporary: _write_text(temporary, text))


def read_json(path: Path) -> Any:
    """The content of a JSON file that this project published.

    Raises:
        DataError: it is damaged.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise DataError(f"{path}: damaged, not JSON: {error}. Restore it or remove it.") from error


def file_digest(path: Path) -> str:
    """xxh3_128 of the file's bytes, as 32 hexadecimal digits."""
    return files_digest([path])


def files_digest(paths: Iterable[Path]) -> str:
    """xxh3_128 over the bytes of several files, one after the other."""
    digest = xxhash.xxh3_128()
    for path in paths:
        with path.open("rb") as stream:
            while chunk := stream.read(_CHUNK_BYTES):
                digest.update(chunk)
    return digest.hexdigest()


def text_digest(text: str) -> str:
    """xxh3_128 of the text in UTF-8, as 32 hexadecimal digits."""
    return xxhash.xxh3_128_hexdigest(text.encode())


def _write_text(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")


def _make_folder(path: Path) -> None:
    # A folder's own name is durable only when the folder above it was synced.
    if not path.is_dir():
        _make_folder(path.parent)
        path.mkdir(exist_ok=True)
        _fsync(path.parent)


def _finish(path: Path) -> None:
    # safetensors makes its files readable by their owner alone, others of a group could not train.
    path.chmod(0o644)
    _fsync(path)


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
