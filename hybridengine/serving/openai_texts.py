"""Text of prompts and responses, by the tokenizer of the model."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from tinker.types import SampledSequence

from hybridengine.errors import RequestError
from hybridengine.serving.ranks import Prompt


class ArgumentError(RequestError):
    """An argument of a call is invalid or not served."""

    def __init__(self, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param, self.code = param, code


class Tokenizer(Protocol):
    """The methods of a transformers tokenizer that are used here."""

    def encode(self, text: str, *, add_special_tokens: bool = ...) -> list[int]:
        """Return the token ids of a text."""
        ...

    def decode(self, token_ids: Any, skip_special_tokens: bool = ..., **settings: Any) -> Any:
        """Return the text of token ids."""
        ...

    def apply_chat_template(self, conversation: Any, **settings: Any) -> Any:
        """Return the token ids of messages."""
        ...


class Texts:
    """Text of a tokenizer's tokens; one thread may use it at a time."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._template_settings = inspect.signature(tokenizer.apply_chat_template).parameters

    def tokens(self, text: str, add_special_tokens: bool) -> list[int]:
        """Return the token ids of a prompt."""
        return self._tokenizer.encode(text, add_special_tokens=add_special_tokens)

    def rendered(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool, variables: Mapping[str, Any]
    ) -> list[int]:
        """Return the token ids of messages in the tokenizer's chat template, which sees `variables` too."""
        reserved = [name for name in variables if name in self._template_settings]
        if reserved:
            raise ArgumentError(
                f"chat_template_kwargs has {reserved[0]}, which is not a variable of the template; leave it out",
                "chat_template_kwargs",
            )
        conversation = [_flat(number, message) for number, message in enumerate(messages)]
        try:
            return self._tokenizer.apply_chat_template(
                conversation,
                add_generation_prompt=add_generation_prompt,
                tokenize=True,
                return_dict=False,
                **variables,
            )
        except Exception as error:  # a template raises whatever its code runs into
            raise ArgumentError(
                f"the model's chat template cannot render the messages ({type(error).__name__}: {error}); send roles and"
                " contents that it knows",
                "messages",
            ) from None

    def token(self, token: int, as_id: bool) -> str:
        """Return the text of one token, or `token_id:N`."""
        return f"token_id:{token}" if as_id else self._decoded([token], False)

    def response(self, prompt: Prompt, sequence: SampledSequence, skip_special_tokens: bool) -> str:
        """Return the text of a response, without what stopped it."""
        # the token before a response tells tokenizers with word-initial spaces that its first word has one
        before, tokens = [prompt.tokens[-1]], sequence.tokens
        whole = self._following(before, tokens, False)
        end = min((whole.find(stop) for stop in prompt.stop_texts if stop in whole), default=None)
        if end is None:
            kept = tokens[:-1] if sequence.stop_reason == "stop" else tokens
            return self._following(before, kept, skip_special_tokens)
        num_kept = len(tokens)  # tokens that lie before the end as a whole
        while not whole[:end].startswith(self._following(before, tokens[:num_kept], False)):
            num_kept -= 1
        rest = whole[len(self._following(before, tokens[:num_kept], False)) : end]
        return self._following(before, tokens[:num_kept], skip_special_tokens) + rest

    def _following(self, before: Sequence[int], tokens: Sequence[int], skip_special_tokens: bool) -> str:
        start = self._decoded(before, skip_special_tokens)
        whole = self._decoded([*before, *tokens], skip_special_tokens)
        return whole[len(start) :] if whole.startswith(start) else self._decoded(tokens, skip_special_tokens)

    def _decoded(self, tokens: Sequence[int], skip_special_tokens: bool) -> str:
        return self._tokenizer.decode(
            [*tokens], skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
        )


def _flat(number: int, message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message whose content is one text, which all templates know."""
    flat = {name: value for name, value in message.items() if value is not None}
    if isinstance(flat.get("content"), list):
        parts = flat["content"]
        if not all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in parts):
            raise ArgumentError(
                f"messages[{number}].content has a part that is not text; send parts of the type text alone",
                "messages",
            )
        flat["content"] = "\n".join(part["text"] for part in parts)
    return flat
