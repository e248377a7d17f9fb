import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from conftest import ROOT, Run, run_sampler, sample_rows, write_jsonl
from language_models import (
    END,
    EOS,
    VOCAB_SIZE,
    lm_settings,
    make_tokenizer,
    noises,
    record_training,
    save_chain_lm,
    save_tiny_lm,
)
from safetensors.torch import load_file, save_file

from rft_batch.errors import InputError, TooManyRowErrors
from rft_batch.finetuning import finetune
from rft_batch.generation import generate
from rft_batch.policies import lm_engine, load_policy, policy_digest
from rft_batch.policies.causal_lm import CausalLMPolicy
from rft_batch.policies.lm_folder import is_hub_id
from rft_batch.policies.lm_text import Stops, text_of
from rft_batch.policies.vllm_engine import engine_arguments, sampling_arguments
from rft_batch.selection import select
from rft_batch.settings import FinetuneSettings, GenerateSettings, SelectSettings

ONE_EACH = {"samples_per_prompt": 1}
OPTIONS: dict[str, Any] = {
    "temperature": 1.0,
    "top_k": 0,
    "top_p": 1.0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "max_new_tokens": 12,
    "stop": (),
    "system": None,
    "chat": False,
    "chat_template_arguments": None,
    "samples_per_prompt": 1,
    "engine": "transformers",
    "engine_arguments": None,
}


def ids_of(text: str, tokenizer: Any = None) -> list[int]:
    return (tokenizer or make_tokenizer())(text)["input_ids"]


def generated(settings: GenerateSettings, into: str = "samples") -> list[dict[str, Any]]:
    generate(replace(settings, into=into))
    return sample_rows(settings.round_dir, into)


def selected_of(settings: GenerateSettings, **changes: Any) -> dict[str, Any]:
    return select(SelectSettings(round_dir=settings.round_dir, top_k=1, **changes))


def test_every_end_id_of_tokenizer_and_generation_config_ends_a_completion(tmp_path: Path) -> None:
    # a -> <eos>, b -> <end>, c for ever.
    folder = save_chain_lm(tmp_path / "lm", {"b": "<end>", "c": "c"}, eos=[EOS, END])
    settings = lm_settings(tmp_path, folder, ["a", "b", "c"], **ONE_EACH)

    rows = generated(settings)

    assert [row["completion_ids"] for row in rows] == [[EOS], [END], ids_of("c") * 12]
    assert [row["finish_reason"] for row in rows] == ["stop", "stop", "length"]
    assert selected_of(settings)["reasons"] == {"top_k": 2, "truncated": 1}
    assert selected_of(settings, into="all", keep_truncated=True)["reasons"] == {"top_k": 3}


def test_an_end_of_the_tokenizer_alone_counts_too(tmp_path: Path) -> None:
    folder = save_chain_lm(tmp_path / "lm", {"b": "<end>"}, eos=END)
    policy = CausalLMPolicy(folder)
    assert policy.end_ids == {EOS, END}
    assert policy.facts()["end_ids"] == [EOS, END]


def test_a_completion_that_ends_at_once_is_a_row_like_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save_chain_lm(tmp_path / "lm", {"c": "d"})
    settings = lm_settings(tmp_path, folder, ["a", "c"], **ONE_EACH)

    empty, other = generated(settings)

    assert (empty["completion"], empty["completion_ids"]) == ("", [EOS])
    assert (empty["finish_reason"], empty["score"], empty["rank"]) == ("stop", 0.0, 0)
    assert other["completion"] == "d"
    assert selected_of(settings)["counts"]["selected"] == 2
    seen = record_training(monkeypatch)
    finetune(FinetuneSettings(round_dir=settings.round_dir, policy=folder, epochs=1))
    assert ([*ids_of("a"), EOS], [-100, EOS]) in seen


