"""The protocol of generation engines: requests come and go, and each token carries the weights' version that drew it.

vLLM is one (`backends/vllm`); another would be one folder that implements `Engine`. Every rank of an engine calls the
same methods with the same arguments in the same order, because tensor-parallel peers compute each step together.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from hybridengine.errors import DataError, StorageError, shown
from hybridengine.reshard.layout import Layout
from hybridengine.runtime.hybrid_engine import GenerationSide


@dataclass(frozen=True)
class SamplingSettings:
    """Settings with which a response is drawn.

    Log-probs are those of the distribution that tokens are drawn from: after temperature, top_k, top_p and min_p. At
    temperature 0 they are the model's own, of all tokens.

    Raises:
        DataError: a value is out of range.
    """

    max_tokens: int
    """Longest response, in tokens."""
    temperature: float = 1.0
    """Divides the logits; 0 takes the likeliest token."""
    top_p: float = 1.0
    """Smallest probability mass that tokens are drawn from."""
    top_k: int = 0
    """Number of likeliest tokens to draw from; 0 for all."""
    min_p: float = 0.0
    """Least probability of a token, relative to the likeliest one."""
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end a response, of which they are the last token; no other token ends one."""
    stop_strings: tuple[str, ...] = ()
    """Texts that end a response, once its tokens, decoded with special ones, contain one; needs a tokenizer."""

    def __post_init__(self) -> None:
        rules = (
            (
                "max_tokens",
                _is_whole(self.max_tokens) and self.max_tokens >= 1,
                "a whole number of at least 1",
            ),
            (
                "temperature",
                _is_number(self.temperature) and (self.temperature == 0 or 0.01 <= self.temperature <= 2),
                "0, or a number from 0.01 to 2",
            ),
            ("top_p", _is_number(self.top_p) and 0 < self.top_p <= 1, "a number above 0 and at most 1"),
            ("top_k", _is_whole(self.top_k) and self.top_k >= 0, "a whole number; 0 stands for all tokens"),
            ("min_p", _is_number(self.min_p) and 0 <= self.min_p <= 1, "a number from 0 to 1"),
            ("stop_token_ids", _are_tokens(self.stop_token_ids), "a tuple of token ids"),
            (
                "stop_strings",
                isinstance(self.stop_strings, tuple)
                and all(isinstance(text, str) and text for text in self.stop_strings),
                "a tuple of texts of at least one character",
            ),
        )
        for name, holds, rule in rules:
            if not holds:
                raise DataError(
                    f"sampling {name}={shown(getattr(self, name))} must be {rule}; choose another value"
                )


def _is_whole(value: object) -> bool:
    return type(value) is int  # True is an int, and no number of tokens


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _are_tokens(value: object) -> bool:
    """Return True for a tuple of whole numbers; the engine knows which ones its model has."""
    return isinstance(value, tuple) and all(map(_is_whole, value))


@dataclass(frozen=True)
class Request:
    """One response to draw.

    Raises:
        DataError: the id is no text, prompt_token_ids no tuple of token ids, the seed no whole number of 64 bits, or
            first_position negative.
    """

    request_id: str
    """Unique among the requests that an engine has."""
    prompt_token_ids: tuple[int, ...]
    seed: int
    """Decides every draw, together with the position of the token in the response and nothing else."""
    sampling: SamplingSettings
    first_position: int = 0
    """Position in the response of the first token to draw: the prompt ends with that many tokens drawn earlier."""

    def __post_init__(self) -> None:
        rules = (
            ("request_id", isinstance(self.request_id, str), "a text"),
            ("prompt_token_ids", _are_tokens(self.prompt_token_ids), "a tuple of token ids"),
            ("seed", _is_whole(self.seed) and -(2**63) <= self.seed < 2**63, "a whole number of 64 bits"),
            (
                "first_position",
                _is_whole(self.first_position) and 0 <= self.first_position < 2**63,
                "a whole number from 0 on",
            ),
            ("sampling", isinstance(self.sampling, SamplingSettings), "of the class SamplingSettings"),
        )
        for name, holds, rule in rules:
            if not holds:
                raise DataError(
                    f"{name}={shown(getattr(self, name))} of request {shown(self.request_id)} must be {rule}; choose"
                    " another value"
                )


@dataclass
class Response:
    """Tokens that have been drawn for a request so far."""

    request_id: str
    token_ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    """Log-probability of each token under the distribution that it was drawn from."""
    versions: list[int] = field(default_factory=list)
    """Version of the weights that drew each token."""
    finish_reason: str | None = None
    """`stop` or `length`; None where the response has not ended."""


class Engine(GenerationSide, Protocol):
    """One rank's part of a generation engine.

    Its weights come from a weight sync (`runtime/hybrid_engine.py`, `runtime/weight_push.py`), which writes into their
    storages. Between two calls of `advance` weights may change while requests stay: where the KV cache is released
    (`leave_generation`), unfinished requests are computed anew when it is back.
    """

    @property
    def layout(self) -> Layout: ...

    @property
    def version(self) -> int:
        """Version of the weights that draw the next tokens."""
        ...

    @property
    def num_unfinished(self) -> int:
        """Number of requests that have not ended."""
        ...

    def add(self, requests: Sequence[Request]) -> None:
        """Queue requests: all of them, or none.

        Raises:
            DataError: a request's id is taken, its prompt is empty, leaves no room for the response or has tokens that
                the model does not know, it stops at such a token, or it has stop strings and the engine has no tokenizer.
        """
        ...

    def advance(self, num_steps: int = 1) -> list[Response]:
        """Take `num_steps` engine steps, fewer where nothing is left to do; return the responses that have ended.

        Raises:
            StorageError: the engine has no weights in training mode.
        """
        ...

    def abort(self, request_ids: Iterable[str]) -> list[Response]:
        """Drop requests whose responses `advance` has not returned; return what has been drawn for each so far."""
        ...

    def weights_changed(self, version: int, keep_kv: bool) -> None:
        """Go on with weights of `version` that were written while the engine had them.

        Args:
            keep_kv: keep keys and values that older weights have computed; otherwise compute unfinished requests anew.
        """
        ...


def generate(
    engine: Engine, prompts: Sequence[Sequence[int]], seeds: Sequence[int], sampling: SamplingSettings
) -> list[Response]:
    """Return a response to each prompt (token ids), in order.

    Raises:
        StorageError: the engine has no weights in training mode, or has other requests.
        DataError: a prompt is empty, leaves no room for its response, has tokens that the model does not know, or has
            no seed.
    """
    if len(prompts) != len(seeds):
        raise DataError(
            f"{len(prompts)} prompts and {len(seeds)} seeds were given; give one seed for each prompt"
        )
    if engine.num_unfinished:
        raise StorageError(
            f"the engine has {engine.num_unfinished} unfinished requests, and generate() takes it for itself;"
            " finish or abort them, or use add() and advance()"
        )
    engine.add(
        [
            Request(str(row), tuple(prompt), seed, sampling)
            for row, (prompt, seed) in enumerate(zip(prompts, seeds, strict=True))
        ]
    )
    ids, ended = [str(row) for row in range(len(prompts))], dict[str, Response]()
    try:
        while engine.num_unfinished:
            ended.update((response.request_id, response) for response in engine.advance())
    finally:
        engine.abort(ids)  # nothing is left but after a failure or an interrupt
    return [ended[row] for row in ids]
