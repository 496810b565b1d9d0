"""The protocol of generation engines: requests come and go, and each token carries the weights' version that drew it.

vLLM is one (`backends/vllm`); another would be one folder that implements `Engine`. Every rank of an engine calls the
same methods with the same arguments in the same order, because tensor-parallel peers compute each step together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Protocol, Self

from pydantic import AfterValidator, ConfigDict, Field, InstanceOf, ValidationError, model_validator
from pydantic.dataclasses import dataclass as pydantic_dataclass
from pydantic_core import ArgsKwargs, PydanticCustomError

from hybridengine.config.wording import rule
from hybridengine.errors import DataError, StorageError, shown
from hybridengine.reshard.layout import Layout
from hybridengine.weights.hybrid_engine import GenerationSide

TokenIds = tuple[int, ...]
"""Token ids; the engine knows which ones its model has."""


@pydantic_dataclass(frozen=True, config=ConfigDict(strict=True, extra="forbid"))
class _Checked:
    """Values whose types and ranges are checked when they are given."""

    @model_validator(mode="wrap")
    @classmethod
    def _check(cls, given: ArgsKwargs, build: Callable[[ArgsKwargs], Self]) -> Self:
        try:
            return build(given)
        except ValidationError as error:
            found, names = error.errors()[0], list(cls.__dataclass_fields__)
            values = dict(zip(names, given.args, strict=False)) | (given.kwargs or {})
            place, *inside = found["loc"]
            name = names[place] if isinstance(place, int) and place < len(names) else place
            if name not in names or name not in values:
                raise TypeError(f"{cls.__name__}({name}): {rule(found['msg'])}") from None
            whose = (
                f"request {shown(values['request_id'])}" if "request_id" in names else "the sampling settings"
            )
            label = f"{name}{''.join(f'[{number}]' for number in inside)}"
            raise DataError(
                f"{label}={shown(found['input'])} of {whose} must be {rule(found['msg'])}; choose another value"
            ) from None


def _check_temperature(value: float) -> float:
    if value and not 0.01 <= value <= 2:
        raise PydanticCustomError("temperature", "0, or a number from 0.01 to 2")
    return value


@pydantic_dataclass(frozen=True)
class SamplingSettings(_Checked):
    """Settings with which a response is drawn.

    Log-probs are those of the distribution that tokens are drawn from: after temperature, top_k, top_p and min_p. At
    temperature 0 they are the model's own, of all tokens.

    Raises:
        DataError: a value is out of range.
    """

    max_tokens: Annotated[int, Field(ge=1)]
    """Longest response, in tokens."""
    temperature: Annotated[float, AfterValidator(_check_temperature)] = 1.0
    """Divides the logits; 0 takes the likeliest token."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Smallest probability mass that tokens are drawn from."""
    top_k: Annotated[int, Field(ge=0)] = 0
    """Number of likeliest tokens to draw from; 0 for all."""
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Least probability of a token, relative to the likeliest one."""
    stop_token_ids: TokenIds = ()
    """Tokens that end a response, of which they are the last token; no other token ends one."""
    stop_strings: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    """Texts that end a response, once its tokens, decoded with special ones, contain one; needs a tokenizer."""


@pydantic_dataclass(frozen=True)
class Request(_Checked):
    """One response to draw.

    Raises:
        DataError: a value has another type, or is out of range.
    """

    request_id: str
    """Unique among the requests that an engine has."""
    prompt_token_ids: TokenIds
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)]
    """Decides every draw, together with the position of the token in the response and nothing else."""
    sampling: InstanceOf[SamplingSettings]
    first_position: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """Position in the response of the first token to draw: the prompt ends with that many tokens drawn earlier."""


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

    Its weights come from a weight sync (`runtime/hybrid_engine.py`), which writes into their
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