def test_a_stop_string_cuts_the_text_and_keeps_the_ids(tmp_path: Path) -> None:
    # It begins in one token and ends in another.
    folder = save_chain_lm(tmp_path / "lm", {"a": "p", "p": "q", "q": "r", "r": "s", "s": "t"})
    settings = lm_settings(tmp_path, folder, ["a"], stop=("zz", "rs"), **ONE_EACH)
    row = generated(settings)[0]
    assert row["completion"] == "pq"
    assert row["completion_ids"] == ids_of("pqrs")
    assert row["finish_reason"] == "stop"


def test_a_stop_string_within_a_token_ends_there_too(tmp_path: Path) -> None:
    word = "one. two"
    folder = save_chain_lm(tmp_path / "lm", {"a": "b", "b": word, word: "c"}, words=[word])
    settings = lm_settings(tmp_path, folder, ["a"], stop=(". ",), **ONE_EACH)
    row = generated(settings)[0]
    assert row["completion"] == "bone"
    assert row["completion_ids"] == [*ids_of("b"), VOCAB_SIZE]


def test_text_ends_at_the_first_of_several_stop_strings() -> None:
    ids = ids_of("ab#cd>ef")
    assert text_of(make_tokenizer(), ids, [">", "#"]) == "ab"
    assert text_of(make_tokenizer(), [*ids, EOS]) == "ab#cd>ef"


def test_a_stop_string_is_seen_when_its_last_token_is_written() -> None:
    stops = Stops(make_tokenizer(), ["\n\n", "end of it all"])
    text = "x" * 500 + "end of it all" + "y" * 3
    endings = [n for n in range(1, len(text) + 1) if stops.ends(ids_of(text)[:n])]
    assert endings[0] == 500 + len("end of it all")
    assert not stops.ends(ids_of("\n x \n"))


def test_prompts_without_room_are_errors_of_their_rows(tmp_path: Path) -> None:
    folder = save_chain_lm(tmp_path / "lm", {"a": "b"}, n_positions=16)
    long = "x" * 159 + "a"
    settings = lm_settings(tmp_path, folder, ["a", "xa", long, "xxa", "xxxa"], max_error_rate=0.2)

    manifest = generate(settings)

    rows = sample_rows(settings.round_dir)
    assert manifest["counts"]["scored"] == 16
    assert manifest["counts"]["unscored"] == 4
    assert manifest["counts"]["prompts_with_one_completion"] == 4, "an error is no completion"
    for row in rows:
        if row["prompt_id"] == "p2":
            assert row["score_error"] == "prompt too long: 160 tokens, the model has room for 16"
            assert (row["finish_reason"], row["completion"]) == ("error", None)
            assert (row["completion_ids"], row["score"], row["rank"]) == ([], None, None)
            assert row["prompt_ids"] == ids_of(long), "nothing is cut"
        else:
            assert row["completion"] == "b"
    with pytest.raises(TooManyRowErrors, match="p2 sample 0: prompt too long: 160 tokens"):
        generate(replace(settings, into="strict", max_error_rate=0.1))
    assert selected_of(settings)["reasons"]["not_scored"] == 4


def test_the_last_token_may_fill_the_context(tmp_path: Path) -> None:
    folder = save_chain_lm(tmp_path / "lm", {"a": "a"}, n_positions=16)
    prompts = ["a" * 14, "a" * 15, "a" * 16]
    settings = lm_settings(
        tmp_path, folder, prompts, max_new_tokens=99, max_error_rate=0.5, **ONE_EACH
    )
    rows = generated(settings)
    assert [len(row["completion_ids"]) for row in rows] == [2, 1, 0]
    assert [row["finish_reason"] for row in rows] == ["length", "length", "error"]


