import json
import math
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from conftest import sample_rows as rows
from conftest import save_tiny_policy, write_jsonl

from rft_batch.errors import DataError, InputError, TooManyRowErrors
from rft_batch.files import file_digest
from rft_batch.generation import generate
from rft_batch.policies import load_policy, policy_digest
from rft_batch.policies.maskgit import MaskGITPolicy
from rft_batch.randomness import SampleNoise
from rft_batch.schema import SAMPLES
from rft_batch.settings import GenerateSettings
from rft_batch.shards import shard_info


def tokens(round_dir: Path, folder: str = "samples") -> dict[tuple[str, int], list[int]]:
    return {
        (row["prompt_id"], row["sample_index"]): row["completion_ids"]
        for row in rows(round_dir, folder)
    }


def contents(folder: Path) -> dict[str, str]:
    return {path.name: file_digest(path) for path in sorted(folder.glob("shard-*.parquet"))}


def test_every_prompt_has_its_samples_with_score_and_rank(settings: GenerateSettings) -> None:
    generate(settings)

    found = rows(settings.round_dir)
    assert len(found) == 7 * 4
    assert {(row["prompt_id"], row["sample_index"]) for row in found} == {
        (f"p{i}", j) for i in range(7) for j in range(4)
    }
    for row in found:
        ids, label = row["completion_ids"], json.loads(row["prompt"])
        assert len(ids) == 6
        assert all(0 <= token < 7 for token in ids)
        expected = sum(token == label for token in ids) / 6 + sum(ids) / 1000
        assert row["score"] == pytest.approx(expected)
        assert row["reward_terms"] == [
            {"reward": "reward.py:share_of_class", "score": row["score"]}
        ]
        assert row["completion"] is None
        assert row["prompt_ids"] == []
        assert row["finish_reason"] == "stop"
        assert row["logprob"] < 0
    for prompt in {row["prompt_id"] for row in found}:
        of_prompt = [row for row in found if row["prompt_id"] == prompt]
        best_first = sorted(of_prompt, key=lambda row: (-row["score"], row["sample_index"]))
        assert [row["rank"] for row in best_first] == [0, 1, 2, 3]


def test_the_manifest_says_what_was_made(settings: GenerateSettings) -> None:
    manifest = generate(settings)

    folder = settings.round_dir / "samples"
    assert manifest == json.loads((folder / "manifest.json").read_text())
    assert manifest["counts"] == {
        "prompts": 7,
        "samples": 28,
        "scored": 28,
        "unscored": 0,
        "prompts_with_one_completion": 0,
    }
    scores = [row["score"] for row in rows(settings.round_dir)]
    assert manifest["scores"]["mean"] == pytest.approx(sum(scores) / 28)
    assert [shard["rows"] for shard in manifest["shards"]] == [8, 8, 8, 4]
    for shard in manifest["shards"]:
        assert shard["xxh3_128"] == file_digest(folder / shard["name"])
        assert shard["bytes"] == (folder / shard["name"]).stat().st_size
    assert manifest["identity"]["policy"] == policy_digest(settings.policy)
    assert manifest["identity"]["round_number"] == 1
    assert manifest["identity"]["dtype"] == "float32"
    assert manifest["versions"]["torch"] == torch.__version__
    assert not list(folder.glob("*.tmp"))


def test_shards_have_the_declared_schema(sampled: Path) -> None:
    for path in sampled.glob("samples/shard-*.parquet"):
        assert pq.read_schema(path).remove_metadata() == SAMPLES.remove_metadata()
        assert int(shard_info(path).metadata["shard"]) == int(path.stem[-5:])


def test_own_loss_is_the_family_loss_on_the_samples(settings: GenerateSettings) -> None:
    manifest = generate(settings)
    policy = load_policy(settings.policy)
    found = rows(settings.round_dir)
    keys = [SampleNoise.for_sample(0, 1, row["prompt_id"], row["sample_index"]) for row in found]
    batch = policy.collate(found, keys, epoch=0)
    with torch.no_grad():
        expected = float(policy.loss(policy.model, batch.tensors)) / batch.num_targets
    assert manifest["own_loss"] == pytest.approx(expected, rel=1e-5)
    assert manifest["anchor_loss"] is None


