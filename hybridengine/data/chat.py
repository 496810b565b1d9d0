"""Tokens of texts and of chat messages that follow turns of the model."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from hybridengine.data.special_tokens import SpecialTokens
from hybridengine.errors import DataError

MARK = "0x5eed"
"""Text of an assistant's message in a template, to find what the template puts after it."""
NAMED_TOKENS = ("bos_token", "eos_token", "pad_token", "unk_token")
"""Tokens that chat templates read by name."""
PROBE = """  The  quick brown fox doesn't jump , at 1234567.89% - ÜBER naïve ﬁancés ! Щи да каша 東京は夜 สวัสดี مرحبا 👩‍🚀
def f(x):\n\tif x >= 0.5 :\n        return {"a": [x, -1]}  # half\r\n\n\n"""
"""Text whose tokens depend on how a tokenizer treats scripts, digits, blanks and code."""


class Chat:
    """A tokenizer and its chat template; None for episodes that handle tokens alone."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def text_tokens(self, text: str) -> list[int]:
        """Return the tokens of a text as it is; special tokens written in it are special."""
        return [*self._tokenizer(text, add_special_tokens=False)["input_ids"]]

    def decoded(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens without special ones."""
        return self._tokenizer.decode([*tokens], skip_special_tokens=True)

    def message_tokens(self, messages: Sequence[Mapping[str, Any]], last: Sequence[int]) -> list[int]:
        """Return the tokens of messages after a turn of the model, up to where its next turn begins.

        `last` are the tokens of that turn: the part of its end that it has drawn is not repeated. Special tokens in the
        messages are left out, so that a tool's output cannot end its message.

        Raises DataError for messages that the template refuses, and for a template that changes earlier turns.
        """
        tokens = self.text_tokens(self._after([*self._before, *messages], True))
        return tokens[_overlap(last, self._end) :]

    def without_end(self, text: str) -> str:
        """Return the text of a turn of the model without the special tokens that end it, if they are written in it."""
        ends = "|".join(map(re.escape, (self._turn_end, str(self._tokenizer.eos_token))))
        return re.sub(rf"(?:(?:{ends})\s*)+\Z", "", text)

    def digests(self) -> dict[str, str]:
        """Return digests of what decides tokens and texts, by its name; another one for a tokenizer that differs in it.

        How a tokenizer splits, joins and adds is told by a fixed text: its settings are written in other words by other
        classes and versions of transformers.
        """
        tokenizer = self._tokenizer
        added = sorted(map(str, tokenizer.added_tokens_decoder.values()))
        tokens = self.text_tokens(PROBE + "".join(f" {token} a{token}" for token in added))
        parts = {
            "vocabulary": sorted(tokenizer.get_vocab().items()),
            "special tokens": [
                self._special.texts,
                *(str(getattr(tokenizer, name)) for name in NAMED_TOKENS),
            ],
            "chat template": tokenizer.chat_template,
            "tokens of a text": tokens,
            "text of tokens": self.decoded(tokens),
        }
        return {
            name: hashlib.sha256(json.dumps(part, sort_keys=True).encode()).hexdigest()
            for name, part in parts.items()
        }

    @cached_property
    def turn_end(self) -> list[int]:
        """Tokens that the model ends a turn with: the chat template's, or the tokenizer's end-of-sequence token.

        The latter is for templates without a special token after an assistant's message, and for those that have no
        place for one.
        """
        return self.text_tokens(self._turn_end)

    @cached_property
    def _turn_end(self) -> str:
        try:
            end = self._special.up_to_first(self._after(self._before, False))
        except DataError:  # a template for prompts of one message
            end = ""
        return end or str(self._tokenizer.eos_token)

    @cached_property
    def _special(self) -> SpecialTokens:
        return SpecialTokens(self._tokenizer)

    @cached_property
    def _before(self) -> list[dict[str, str]]:
        return [{"role": "user", "content": "?"}, {"role": "assistant", "content": MARK}]

    @cached_property
    def _end(self) -> list[int]:
        """Tokens that the template puts after an assistant's message."""
        return self.text_tokens(self._after(self._before, False))

    def _after(self, messages: Sequence[Mapping[str, Any]], opens: bool) -> str:
        """Return what the template puts after the assistant's message of `_before`."""
        _, mark, after = self._rendered(messages, opens).partition(MARK)
        if not mark:
            raise DataError(
                "the chat template does not repeat the assistant's earlier turns as they are, so that no message can"
                " follow them; name another one in model.chat_template, or let episodes add texts in place of messages"
            )
        return after

    def _rendered(self, messages: Sequence[Mapping[str, Any]], opens: bool) -> str:
        try:
            return self._tokenizer.apply_chat_template(
                self._special.removed_from([*messages]), tokenize=False, add_generation_prompt=opens
            )
        except Exception as error:  # jinja's, and whatever the template's code raises
            raise DataError(
                f"the chat template refuses the messages ({type(error).__name__}: {error}); correct their roles and keys"
            ) from None


def _overlap(last: Sequence[int], end: Sequence[int]) -> int:
    """Return how many of the first tokens of `end` are the last tokens of a turn."""
    most = min(len(last), len(end))
    return next((size for size in range(most, 0, -1) if [*last[-size:]] == [*end[:size]]), 0)
