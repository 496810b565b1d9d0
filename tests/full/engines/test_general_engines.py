"""Engines of any sizes over four ranks: the placement by vLLM's own loader, and agreement among the engine's ranks."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from hybridengine.topology.generation import GenerationGrid, Grouping
from hybridengine.topology.grid import Grid, RankOrder
from hybridengine.topology.sizes import GenSizes, TrainSizes
from tests.full.engines.engine_ranks import NEW_TOKENS, PROMPTS, fill_engine
from tests.gloo.ranks import RankLauncher
from tests.gloo.tiny_models import write_model


@dataclass(frozen=True)
class Case:
    """A model with 2 KV heads and a generation grid over four ranks."""

    family: str
    tied: bool
    train: str
    gen: str
    order: RankOrder = RankOrder.PAPER
    grouping: Grouping = Grouping.INTERVAL

    def __str__(self) -> str:
        return f"{self.family}-{self.train}-to-{self.gen}-{self.grouping.value}"

    @property
    def generation(self) -> GenerationGrid:
        grid = Grid(TrainSizes.parse(self.train), self.order)
        return GenerationGrid(grid, GenSizes.parse(self.gen), self.grouping)


CASES = [
    Case("qwen2", False, "1-2-2", "1-4"),  # a KV head on two ranks, gen tp 0..3 on ranks 0, 2, 1, 3
    Case("qwen3", True, "2-2-1", "1-4"),
    Case("llama", False, "2-1-2", "4-1", RankOrder.MEGATRON),  # gen pp 0..3 on ranks 0, 2, 1, 3
    Case("llama", True, "2-2-1", "2-2", grouping=Grouping.VANILLA),
    Case("qwen3", False, "1-4-1", "2-2"),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_engines_hold_what_their_layout_says_and_generate_as_transformers(
    case: Case, tmp_path: Path, run_ranks: RankLauncher
) -> None:
    sizes: dict[str, Any] = {
        "head_dim": 32,
        "hidden_size": 256 if case.family == "qwen2" else 64,
        "num_key_value_heads": 2,
        "num_hidden_layers": 5,
        "eos_token_id": None,  # all responses have the same length
    }
    model = write_model(tmp_path, case.family, case.tied, **sizes)
    ranks = run_ranks(4, fill_engine, tmp_path, case.generation)
    assert sorted({seen.replica for seen in ranks}) == list(range(case.generation.num_replicas))
    for seen in ranks:
        assert seen.differing == []
        for prompt, generated in zip(PROMPTS, seen.generated, strict=True):
            tokens = prompt + generated.token_ids
            with torch.no_grad():
                logits = model(torch.tensor([tokens])).logits[0, len(prompt) - 1 : -1]
            assert len(generated.token_ids) == NEW_TOKENS
            assert generated.token_ids == logits.argmax(-1).tolist()