def test_the_anchor_has_a_loss_of_its_own(settings: GenerateSettings, tmp_path: Path) -> None:
    anchor = write_jsonl(
        tmp_path / "anchor.jsonl",
        [
            {"prompt_id": f"a{i}", "prompt": i % 3, "completion_ids": [6, 5, 4, 3, 2, 1]}
            for i in range(9)
        ],
    )
    one = generate(replace(settings, anchor=anchor))
    other = generate(replace(settings, anchor=anchor, seed=9, into="other"))
    assert one["anchor_loss"] > 0
    assert one["anchor_loss"] == other["anchor_loss"]
    assert one["own_loss"] != other["own_loss"]


def test_samples_do_not_depend_on_batches_and_shards(settings: GenerateSettings) -> None:
    generate(settings)
    for name, changes in {
        "singles": {"batch_size": 1},
        "threes": {"batch_size": 3, "prompts_per_shard": 5},
        "whole": {"batch_size": 1000, "prompts_per_shard": 100},
    }.items():
        generate(replace(settings, into=name, **changes))
        for one, other in zip(
            rows(settings.round_dir, name), rows(settings.round_dir), strict=True
        ):
            # The token ids are equal; logits differ in their last bits between matrix kernels.
            assert one.pop("logprob") == pytest.approx(other.pop("logprob"), rel=1e-5)
            assert one == other


def test_seed_and_round_change_the_samples(settings: GenerateSettings) -> None:
    generate(settings)
    generate(replace(settings, into="seed", seed=1))
    generate(replace(settings, into="round", round_number=2))
    found = [tokens(settings.round_dir, name) for name in ("samples", "seed", "round")]
    assert found[0] != found[1] != found[2] != found[0]


def test_the_round_number_is_that_of_the_folder(settings: GenerateSettings) -> None:
    assert settings.key_round == 1
    assert replace(settings, round_dir=Path("runs/x/round-12")).key_round == 12
    assert replace(settings, round_dir=Path("runs/x")).key_round == 0
    assert replace(settings, round_number=5).key_round == 5


def test_a_complete_stage_is_left_alone(settings: GenerateSettings, capsys: Any) -> None:
    first = generate(settings)
    before = {p: p.stat().st_mtime_ns for p in (settings.round_dir / "samples").iterdir()}

    assert generate(replace(settings, batch_size=2)) == first

    assert "complete already, nothing to do" in capsys.readouterr().err
    assert {p: p.stat().st_mtime_ns for p in (settings.round_dir / "samples").iterdir()} == before


def test_only_missing_shards_are_made(settings: GenerateSettings) -> None:
    generate(settings)
    folder = settings.round_dir / "samples"
    whole = contents(folder)
    kept = folder / "shard-00000.parquet"
    stamp = kept.stat().st_mtime_ns
    for name in ("manifest.json", "shard-00001.parquet", "shard-00003.parquet"):
        (folder / name).unlink()
    (folder / "shard-00001.parquet.tmp").write_text("half a shard")

    generate(settings)

    assert contents(folder) == whole
    assert kept.stat().st_mtime_ns == stamp
    assert not list(folder.glob("*.tmp"))


def test_a_limit_makes_a_stage_partial(settings: GenerateSettings) -> None:
    folder = settings.round_dir / "samples"
    found = generate(replace(settings, limit=3))
    assert found == {"stage": "generate", "folder": str(folder), "unfinished_shards": 2}
    assert not (folder / "manifest.json").exists()
    assert len(rows(settings.round_dir)) == 2 * 2 * 4

    generate(settings)
    assert len(rows(settings.round_dir)) == 28


def test_a_stage_of_other_settings_is_refused_and_untouched(
    settings: GenerateSettings, tmp_path: Path
) -> None:
    generate(replace(settings, limit=2))
    folder = settings.round_dir / "samples"
    before = {path: file_digest(path) for path in folder.iterdir()}
    write_jsonl(settings.prompts, [{"prompt_id": "p0", "prompt": 1}])

    with pytest.raises(InputError) as error:
        generate(replace(settings, samples_per_prompt=8, temperature=0.5))

    lines = str(error.value).splitlines()
    assert lines[0] == f"{folder / 'settings.json'}: made with other settings:"
    assert [line.split(":")[0].strip() for line in lines[1:4]] == [
        "prompts",
        "samples_per_prompt",
        "temperature",
    ]
    assert lines[2] == "  samples_per_prompt: recorded 4, now 8"
    assert {path: file_digest(path) for path in folder.iterdir()} == before


def test_a_complete_stage_remembers_its_settings_by_its_manifest(
    settings: GenerateSettings,
) -> None:
    generate(settings)
    folder = settings.round_dir / "samples"
    (folder / "settings.json").unlink()
    with pytest.raises(InputError, match=r"manifest\.json: made with other settings:\n  seed:"):
        generate(replace(settings, seed=1))


