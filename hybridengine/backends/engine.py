"""The protocol of generation engines: requests join and leave at any time. `backends/vllm` implements it.

All ranks of an engine make the same calls in the same order: tensor-parallel peers compute each step together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Protocol, Self

import numpy as np
from pydantic import AfterValidator, ConfigDict, Field, InstanceOf, ValidationError, model_validator
from pydantic.dataclasses import dataclass as pydantic_dataclass
from pydantic_core import ArgsKwargs, PydanticCustomError

from hybridengine.config.loading import rule
from hybridengine.config.sections import RolloutSection, StructureSection
from hybridengine.errors import DataError, StorageError, shown
from hybridengine.reshard.layout import Layout
from hybridengine.weights.hybrid_engine import GenerationSide

TokenIds = tuple[int, ...]
"""Token ids; the engine validates them against its model."""


@pydantic_dataclass(frozen=True, config=ConfigDict(strict=True, extra="forbid"))
class _Checked:
    """Base of dataclasses whose types and ranges are validated on construction."""

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
    """Sampling settings of a response; DataError if a value is out of range.

    Log-probs are those of the distribution that tokens are drawn from, after temperature, top_k, top_p, min_p and the
    structure. At temperature 0 they are the model's own, over all tokens that the structure allows.
    """

    max_tokens: Annotated[int, Field(ge=1)]
    """Longest response, in tokens."""
    temperature: Annotated[float, AfterValidator(_check_temperature)] = 1.0
    """Divisor of the logits; 0 selects the most likely token."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Smallest total probability of the most likely tokens to draw from."""
    top_k: Annotated[int, Field(ge=0)] = 0
    """Number of most likely tokens to draw from; 0 for all."""
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Minimum probability of a token relative to the most likely one."""
    stop_token_ids: TokenIds = ()
    """Tokens that end a response and are its last token; no other token ends a response."""
    stop_strings: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    """Texts that end a response when its tokens, decoded with special tokens, contain one; requires a tokenizer."""
    structure: InstanceOf[StructureSection] | None = None
    """Form of the response, which its last stop token ends; requires a tokenizer."""
    adapter: str = ""
    """PEFT folder of the adapters that draw the response, for an engine that loads them; empty for the weights alone."""

    @classmethod
    def of(
        cls, rollout: RolloutSection, max_tokens: int, stop_token_ids: TokenIds, *, greedy: bool = False
    ) -> SamplingSettings:
        """Return the settings of a run's responses; those of `greedy` ones draw the most likely tokens of the form."""
        drawn = {} if greedy else {name: getattr(rollout, name) for name in ("top_p", "top_k", "min_p")}
        return cls(
            max_tokens=max_tokens,
            temperature=0.0 if greedy else rollout.temperature,
            stop_token_ids=stop_token_ids,
            stop_strings=rollout.stop,
            structure=rollout.structure,
            **drawn,
        )

    @property
    def reads_text(self) -> bool:
        """True if the engine needs a tokenizer."""
        return bool(self.stop_strings) or self.structure is not None


@pydantic_dataclass(frozen=True)
class Request(_Checked):
    """A request for one response; DataError if a value has the wrong type or is out of range."""

    request_id: str
    """Id, unique among the requests of an engine."""
    prompt_token_ids: TokenIds
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)]
    """Seed that, with the position of the token in the response, determines every draw."""
    sampling: InstanceOf[SamplingSettings]
    first_position: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """Position in the response of the first token to draw; the prompt ends with this number of earlier tokens."""
    num_read: Annotated[int, Field(ge=0)] | None = None
    """Last tokens of the prompt in which stop strings and the structure have begun; by default `first_position`."""
    num_routed: Annotated[int, Field(ge=0)] = 0
    """First tokens of the prompt whose experts are known: the response tells those of the other tokens."""
    images: tuple[InstanceOf[np.ndarray], ...] = ()
    """Images of the prompt, uint8 [height, width, 3] each, whose tokens it has (`data.images`)."""


