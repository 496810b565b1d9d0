"""Samples as the responses that OpenAI's and vLLM's clients expect: types of `openai`, with vLLM's additional fields."""

from __future__ import annotations

import itertools
import time
import uuid
from collections.abc import Sequence
from typing import Any

from openai.types import Completion, CompletionChoice, CompletionUsage
from openai.types.chat import ChatCompletion, ChatCompletionMessage, ChatCompletionTokenLogprob
from openai.types.chat.chat_completion import Choice, ChoiceLogprobs
from openai.types.chat.chat_completion_token_logprob import TopLogprob
from openai.types.completion_choice import Logprobs
from tinker.types import SampledSequence, SampleResponse

from hybridengine.serving.openai_texts import Texts
from hybridengine.serving.openai_wire import ChatRequest, CompletionRequest, GenerateRequest, TextRequest
from hybridengine.serving.ranks import Prompt

LOWEST = -9999.0
"""Log-prob that stands for all lower ones: JSON has no infinity."""


def completion(
    request: CompletionRequest, prompts: Sequence[Prompt], drawn: Sequence[SampleResponse], texts: Texts
) -> dict[str, Any]:
    """Return the response of /v1/completions: the choices of the first prompt, then those of the next."""
    choices = []
    for prompt, sampled in zip(prompts, drawn, strict=True):
        for sequence in sampled.sequences:
            own = _own_fields(request, prompt, sampled, sequence)
            if request.return_token_ids:
                own["prompt_token_ids"] = prompt.tokens
            choices.append(
                CompletionChoice(
                    index=len(choices),
                    text=texts.response(prompt, sequence, request.skip_special_tokens),
                    finish_reason=sequence.stop_reason,
                    logprobs=None
                    if request.logprobs is None
                    else _token_log_probs(sequence, texts, request.return_tokens_as_token_ids),
                    **own,
                )
            )
    return Completion(
        id=f"cmpl-{uuid.uuid4().hex}",
        object="text_completion",
        created=int(time.time()),
        model=request.model,
        choices=choices,
        usage=_usage(prompts, drawn),
    ).model_dump(mode="json", exclude_unset=True)


def chat_completion(
    request: ChatRequest, prompts: Sequence[Prompt], drawn: Sequence[SampleResponse], texts: Texts
) -> dict[str, Any]:
    """Return the response of /v1/chat/completions."""
    prompt, sampled = prompts[0], drawn[0]
    own: dict[str, Any] = {"prompt_token_ids": prompt.tokens} if request.return_token_ids else {}
    choices = [
        Choice(
            index=index,
            message=ChatCompletionMessage(
                role="assistant",
                content=texts.response(prompt, sequence, request.skip_special_tokens),
                refusal=None,
            ),
            finish_reason=sequence.stop_reason,
            logprobs=ChoiceLogprobs(
                content=_contents(sequence, texts, request.return_tokens_as_token_ids), refusal=None
            )
            if request.logprobs
            else None,
            **_own_fields(request, prompt, sampled, sequence),
        )
        for index, sequence in enumerate(sampled.sequences)
    ]
    return ChatCompletion(
        id=f"chatcmpl-{uuid.uuid4().hex}",
        object="chat.completion",
        created=int(time.time()),
        model=request.model,
        choices=choices,
        usage=_usage(prompts, drawn),
        **own,
    ).model_dump(mode="json", exclude_unset=True)


def generated(
    request: GenerateRequest, prompts: Sequence[Prompt], drawn: Sequence[SampleResponse], texts: Texts
) -> dict[str, Any]:
    """Return the response of /inference/v1/generate (`output_mode` tokens).

    Entries of `logprobs` have `token_id` as in vLLM 0.32, and the earlier `token` ("token_id:N"), which renderers read.
    """
    prompt, sampled, settings = prompts[0], drawn[0], request.settings()
    response = {
        "request_id": request.request_id,
        "model": request.model,
        "created": int(time.time()),
        "output_mode": "tokens",
        "choices": [
            {
                "index": index,
                "token_ids": sequence.tokens,
                "finish_reason": sequence.stop_reason,
                "logprobs": None
                if settings.logprobs is None
                else {
                    "content": [
                        each.model_dump(mode="json", exclude_unset=True)
                        for each in _contents(sequence, texts, as_ids=True)
                    ]
                },
            }
            for index, sequence in enumerate(sampled.sequences)
        ],
        "usage": _usage(prompts, drawn).model_dump(mode="json", exclude_unset=True),
        "prompt_logprobs": None if settings.prompt_logprobs is None else _prompt_log_probs(prompt, sampled),
    }
    return response | ({"prompt_token_ids": prompt.tokens} if request.return_token_ids else {})


