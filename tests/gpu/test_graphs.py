"""CUDA graphs over several switches: addresses stay, weights come and go, and there is one copy of them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor

from hybridengine.backends.vllm.construction import EngineSettings
from tests.gpu import one_device
from tests.gpu.one_device import MIB, SMALL

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(900)]

NUM_PROMPTS, PROMPT_TOKENS, NEW_TOKENS = 16, 24, 32
LARGEST_DIFFERENCE, MEAN_DIFFERENCE = 0.1, 0.015
"""Bounds of |vLLM - Megatron| of a token's log-prob in bfloat16."""
TIE = 0.05
"""Difference of log-probs below which rounding decides between two tokens."""


@dataclass(frozen=True)
class Round:
    """A switch, greedy responses, and the switch back."""

    tokens: list[list[int]]
    log_probs: Tensor
    """vLLM's, [B, R]."""
    megatron_log_probs: Tensor
    """Those of the same tokens, after the switch back."""
    peak_weight_bytes: int
    redundant_bytes: int


@dataclass(frozen=True)
class Outcome:
    rounds: list[Round]
    """Two with the same weights, and one after an optimizer step."""
    shard_bytes: tuple[int, int]
    """Bytes of the weights in training, and in generation."""
    bucket_bytes: int
    """Bytes of the largest bucket."""
    weights_equal: bool
    """True if the first two switches have brought back the bits that they took."""


def live_through_rounds(rank: int, folder: Path, cuda_graphs: bool, kv_cache_bytes: int) -> Outcome:
    identity, registry = one_device.begin(rank)
    trainer = one_device.make_trainer(folder, registry)
    settings = EngineSettings(
        max_model_tokens=256, kv_cache_bytes=kv_cache_bytes, dtype="bfloat16", cuda_graphs=cuda_graphs
    )
    hybrid, engine = one_device.make_hybrid(folder, trainer, registry, settings, identity)
    prompts = one_device.make_prompts(NUM_PROMPTS, PROMPT_TOKENS, trainer.shape.vocab_size)
    before, equal, rounds = one_device.optimizer_state(trainer), True, []
    for number in range(3):
        if number == 2:
            equal = one_device.same(before, one_device.optimizer_state(trainer))
            one_device.step(trainer, one_device.drawn_rows(8, 8, 24, trainer.shape.vocab_size))
        if cuda_graphs:
            one_device.fill_cache(32 * MIB)  # training has done so on a full device
        there = hybrid.to_generate()
        drawn = one_device.draw(engine, prompts, NEW_TOKENS)
        back = hybrid.to_train()
        tokens = [response.token_ids for response in drawn]
        megatron = one_device.log_probs_of(trainer, one_device.rows_of(prompts, tokens))
        redundant = there.redundant_bytes + back.redundant_bytes
        peak = max(there.peak_weight_bytes, back.peak_weight_bytes)
        log_probs = torch.tensor([response.log_probs for response in drawn])
        rounds.append(Round(tokens, log_probs, megatron, peak, redundant))
    shards = trainer.weights.total_bytes, engine.weights.total_bytes
    return Outcome(rounds, shards, one_device.largest_bucket_bytes(hybrid, engine), equal)


def check_rounds(outcome: Outcome) -> None:
    """Assert what holds in every mode: log-probs are Megatron's, each round, and no weight stays twice."""
    first, second, trained = outcome.rounds
    assert outcome.weights_equal
    assert second.tokens == first.tokens, "a switch there and back has changed what the engine draws"
    for one in outcome.rounds:
        difference = (one.log_probs - one.megatron_log_probs).abs()
        assert difference.max() < LARGEST_DIFFERENCE, difference.max()
        assert difference.mean() < MEAN_DIFFERENCE, difference.mean()
        assert one.redundant_bytes == 0
    change = (trained.megatron_log_probs[:, 0] - first.megatron_log_probs[:, 0]).abs()
    assert change.max() > LARGEST_DIFFERENCE, "the optimizer step is too small to show stale weights"


def check_same_up_to_ties(one: Round, other: Round) -> None:
    """Assert that where two modes first draw other tokens for a prompt, Megatron finds both as likely."""
    num_equal = 0
    for row, (tokens, others) in enumerate(zip(one.tokens, other.tokens, strict=True)):
        differ = [place for place, pair in enumerate(zip(tokens, others, strict=True)) if pair[0] != pair[1]]
        num_equal += not differ
        if differ:
            place = row, differ[0]
            gap = (one.megatron_log_probs[place] - other.megatron_log_probs[place]).abs()
            assert gap < TIE, (place, gap)
    assert num_equal >= len(one.tokens) // 2


def check_peak(outcome: Outcome) -> None:
    """Assert that no switch had more than one copy of the weights and two buckets."""
    for one in outcome.rounds:
        assert one.peak_weight_bytes <= max(outcome.shard_bytes) + 2 * outcome.bucket_bytes


@pytest.fixture(scope="module")
def outcomes(on_device, tmp_path_factory) -> dict[str, Outcome]:
    folder = one_device.write_config(tmp_path_factory.mktemp("model"), **SMALL)
    found = {}
    for name, cuda_graphs in (("eager", False), ("graphs", True)):
        [found[name]] = on_device(1, live_through_rounds, folder, cuda_graphs, 256 * MIB)
    return found


def test_graphs_draw_what_the_eager_engine_draws(outcomes, note):
    """Passes if an engine with CUDA graphs draws the greedy tokens of one without, but for ties, over three switches of
    which the last follows an optimizer step, and if the log-probs of both are Megatron's."""
    for name, outcome in outcomes.items():
        difference = (outcome.rounds[0].log_probs - outcome.rounds[0].megatron_log_probs).abs()
        note(f"{name}: log-probs differ from Megatron's by {difference.max():.3g}")
        check_rounds(outcome)
    check_same_up_to_ties(outcomes["eager"].rounds[0], outcomes["graphs"].rounds[0])


@pytest.mark.parametrize("name", ["eager", "graphs"])
def test_a_switch_holds_one_copy(outcomes, note, name):
    """Passes if the peak of each switch is one copy of the weights and two buckets, with graphs too, for which the device
    then takes memory back that torch keeps in its cache."""
    outcome = outcomes[name]
    note(f"peak {outcome.rounds[0].peak_weight_bytes / max(outcome.shard_bytes):.2f} of a shard")
    check_peak(outcome)