def test_what_was_sampled_is_trained_on_id_for_id(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The tokenizer has a word "ab", so a, b read again as text is another sequence; and the
    # prompt's last character would melt with the completion's first.
    folder = save_chain_lm(tmp_path / "lm", {"x": "a", "a": "b"}, words=["ab"])
    settings = lm_settings(tmp_path, folder, ["x", "xa"], **ONE_EACH)
    tokenizer = make_tokenizer(words=["ab"])
    x, a, b = (tokenizer.convert_tokens_to_ids(c) for c in "xab")

    first, second = generated(settings)

    assert (first["completion"], first["completion_ids"]) == ("ab", [a, b, EOS])
    assert tokenizer("ab")["input_ids"] == [VOCAB_SIZE]
    assert (second["prompt_ids"], second["completion_ids"]) == ([x, a], [b, EOS])
    selected_of(settings)
    seen = record_training(monkeypatch)
    finetune(FinetuneSettings(round_dir=settings.round_dir, policy=folder, epochs=1))
    assert sorted(seen) == sorted(
        [([x, a, b, EOS], [-100, a, b, EOS]), ([x, a, b, EOS], [-100, -100, b, EOS])]
    )


def test_several_samples_at_temperature_zero_are_refused(tmp_path: Path) -> None:
    settings = lm_settings(tmp_path, save_tiny_lm(tmp_path / "lm"), ["a"], temperature=0.0)
    with pytest.raises(InputError) as error:
        generate(settings)
    assert str(error.value) == (
        "--temperature 0 with --samples-per-prompt 4: all samples of a prompt would be the same. "
        "Pass --samples-per-prompt 1."
    )
    assert not settings.round_dir.exists()


def test_samples_of_a_prompt_differ_and_do_not_depend_on_the_batch(tmp_path: Path) -> None:
    folder = save_tiny_lm(tmp_path / "lm", sharpness=4.0)
    settings = lm_settings(tmp_path, folder, ["ab", "ab", "q"], samples_per_prompt=8)
    found = generated(settings)
    assert len({tuple(row["completion_ids"]) for row in found}) >= 23, "8 x 3, twice the same text"
    for size in (1, 5):
        other = generated(replace(settings, batch_size=size), f"batch-{size}")
        for one, again in zip(found, other, strict=True):
            assert one.pop("logprob") == pytest.approx(again["logprob"], rel=1e-4)
            assert one == {name: value for name, value in again.items() if name != "logprob"}
            one["logprob"] = again["logprob"]


def test_dropout_is_off_while_sampling_and_on_while_training(tmp_path: Path) -> None:
    drops = {"resid_pdrop": 0.5, "embd_pdrop": 0.5, "attn_pdrop": 0.5}
    folder = save_tiny_lm(tmp_path / "lm", "gpt2", **drops)
    policy = CausalLMPolicy(folder)
    options = OPTIONS | {"temperature": 0.0}
    run = policy.sampler(**options)
    prompts = ["abc"] * 2
    found = [run_sampler(run, prompts, noises(2)).ids for _ in range(2)]
    assert np.array_equal(np.array(found[0]), np.array(found[1]))
    off = dict.fromkeys(policy.training_options, None) | {"lora_rank": 0}
    assert policy.trained(**off).training


def test_the_own_loss_is_that_of_a_forward_pass(tmp_path: Path) -> None:
    folder = save_tiny_lm(tmp_path / "lm", sharpness=4.0)
    settings = lm_settings(tmp_path, folder, ["ab", "qrst"], temperature=0.7, top_k=9)
    manifest = generate(settings)
    policy = CausalLMPolicy(folder)

    batch = policy.collate(sample_rows(settings.round_dir), noises(8), epoch=0)
    with torch.no_grad():
        total = float(policy.loss(policy.model, batch.tensors))

    assert manifest["own_loss"] == pytest.approx(total / batch.num_targets, rel=1e-5)


def test_the_loss_is_the_sum_over_the_completions_tokens(tmp_path: Path) -> None:
    policy = CausalLMPolicy(save_tiny_lm(tmp_path / "lm", sharpness=4.0))
    rows = [
        {"prompt_ids": [5] * n, "completion_ids": list(range(10, 10 + m))}
        for n, m in ((1, 5), (7, 1), (3, 9))
    ]
    batch = policy.collate(rows, noises(3), epoch=0)
    expected = 0.0
    with torch.no_grad():
        for row in rows:
            sequence = torch.tensor([row["prompt_ids"] + row["completion_ids"]])
            logprobs = policy.model(input_ids=sequence).logits.log_softmax(-1)[0]
            for place in range(len(row["prompt_ids"]), sequence.shape[1]):
                expected -= float(logprobs[place - 1, sequence[0, place]])
        assert float(policy.loss(policy.model, batch.tensors)) == pytest.approx(expected, rel=1e-5)
    assert batch.num_targets == 15


def test_a_row_that_was_not_sampled_gets_its_end(tmp_path: Path) -> None:
    policy = CausalLMPolicy(save_tiny_lm(tmp_path / "lm"))
    row = policy.encode_row("ab", {"completion": "cd"})
    assert row == {"prompt_ids": ids_of("ab"), "completion_ids": [*ids_of("cd"), EOS]}


def test_an_anchor_of_texts_has_a_loss(tmp_path: Path) -> None:
    settings = lm_settings(tmp_path, save_chain_lm(tmp_path / "lm", {"a": "b"}), ["a"], **ONE_EACH)
    anchor = write_jsonl(
        tmp_path / "anchor.jsonl", [{"prompt_id": "q", "prompt": "a", "completion": "b"}]
    )
    # What the chain writes: b and the end, both certain.
    assert generate(replace(settings, anchor=anchor))["anchor_loss"] == pytest.approx(0, abs=1e-6)
    write_jsonl(anchor, [{"prompt_id": "q", "prompt": "a", "completion": None}])
    with pytest.raises(InputError, match=r'^--anchor .*: column "completion" with text is missing'):
        generate(replace(settings, anchor=anchor, into="other"))


def test_options_of_other_families_are_refused_by_name(
    tmp_path: Path, settings: GenerateSettings
) -> None:
    lm = lm_settings(tmp_path / "..", save_tiny_lm(tmp_path / "lm"), ["a"], steps=5)
    with pytest.raises(InputError) as error:
        generate(replace(lm, round_dir=tmp_path / "lm-round"))
    assert str(error.value) == (
        "--steps 5: a policy of the family causal_lm does not take this option. Leave it out."
    )
    with pytest.raises(InputError) as error:
        generate(replace(settings, stop=("x",), prompts=settings.prompts))
    assert str(error.value) == (
        "--stop ('x',): a policy of the family maskgit does not take this option. Leave it out."
    )


def test_the_manifest_records_the_generation_config_that_is_not_applied(tmp_path: Path) -> None:
    folder = save_tiny_lm(tmp_path / "lm")
    path = folder / "generation_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"do_sample": True, "top_k": 3}))
    recorded = generate(lm_settings(tmp_path, folder, ["a"]))["policy"]
    assert recorded["generation_config"]["top_k"] == 3
    assert recorded["context"] == 128
    assert recorded["end_ids"] == [EOS]


def test_reduced_precision_leaves_the_rotary_frequencies_whole(tmp_path: Path) -> None:
    folder = save_tiny_lm(tmp_path / "lm")
    whole, reduced = load_policy(folder), load_policy(folder, dtype=torch.bfloat16)
    assert {p.dtype for p in reduced.model.parameters()} == {torch.bfloat16}
    frequencies = dict(reduced.model.named_buffers())
    assert frequencies
    for name, buffer in whole.model.named_buffers():
        assert torch.equal(frequencies[name], buffer)


def test_a_model_in_reduced_precision_is_sampled(tmp_path: Path) -> None:
    policy = save_tiny_lm(tmp_path / "lm")
    manifest = generate(lm_settings(tmp_path, policy, ["a", "bcd"], dtype="bfloat16"))
    assert manifest["counts"]["scored"] == manifest["counts"]["samples"] > 0
    assert manifest["identity"]["dtype"] == "bfloat16"


def change_weights(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def test_weights_that_are_left_over_are_named_and_left_out(tmp_path: Path, capsys: Any) -> None:
    folder = save_tiny_lm(tmp_path / "policy")
    change_weights(folder, lambda t: t.update({"v_head.weight": torch.zeros(2)}))
    load_policy(folder)
    assert "weights that the model does not use: v_head.weight" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda t: t.pop("model.layers.1.mlp.up_proj.weight"),
            "weights missing: model.layers.1.mlp.up_proj.weight.",
        ),
        (
            lambda t: t.update({"model.norm.weight": torch.zeros(5)}),
            "weights of another shape: model.norm.weight.",
        ),
    ],
)
def test_weights_that_are_not_those_of_the_config_are_refused(
    tmp_path: Path, change: Callable[[dict[str, torch.Tensor]], None], message: str
) -> None:
    folder = save_tiny_lm(tmp_path / "lm")
    change_weights(folder, change)
    with pytest.raises(InputError) as error:
        load_policy(folder)
    assert str(error.value).startswith(f"policy {folder}: {message} They are not those of its")