def _usage(prompts: Sequence[Prompt], drawn: Sequence[SampleResponse]) -> CompletionUsage:
    prompt_tokens = sum(len(prompt.tokens) for prompt in prompts)
    completion_tokens = sum(len(each.tokens) for sampled in drawn for each in sampled.sequences)
    return CompletionUsage(
        prompt_tokens=prompt_tokens,
        completion_tokens=completion_tokens,
        total_tokens=prompt_tokens + completion_tokens,
    )


def _own_fields(
    request: TextRequest, prompt: Prompt, sampled: SampleResponse, sequence: SampledSequence
) -> dict[str, Any]:
    """Return the fields of vLLM that a choice has."""
    fields: dict[str, Any] = {"token_ids": sequence.tokens} if request.return_token_ids else {}
    if request.prompt_logprobs is not None:
        fields["prompt_logprobs"] = _prompt_log_probs(prompt, sampled)
    return fields


def _positions(sequence: SampledSequence) -> list[tuple[int, float, dict[int, float]]]:
    """Return each token, its log-prob and those of the most likely tokens, likeliest first."""
    tops = sequence.topk_logprobs or [None] * len(sequence.tokens)
    return [
        (token, max(value, LOWEST), {each: max(its, LOWEST) for each, its in top or ()})
        for token, value, top in zip(sequence.tokens, sequence.logprobs or (), tops, strict=True)
    ]


def _token_log_probs(sequence: SampledSequence, texts: Texts, as_ids: bool) -> Logprobs:
    """Return the log-probs of a completion; with the most likely tokens of a position goes the drawn one."""
    positions = _positions(sequence)
    lengths = [len(texts.token(token, as_id=False)) for token in sequence.tokens]
    return Logprobs(
        tokens=[texts.token(token, as_ids) for token in sequence.tokens],
        token_logprobs=[value for _, value, _ in positions],
        text_offset=[*itertools.accumulate(lengths, initial=0)][:-1],
        top_logprobs=[
            {texts.token(each, as_ids): its for each, its in ({token: value} | top).items()}
            for token, value, top in positions
        ],
    )


def _contents(sequence: SampledSequence, texts: Texts, as_ids: bool) -> list[ChatCompletionTokenLogprob]:
    """Return the log-probs of a chat's response."""

    def entry(token: int, value: float) -> dict[str, Any]:
        written = list(texts.token(token, as_id=False).encode())
        return {"token": texts.token(token, as_ids), "bytes": written, "logprob": value} | (
            {"token_id": token} if as_ids else {}
        )

    return [
        ChatCompletionTokenLogprob(
            **entry(token, value), top_logprobs=[TopLogprob(**entry(*each)) for each in top.items()]
        )
        for token, value, top in _positions(sequence)
    ]


def _prompt_log_probs(prompt: Prompt, sampled: SampleResponse) -> list[dict[int, Any] | None]:
    """Return vLLM's `prompt_logprobs`: the token of each position but the first, and the most likely ones with ranks."""
    values = sampled.prompt_logprobs or [None]
    tops = sampled.topk_prompt_logprobs or [None] * len(values)
    return [
        None
        if value is None
        else {token: {"logprob": max(value, LOWEST), "rank": None}}
        | {
            each: {"logprob": max(its, LOWEST), "rank": rank}
            for rank, (each, its) in enumerate(top or (), start=1)
        }
        for token, value, top in zip(prompt.tokens, values, tops, strict=True)
    ]
