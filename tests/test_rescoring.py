"""Samples scored anew: the same samples, the shards that the other reward would have made."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from conftest import ROOT, write_jsonl

from rft_batch.errors import DataError, InputError, TooManyRowErrors
from rft_batch.files import file_digest
from rft_batch.generation import generate
from rft_batch.inspection import inspect
from rft_batch.rescoring import rescore
from rft_batch.schema import SAMPLES
from rft_batch.settings import GenerateSettings, InspectSettings
from rft_batch.shards import shard_info, write_samples
from rft_batch.verification import verify_round


@pytest.fixture
def other_reward(tmp_path: Path) -> str:
    path = tmp_path / "other.py"
    path.write_text(
        "def first_token(completion_ids, level, **columns):\n"
        "    return [ids[0] - l for ids, l in zip(completion_ids, level)]\n"
    )
    return f"{path}:first_token"


@pytest.fixture
def again(settings: GenerateSettings, other_reward: str) -> GenerateSettings:
    """The samples of a complete stage, to be scored by another reward."""
    generate(settings)
    return replace(
        settings, policy=None, reward=(other_reward,), rescore="samples", into="by-first"
    )


def contents(folder: Path) -> dict[str, str]:
    return {path.name: file_digest(path) for path in sorted(folder.glob("shard-*.parquet"))}


def tables(folder: Path) -> list[Any]:
    return [
        pq.read_table(path).replace_schema_metadata(None)
        for path in sorted(folder.glob("shard-*.parquet"))
    ]


def test_the_shards_are_those_that_the_other_reward_would_have_made(
    settings: GenerateSettings, again: GenerateSettings, other_reward: str
) -> None:
    before = contents(settings.round_dir / "samples")
    manifest = rescore(again)

    generated = generate(replace(settings, reward=(other_reward,), into="generated"))
    assert tables(settings.round_dir / "by-first") == tables(settings.round_dir / "generated")
    for key in ("counts", "scores", "own_loss", "anchor_loss", "policy", "stage"):
        assert manifest[key] == generated[key]
    assert [s["rows"] for s in manifest["shards"]] == [s["rows"] for s in generated["shards"]]
    assert contents(settings.round_dir / "samples") == before
    for path in (settings.round_dir / "by-first").glob("shard-*.parquet"):
        assert pq.read_schema(path).remove_metadata() == SAMPLES.remove_metadata()
        assert shard_info(path).metadata["policy"] == manifest["policy"]["digest"]


def test_it_remembers_what_made_the_samples_and_which_they_were(
    settings: GenerateSettings, again: GenerateSettings
) -> None:
    source = json.loads((settings.round_dir / "samples" / "manifest.json").read_text())
    # Settings of sampling say nothing here: nothing is sampled.
    identity = rescore(replace(again, samples_per_prompt=99, seed=5, prompts_per_shard=1))[
        "identity"
    ]
    assert identity.pop("rescored") == {
        "folder": "samples",
        "manifest": file_digest(settings.round_dir / "samples" / "manifest.json"),
    }
    assert identity.pop("into") == "by-first"
    assert list(identity.pop("rewards")) == ["other.py:first_token"]
    assert identity.items() <= source["identity"].items()


def test_the_round_is_whole_and_can_be_looked_at(again: GenerateSettings) -> None:
    rescore(again)
    problems, checked = verify_round(again.round_dir)
    assert (problems, checked) == ([], 10)
    shown = inspect(InspectSettings(round_dir=again.round_dir, into="by-first", best=1))
    assert "Best 1" in shown


def test_only_missing_shards_are_scored(again: GenerateSettings, capsys: Any) -> None:
    found = rescore(replace(again, limit=3))
    folder = again.round_dir / "by-first"
    assert found == {"stage": "generate", "folder": str(folder), "unfinished_shards": 2}
    stamps = {path: path.stat().st_mtime_ns for path in folder.glob("shard-*.parquet")}
    assert len(stamps) == 2

    manifest = rescore(again)
    assert all(path.stat().st_mtime_ns == stamp for path, stamp in stamps.items())
    assert manifest["counts"]["samples"] == 28
    capsys.readouterr()
    assert rescore(again) == manifest
    assert "complete already, nothing to do" in capsys.readouterr().err


def test_scores_of_scores_lead_back_to_the_samples(
    settings: GenerateSettings, again: GenerateSettings
) -> None:
    rescore(again)
    rescore(replace(again, reward=settings.reward, rescore="by-first", into="back"))
    assert tables(settings.round_dir / "back") == tables(settings.round_dir / "samples")


def test_rows_without_a_completion_keep_their_reason(
    settings: GenerateSettings, again: GenerateSettings
) -> None:
    folder = settings.round_dir / "samples"
    path = folder / "shard-00001.parquet"
    metadata, rows = shard_info(path).metadata, pq.read_table(path).to_pylist()
    row = rows[0]
    row |= {"finish_reason": "error", "score_error": "99 tokens", "score": None, "rank": None}
    write_samples(path, pa.Table.from_pylist(rows, schema=SAMPLES), metadata)
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["shards"][1]["bytes"] = path.stat().st_size
    (folder / "manifest.json").write_text(json.dumps(manifest))

    assert rescore(again)["counts"]["unscored"] == 1
    rows = pq.read_table(settings.round_dir / "by-first" / path.name).to_pylist()
    (found,) = [r for r in rows if r["score"] is None]
    assert (found["prompt_id"], found["sample_index"]) == (row["prompt_id"], row["sample_index"])
    assert (found["score_error"], found["rank"], found["reward_terms"]) == (
        "99 tokens",
        None,
        [],
    )


def test_other_prompts_are_refused_and_nothing_is_written(again: GenerateSettings) -> None:
    prompts = [{"prompt_id": f"p{i}", "prompt": i % 3, "level": i + 1} for i in range(7)]
    write_jsonl(again.prompts, prompts)
    with pytest.raises(InputError, match=r"not the prompts that .*/samples was made of \(digest"):
        rescore(again)
    assert not (again.round_dir / "by-first").exists()


def test_other_rewards_in_the_same_folder_are_refused(
    settings: GenerateSettings, again: GenerateSettings
) -> None:
    rescore(again)
    with pytest.raises(InputError, match=r"by-first/manifest\.json: made with other settings:\n"):
        rescore(replace(again, reward=settings.reward))
    # Nor does it write into what was generated.
    with pytest.raises(InputError, match=r"made with other settings:\n"):
        rescore(replace(again, rescore="by-first", into="samples"))


def test_samples_that_are_not_whole_are_refused(again: GenerateSettings) -> None:
    folder = again.round_dir / "samples"
    (folder / "shard-00002.parquet").rename(folder / "away")
    with pytest.raises(DataError, match=r"shard-00002\.parquet: the manifest records"):
        rescore(again)
    (folder / "away").rename(folder / "shard-00002.parquet")
    (folder / "manifest.json").unlink()
    with pytest.raises(DataError, match=r"samples/manifest\.json: not found, so this stage is not"):
        rescore(again)
    assert not (again.round_dir / "by-first").exists()


def test_a_shard_of_other_samples_is_refused(again: GenerateSettings) -> None:
    folder = again.round_dir / "samples"
    (folder / "shard-00000.parquet").write_bytes((folder / "shard-00001.parquet").read_bytes())
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["shards"][0]["bytes"] = (folder / "shard-00000.parquet").stat().st_size
    (folder / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(DataError, match="does not hold every sample of its prompts once"):
        rescore(again)


def test_too_many_unscored_rows_fail_the_stage(
    again: GenerateSettings, reward_file: Callable[[str], str]
) -> None:
    failing = replace(again, reward=(reward_file("raise ValueError('no')"),))
    with pytest.raises(TooManyRowErrors, match=r"by-first: 8 of 28 samples could not be scored"):
        rescore(failing)
    assert rescore(replace(failing, max_error_rate=1.0))["counts"]["scored"] == 0


def test_the_names_of_its_folders_are_checked(settings: GenerateSettings) -> None:
    with pytest.raises(InputError, match=r"^--rescore samples: samples are never written again\."):
        replace(settings, rescore="samples")
    with pytest.raises(InputError, match=r"^--rescore '\.\./x': a name has up to 100 of"):
        replace(settings, rescore="../x", into="other")
    with pytest.raises(InputError, match=r"^--rescore: none given"):
        rescore(settings)


@pytest.mark.parametrize("processes", [1, 2])
def test_by_command_and_by_several_processes(again: GenerateSettings, processes: int) -> None:
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", "0",
                "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]  # fmt: skip
    done = subprocess.run(
        [
            sys.executable, *(launcher if processes > 1 else []), "-m", "rft_batch", "generate",
            again.round_dir, "--rescore", "samples", "--into", "launched", "--prompts",
            again.prompts, "--reward", again.reward[0], "--reward-workers", "1",
        ],
        cwd=ROOT,
        env=os.environ | {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert f"28 samples of samples in 4 shards to score, {processes} process(es)" in done.stderr
    rescore(again)
    assert tables(again.round_dir / "launched") == tables(again.round_dir / "by-first")
    assert (again.round_dir / "launched" / "manifest.json").exists()