def test_weights_in_a_pickle_are_refused(tmp_path: Path) -> None:
    folder = save_tiny_lm(tmp_path / "lm")
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    with pytest.raises(InputError, match=f"^policy {folder}: cannot be loaded: OSError: "):
        load_policy(folder)


def test_adapters_alone_are_refused(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(InputError) as error:
        load_policy(tmp_path)
    assert str(error.value) == (
        f"policy {tmp_path}: holds adapters alone. Give the folder of the model that they are "
        "merged into: finetune exports it beside them."
    )


def test_a_model_in_several_files_is_read_whole_and_exported_as_one(tmp_path: Path) -> None:
    one = CausalLMPolicy(save_tiny_lm(tmp_path / "one"))
    one.model.save_pretrained(tmp_path / "several", max_shard_size="8KB")
    one.tokenizer.save_pretrained(tmp_path / "several")
    assert (tmp_path / "several" / "model.safetensors.index.json").exists()

    several = CausalLMPolicy(tmp_path / "several")
    several.save(tmp_path / "out", several.model.state_dict())

    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert {name for name in names if "safetensors" in name} == {"model.safetensors"}
    again = CausalLMPolicy(tmp_path / "out").model.state_dict()
    assert all(torch.equal(again[n], tensor) for n, tensor in one.model.state_dict().items())


def test_the_batch_is_halved_when_memory_ends_and_what_is_written_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    folder = save_tiny_lm(tmp_path / "lm", sharpness=2.0)
    settings = lm_settings(tmp_path, folder, ["ab", "q", "xyz"], max_new_tokens=40, batch_size=8)
    whole = generated(settings)
    sizes = []

    def limited(logits: Any, *arguments: Any) -> Any:
        sizes.append(len(logits))
        if len(sizes) > 20 and len(logits) > 3:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB")
        return draw(logits, *arguments)

    draw = lm_engine.draw
    monkeypatch.setattr(lm_engine, "draw", limited)
    found = generated(settings, "halved")

    assert "out of memory: --batch-size 2 from here on" in capsys.readouterr().err
    for one, other in zip(whole, found, strict=True):
        assert one["completion_ids"] == other["completion_ids"]
    # Those that had ended before are not written again.
    steps = sum(sizes)
    assert steps < 1.7 * sum(len(row["completion_ids"]) for row in whole)


def test_a_model_without_any_end_is_refused(tmp_path: Path) -> None:
    folder = save_tiny_lm(tmp_path / "lm", eos=None)
    tokenizer = make_tokenizer()
    tokenizer.eos_token = None
    tokenizer.save_pretrained(folder)
    with pytest.raises(InputError) as error:
        load_policy(folder)
    assert str(error.value) == (
        f"policy {folder}: neither tokenizer nor generation_config.json has an eos_token_id, so no "
        "completion could ever end. Add one."
    )


def test_code_in_the_folder_runs_only_when_it_is_trusted(tmp_path: Path) -> None:
    folder = save_tiny_lm(tmp_path / "lm")
    config = json.loads((folder / "config.json").read_text())
    config |= {
        "model_type": "own",
        "auto_map": {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnModel"},
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "own.py").write_text(
        "from transformers import LlamaConfig, LlamaForCausalLM\n"
        "class OwnConfig(LlamaConfig):\n    model_type = 'own'\n"
        "class OwnModel(LlamaForCausalLM):\n    config_class = OwnConfig\n"
    )
    with pytest.raises(InputError, match=r"If it has code of its own that you trust: --trust-pol"):
        load_policy(folder)
    assert type(load_policy(folder, trust_policy_code=True).model).__name__ == "OwnModel"


def test_the_digest_changes_with_weights_tokenizer_and_template_and_not_with_a_readme(
    tmp_path: Path,
) -> None:
    folder = save_tiny_lm(tmp_path / "lm")
    first = policy_digest(folder)
    (folder / "README.md").write_text("a model")
    assert policy_digest(folder) == first
    digests = {first}
    for name in ("tokenizer.json", "chat_template.jinja", "generation_config.json", "config.json"):
        with (folder / name).open("a") as file:
            file.write("\n")
        digests.add(policy_digest(folder))
    change_weights(folder, lambda t: t["model.norm.weight"].add_(1))
    digests.add(policy_digest(folder))
    assert len(digests) == 6


@pytest.mark.parametrize(
    ("text", "is_one"),
    [
        ("owner/name", True),
        ("owner/name-1.5B@main", True),
        ("owner/name@refs/pr/3", True),
        ("name", False),
        ("/owner/name", False),
        ("a/b/c", False),
        ("../name", False),
        ("owner/", False),
    ],
)
def test_hub_ids_are_told_from_folders(text: str, is_one: bool) -> None:
    assert is_hub_id(text) == is_one


def test_a_hub_id_that_cannot_be_fetched_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(InputError) as error:
        load_policy(Path("nobody/has-this@v9"))
    assert str(error.value).startswith(
        "policy nobody/has-this@v9: there is no such folder, and it cannot be fetched from the hub:"
    )


# vLLM is not installed where these run; that it is missing is said before any work.
no_vllm = pytest.mark.skipif(find_spec("vllm") is not None, reason="vLLM is there")


@no_vllm
def test_without_vllm_its_engine_is_bad_input(tmp_path: Path, run: Run) -> None:
    settings = lm_settings(tmp_path, save_tiny_lm(tmp_path / "lm"), ["a"])
    code, _, err = run(
        "generate", settings.round_dir, "--policy", settings.policy, "--prompts", settings.prompts,
        "--reward", settings.reward[0], "--engine", "vllm",
    )  # fmt: skip
    assert code == 2
    assert "--engine vllm: vLLM cannot be imported: No module named 'vllm'" in err
    assert "pip install 'rft-batch[vllm]', or leave --engine out." in err
    assert not settings.round_dir.exists()


def test_arguments_of_vllm_without_vllm_are_refused(tmp_path: Path) -> None:
    policy = CausalLMPolicy(save_tiny_lm(tmp_path / "lm"))
    with pytest.raises(InputError) as error:
        policy.sampler(**(OPTIONS | {"engine_arguments": "{}"}))
    assert str(error.value) == (
        "--engine-arguments: only --engine vllm takes them. Leave them out."
    )


def test_engine_arguments_are_an_object_of_json() -> None:
    assert engine_arguments(None) == {}
    assert engine_arguments('{"tensor_parallel_size": 2}') == {"tensor_parallel_size": 2}
    with pytest.raises(InputError, match=r"^--engine-arguments 'x=1': not JSON: Expecting value"):
        engine_arguments("x=1")
    with pytest.raises(InputError, match=r"^--engine-arguments '\[1\]': expected an object of JS"):
        engine_arguments("[1]")


def test_every_sample_has_parameters_of_its_own_for_vllm() -> None:
    options = OPTIONS | {"temperature": 0.7, "top_k": 20, "top_p": 0.9, "stop": ("\n",)}
    end_ids = frozenset({END, EOS})
    one, other = (sampling_arguments(options, end_ids, noise, 33) for noise in noises(2))
    assert one.pop("seed") != other["seed"]
    assert 0 <= other["seed"] < 2**31
    assert one == {
        "n": 1,
        "temperature": 0.7,
        "top_k": 20,
        "top_p": 0.9,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "max_tokens": 33,
        "stop": ["\n"],
        "stop_token_ids": [EOS, END],
        "logprobs": 0,
    }
    again = sampling_arguments(options, end_ids, noises(2)[1], 33)
    assert again == other
    assert sampling_arguments(OPTIONS, end_ids, noises(1)[0], 1)["stop"] is None


class FakeLLM:
    """What vLLM gives back, for prompts as it takes them: each prompt's last token, then the end.

    It stands in where vLLM cannot run; the test below it runs the real one.
    """

    def __init__(self, model: str, **arguments: Any) -> None:
        assert (Path(model) / "config.json").exists()
        assert arguments == {"tensor_parallel_size": 2}

    def generate(self, inputs: Any, parameters: Any, use_tqdm: bool) -> list[Any]:
        outputs = []
        for given, wanted in zip(inputs, parameters, strict=True):
            tokens = given["prompt_token_ids"]
            ids = [tokens[-1], EOS][: wanted.max_tokens]
            reason = "stop" if ids[-1] == EOS else "length"
            written = SimpleNamespace(token_ids=ids, finish_reason=reason, cumulative_logprob=-1.5)
            outputs.append(SimpleNamespace(prompt_token_ids=tokens, outputs=[written]))
        return outputs


@pytest.mark.parametrize(("temperature", "logprob"), [(1.0, -1.5), (0.7, None)])
def test_what_vllm_gives_back_stands_at_its_prompt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, temperature: float, logprob: float | None
) -> None:
    fake = SimpleNamespace(LLM=FakeLLM, SamplingParams=SimpleNamespace)
    monkeypatch.setitem(sys.modules, "vllm", fake)
    folder = save_tiny_lm(tmp_path / "lm", max_position_embeddings=16)
    settings = lm_settings(
        tmp_path, folder, ["ab", "x" * 99, "cd", "e" * 15], max_error_rate=0.5, engine="vllm",
        engine_arguments='{"tensor_parallel_size": 2}', temperature=temperature, **ONE_EACH,
    )  # fmt: skip

    manifest = generate(settings)

    rows = sample_rows(settings.round_dir)
    assert [row["completion"] for row in rows] == ["b", None, "d", "e"]
    assert [row["finish_reason"] for row in rows] == ["stop", "error", "stop", "length"]
    assert [row["logprob"] for row in rows] == [logprob, None, logprob, logprob]
    assert [row["prompt_ids"] for row in rows[::2]] == [ids_of("ab"), ids_of("cd")]
    assert manifest["own_loss"] == pytest.approx(3 * 1.5 / 5)
    assert manifest["policy"]["generation_config"]["eos_token_id"] == EOS


def test_an_anchor_with_vllm_is_refused(settings: GenerateSettings) -> None:
    with pytest.raises(InputError) as error:
        replace(settings, engine="vllm", anchor=Path("anchor.jsonl"))
    assert str(error.value) == (
        "--anchor with --engine vllm: vLLM has the weights to itself, and nothing is left that "
        "computes a loss. Leave one of them out."
    )


@pytest.mark.gpu
def test_vllm_writes_what_transformers_writes(tmp_path: Path) -> None:
    pytest.importorskip("vllm")
    # Sizes that its kernels take; the likeliest tokens are so far ahead that rounding is nothing.
    size = {"hidden_size": 128, "intermediate_size": 128, "num_attention_heads": 2}
    folder = save_tiny_lm(tmp_path / "lm", sharpness=4.0, head_dim=64, **size)
    settings = lm_settings(
        tmp_path, folder, ["ab", "cdef", "x" * 200], temperature=0.0, max_error_rate=0.5,
        dtype="float32", **ONE_EACH,
    )  # fmt: skip
    exact = generated(settings)
    arguments = {"dtype": "float32", "enforce_eager": True, "gpu_memory_utilization": 0.2}
    vllm = replace(settings, engine="vllm", engine_arguments=json.dumps(arguments))
    found = generated(vllm, "vllm")
    for one, other in zip(exact, found, strict=True):
        for name in ("prompt_ids", "completion_ids", "completion", "finish_reason", "score_error"):
            assert one[name] == other[name], name


def test_importing_the_package_imports_neither_transformers_nor_peft() -> None:
    script = (
        "import sys, rft_batch.cli, rft_batch.policies, rft_batch.settings\n"
        "print({'transformers', 'peft', 'vllm'} & set(sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "set()"
