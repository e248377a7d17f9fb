"""Sequence classifiers as rewards: tiny ones with random weights, made on the spot."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import save_tiny_policy
from safetensors.torch import load_file, save_file
from tokenizers import Regex, Tokenizer, models, pre_tokenizers, processors
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2ForSequenceClassification,
    LlamaConfig,
    LlamaForSequenceClassification,
    PreTrainedTokenizerFast,
    RobertaConfig,
    RobertaForSequenceClassification,
)

from rft_batch.errors import InputError
from rft_batch.generation import generate
from rft_batch.rewards import RewardModels, Score, load_rewards, ready_rewards, score_completions
from rft_batch.settings import GenerateSettings

LETTERS = "abcdefghijklmnopqrstuvwxyz .:"
SPECIAL = ["<pad>", "<eos>", "<bos>", "<unk>"]
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ m['role'][0] }}:{{ m['content'] }}{{ eos_token }}"
    "{% endfor %}"
)
VOCABULARY = len(LETTERS) + len(SPECIAL)

Make = Callable[..., Path]


def make_tokenizer(pad: str | None, shift: int = 0, adds_bos: bool = False) -> Any:
    """One token for each letter, its ids shifted in a circle."""
    ids = {t: (i + shift) % VOCABULARY for i, t in enumerate([*SPECIAL, *LETTERS])}
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    if adds_bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<bos> $A", special_tokens=[("<bos>", ids["<bos>"])]
        )
    made = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=pad,
        eos_token="<eos>",
        bos_token="<bos>",
        unk_token="<unk>",
    )
    made.chat_template = TEMPLATE
    return made


FAMILIES = {
    "llama": (LlamaForSequenceClassification, LlamaConfig, {"intermediate_size": 32}),
    "gpt2": (GPT2ForSequenceClassification, GPT2Config, {}),
    "bert": (BertForSequenceClassification, BertConfig, {"intermediate_size": 32}),
    "roberta": (RobertaForSequenceClassification, RobertaConfig, {"intermediate_size": 32}),
}


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """Saves a reward model; gives its folder."""

    def make(
        name: str = "rm-1",
        family: str = "llama",
        outputs: int = 1,
        pad: str | None = "<pad>",
        positions: int = 64,
        **tokenizer_options: Any,
    ) -> Path:
        kind, config_kind, changes = FAMILIES[family]
        tokenizer = make_tokenizer(pad, **tokenizer_options)
        torch.manual_seed(0)
        config = config_kind(
            vocab_size=VOCABULARY,
            hidden_size=16,
            num_hidden_layers=2,
            num_attention_heads=2,
            max_position_embeddings=positions,
            num_labels=outputs,
            pad_token_id=tokenizer.pad_token_id,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            **changes,
        )
        model = kind(config)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() > 1:
                    parameter.normal_(std=0.5)  # far from equal scores for all
        model.save_pretrained(tmp_path / name)
        tokenizer.save_pretrained(tmp_path / name)
        return tmp_path / name

    return make


PROMPTS = ["a", "tell me a story", "why", "", "count: a b c", "x", "long " * 6, "q"]
TEXTS = ["b", "once.", "because of that.", "end", "d", "yz", ".", "quiet"]


def scored(
    folder: Path, prompts: list[Any], texts: list[str], output: str = "", batch_size: int = 16
) -> list[Score]:
    outputs = (output,) if output else ()
    rewards = load_rewards([], [], RewardModels((str(folder),), outputs, batch_size))
    ids = [[9999]] * len(texts)  # no id of the policy may reach a model
    with ready_rewards(rewards, prompts) as call:
        return score_completions(rewards, prompts, texts, ids, {}, call)


def numbers(found: list[Score]) -> list[float]:
    assert [s.error for s in found] == [None] * len(found)
    return [s.score for s in found if s.score is not None]


def alone(folder: Path, texts: list[str], special: bool = True) -> list[list[float]]:
    """The outputs that the model gives each text by itself, without any padding."""
    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    model.config.pad_token_id = None
    tokenizer = AutoTokenizer.from_pretrained(folder)
    with torch.no_grad():
        return [
            model(**tokenizer(t, add_special_tokens=special, return_tensors="pt"))
            .logits[0]
            .tolist()
            for t in texts
        ]


def chats(prompts: list[str]) -> list[Any]:
    return [[{"role": "user", "content": text}] for text in prompts]


@pytest.mark.parametrize(
    ("family", "pad"),
    [
        *(
            (family, pad)
            for family in ("llama", "gpt2", "bert")
            for pad in (None, "<pad>", "<eos>")
        ),
        ("roberta", "<pad>"),  # it counts its positions from the id of the padding on
    ],
)
def test_a_score_does_not_depend_on_its_batch(make: Make, family: str, pad: str | None) -> None:
    folder = make(family=family, pad=pad)
    prompts = ["a<eos>b", *PROMPTS[1:6], "<pad>", "q<eos>"]
    texts = [p + t for p, t in zip(prompts, TEXTS, strict=True)]
    expected = [row[0] for row in alone(folder, texts)]
    assert max(expected) - min(expected) > 0.3
    for batch_size in (1, 3, 16):
        found = numbers(scored(folder, prompts, TEXTS, batch_size=batch_size))
        assert found == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("pad", [None, "<eos>"])
def test_a_chat_is_rendered_by_the_models_own_template(make: Make, pad: str | None) -> None:
    # The end of a turn stands within the text and at its end, and is the padding.
    folder = make(pad=pad, adds_bos=True)
    rendered = [f"<bos>u:{p}<eos>a:{t}<eos>" for p, t in zip(PROMPTS, TEXTS, strict=True)]
    expected = [row[0] for row in alone(folder, rendered, special=False)]
    for batch_size in (1, 4):
        found = numbers(scored(folder, chats(PROMPTS), TEXTS, batch_size=batch_size))
        assert found == pytest.approx(expected, abs=1e-5)


def test_a_text_gets_the_special_tokens_of_its_tokenizer(make: Make) -> None:
    folder = make(adds_bos=True)
    with_bos = [row[0] for row in alone(folder, ["<bos>ab"], special=False)]
    assert numbers(scored(folder, ["a"], ["b"])) == pytest.approx(with_bos, abs=1e-5)


def test_a_batch_that_holds_every_id_is_scored_one_by_one(make: Make) -> None:
    folder = make(family="gpt2", pad=None)
    texts = ["".join(SPECIAL) + LETTERS, "a"]
    expected = [row[0] for row in alone(folder, texts)]
    assert numbers(scored(folder, ["", ""], texts)) == pytest.approx(expected, abs=1e-5)


def test_a_vocabulary_that_is_shifted_reads_the_same_text(make: Make, tmp_path: Path) -> None:
    plain, shifted = make("plain"), make("shifted", shift=1)
    weights = load_file(plain / "model.safetensors")
    weights["model.embed_tokens.weight"] = weights["model.embed_tokens.weight"].roll(1, 0)
    save_file(weights, shifted / "model.safetensors", {"format": "pt"})
    assert numbers(scored(plain, PROMPTS, TEXTS)) == pytest.approx(
        numbers(scored(shifted, PROMPTS, TEXTS)), abs=1e-5
    )


def test_several_outputs_need_a_choice(make: Make) -> None:
    for outputs in (2, 5):
        folder = make(f"rm-{outputs}", outputs=outputs)
        with pytest.raises(InputError, match=rf"rm-{outputs}: it has {outputs} outputs\. Say whic"):
            scored(folder, PROMPTS, TEXTS)
        logits = torch.tensor(alone(folder, [p + t for p, t in zip(PROMPTS, TEXTS, strict=True)]))
        last = outputs - 1
        assert numbers(scored(folder, PROMPTS, TEXTS, str(last))) == pytest.approx(
            logits[:, last].tolist(), abs=1e-5
        )
        assert numbers(scored(folder, PROMPTS, TEXTS, "softmax:1")) == pytest.approx(
            logits.softmax(-1)[:, 1].tolist(), abs=1e-5
        )


@pytest.mark.parametrize(
    ("outputs", "output", "message"),
    [
        (2, "2", r"^--reward-output 2: --reward-model .*rm has 2 output\(s\), numbered from 0\.$"),
        (1, "softmax:0", "one alone has no softmax"),
        (1, "1", r"has 1 output\(s\), numbered from 0"),
        (2, "best", "^--reward-output best: write the number of an output as 0, or the probab"),
        (2, "softmax", "^--reward-output softmax: write"),
    ],
)
def test_an_output_that_is_not_there_is_refused(
    make: Make, outputs: int, output: str, message: str
) -> None:
    with pytest.raises(InputError, match=message):
        scored(make("rm", outputs=outputs), ["a"], ["b"], output)


def test_one_output_may_be_named(make: Make) -> None:
    folder = make()
    assert numbers(scored(folder, ["a"], ["b"], "0")) == numbers(scored(folder, ["a"], ["b"]))


@pytest.mark.parametrize("lost", ["score.weight", "model.layers.1.mlp.up_proj.weight"])
def test_weights_that_would_be_random_are_refused(make: Make, lost: str) -> None:
    folder = make()
    weights = load_file(folder / "model.safetensors")
    del weights[lost]
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(InputError, match=f"weights are missing and would be random: {lost}"):
        scored(folder, ["a"], ["b"])


def test_what_is_no_reward_model_is_refused(make: Make, tmp_path: Path) -> None:
    policy = save_tiny_policy(tmp_path / "policy")
    with pytest.raises(InputError, match=r"policy: not a sequence classifier with safetensors"):
        scored(policy, ["a"], ["b"])
    with pytest.raises(InputError, match=r"there is no such folder, and the hub does not give it"):
        scored(tmp_path / "no" / "such", ["a"], ["b"])
    folder = make()
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer_config.json").unlink()
    with pytest.raises(InputError, match="its tokenizer cannot be loaded"):
        scored(folder, ["a"], ["b"])


def test_a_model_without_a_template_refuses_chats_and_takes_texts(make: Make) -> None:
    folder = make()
    (folder / "chat_template.jinja").unlink()
    assert numbers(scored(folder, ["a"], ["b"]))
    with pytest.raises(InputError, match="its tokenizer has no chat template"):
        scored(folder, chats(["a"]), ["b"])


@pytest.mark.parametrize(("family", "limit"), [("llama", 20), ("gpt2", 20), ("roberta", 19)])
def test_a_text_that_is_too_long_is_the_state_of_its_row(
    make: Make, family: str, limit: int
) -> None:
    folder = make(family=family, positions=20)
    texts = ["a" * (limit - 1), "a" * limit, "b"]
    found = scored(folder, ["q"] * 3, texts)
    assert [s.score is None for s in found] == [False, True, False]
    assert found[1].error == f"{limit + 1} tokens, rm-1 reads up to {limit}"


def test_what_has_no_text_is_the_state_of_its_row(make: Make) -> None:
    folder = make()
    prompts: list[Any] = [3, "a", chats(["a"])[0], ""]
    rewards = load_rewards([], [], RewardModels((str(folder),)))
    with ready_rewards(rewards, prompts) as call:
        texts = ["b", None, None, ""]
        found = score_completions(rewards, prompts, texts, [[1]] * 4, {}, call)
    assert [s.score for s in found] == [None] * 4
    assert [s.error for s in found] == [
        "the prompt or the completion has no text",
        "the prompt or the completion has no text",
        "the completion has no text",
        "there is no text",
    ]


def test_functions_come_before_models_in_weights_and_terms(
    make: Make, reward_file: Callable[[str], str]
) -> None:
    folder, reference = make(), reward_file("return [1.0] * len(prompts)")
    for workers in (0, 1):
        rewards = load_rewards([reference], [10.0, 2.0], RewardModels((str(folder),)))
        with ready_rewards(rewards, PROMPTS, workers) as call:
            found = score_completions(rewards, PROMPTS, TEXTS, [[1]] * 8, {}, call)
        of_model = numbers(scored(folder, PROMPTS, TEXTS))
        assert [s.score for s in found] == pytest.approx([10 + 2 * s for s in of_model])
        assert [name for name, _ in found[0].terms] == ["user_reward.py:reward", "rm-1"]


@pytest.mark.parametrize(
    ("count", "outputs", "message"),
    [
        (
            2,
            ("0", "0", "0"),
            "--reward-output: 3 given for 2 reward models. Give one for each, or ",
        ),
        (1, ("0", "1"), "--reward-output: 2 given for 1 reward models. Give one for each, or one"),
    ],
)
def test_outputs_that_do_not_fit_the_models_are_refused(
    make: Make, count: int, outputs: tuple[str, ...], message: str
) -> None:
    folders = tuple(str(make(f"rm-{i}")) for i in range(count))
    with pytest.raises(InputError) as error:
        load_rewards([], [], RewardModels(folders, outputs))
    assert str(error.value).startswith(message)


def test_two_models_of_one_name_are_refused(make: Make) -> None:
    folder = str(make())
    with pytest.raises(InputError, match="two of rm-1, rm-1 have the same name"):
        load_rewards([], [], RewardModels((folder, folder)))


def test_a_changed_model_is_another_reward(make: Make) -> None:
    folder = make(outputs=2)

    def digest(output: str = "0") -> str:
        return load_rewards([], [], RewardModels((str(folder),), (output,)))[0].digest

    before = digest()
    assert before.endswith(", float32, output 0")
    assert digest() == before
    assert digest("1") != before
    (folder / ".cache").write_text("hidden files are not the model")
    assert digest() == before
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 0.1}))
    assert digest() != before


def test_a_stage_is_scored_by_a_model_whatever_its_batch(
    settings: GenerateSettings, make: Make, reward_file: Callable[[str], str]
) -> None:
    # The policy here has no text, so every row is a state of the model's, none a score.
    folder = make()
    both = replace(
        settings, reward=(), reward_model=(str(folder),), reward_batch_size=4, max_error_rate=1.0
    )
    manifest = generate(both)
    assert list(manifest["identity"]["rewards"]) == ["rm-1"]
    assert manifest["counts"]["unscored"] == 28
    assert generate(replace(both, reward_batch_size=1)) == manifest
