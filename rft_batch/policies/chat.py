"""A prompt's content as token ids: text as it is, chat messages through the template.

The one place where a prompt becomes ids: what `generate` samples from is stored in `prompt_ids`,
and `finetune` trains on those.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rft_batch.errors import InputError

_ROLES = ("system", "developer", "user", "assistant", "tool")


@dataclass(frozen=True)
class Rendering:
    """How prompts are rendered."""

    system: str | None = None
    """Put before the messages of every prompt."""
    chat: bool = False
    """Whether a text prompt is the message of a user."""
    template_arguments: Mapping[str, Any] = field(default_factory=dict)
    """For the chat template, such as `{"enable_thinking": false}`."""


def is_chat(content: Any) -> bool:
    """Whether a prompt's content is a list of messages."""
    return isinstance(content, list) and bool(content) and isinstance(content[0], dict)


def prompt_ids(tokenizer: Any, content: Any, rendering: Rendering) -> list[int]:
    """The token ids that the model gets.

    Text is tokenized with the special tokens that the tokenizer adds by itself. Messages go through
    the chat template, which writes its own special tokens, so none are added to them.

    Args:
        tokenizer: a transformers tokenizer.
        content: text, or messages with `role` and `content`; if the last is an assistant's, it is
            the beginning of the completion.
        rendering: see `Rendering`.

    Raises:
        InputError: it is neither, a message is wrong, the tokenizer has no template, the template
            fails, or no token comes out.
    """
    if isinstance(content, str) and rendering.chat:
        content = [{"role": "user", "content": content}]
    if isinstance(content, str):
        if rendering.system is not None:
            raise InputError("the prompt is text, and --system goes before messages: pass --chat")
        ids = list(tokenizer(content)["input_ids"])
    elif is_chat(content):
        ids = _chat_ids(tokenizer, content, rendering)
    else:
        raise InputError(f"expected text or a list of messages, found {content!r:.60}")
    if not ids:
        raise InputError("the prompt is empty")
    return ids


def _chat_ids(tokenizer: Any, content: Sequence[Any], rendering: Rendering) -> list[int]:
    if not tokenizer.chat_template:
        raise InputError("the prompt has messages, and the tokenizer has no chat template")
    messages = [_message(message) for message in content]
    if rendering.system is not None:
        if messages[0]["role"] == "system":
            raise InputError("the prompt has a system message already; leave out --system")
        messages.insert(0, {"role": "system", "content": rendering.system})
    begun = messages[-1]["role"] == "assistant"
    try:
        text = tokenizer.apply_chat_template(
            messages,
            tokenize=False,
            add_generation_prompt=not begun,
            continue_final_message=begun,
            **rendering.template_arguments,
        )
    except Exception as error:  # templates are programs and raise what they like
        raise InputError(f"the chat template failed: {type(error).__name__}: {error}") from error
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def _message(message: Any) -> dict[str, Any]:
    # Parquet gives every message all keys that any has, null where it has none, and templates ask
    # whether a key is there.
    kept = {k: v for k, v in message.items() if v is not None} if isinstance(message, dict) else {}
    if kept.get("role") not in _ROLES or not isinstance(kept.get("content", ""), str):
        raise InputError(
            f"message {message!r:.60} needs a role ({', '.join(_ROLES)}) and text as content"
        )
    return kept
