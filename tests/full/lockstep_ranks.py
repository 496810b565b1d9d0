"""Runs on each rank: the same requests advanced together and by vLLM's scheduler, with the same weights."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import torch
from safetensors.torch import load_file

from hybridengine.backends.vllm.engine import EngineSettings, Generated, SamplingSettings, VllmEngine
from hybridengine.backends.vllm.lockstep import LockstepDecoder
from hybridengine.model_shapes import ModelShape
from hybridengine.topology.generation import GenerationGrid
from tests.full.vllm_ranks import take_place

LONG = [(7 * place) % 120 + 1 for place in range(150)]
"""Longer than a block of the KV cache, which vLLM would keep as a prefix."""
PROMPTS = [LONG, [1], [7, 130, 64], LONG, [7, 130, 64], list(range(2, 42)), LONG[:140]]
"""Some of them several times."""
NEW_TOKENS = 24
MAX_SEQUENCES = 8


@dataclass(frozen=True)
class Compared:
    """What one rank saw."""

    together: list[Generated]
    """Greedy, advanced together."""
    scheduled: list[Generated]
    """Greedy, by vLLM's scheduler, afterwards and in the same KV cache; its prefix cache was filled before."""
    stopped: list[Generated]
    """Greedy and together, where the tokens of `stop_token_ids` end a response."""
    stop_token_ids: tuple[int, ...]
    sampled: list[Generated]
    sampled_alone: list[Generated]
    """Every request by itself, with the same seed."""
    many: int
    """Responses to more prompts than are advanced together."""
    batches_together: int
    """How many of the calls of `generate` were advanced together."""


def compare_ways(rank: int, folder: Path, generation: GenerationGrid) -> Compared:
    """Generate both ways."""
    identity = take_place(rank)
    settings = EngineSettings(256, max_sequences=MAX_SEQUENCES, kv_cache_bytes=64 * 2**20, seed=17)
    engine = VllmEngine(folder, ModelShape.from_folder(folder), generation, settings, identity)
    engine._runner.model.load_weights(load_file(folder / "model.safetensors").items())
    greedy, sampling = SamplingSettings(NEW_TOKENS, 0.0), SamplingSettings(NEW_TOKENS, 0.8)
    seeds = list(range(100, 100 + len(PROMPTS)))

    def by_scheduler() -> list[Generated]:
        with mock.patch.object(LockstepDecoder, "fits", return_value=False):
            return engine.generate(PROMPTS, seeds, greedy)

    with mock.patch.object(
        LockstepDecoder, "generate", autospec=True, side_effect=LockstepDecoder.generate
    ) as together:
        by_scheduler()
        other_prompts = [[token + 1 for token in prompt] for prompt in PROMPTS]
        engine.generate(other_prompts, seeds, greedy)  # into blocks that vLLM takes for its prefixes
        first = engine.generate(PROMPTS, seeds, greedy)
        engine.generate(other_prompts, seeds, greedy)
        scheduled = by_scheduler()
        stops = (first[1].token_ids[3], first[5].token_ids[0])
        stopped = engine.generate(PROMPTS, seeds, SamplingSettings(NEW_TOKENS, 0.0, stops))
        sampled = engine.generate(PROMPTS, seeds, sampling)
        alone = [
            engine.generate([prompt], [seed], sampling)[0]
            for prompt, seed in zip(PROMPTS, seeds, strict=True)
        ]
        many = engine.generate([[5]] * (MAX_SEQUENCES + 1), range(MAX_SEQUENCES + 1), greedy)
    torch.distributed.barrier()
    return Compared(first, scheduled, stopped, stops, sampled, alone, len(many), together.call_count)
