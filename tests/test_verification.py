import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from rft_batch.files import file_digest
from rft_batch.finetuning import finetune
from rft_batch.schema import SAMPLES
from rft_batch.settings import FinetuneSettings
from rft_batch.shards import shard_info, write_flags, write_samples
from rft_batch.verification import verify_round


@pytest.fixture
def whole(selected: Path, policy: Path) -> Path:
    """A round with samples, selection and training."""
    finetune(FinetuneSettings(round_dir=selected, policy=policy, epochs=1))
    return selected


def test_a_whole_round_has_no_problems(whole: Path) -> None:
    # 4 sample shards, 4 flag shards, 2 policies and 3 manifests.
    assert verify_round(whole) == ([], 13)


def published(round_dir: Path) -> list[Path]:
    shards = [*round_dir.glob("*/shard-*.parquet"), *round_dir.glob("policy*/*")]
    assert len(shards) == 12
    return sorted(shards)


def test_every_flipped_bit_is_found_and_its_file_named(whole: Path) -> None:
    rng = random.Random(0)
    for _ in range(60):
        path = rng.choice(published(whole))
        content = path.read_bytes()
        flipped = bytearray(content)
        flipped[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
        path.write_bytes(flipped)

        problems, _ = verify_round(whole)

        named = path if path.suffix == ".parquet" else path.parent
        assert any(str(named) in problem for problem in problems), path
        path.write_bytes(content)
    assert verify_round(whole)[0] == []


@pytest.mark.parametrize("cut", [0, 1, 0.5, -1])
def test_every_cut_file_is_found(whole: Path, cut: float) -> None:
    for path in published(whole):
        content = path.read_bytes()
        path.write_bytes(content[: int(cut * len(content)) if cut == 0.5 else int(cut)])
        assert verify_round(whole)[0], path
        path.write_bytes(content)


def test_missing_and_unlisted_files_are_found(whole: Path) -> None:
    path = whole / "samples" / "shard-00001.parquet"
    path.rename(path.with_name("shard-00009.parquet"))
    assert verify_round(whole)[0] == [
        f"{path}: missing.",
        f"{path.with_name('shard-00009.parquet')}: the manifest does not list it.",
        f"{whole / 'selection' / path.name}: its flags belong to other samples than {path}.",
    ]


def rewrite(
    round_dir: Path, folder: str, change: Callable[[list[dict[str, Any]]], list[dict[str, Any]]]
) -> Path:
    """Forges a shard: other rows, with a right digest in the manifest."""
    path = round_dir / folder / "shard-00000.parquet"
    rows = change(pq.read_table(path).to_pylist())
    schema = pq.read_schema(path)
    metadata = {k: v for k, v in shard_info(path).metadata.items() if k != "schema_version"}
    table = pq.read_table(path).schema.empty_table().from_pylist(rows, schema=schema)
    (write_samples if folder == "samples" else write_flags)(path, table, metadata)
    manifest_path = round_dir / folder / "manifest.json"
    manifest = json.loads(manifest_path.read_text())
    entry = manifest["shards"][0]
    entry |= {"rows": len(rows), "bytes": path.stat().st_size, "xxh3_128": file_digest(path)}
    manifest_path.write_text(json.dumps(manifest))
    return path


def changed(row: int, **values: Any) -> Callable[[list[dict[str, Any]]], list[dict[str, Any]]]:
    return lambda rows: [r | values if i == row else r for i, r in enumerate(rows)]


FORGERIES: dict[str, tuple[str, Any, str]] = {
    "a sample twice": (
        "samples", lambda rows: [*rows, rows[0]], "not every prompt has its 4 samples once"
    ),
    "a sample less": ("samples", lambda rows: rows[1:], "not every prompt has its 4 samples once"),
    "another score": ("samples", changed(0, score=-5.0), "the ranks do not follow from the scores"),
    "a reason beside a score": (
        "samples", changed(2, score_error="x"), "neither a finite score nor a reason, or both"
    ),
    "a prompt of another shard": (
        "samples",
        lambda rows: [r | {"prompt_id": "p5" if r["prompt_id"] == "p0" else "p1"} for r in rows],
        'prompt "p5" stands in an earlier shard too',
    ),
    "flags in another order": ("selection", lambda rows: rows[::-1], "not row for row as"),
    "a flag without a reason": (
        "selection", changed(5, selected=True), "a flag and its reason disagree"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FORGERIES)
def test_a_forgery_with_right_digests_is_found(whole: Path, name: str) -> None:
    folder, change, message = FORGERIES[name]
    rewrite(whole, folder, change)
    assert any(message in problem for problem in verify_round(whole)[0])


def test_a_damaged_manifest_is_a_problem_and_no_crash(whole: Path) -> None:
    path = whole / "samples" / "manifest.json"
    for content in ("{", "[]", "{}", '{"stage": "generate", "shards": [3], "identity": {}}'):
        path.write_text(content)
        assert any(str(path) in problem for problem in verify_round(whole)[0]), content


def test_the_forger_of_these_tests_changes_nothing_by_itself(whole: Path) -> None:
    rewrite(whole, "samples", lambda rows: rows)
    problems, _ = verify_round(whole)
    assert all("samples/shard" not in p.split(":")[0] for p in problems)
    assert pq.read_schema(whole / "samples/shard-00000.parquet").names == SAMPLES.names
