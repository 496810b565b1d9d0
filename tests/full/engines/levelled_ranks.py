"""Runs on each rank: engines that draw rows of very different lengths, each its own ones and then together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from unittest import mock

import torch.distributed as dist
from safetensors.torch import load_file

from hybridengine.backends import levelling
from hybridengine.backends.engine import Request, Response, SamplingSettings, generate
from hybridengine.backends.levelling import Peers, respond_together
from hybridengine.backends.vllm.construction import EngineSettings
from hybridengine.backends.vllm.engine import VllmEngine
from hybridengine.models.shapes import ModelShape
from hybridengine.topology.generation import GenerationGrid
from tests.full.engines.vllm_ranks import take_place

SLOTS = 4
LENGTHS = [[40, 3, 60, 8, 25, 50, 5, 44, 12, 56, 31, 48], [2, 5, 3, 9, 4, 2, 6, 3, 5, 4, 8, 2]]
"""Length of the response of each row of two engines."""
PROMPT_TOKENS = 110
"""With the first 19 tokens of a response, more than a block of the KV cache."""
MOST_STEPS = 800


@dataclass(frozen=True)
class Seen:
    """Responses of one rank's engine, and its engine steps."""

    place: int
    num_stages: int
    alone: list[Response]
    together: list[Response]
    crowded: list[Response]
    """Together, with a KV cache that does not have room for the first engine's running rows."""
    few: list[Response]
    """Together, with no more rows than slots."""
    with_strings: list[Response]
    """Crowded, and each row with `stop_string` of its response alone."""
    steps_alone: int
    steps_together: int
    steps_few: int
    moved: list[int]
    """Tokens, drawn before, of each request that this engine has taken; without a crowded cache."""
    moved_crowded: list[int]
    moved_with_strings: list[int]


def stop_string(response: Response) -> str:
    """Return a text of two tokens, near the end of the response."""
    place = max(1, len(response.token_ids) - 2)
    return " ".join(f"word{token}" for token in response.token_ids[place - 1 : place + 1])


def prompts_of(place: int) -> list[list[int]]:
    """Return the prompts of one engine's rows, of which every fourth is the same."""
    rows = range(len(LENGTHS[place]))
    return [[3 + row % 4, 17, 40 + place, *range(PROMPT_TOKENS - 3)] for row in rows]


def draw(rank: int, folder: Path, generation: GenerationGrid) -> Seen:
    identity = take_place(rank)
    shape = ModelShape.from_folder(folder)
    tokenizer = str(folder) if (folder / "tokenizer.json").exists() else None
    settings = EngineSettings(
        256,
        SLOTS,
        16 * 2**20,
        keep_routes=shape.experts is not None,
        keep_supports=True,
        tokenizer=tokenizer,
    )
    engine = VllmEngine(folder, shape, generation, settings, identity)
    engine._runner.model.load_weights(load_file(folder / "model.safetensors").items())
    peers = Peers(generation, rank, 60.0)
    lengths = LENGTHS[peers.place]
    prompts = prompts_of(peers.place)
    seeds = [100 * peers.place + row for row in range(len(lengths))]
    sampling = [SamplingSettings(length, 0.9, top_p=0.95) for length in lengths]
    steps, moved = [0], list[int]()
    step, take = engine._engine.step, levelling._Levelled._take

    def counted() -> object:
        steps[0] += 1
        assert steps[0] < MOST_STEPS, "the engine draws nothing"
        return step()

    def noted(levelled: levelling._Levelled, given: list[tuple[int, Request, Response]]) -> None:
        moved.extend(len(response.token_ids) for *_, response in given)
        take(levelled, given)

    def together(count: int, strings: Sequence[str] = ()) -> tuple[list[Response], int, list[int]]:
        steps[0] = 0
        moved.clear()
        requests = [
            Request(
                f"{peers.place}/{row}",
                tuple(prompts[row]),
                seeds[row],
                replace(sampling[row], stop_strings=tuple(strings[row : row + 1])),
            )
            for row in range(count)
        ]
        responses = respond_together(engine, requests, peers)
        assert engine.num_unfinished == 0
        return responses, steps[0], [*moved]

    with (
        mock.patch.object(engine._engine, "step", counted),
        mock.patch.object(levelling._Levelled, "_take", noted),
        mock.patch.object(levelling, "STEPS", 8),
    ):
        alone = generate(engine, prompts, seeds, sampling)
        steps_alone = steps[0]
        shared, steps_together, moved_together = together(len(lengths))
        few, steps_few, moved_few = together(SLOTS)
        assert moved_few == []
        pool = engine._engine.engine_core.engine_core.scheduler.kv_cache_manager.block_pool
        num_left = SLOTS + 1 if peers.place == 0 else pool.get_num_free_blocks()
        taken = pool.get_new_blocks(pool.get_num_free_blocks() - num_left)
        crowded, _, moved_crowded = together(len(lengths))
        strings = [stop_string(response) for response in alone] if tokenizer is not None else []
        with_strings, _, moved_with_strings = together(len(lengths), strings)
        pool.free_blocks(taken)
    dist.barrier()
    return Seen(
        peers.place,
        generation.sizes.pp_size,
        alone,
        shared,
        crowded,
        few,
        with_strings,
        steps_alone,
        steps_together,
        steps_few,
        moved_together,
        moved_crowded,
        moved_with_strings,
    )
