"""Runs on each rank: the same requests advanced together and by vLLM's scheduler, with the same weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file

from hybridengine.backends.vllm import lockstep
from hybridengine.backends.vllm.engine import EngineSettings, Generated, SamplingSettings, VllmEngine
from hybridengine.backends.vllm.lockstep import Drawn
from hybridengine.errors import DataError
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
    """Greedy, by vLLM's scheduler, before anything was advanced together."""
    stopped: list[Generated]
    """Greedy and together, where the tokens of `stop_token_ids` end a response."""
    stop_token_ids: tuple[int, ...]
    sampled: list[Generated]
    sampled_alone: list[Generated]
    """Every request by itself, with the same seed."""
    many: list[Generated]
    """Responses to `PROMPTS` three times over, more than are advanced together."""
    batches: list[int]
    """How many of them advanced together, one batch after another."""


def compare_ways(rank: int, folder: Path, generation: GenerationGrid) -> Compared:
    """Generate both ways."""
    identity = take_place(rank)
    settings = EngineSettings(256, max_sequences=MAX_SEQUENCES, kv_cache_bytes=64 * 2**20, seed=17)
    engine = VllmEngine(folder, ModelShape.from_folder(folder), generation, settings, identity)
    engine._runner.model.load_weights(load_file(folder / "model.safetensors").items())
    decoder, together = engine._lockstep, []
    assert decoder is not None
    greedy, sampling = SamplingSettings(NEW_TOKENS, 0.0), SamplingSettings(NEW_TOKENS, 0.8)
    seeds = list(range(100, 100 + len(PROMPTS)))

    engine._lockstep = None
    scheduled = engine.generate(PROMPTS, seeds, greedy)
    engine._lockstep = decoder
    other_prompts = [[token + 1 for token in prompt] for prompt in PROMPTS]
    engine.generate(other_prompts, seeds, greedy)  # what is in the cache is nobody's
    first = engine.generate(PROMPTS, seeds, greedy)
    stops = (first[1].token_ids[3], first[5].token_ids[0])
    stopped = engine.generate(PROMPTS, seeds, SamplingSettings(NEW_TOKENS, 0.0, stops))
    sampled = engine.generate(PROMPTS, seeds, sampling)
    alone = [
        engine.generate([prompt], [seed], sampling)[0] for prompt, seed in zip(PROMPTS, seeds, strict=True)
    ]
    generate = decoder.generate

    def counted(prompts: Sequence[Sequence[int]], *rest: Any) -> Drawn:
        together.append(len(prompts))
        return generate(prompts, *rest)

    with mock.patch.object(decoder, "generate", counted), mock.patch.object(lockstep, "PREFILL_TOKENS", 200):
        many = engine.generate(PROMPTS * 3, seeds * 3, sampling)
    assert engine.generate([], [], sampling) == []
    for wrong in ([], [1] * (256 - NEW_TOKENS + 1)):
        with pytest.raises(DataError, match=f"prompt 1 has {len(wrong)} tokens"):
            engine.generate([[1], wrong], [1, 2], sampling)
    torch.distributed.barrier()
    return Compared(first, scheduled, stopped, stops, sampled, alone, many, together)
