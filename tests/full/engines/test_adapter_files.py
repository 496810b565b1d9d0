"""PEFT folders that a trainer writes, as vLLM loads them itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.full.engines.adapter_ranks import export_and_generate
from tests.gloo.adapters_by_hand import adapt, write_peft
from tests.gloo.ranks import RankLauncher
from tests.gloo.tiny_models import write_model

NUM_TOKENS = 8
PROMPTS = [[5, 17, 3], [101, 7, 7, 64, 2, 9]]


@pytest.mark.parametrize("family", ["llama", "phi3"])
def test_vllm_loads_exported_adapters(family: str, tmp_path: Path, run_ranks: RankLauncher):
    hidden_size = 256 if family == "phi3" else 64
    model: Any = write_model(tmp_path / "model", family, head_dim=32, hidden_size=hidden_size)
    expected = [greedy(model, prompt) for prompt in PROMPTS]
    write_peft(tmp_path / "adapters", adapt(model))
    adapted = [greedy(model, prompt) for prompt in PROMPTS]
    assert adapted != expected
    paths = tmp_path / "model", tmp_path / "adapters", tmp_path / "exported"
    (found,) = run_ranks(1, export_and_generate, *paths, PROMPTS, NUM_TOKENS, timeout_s=180)
    assert found == adapted


def greedy(model: Any, prompt: list[int]) -> list[int]:
    """Return the most likely tokens after a prompt."""
    tokens = list(prompt)
    with torch.no_grad():
        for _ in range(NUM_TOKENS):
            tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens[len(prompt) :]
