import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from conftest import sample_rows
from language_models import (
    BOS,
    END,
    lm_settings,
    make_tokenizer,
    record_training,
    save_chain_lm,
    save_tiny_lm,
)

from rft_batch.errors import InputError
from rft_batch.finetuning import finetune
from rft_batch.generation import generate
from rft_batch.policies.causal_lm import CausalLMPolicy
from rft_batch.policies.chat import Rendering, prompt_ids
from rft_batch.prompts import read_prompts
from rft_batch.selection import select
from rft_batch.settings import FinetuneSettings, SelectSettings

CHAT = [{"role": "user", "content": "1+1="}]


def rendered(content: Any, tokenizer: Any = None, **options: Any) -> str:
    tokenizer = tokenizer or make_tokenizer()
    return tokenizer.decode(prompt_ids(tokenizer, content, Rendering(**options)))


def test_text_is_taken_as_it_is() -> None:
    assert rendered("u: 1+1=") == "u: 1+1="


def test_messages_go_through_the_template_once() -> None:
    assert rendered(CHAT) == "<bos>u:1+1=<end>a:"


def test_a_text_prompt_can_be_a_users_message() -> None:
    assert rendered("1+1=", chat=True) == rendered(CHAT)


def test_a_system_message_is_put_before_all_others() -> None:
    assert rendered(CHAT, system="be brief") == "<bos>s:be brief<end>u:1+1=<end>a:"
    assert rendered("1+1=", chat=True, system="x") == "<bos>s:x<end>u:1+1=<end>a:"


def test_an_assistants_last_message_is_begun_and_not_ended() -> None:
    begun = [*CHAT, {"role": "assistant", "content": "it is "}]
    assert rendered(begun) == "<bos>u:1+1=<end>a:it is "


def test_arguments_reach_the_template() -> None:
    template = "{{ 'slow' if thinking is defined and thinking else 'fast' }}"
    tokenizer = make_tokenizer(template=template)
    assert rendered(CHAT, tokenizer) == "fast"
    assert rendered(CHAT, tokenizer, template_arguments={"thinking": True}) == "slow"


@pytest.mark.parametrize("content", ["ab", CHAT])
@pytest.mark.parametrize("chat", [False, True])
def test_a_begin_stands_once_before_every_kind_of_prompt(content: Any, chat: bool) -> None:
    ids = prompt_ids(make_tokenizer(adds_bos=True), content, Rendering(chat=chat))
    assert ids[0] == BOS
    assert ids.count(BOS) == 1


def test_the_begin_that_the_tokenizer_adds_would_be_seen_twice() -> None:
    # Shows that the test above can fail: what a template wrote, tokenized like text.
    tokenizer = make_tokenizer(adds_bos=True)
    text = tokenizer.apply_chat_template(CHAT, tokenize=False)
    assert tokenizer(text)["input_ids"].count(BOS) == 2


@pytest.mark.parametrize("prompts", [["ab", "cd"], [CHAT, CHAT]])
def test_the_stages_share_prompts_with_one_begin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, prompts: list[Any]
) -> None:
    folder = save_chain_lm(tmp_path / "lm", {"b": "x", "d": "y", ":": "z"}, adds_bos=True)
    settings = lm_settings(tmp_path, folder, prompts)
    generate(settings)
    select(SelectSettings(round_dir=settings.round_dir, top_k=1))
    trained = record_training(monkeypatch)
    finetune(FinetuneSettings(round_dir=settings.round_dir, policy=folder, epochs=1))

    stored = sample_rows(settings.round_dir)
    policy = CausalLMPolicy(folder)
    for row in stored:
        content = prompts[int(row["prompt_id"][1:])]
        assert row["prompt_ids"] == policy.encode_prompt(content)
        assert row["prompt_ids"].count(BOS) == 1
    wanted = {tuple(row["prompt_ids"] + row["completion_ids"]) for row in stored}
    assert {tuple(ids) for ids, _ in trained} == wanted


def test_keys_that_parquet_fills_with_null_do_not_reach_the_template(tmp_path: Path) -> None:
    named = [{"role": "user", "content": "hi", "name": "eve"}]
    table = pa.table({"prompt_id": ["a", "b"], "prompt": [CHAT, named]})
    pq.write_table(table, tmp_path / "prompts.parquet")

    contents = [
        p.content for p in read_prompts(tmp_path / "prompts.parquet", "prompt_id", "prompt")
    ]

    assert contents[0] == [CHAT[0] | {"name": None}], "Arrow gives all messages all keys"
    assert [rendered(content) for content in contents] == [
        "<bos>u:1+1=<end>a:",
        "<bos>u:hi/eve<end>a:",
    ]


def test_null_keys_are_dropped_by_ourselves(monkeypatch: pytest.MonkeyPatch) -> None:
    # transformers 5.24 drops them too, earlier versions do not.
    tokenizer = make_tokenizer()
    given: list[Any] = []
    render = tokenizer.apply_chat_template
    monkeypatch.setattr(
        tokenizer,
        "apply_chat_template",
        lambda messages, **named: (given.extend(messages), render(messages, **named))[1],
    )
    rendered([CHAT[0] | {"name": None, "tool_calls": None}], tokenizer)
    assert given == CHAT


