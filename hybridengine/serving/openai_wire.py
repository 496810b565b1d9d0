"""Requests of OpenAI's API and of vLLM's token endpoint, checked, and the prompts that they ask for."""

from __future__ import annotations

import secrets
import uuid
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, TypeVar

import numpy as np
import pydantic
import pydantic_core
from pydantic import Field

from hybridengine.errors import shown
from hybridengine.serving.openai_texts import ArgumentError, Texts
from hybridengine.serving.ranks import ModelFacts, Prompt
from hybridengine.serving.tinker_wire import check_ids

MAX_SAMPLES = 4096
"""Largest number of samples of one call."""
HARMLESS = {
    "cache_salt",
    "detokenize",
    "flat_logprobs",
    "include_reasoning",
    "metadata",
    "output_kind",
    "parallel_tool_calls",
    "priority",
    "prompt_cache_key",
    "prompt_cache_options",
    "prompt_cache_retention",
    "request_id",
    "routed_experts_prompt_start",
    "safety_identifier",
    "service_tier",
    "session_id",
    "skip_clone",
    "spaces_between_special_tokens",
    "store",
    "stream_interval",
    "stream_options",
    "user",
}
"""Arguments that are ignored: they change neither what is sampled nor what the answer means."""
NEUTRAL: Mapping[str, Sequence[Any]] = {
    "add_special_tokens": [False],
    "bad_words": [[]],
    "best_of": [1],
    "content_parts": [[]],
    "continue_final_message": [False],
    "documents": [[]],
    "echo": [False],
    "extra_args": [{}],
    "frequency_penalty": [0],
    "function_call": ["none", "auto"],
    "functions": [[]],
    "include_stop_str_in_output": [False],
    "length_penalty": [1],
    "logit_bias": [{}],
    "min_p": [0],
    "min_tokens": [0],
    "modalities": [["text"]],
    "output_mode": ["tokens"],
    "presence_penalty": [0],
    "repetition_penalty": [1],
    "response_format": [{"type": "text"}],
    "stream": [False],
    "suffix": [""],
    "thinking_token_budget": [-1],
    "tool_choice": ["none", "auto"],
    "tools": [[]],
    "use_beam_search": [False],
    "vllm_xargs": [{}],
    "watermarking": [False],
}
"""Arguments that are not served, with the values that change nothing."""


TokenId = Annotated[int, Field(ge=0, lt=2**31)]
NumTop = Annotated[int, Field(ge=0, le=1024)]
StopText = Annotated[str, Field(min_length=1)]