@pytest.mark.parametrize("name", ["settings.json", "manifest.json"])
def test_a_damaged_record_is_named(settings: GenerateSettings, name: str) -> None:
    generate(settings)
    path = settings.round_dir / "samples" / name
    if name == "settings.json":
        (settings.round_dir / "samples" / "manifest.json").unlink()
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(DataError, match=f"^{path}: damaged, not JSON: "):
        generate(settings)


def test_another_policy_or_reward_under_the_same_name_is_refused(
    settings: GenerateSettings, tmp_path: Path
) -> None:
    generate(replace(settings, limit=2))
    (tmp_path / "reward.py").write_text(
        "def share_of_class(prompts):\n    return [0] * len(prompts)\n"
    )
    with pytest.raises(InputError, match=r"\n  rewards: recorded"):
        generate(settings)
    save_tiny_policy(settings.policy, seed=5)
    with pytest.raises(InputError, match=r"\n  policy: recorded"):
        generate(settings)


def test_states_of_rows_are_kept_with_their_reason(
    settings: GenerateSettings, reward_file: Callable[[str], str]
) -> None:
    reference = reward_file("return [None if level == 2 else 1.0 for level in columns['level']]")
    manifest = generate(replace(settings, reward=(reference,), max_error_rate=0.2))
    assert manifest["counts"]["unscored"] == 4
    for row in rows(settings.round_dir):
        if row["prompt_id"] == "p2":
            assert (row["score"], row["rank"]) == (None, None)
            assert row["score_error"] == "the reward returned None"
        else:
            assert (row["score"], row["score_error"]) == (1.0, None)
            assert row["rank"] == row["sample_index"]


def test_too_many_unscored_rows_fail_the_stage_and_are_kept(
    settings: GenerateSettings, reward_file: Callable[[str], str]
) -> None:
    reference = reward_file("raise ValueError('no')")
    failing = replace(settings, reward=(reference,), max_error_rate=0.25)

    with pytest.raises(TooManyRowErrors) as error:
        generate(failing)

    assert str(error.value).splitlines() == [
        f"{settings.round_dir / 'samples'}: 16 of 28 samples could not be scored, "
        "--max-error-rate 0.25 allows 7.",
        "  p0 sample 0: ValueError: no",
        "  p0 sample 1: ValueError: no",
        "  p0 sample 2: ValueError: no",
        "The samples are kept. Mend the reward, or raise --max-error-rate.",
    ]
    assert not (settings.round_dir / "samples" / "manifest.json").exists()
    kept = contents(settings.round_dir / "samples")
    assert len(kept) == 2

    assert generate(replace(failing, max_error_rate=1.0))["scores"]["mean"] is None
    assert kept.items() <= contents(settings.round_dir / "samples").items()


def test_a_wrong_number_of_scores_publishes_nothing(
    settings: GenerateSettings, reward_file: Callable[[str], str]
) -> None:
    failing = replace(settings, reward=(reward_file("return [1.0]"),))
    with pytest.raises(DataError, match="returned 1 scores for 8 completions"):
        generate(failing)
    assert contents(settings.round_dir / "samples") == {}


def test_a_reward_may_limit_its_time_by_a_signal(
    settings: GenerateSettings, reward_file: Callable[[str], str]
) -> None:
    # Verifiers of mathematics do; off the main thread it raises, and all their scores are lost.
    reference = reward_file(
        "import signal\n"
        "signal.signal(signal.SIGALRM, lambda *_: None)\n"
        "signal.alarm(0)\n"
        "return [1.0] * len(prompts)"
    )
    assert generate(replace(settings, reward=(reference,)))["counts"]["unscored"] == 0


def test_all_prompts_that_do_not_suit_are_named(settings: GenerateSettings) -> None:
    labels = [0, 5, "x"]
    write_jsonl(
        settings.prompts, [{"prompt_id": f"p{i}", "prompt": p} for i, p in enumerate(labels)]
    )
    with pytest.raises(InputError) as error:
        generate(settings)
    assert str(error.value).splitlines() == [
        f'{settings.prompts} line 2: prompt "p1": label 5 is not a whole number from 0 to 2.',
        f"{settings.prompts} line 3: prompt \"p2\": label 'x' is not a whole number from 0 to 2.",
    ]
    assert not settings.round_dir.exists()