@pytest.mark.parametrize(
    ("content", "options", "message"),
    [
        ("", {}, "the prompt is empty"),
        ([], {}, "expected text or a list of messages, found []"),
        (7, {}, "expected text or a list of messages, found 7"),
        (["a"], {}, "expected text or a list of messages, found ['a']"),
        (
            "a",
            {"system": "b"},
            "the prompt is text, and --system goes before messages: pass --chat",
        ),
        (
            [{"role": "system", "content": "a"}, *CHAT],
            {"system": "b"},
            "the prompt has a system message already; leave out --system",
        ),
        (
            [{"role": "robot", "content": "a"}],
            {},
            "message {'role': 'robot', 'content': 'a'} needs a role (system, developer, user, "
            "assistant, tool) and text as content",
        ),
        (
            [{"content": "a"}],
            {},
            "message {'content': 'a'} needs a role (system, developer, user, assistant, tool) and "
            "text as content",
        ),
        (
            [*CHAT, "a"],
            {},
            "message 'a' needs a role (system, developer, user, assistant, tool) and text as "
            "content",
        ),
        (
            [{"role": "user", "content": ["a"]}],
            {},
            "message {'role': 'user', 'content': ['a']} needs a role (system, developer, user, "
            "assistant, tool) and text as content",
        ),
    ],
)
def test_prompts_that_do_not_suit_are_refused(
    content: Any, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError) as error:
        rendered(content, **options)
    assert str(error.value) == message


def test_messages_without_a_template_are_refused() -> None:
    with pytest.raises(InputError) as error:
        rendered(CHAT, make_tokenizer(template=None))
    assert str(error.value) == "the prompt has messages, and the tokenizer has no chat template"


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (
            "{{ raise_exception('roles must alternate') }}",
            "the chat template failed: TemplateError: roles must alternate",
        ),
        ("{{ messages[0]['content'] + 1 }}", "the chat template failed: TypeError: can only "),
    ],
)
def test_a_template_that_fails_is_quoted(template: str, message: str) -> None:
    with pytest.raises(InputError) as error:
        rendered(CHAT, make_tokenizer(template=template))
    assert str(error.value).startswith(message)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "--chat-template-arguments '{': not JSON: Expecting property name"),
        ("[1]", "--chat-template-arguments '[1]': expected an object of JSON"),
    ],
)
def test_template_arguments_that_are_no_object_are_refused(
    tmp_path: Path, text: str, message: str
) -> None:
    policy = CausalLMPolicy(save_tiny_lm(tmp_path / "lm"))
    with pytest.raises(InputError) as error:
        policy.encode_prompt(CHAT, chat_template_arguments=text)
    assert str(error.value).startswith(message)


def test_prompts_that_do_not_suit_are_named_before_any_work(tmp_path: Path) -> None:
    settings = lm_settings(tmp_path, save_tiny_lm(tmp_path / "lm", template=None), ["a", CHAT, ""])
    with pytest.raises(InputError) as error:
        generate(settings)
    assert str(error.value).splitlines() == [
        f'{settings.prompts} line 2: prompt "p1": the prompt has messages, and the tokenizer has '
        "no chat template.",
        f'{settings.prompts} line 3: prompt "p2": the prompt is empty.',
    ]
    assert not settings.round_dir.exists()


def test_the_options_reach_the_stored_prompt(tmp_path: Path) -> None:
    template = "{{ greeting }}{% for m in messages %}{{ m['content'] }}<end>{% endfor %}"
    settings = lm_settings(
        tmp_path,
        save_tiny_lm(tmp_path / "lm", template=template),
        ["ab"],
        chat=True,
        system="cd",
        chat_template_arguments='{"greeting": "hi"}',
    )
    manifest = generate(settings)
    row = sample_rows(settings.round_dir)[0]
    assert make_tokenizer().decode(row["prompt_ids"]) == "hicd<end>ab<end>"
    assert row["prompt_ids"].count(END) == 2
    assert row["prompt"] == "ab", "the prompt is stored as it came"
    assert manifest["identity"]["system"] == "cd"


SEPARATORS = "a\u2028b\u2029c\u0085d\ve\fg\r\nh\ti\U0001f600\u00e9\x1ej"


def test_separators_of_unicode_pass_unchanged(tmp_path: Path) -> None:
    """In prompts and completions; `str.splitlines` would cut at most of them."""
    folder = save_chain_lm(tmp_path / "lm", {"b": SEPARATORS}, words=[SEPARATORS])
    raw = [f"{SEPARATORS}b", "ab"]
    settings = lm_settings(tmp_path, folder, raw, samples_per_prompt=1)
    lines = [
        json.dumps({"prompt_id": f"p{i}", "prompt": text}, ensure_ascii=False)
        for i, text in enumerate(raw)
    ]
    settings.prompts.write_bytes(b"\xef\xbb\xbf" + "\r\n".join(lines).encode())

    generate(settings)

    rows = sample_rows(settings.round_dir)
    assert [row["prompt"] for row in rows] == raw
    assert {row["completion"] for row in rows} == {SEPARATORS}
