"""Runs on each rank: requests added and aborted, alone and among others, over weight changes and with all samplings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from safetensors.torch import load_file

from hybridengine.backends.engine import Request, Response, SamplingSettings, generate
from hybridengine.backends.vllm.construction import EngineSettings
from hybridengine.backends.vllm.engine import VllmEngine
from hybridengine.config.sections import StructureSection
from hybridengine.errors import DataError, StorageError
from hybridengine.models.shapes import ModelShape
from hybridengine.topology.generation import GenerationGrid
from tests.full.engines.vllm_ranks import take_place

LONG = [(7 * place) % 120 + 1 for place in range(150)]
"""A prompt longer than a block of the KV cache, which vLLM keeps as a prefix."""
PROMPTS = [LONG, [1], [7, 130, 64], LONG, [7, 130, 64], list(range(2, 42)), LONG[:140]]
"""Prompts, some of them repeated."""
SEEDS = list(range(100, 100 + len(PROMPTS)))
MAX_TOKENS, NEW_TOKENS = 256, 24
SAMPLED = SamplingSettings(NEW_TOKENS, 0.8)
TRUNCATED = [
    SamplingSettings(NEW_TOKENS, 1.5, top_k=5),
    SamplingSettings(NEW_TOKENS, 1.5, top_p=0.3),
    SamplingSettings(NEW_TOKENS, 1.5, min_p=0.5),
]
NUM_DRAWS = 600
STRUCTURE = StructureSection(regex="(w0(01|02|13)){2,4}(w1[0-2][0-9]){1,3}")
"""Form of responses, in the tokenizer's words without spaces, as vLLM's grammars read them."""
STRUCTURED = SamplingSettings(NEW_TOKENS, 1.5, top_k=20, stop_token_ids=(4,), structure=STRUCTURE)
SMALL_CACHE_TOKENS = 512
"""Tokens of a KV cache that is too small for all of `PROMPTS` at the same time."""


@dataclass(frozen=True)
class Seen:
    """Responses of one rank."""

    sampled: list[Response]
    """Responses to all of `PROMPTS` together."""
    alone: list[Response]
    """Responses to each prompt by itself, with the same seeds."""
    coming_and_going: list[Response]
    """Responses to requests that are added while earlier ones run, among others that are aborted."""
    over_a_switch: list[Response]
    """Responses during which the KV cache is released and restored, with a new version of the same weights."""
    kept: list[Response]
    """Responses during which a new version of the same weights is loaded and the KV cache is kept."""
    continued: list[Response]
    """Responses to new requests whose prompt contains a part of `sampled`."""
    crowded: list[Response]
    """Responses when neither a forward pass nor the KV cache has room for all requests."""
    truncated: list[list[Response]]
    """Responses under each of `TRUNCATED`."""
    first_tokens: list[list[int]]
    """First tokens of `NUM_DRAWS` responses to the second prompt, under each of `TRUNCATED`."""
    greedy: list[Response]
    stopped: list[Response]
    """Greedy responses that end at the tokens of `stop_token_ids`."""
    stop_token_ids: tuple[int, ...]
    stopped_by_text: list[Response]
    """Greedy responses that end at the words of two tokens in a row."""
    stop_strings: tuple[str, ...]
    continued_to_text: list[Response]
    """The same responses, in new requests after each one's first tokens, which may have begun the words."""
    structured: list[Response]
    """Responses of the form `STRUCTURE`."""
    continued_in_structure: list[Response]
    """The same responses, in new requests after each one's first tokens."""


def word(token: int) -> str:
    """Return the tokenizer's text of a token; words are joined by spaces."""
    return f"w{token:03d}"