def test_known_tokens_stand_in_the_samples(settings: GenerateSettings) -> None:
    known = [None, 5, None, None, 5, None]
    write_jsonl(settings.prompts, [{"prompt_id": "k", "prompt": {"label": 1, "known_ids": known}}])
    (settings.policy.parent / "reward.py").write_text(
        "def share_of_class(completion_ids):\n    return [0.5 for _ in completion_ids]\n"
    )
    generate(settings)
    for row in rows(settings.round_dir):
        assert [row["completion_ids"][1], row["completion_ids"][4]] == [5, 5]
        assert row["prompt_ids"] == [7, 5, 7, 7, 5, 7]


def test_the_batch_is_halved_when_memory_ends(
    settings: GenerateSettings, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    generate(replace(settings, into="plain"))
    sizes = []
    original = MaskGITPolicy.sampler

    def limited(self: MaskGITPolicy, **options: Any) -> Any:
        sample = original(self, **options)

        def run(prompts: Any, noises: Any, batch_size: int) -> Any:
            sizes.append(batch_size)
            if batch_size > 3:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB")
            return sample(prompts, noises, batch_size)

        return run

    monkeypatch.setattr(MaskGITPolicy, "sampler", limited)

    generate(replace(settings, batch_size=8))

    assert sizes[:3] == [8, 4, 2]
    assert max(sizes[3:]) == 2
    assert "out of memory: --batch-size 2 from here on" in capsys.readouterr().err
    assert tokens(settings.round_dir) == tokens(settings.round_dir, "plain")


def test_scores_that_are_not_finite_do_not_reach_the_means(
    settings: GenerateSettings, reward_file: Callable[[str], str]
) -> None:
    reference = reward_file("return [float('nan') if level else 0.5 for level in columns['level']]")
    manifest = generate(replace(settings, reward=(reference,), max_error_rate=1.0))
    assert manifest["scores"] == {"mean": 0.5, "mean_of_best": 0.5}
    assert not any(math.isnan(row["score"] or 0) for row in rows(settings.round_dir))


def test_a_reward_of_a_column_that_is_not_there_is_refused_before_any_work(
    settings: GenerateSettings,
) -> None:
    with pytest.raises(InputError, match=r'it needs the column "answer", which no '):
        generate(replace(settings, reward=("rft_batch.rewards.text:exact_answer",)))
    assert not settings.round_dir.exists()


def test_there_is_something_to_score(settings: GenerateSettings) -> None:
    with pytest.raises(InputError, match=r"^--policy: none given\. Pass the folder to sample, or"):
        replace(settings, policy=None)
    with pytest.raises(InputError, match=r"^--rescore: nothing is to be generated"):
        generate(replace(settings, rescore="samples", into="again"))


def test_prompts_whose_samples_are_all_one_completion_are_counted_and_warned_of(
    settings: GenerateSettings, reward_file: Callable[[str], str], capsys: Any
) -> None:
    contents = [{"label": 1, "known_ids": [i] * 6} if i in (1, 4) else 1 for i in range(5)]
    write_jsonl(
        settings.prompts, [{"prompt_id": f"p{i}", "prompt": c} for i, c in enumerate(contents)]
    )
    reward = reward_file("return [0.5] * len(prompts)")

    manifest = generate(replace(settings, reward=(reward,)))

    assert manifest["counts"]["prompts_with_one_completion"] == 2
    assert (
        "warning: the 4 samples of 2 of 5 prompts are all the same completion; nothing can be "
        "selected among them"
    ) in capsys.readouterr().err


def test_one_sample_per_prompt_is_no_collapse(settings: GenerateSettings, capsys: Any) -> None:
    manifest = generate(replace(settings, samples_per_prompt=1))
    assert manifest["counts"]["prompts_with_one_completion"] == 0
    assert "warning" not in capsys.readouterr().err


def test_a_name_that_leads_out_of_the_round_is_refused(settings: GenerateSettings) -> None:
    for name in ("../x", "/abs", "a/b", "", ".hidden", "-x", "a" * 101):
        with pytest.raises(InputError, match=r"^--into .*: a name has up to 100 of"):
            replace(settings, into=name)
    assert os.listdir(settings.policy.parent)


@pytest.mark.gpu
def test_a_gpu_gives_the_same_samples_but_for_rounding(settings: GenerateSettings) -> None:
    generate(replace(settings, device="cpu", dtype="float32"))
    generate(replace(settings, into="gpu", device="cuda", dtype="float32"))
    cpu, gpu = tokens(settings.round_dir), tokens(settings.round_dir, "gpu")
    assert sum(cpu[key] != gpu[key] for key in cpu) <= 1
