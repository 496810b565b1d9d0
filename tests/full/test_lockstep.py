"""Rows that advance together: the tokens and log-probs of vLLM's own scheduler, with prompts computed once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from hybridengine.topology.generation import GenerationGrid
from hybridengine.topology.grid import Grid
from hybridengine.topology.sizes import GenSizes, TrainSizes
from tests.full.lockstep_ranks import MAX_SEQUENCES, NEW_TOKENS, PROMPTS, Compared, compare_ways
from tests.full.vllm_ranks import VllmRankLauncher
from tests.gloo.tiny_models import write_model

pytestmark = pytest.mark.timeout(300)

SIZES = ("1-1", "1-2")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("lockstep") / "model"
    sizes: dict[str, Any] = {
        "hidden_size": 64,
        "head_dim": 32,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "eos_token_id": None,
    }
    write_model(folder, "qwen3", True, **sizes)
    return folder


@pytest.fixture(scope="module", params=SIZES)
def ranks(request: pytest.FixtureRequest, model: Path, run_vllm_ranks: VllmRankLauncher) -> list[Compared]:
    grid = Grid(TrainSizes.parse("1-2-1"))
    generation = GenerationGrid(grid, GenSizes.parse(request.param))
    return run_vllm_ranks(2, compare_ways, model, generation, timeout_s=240)


def test_tokens_and_log_probs_are_those_of_the_scheduler(ranks: list[Compared]):
    for seen in ranks:
        assert [one.token_ids for one in seen.together] == [one.token_ids for one in seen.scheduled]
        for one, other in zip(seen.together, seen.scheduled, strict=True):
            torch.testing.assert_close(
                torch.tensor(one.log_probs), torch.tensor(other.log_probs), rtol=0, atol=1e-5
            )


def test_log_probs_are_those_of_transformers(ranks: list[Compared], model: Path):
    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    for prompt, generated in zip(PROMPTS, ranks[0].sampled, strict=True):
        tokens = torch.tensor([prompt + generated.token_ids])
        with torch.no_grad():
            log_probs = (reference(tokens).logits[0, len(prompt) - 1 : -1].double() / 0.8).log_softmax(-1)
        expected = log_probs.gather(1, torch.tensor(generated.token_ids)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(generated.log_probs).double(), expected, rtol=0, atol=2e-5)


def test_a_response_ends_with_its_first_stop_token(ranks: list[Compared]):
    for seen in ranks:
        lengths = []
        for whole, cut in zip(seen.together, seen.stopped, strict=True):
            ends = [place for place, token in enumerate(whole.token_ids) if token in seen.stop_token_ids]
            length = ends[0] + 1 if ends else NEW_TOKENS
            assert cut.token_ids == whole.token_ids[:length]
            assert len(cut.log_probs) == length
            lengths.append(length)
        assert 1 in lengths
        assert len(set(lengths)) > 1


def test_a_row_is_drawn_by_its_seed_alone(ranks: list[Compared]):
    for seen in ranks:
        assert [one.token_ids for one in seen.sampled] == [one.token_ids for one in seen.sampled_alone]
        assert seen.sampled[0].token_ids != seen.sampled[3].token_ids  # the same prompt, another seed
        assert [one.token_ids for one in seen.many] == [one.token_ids for one in seen.sampled] * 3
        assert seen.batches == [MAX_SEQUENCES, MAX_SEQUENCES, 3 * len(PROMPTS) - 2 * MAX_SEQUENCES]
    assert [one.token_ids for one in ranks[0].sampled] == [one.token_ids for one in ranks[1].sampled]
