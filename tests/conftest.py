"""Tiny real policies, and rounds made of them."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import settings as hypothesis_settings

from rft_batch import cli
from rft_batch.files import publish_json
from rft_batch.generation import generate
from rft_batch.policies import Completions, Sampler, join_completions
from rft_batch.policies.token_model import ClassCondition, Recipe, TokenModelSpec, save_policy
from rft_batch.policies.token_transformer import TokenTransformer
from rft_batch.ranking import UNRANKED, rank_samples
from rft_batch.schema import SAMPLES
from rft_batch.selection import select
from rft_batch.settings import (
    FinetuneSettings,
    GenerateSettings,
    InspectSettings,
    ReportSettings,
    SelectSettings,
    fingerprint,
)
from rft_batch.shards import shard_entries, shard_name, write_samples

# Threads that wait for each other cost more than these small matrices do.
torch.set_num_threads(1)

# The same examples in every run, and no folder of earlier ones.
hypothesis_settings.register_profile("fixed", derandomize=True, deadline=None, database=None)
hypothesis_settings.load_profile("fixed")

# Exit code, standard output and error of a command line.
Run = Callable[..., tuple[int, str, str]]

ROOT = Path(__file__).resolve().parent.parent

COMMANDS = {
    "generate": GenerateSettings,
    "select": SelectSettings,
    "finetune": FinetuneSettings,
    "report": ReportSettings,
    "inspect": InspectSettings,
}

TINY = TokenModelSpec(
    family="maskgit",
    model="rft_batch.policies.token_transformer:TokenTransformer",
    model_arguments={
        "vocab_size": 7,
        "seq_len": 6,
        "num_classes": 3,
        "width": 16,
        "num_layers": 2,
        "num_heads": 2,
    },
    vocab_size=7,
    mask_id=7,
    seq_len=6,
    condition=ClassCondition(num_classes=3, null_class=3),
    recipe=Recipe(condition_dropout=0.1),
)

_ROW = {
    "prompt": "q",
    "prompt_ids": [],
    "completion": None,
    "completion_ids": [],
    "finish_reason": "stop",
    "reward_terms": [],
    "logprob": None,
}

REWARD = '''"""How many of a completion's tokens are the asked class."""


def share_of_class(prompts, completion_ids, **columns):
    return [
        sum(token == label for token in ids) / len(ids) + sum(ids) / 1000
        for label, ids in zip(prompts, completion_ids, strict=True)
    ]