def exercise_engine(rank: int, folder: Path, generation: GenerationGrid) -> Seen:
    """Generate in every way that an engine offers."""
    identity = take_place(rank)
    shape = ModelShape.from_folder(folder)
    settings = EngineSettings(MAX_TOKENS, 8, 64 * 2**20, tokenizer=str(folder), keep_supports=True)
    engine = VllmEngine(folder, shape, generation, settings, identity)
    engine._runner.model.load_weights(load_file(folder / "model.safetensors").items())
    sampled = generate(engine, PROMPTS, SEEDS, every(SAMPLED))
    greedy = generate(engine, PROMPTS, SEEDS, every(SamplingSettings(NEW_TOKENS, 0.0)))
    stops = (greedy[1].token_ids[3], greedy[5].token_ids[0])
    texts = (f"{word(greedy[1].token_ids[3])} {word(greedy[1].token_ids[4])}",)
    _refuse_wrong_requests(engine)
    by_text = SamplingSettings(NEW_TOKENS, 0.0, stop_strings=texts)
    stopped_by_text = generate(engine, PROMPTS, SEEDS, every(by_text))
    structured = generate(engine, PROMPTS, SEEDS, every(STRUCTURED))
    return Seen(
        sampled=sampled,
        alone=[
            generate(engine, [prompt], [seed], [SAMPLED])[0]
            for prompt, seed in zip(PROMPTS, SEEDS, strict=True)
        ],
        coming_and_going=_come_and_go(engine),
        over_a_switch=_change_weights(engine, keep_kv=False),
        kept=_change_weights(engine, keep_kv=True),
        continued=_continue(engine, sampled, SAMPLED),
        crowded=_crowd(engine),
        truncated=[generate(engine, PROMPTS, SEEDS, every(sampling)) for sampling in TRUNCATED],
        first_tokens=[_draw_often(engine, replace(sampling, max_tokens=1)) for sampling in TRUNCATED],
        greedy=greedy,
        stopped=generate(
            engine, PROMPTS, SEEDS, every(SamplingSettings(NEW_TOKENS, 0.0, stop_token_ids=stops))
        ),
        stop_token_ids=stops,
        stopped_by_text=stopped_by_text,
        stop_strings=texts,
        continued_to_text=_continue(engine, stopped_by_text, by_text),
        structured=structured,
        continued_in_structure=_continue(engine, structured, STRUCTURED),
    )


def every(sampling: SamplingSettings) -> list[SamplingSettings]:
    """Return the same settings for each of `PROMPTS`."""
    return [sampling] * len(PROMPTS)


def _requests(sampling: SamplingSettings = SAMPLED, prefix: str = "") -> list[Request]:
    return [
        Request(f"{prefix}{row}", tuple(prompt), seed, sampling)
        for row, (prompt, seed) in enumerate(zip(PROMPTS, SEEDS, strict=True))
    ]


def _finish(engine: VllmEngine, ended: Sequence[Response] = ()) -> list[Response]:
    found = list(ended)
    while engine.num_unfinished:
        found += engine.advance()
    return sorted(found, key=lambda response: int(response.request_id))


def _draw_often(engine: VllmEngine, sampling: SamplingSettings) -> list[int]:
    found = generate(engine, [PROMPTS[1]] * NUM_DRAWS, range(NUM_DRAWS), [sampling] * NUM_DRAWS)
    return [response.token_ids[0] for response in found]


def _come_and_go(engine: VllmEngine) -> list[Response]:
    ended: list[Response] = []
    others = _requests(SamplingSettings(2 * NEW_TOKENS, 0.3), prefix="other ")
    for number, (request, other) in enumerate(zip(_requests(), others, strict=True)):
        engine.add([other, request])
        ended += engine.advance(number)
    aborted = engine.abort([other.request_id for other in others])
    assert all(len(other.token_ids) < 2 * NEW_TOKENS and other.finish_reason is None for other in aborted)
    return _finish(engine, ended)


def _change_weights(engine: VllmEngine, keep_kv: bool) -> list[Response]:
    """Generate seven tokens with the present version of the weights, and the rest with the next one."""
    version = engine.version
    engine.add(_requests())
    ended = engine.advance(7)
    if keep_kv:
        engine.weights_changed(version + 1, keep_kv=True)
    else:
        engine.leave_generation()
        assert engine.kv_cache_bytes == 0
        with pytest.raises(StorageError, match="switch to generation first"):
            engine.advance()
        engine.enter_generation(version + 1)
    return _finish(engine, ended)