@dataclass
class Response:
    """Tokens drawn for a request so far."""

    request_id: str
    token_ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    """Log-probability of each token under the distribution that it was drawn from."""
    versions: list[int] = field(default_factory=list)
    """Version of the weights that produced each token."""
    supports: list[np.ndarray] | None = None
    """Support of each token's draw (`rows/supports.py`). None unless the engine keeps them."""
    routes: np.ndarray | None = None
    """Experts that computed each token of prompt and response after the `num_routed` first, [N, L, K] with L layers of K
    experts each; the last token of the response has none. None unless the engine keeps them."""
    finish_reason: str | None = None
    """`stop` or `length`; None for an unfinished response."""


class Engine(GenerationSide, Protocol):
    """One rank's part of a generation engine.

    Its weights come from a weight sync (`weights/hybrid_engine.py`), which writes into their storages. Weights may
    change between two calls of `advance` while requests stay: if the KV cache is released (`leave_generation`),
    unfinished requests are recomputed once it is reallocated.
    """

    layout: Layout
    version: int
    """Version of the weights that produce the next tokens."""

    @property
    def num_unfinished(self) -> int:
        """Number of unfinished requests."""
        ...

    @property
    def max_running(self) -> int:
        """Largest number of requests that run at once."""
        ...

    @property
    def waiting(self) -> list[str]:
        """Ids of the requests that wait for a slot or for room in the KV cache, in the order in which they will run."""
        ...

    def add(self, requests: Sequence[Request]) -> None:
        """Queue requests: either all of them or none.

        Raises:
            DataError: a request's id is taken; its prompt is empty, leaves no room for the response or has tokens
                unknown to the model; a stop token is unknown to the model; it has stop strings or a structure, and the
                engine has no tokenizer; or its earlier tokens do not have its structure.
        """
        ...

    def advance(self, num_steps: int = 1) -> list[Response]:
        """Take up to `num_steps` steps while requests are unfinished; return the responses that have ended.

        Raises:
            StorageError: the engine has no weights, because it is in training mode.
            DataError: no token of the model continues a response in its structure.
        """
        ...

    def progress(self) -> list[Response]:
        """Return the tokens drawn so far for each request whose response `advance` has not returned, in order."""
        ...

    def settle(self) -> None:
        """Finish steps in flight, which an engine with pipeline stages has, before its weights change."""
        ...

    def abort(self, request_ids: Iterable[str]) -> list[Response]:
        """Drop requests whose responses `advance` has not returned; return the tokens drawn for each so far."""
        ...

    def weights_changed(self, version: int, keep_kv: bool) -> None:
        """Continue with weights of `version`, which were written while the engine was in generation mode.

        `keep_kv` keeps keys and values of older weights; otherwise unfinished requests are recomputed.
        """
        ...


def generate(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    seeds: Sequence[int],
    sampling: Sequence[SamplingSettings],
    images: Sequence[tuple[np.ndarray, ...]] | None = None,
) -> list[Response]:
    """Return a response to each prompt (token ids), in order; each has a seed and sampling settings of its own.

    `images` are those of each prompt, if any have some.

    Raises:
        StorageError: the engine has no weights, because it is in training mode, or has other requests.
        DataError: a prompt is refused (see `Engine.add`), or has no seed or settings.
    """
    if not len(prompts) == len(seeds) == len(sampling):
        raise DataError(
            f"{len(prompts)} prompts, {len(seeds)} seeds and {len(sampling)} sampling settings were given; give one seed"
            " and one of the settings for each prompt"
        )
    if engine.num_unfinished:
        raise StorageError(
            f"the engine has {engine.num_unfinished} unfinished requests, and generate() takes it for itself;"
            " finish or abort them, or use add() and advance()"
        )
    ids, ended = [str(row) for row in range(len(prompts))], dict[str, Response]()
    given = zip(ids, map(tuple, prompts), seeds, sampling, images or [()] * len(ids), strict=True)
    engine.add(
        [Request(name, prompt, seed, settings, images=seen) for name, prompt, seed, settings, seen in given]
    )
    try:
        while engine.num_unfinished:
            ended.update((response.request_id, response) for response in engine.advance())
    finally:
        engine.abort(ids)  # requests remain only after a failure or an interrupt
    return [ended[row] for row in ids]
