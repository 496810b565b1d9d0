"""Special tokens in texts that nobody trusts: `<|im_end|>` in a tool's output would end its message."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any


class SpecialTokens:
    """The special tokens of a tokenizer, as texts."""

    def __init__(self, tokenizer: Any) -> None:
        special = {str(token) for token in tokenizer.added_tokens_decoder.values() if token.special}
        special |= set(tokenizer.all_special_tokens)
        self.texts = sorted(special - {""}, key=lambda text: (-len(text), text))
        """Longest first."""
        self._pattern = re.compile("|".join(map(re.escape, self.texts)))

    def removed(self, text: str) -> str:
        """Return a text without special tokens, also those that what is left would form."""
        text, start = self._pattern.sub("", text), 0
        while (found := self._pattern.search(text, start)) and found.group():
            # What was around a token has formed this one, and what is around this one may form another.
            text = text[: found.start()] + text[found.end() :]
            start = max(0, found.start() - len(self.texts[0]) + 1)
        return text

    def up_to_first(self, text: str) -> str:
        """Return a text up to and including its first special token; nothing if it has none."""
        found = self._pattern.search(text)
        return text[: found.end()] if found else ""

    def removed_from(self, value: Any) -> Any:
        """Return a value of JSON, such as a chat message, without special tokens in its texts."""
        if isinstance(value, str):
            return self.removed(value)
        if isinstance(value, Mapping):
            return {key: self.removed_from(one) for key, one in value.items()}
        return [self.removed_from(one) for one in value] if isinstance(value, list | tuple) else value