def _continue(
    engine: VllmEngine, responses: Sequence[Response], sampling: SamplingSettings
) -> list[Response]:
    known = [response.token_ids[:-1][: 3 + row] for row, response in enumerate(responses)]
    engine.add(
        [
            Request(
                str(row),
                (*PROMPTS[row], *tokens),
                SEEDS[row],
                replace(sampling, max_tokens=NEW_TOKENS - len(tokens)),
                first_position=len(tokens),
            )
            for row, tokens in enumerate(known)
        ]
    )
    found = _finish(engine)
    for tokens, response in zip(known, found, strict=True):
        response.token_ids[:0] = tokens
    return found


def _crowd(engine: VllmEngine) -> list[Response]:
    """Generate with less room in a forward pass than all prompts need, and in the KV cache than all sequences need."""
    scheduler = engine._engine.engine_core.engine_core.scheduler
    pool = scheduler.kv_cache_manager.block_pool
    num_tokens, scheduler.max_num_scheduled_tokens = scheduler.max_num_scheduled_tokens, MAX_TOKENS
    num_taken = pool.get_num_free_blocks() - SMALL_CACHE_TOKENS // scheduler.cache_config.block_size
    taken = pool.get_new_blocks(num_taken)
    try:
        return generate(engine, PROMPTS, SEEDS, every(SAMPLED))
    finally:
        pool.free_blocks(taken)
        scheduler.max_num_scheduled_tokens = num_tokens


def _second_fails(add: Callable[..., str]) -> Callable[..., str]:
    """Return a function that calls `add` the first time and fails the second time."""
    calls = iter([add])

    def wrapped(*args: Any, **named: Any) -> str:
        for call in calls:
            return call(*args, **named)
        raise RuntimeError("no room")

    return wrapped


def _refuse_wrong_requests(engine: VllmEngine) -> None:
    assert generate(engine, [], [], []) == []
    for wrong in ([], [1] * (MAX_TOKENS - NEW_TOKENS + 1)):
        with pytest.raises(DataError, match=f"the prompt of request '1' has {len(wrong)} tokens"):
            generate(engine, [[1], wrong], [1, 2], [SAMPLED] * 2)
    vocab_size = engine.vocab_size
    for token in (-1, vocab_size):
        with pytest.raises(
            DataError, match=rf"request '1' has the token {token}, .* from 0 to {vocab_size - 1};"
        ):
            generate(engine, [[1], [1, token]], [1, 2], [SAMPLED] * 2)
        with pytest.raises(DataError, match=rf"the stop_token_ids of request '0' has the token {token},"):
            generate(engine, [[1]], [1], [SamplingSettings(1, stop_token_ids=(0, token))])
    with (
        mock.patch.object(
            engine._engine, "add_request", side_effect=_second_fails(engine._engine.add_request)
        ),
        pytest.raises(RuntimeError, match="no room"),
    ):
        generate(engine, [[1], [1]], [1, 2], [SAMPLED] * 2)
    with pytest.raises(DataError, match="2 prompts, 1 seeds and 2 sampling settings were"):
        generate(engine, [[1], [1]], [1], [SAMPLED] * 2)
    with pytest.raises(DataError, match="2 prompts, 2 seeds and 1 sampling settings were"):
        generate(engine, [[1], [1]], [1, 2], [SAMPLED])
    for structure in (
        StructureSection(regex="w001[^\\s\\S]"),
        StructureSection(choices=("w0019",)),  # of a token and a part of one
    ):
        with pytest.raises(DataError, match="no token of the model goes on after its 1 tokens"):
            generate(engine, [[1]], [1], [replace(STRUCTURED, structure=structure)])
    wrong_start = Request("0", (1, 3), 1, STRUCTURED, first_position=1)
    with pytest.raises(DataError, match="the first 1 tokens of response 0 do not have the form"):
        engine.add([wrong_start])
    request = Request("twice", (1,), 1, SAMPLED)
    with pytest.raises(DataError, match="'twice' already"):
        engine.add([request, request])
    assert engine.num_unfinished == 0
    engine.add([request])
    with pytest.raises(StorageError, match="1 unfinished"):
        generate(engine, [[1]], [1], [SAMPLED])
    engine.abort(["twice"])
