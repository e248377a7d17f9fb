"""Completions as text, and where a stop string ends one."""

from collections.abc import Sequence
from typing import Any


def text_of(tokenizer: Any, ids: Sequence[int], stop: Sequence[str] = ()) -> str:
    """A completion as text, without special tokens, up to the first stop string.

    Args:
        tokenizer: a transformers tokenizer.
        ids: token ids of the completion.
        stop: strings that end it and are left out of the text, as in vLLM.
    """
    # Clean-up would take away the space before a comma that the policy wrote.
    text: str = tokenizer.decode(
        list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False
    )
    ends = [place for string in stop if (place := text.find(string)) >= 0]
    return text[: min(ends)] if ends else text


class Stops:
    """Tells whether a completion has just come to a stop string.

    Args:
        tokenizer: a transformers tokenizer.
        stop: the strings.
    """

    def __init__(self, tokenizer: Any, stop: Sequence[str]) -> None:
        self._tokenizer, self._stop = tokenizer, stop
        # A character is at most four byte tokens; what lies further back was looked at before.
        self._tail = 4 * max(map(len, stop)) + 4

    def ends(self, ids: Sequence[int]) -> bool:
        """Whether a stop string stands in the last tokens."""
        text = text_of(self._tokenizer, ids[-self._tail :])
        return any(string in text for string in self._stop)