'''


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="run tests that take minutes")
    parser.addoption("--network", action="store_true", help="run tests that need a model hub")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    reasons = {
        "gpu": None if torch.cuda.is_available() else "no GPU here",
        "slow": None if config.getoption("--slow") else "slow: pass --slow",
        "network": None if config.getoption("--network") else "needs a hub: pass --network",
    }
    for item in items:
        for marker, reason in reasons.items():
            if reason and item.get_closest_marker(marker):
                item.add_marker(pytest.mark.skip(reason=reason))


def save_tiny_policy(folder: Path, seed: int = 0, **changes: Any) -> Path:
    """A policy of 2 layers and 7 tokens with random weights, its spec changed as asked."""
    torch.manual_seed(seed)
    model = TokenTransformer(**TINY.model_arguments)
    with torch.no_grad():
        model.head.weight.mul_(8)  # sharper than chance, so that prompts matter
    save_policy(folder, replace(TINY, **changes), model.state_dict())
    return folder


def run_sampler(
    sampler: Sampler, prompts: Sequence[Any], noises: Sequence[Any], batch_size: int = 64
) -> Completions:
    """All completions of a sampler, each at its prompt's place."""
    places, parts = zip(*sampler(prompts, noises, batch_size), strict=True)
    return join_completions(parts, [place for group in places for place in group])


def write_jsonl(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def sample_rows(round_dir: Path, folder: str = "samples") -> list[dict[str, Any]]:
    """The rows of all shards, by prompt and sample."""
    paths = sorted((round_dir / folder).glob("shard-*.parquet"))
    found = [row for path in paths for row in pq.read_table(path).to_pylist()]
    return sorted(found, key=lambda row: (row["prompt_id"], row["sample_index"]))


def launch(
    processes: int, *arguments: object, script: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """`rft-batch`, or a script that ends in it, under torchrun on the CPU."""
    program = [str(script)] if script else ["-m", "rft_batch"]
    return subprocess.run(
        [
            sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(processes),
            "--master-port", "0", "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0",
            *program, *map(str, arguments),
        ],
        cwd=ROOT,
        env=os.environ | {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )  # fmt: skip


def write_sgd_script(folder: Path) -> Path:
    """`rft-batch` with plain gradient steps; see the fixture `sgd`."""
    script = folder / "sgd.py"
    script.write_text(
        "import torch\ntorch.optim.AdamW = torch.optim.SGD\n"
        "from rft_batch.cli import main\nmain()\n"
    )
    return script


@pytest.fixture
def sgd(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plain gradient steps: Adam blows the rounding of a gradient that is 0 up to a full step.

    The bias of attention keys is such a parameter.
    """
    monkeypatch.setattr(torch.optim, "AdamW", torch.optim.SGD)


@pytest.fixture
def policy(tmp_path: Path) -> Path:
    return save_tiny_policy(tmp_path / "policy")


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    rows = [{"prompt_id": f"p{i}", "prompt": i % 3, "level": i} for i in range(7)]
    return write_jsonl(tmp_path / "prompts.jsonl", rows)


@pytest.fixture
def reward(tmp_path: Path) -> str:
    (tmp_path / "reward.py").write_text(REWARD)
    return f"{tmp_path / 'reward.py'}:share_of_class"


@pytest.fixture
def settings(tmp_path: Path, policy: Path, prompts: Path, reward: str) -> GenerateSettings:
    """7 prompts x 4 samples in 4 shards."""
    return GenerateSettings(
        round_dir=tmp_path / "run" / "round-1",
        policy=policy,
        prompts=prompts,
        reward=(reward,),
        samples_per_prompt=4,
        prompts_per_shard=2,
        steps=3,
    )


@pytest.fixture
def sampled(settings: GenerateSettings) -> Path:
    """A round whose samples are made."""
    generate(settings)
    return settings.round_dir


@pytest.fixture
def selected(sampled: Path) -> Path:
    """A round whose samples are made and selected."""
    select(SelectSettings(round_dir=sampled, top_k=2))
    return sampled


@pytest.fixture
def read_groups(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Numbers of the row groups that are read from now on."""
    groups: list[int] = []
    original = pq.ParquetFile.read_row_group

    def read(self: pq.ParquetFile, group: int, columns: list[str]) -> Any:
        groups.append(group)
        return original(self, group, columns)

    monkeypatch.setattr(pq.ParquetFile, "read_row_group", read)
    return groups


@pytest.fixture
def reward_file(tmp_path: Path) -> Callable[[str], str]:
    """Writes a reward function's body; gives its import string."""

    def write(body: str) -> str:
        lines = "\n".join("    " + line for line in body.splitlines())
        text = f"def reward(prompts, completions, completion_ids, **columns):\n{lines}\n"
        (tmp_path / "user_reward.py").write_text(text)
        return f"{tmp_path / 'user_reward.py'}:reward"

    return write


def made_round(round_dir: Path, shards: list[list[dict[str, Any]]], into: str = "samples") -> Path:
    """A round of samples whose scores, texts and token ids are given.

    Args:
        round_dir: the round.
        shards: the rows of each shard, by prompt; of a row `prompt_id`, `sample_index` and `score`
            must be there.
        into: the folder of samples.
    """
    paths = []
    identity = {
        "round_number": 1,
        "samples_per_prompt": len({r["sample_index"] for r in shards[0]}),
    }
    for number, given in enumerate(shards):
        rows = [{**_ROW, "score_error": "bad" if r["score"] is None else None, **r} for r in given]
        score = np.array([row["score"] for row in rows], dtype=np.float32)
        index = np.array([row["sample_index"] for row in rows], dtype=np.int32)
        prompt_ids = [row["prompt_id"] for row in rows]
        _, group = np.unique(prompt_ids, return_inverse=True)
        for row, rank in zip(rows, rank_samples(group, score, index).tolist(), strict=True):
            row["rank"] = None if rank == UNRANKED else rank
        path = round_dir / into / shard_name(number)
        metadata = {"fingerprint": fingerprint(identity), "shard": str(number)}
        write_samples(path, pa.Table.from_pylist(rows, schema=SAMPLES), metadata)
        paths.append(path)
    prompts = {row["prompt_id"] for rows in shards for row in rows}
    manifest = {
        "stage": "generate",
        "identity": identity,
        "counts": {"prompts": len(prompts)},
        "shards": shard_entries(paths),
    }
    publish_json(round_dir / into / "settings.json", identity)
    publish_json(round_dir / into / "manifest.json", manifest)
    return round_dir


def scored(prompt_id: str, *scores: float | None, **columns: list[Any]) -> list[dict[str, Any]]:
    """The rows of a prompt, one for each score; other columns by name, a value for each."""
    return [
        {
            "prompt_id": prompt_id,
            "sample_index": index,
            "score": score,
            **{name: values[index] for name, values in columns.items()},
        }
        for index, score in enumerate(scores)
    ]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> Run:
    """Runs a command line in this process; gives exit code, standard output and error."""

    def run(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["rft-batch", *map(str, arguments)])
        monkeypatch.setattr(cli, "exit_on_sigterm", lambda: None)
        capsys.readouterr()
        code = 0
        try:
            cli.main()
        except SystemExit as exit_:
            code = int(exit_.code or 0)
        out, err = capsys.readouterr()
        return code, out, err

    return run