class _Sampling(pydantic.BaseModel):
    """Sampling settings that all endpoints share."""

    model_config = pydantic.ConfigDict(strict=True)
    temperature: Annotated[float, Field(ge=0, le=2)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Field(ge=-1)] = -1
    n: Annotated[int, Field(ge=1, le=MAX_SAMPLES)] = 1
    seed: int | None = None
    stop: StopText | list[StopText] = Field(default_factory=list)
    stop_token_ids: list[TokenId] = Field(default_factory=list)
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    prompt_logprobs: NumTop | None = None

    @property
    def stop_texts(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    def as_prompt(
        self, tokens: Sequence[int], facts: ModelFacts, num_top: int, max_tokens: int | None
    ) -> Prompt:
        """Return a prompt with these settings; `max_tokens` None is the rest of the context.

        Raises: RequestError for a prompt that the model cannot continue.
        """
        left = facts.context_tokens - len(tokens)
        if not tokens:
            raise ArgumentError("the prompt has no tokens; send at least one")
        if left < (max_tokens or 1):
            raise ArgumentError(
                f"the prompt has {len(tokens)} tokens and max_tokens={max_tokens}, which together exceed the model's"
                f" context length of {facts.context_tokens}; shorten the prompt, or lower max_tokens",
                code="context_length_exceeded",
            )
        check_ids("the prompt", np.asarray(tokens), facts)
        check_ids("stop_token_ids", np.asarray(self.stop_token_ids, np.int64), facts)
        return Prompt(
            tokens=tuple(tokens),
            num_samples=self.n,
            seed=secrets.randbelow(2**31) if self.seed is None else self.seed,
            max_tokens=max_tokens or left,
            temperature=self.temperature,
            top_k=self.top_k or -1,
            top_p=self.top_p,
            stop_ids=tuple(self.stop_token_ids),
            stop_texts=self.stop_texts,
            stop_at_end=not self.ignore_eos,
            # the first token has no log-prob
            log_probs_from=None if self.prompt_logprobs is None or len(tokens) == 1 else 0,
            top_prompt_log_probs=self.prompt_logprobs or 0,
            top_log_probs=num_top,
        )


class TextRequest(_Sampling):
    """Arguments that the endpoints share which answer with text."""

    model: str
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False


class CompletionRequest(TextRequest):
    """A call of /v1/completions."""

    prompt: str | list[TokenId] | Annotated[list[str | list[TokenId]], Field(min_length=1)]
    logprobs: NumTop | None = None
    add_special_tokens: bool = True

    def prompts(self, texts: Texts, facts: ModelFacts) -> list[Prompt]:
        """Return the prompts of the call; without `max_tokens`, responses have at most 16 tokens, as OpenAI's have."""
        single = isinstance(self.prompt, str) or not self.prompt or isinstance(self.prompt[0], int)
        given: Any = [self.prompt] if single else self.prompt
        if len(given) * self.n > MAX_SAMPLES:
            raise ArgumentError(
                f"{len(given)} prompts with n={self.n} are more than {MAX_SAMPLES} samples; send several calls",
                "n",
            )
        prompts = []
        for each in given:
            tokens = texts.tokens(each, self.add_special_tokens) if isinstance(each, str) else each
            usual = max(1, min(16, facts.context_tokens - len(tokens)))
            prompts.append(self.as_prompt(tokens, facts, self.logprobs or 0, self.max_tokens or usual))
        return prompts


class ChatRequest(TextRequest):
    """A call of /v1/chat/completions."""

    messages: Annotated[list[dict[str, Any]], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool = False
    top_logprobs: NumTop = 0
    add_generation_prompt: bool = True
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)

    def prompts(self, texts: Texts, facts: ModelFacts) -> list[Prompt]:
        """Return the only prompt of the call."""
        if self.top_logprobs and not self.logprobs:
            raise ArgumentError(
                f"top_logprobs={self.top_logprobs} needs logprobs=true; set both", "top_logprobs"
            )
        tokens = texts.rendered(self.messages, self.add_generation_prompt, self.chat_template_kwargs)
        longest = self.max_completion_tokens or self.max_tokens
        return [self.as_prompt(tokens, facts, self.top_logprobs, longest)]


class _GenerateSampling(_Sampling):
    logprobs: NumTop | None = None


class GenerateRequest(pydantic.BaseModel):
    """A call of vLLM's /inference/v1/generate."""

    model_config = pydantic.ConfigDict(strict=True)
    token_ids: list[TokenId]
    sampling_params: dict[str, Any]
    model: str | None = None
    request_id: str = Field(default_factory=lambda: uuid.uuid4().hex)
    return_token_ids: bool = False

    def settings(self) -> _GenerateSampling:
        """Return the sampling settings; raise ArgumentError for those that are not served."""
        return _checked(_GenerateSampling, self.sampling_params, "sampling_params.")

    def prompts(self, _: Texts, facts: ModelFacts) -> list[Prompt]:
        """Return the only prompt of the call."""
        settings = self.settings()
        # Renderers ask for 1 with each response and read the drawn token's log-prob alone. The most likely tokens cost
        # a pass of the trainer, so an answer has them from 2 on; a list of them may be shorter than asked for.
        num_top = settings.logprobs if settings.logprobs and settings.logprobs > 1 else 0
        return [settings.as_prompt(self.token_ids, facts, num_top, settings.max_tokens)]


RequestT = TypeVar("RequestT", bound=pydantic.BaseModel)


def read(request: type[RequestT], body: bytes) -> RequestT:
    """Return a JSON body as a request; raise ArgumentError for the first argument that is invalid or not served."""
    try:
        arguments = pydantic_core.from_json(body)  # refuses lone surrogates, which UTF-8 lacks
    except ValueError as error:
        raise ArgumentError(f"the body is not JSON ({error}); send a JSON object") from None
    if not isinstance(arguments, dict):
        raise ArgumentError(f"the body is {shown(arguments)}; send a JSON object")
    return _checked(request, arguments, "")


def _checked(request: type[RequestT], arguments: Mapping[str, Any], place: str) -> RequestT:
    given = {name: value for name, value in arguments.items() if value is not None}
    for name, value in given.items():
        if name in request.model_fields or name in HARMLESS or value in NEUTRAL.get(name, ()):
            continue
        neutral = "".join(f", or send {shown(each)}" for each in NEUTRAL.get(name, ()))
        raise ArgumentError(
            f"{place}{name}={shown(value)} is not served by this endpoint; leave it out{neutral}",
            place + name,
        )
    try:
        return request.model_validate({name: given[name] for name in request.model_fields if name in given})
    except pydantic.ValidationError as error:
        problem = error.errors()[0]
        name = f"{place}{problem['loc'][0]}"
        raise ArgumentError(f"{name}={shown(problem['input'])}: {problem['msg']}", name) from None
