"""Tests that need one GPU: a Megatron step, a checkpoint, the ledger against CUDA's allocator, a switch with vLLM."""

from __future__ import annotations

import os
import time

import pytest
import torch
import torch.distributed as dist
import transformers

from hybridengine.backends.engine import SamplingSettings, generate
from hybridengine.backends.megatron import shim
from hybridengine.backends.megatron.checkpoint import BackgroundSave, load_checkpoint
from hybridengine.backends.megatron.groups import initialize_globals
from hybridengine.backends.megatron.model import available_names
from hybridengine.backends.megatron.outputs import response_log_probs
from hybridengine.backends.megatron.trainer import MegatronTrainer
from hybridengine.backends.megatron.weights import load_weights
from hybridengine.backends.vllm import environment
from hybridengine.backends.vllm.construction import EngineSettings
from hybridengine.backends.vllm.engine import VllmEngine
from hybridengine.config.role_sections import OptimizerSection
from hybridengine.models.shapes import ModelShape
from hybridengine.reshard.compiler import compile_plan
from hybridengine.topology.generation import GenerationGrid
from hybridengine.topology.grid import Grid
from hybridengine.topology.sizes import GenSizes, TrainSizes
from hybridengine.weights.hybrid_engine import HybridEngine
from hybridengine.weights.process_groups import ProcessGroups
from hybridengine.weights.transport import PointToPointTransport

pytestmark = pytest.mark.gpu

ALONE = Grid(TrainSizes(1, 1, 1))
PROMPT = [3, 14, 15, 92, 65]
RESPONSE_TOKENS = 24
ALLOCATOR_ROUNDING = 512
"""CUDA's caching allocator rounds each block up to a multiple of this many bytes."""


@pytest.fixture(scope="module")
def registry():
    os.environ.update(environment.ON_GPU)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29517", RANK="0", LOCAL_RANK="0", WORLD_SIZE="1")
    torch.cuda.set_device(0)
    dist.init_process_group("cpu:gloo,cuda:nccl", rank=0, world_size=1)
    initialize_globals(1)
    yield ProcessGroups(timeout_s=60)
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Write a Qwen2-like model of about 130 MB in bfloat16, in which every weight matters."""
    config = transformers.Qwen2Config(
        vocab_size=4099,
        hidden_size=1024,
        intermediate_size=2816,
        num_hidden_layers=4,
        num_attention_heads=16,
        num_key_value_heads=4,
        max_position_embeddings=256,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    model = transformers.Qwen2ForCausalLM(config).bfloat16()
    place = tmp_path_factory.mktemp("model")
    model.save_pretrained(place)
    return place


@pytest.fixture(scope="module")
def trainer(registry, folder):
    model = MegatronTrainer(
        ModelShape.from_folder(folder), ALONE, 0, registry, dtype="bfloat16", names=available_names()
    )
    load_weights(model, folder)
    model.start_optimizer(OptimizerSection(lr=1e-3), offload="optimizer")
    return model


@pytest.fixture(scope="module")
def hybrid(trainer, folder, registry):
    generation = GenerationGrid(ALONE, GenSizes(1, 1))
    trainer.leave_training()
    engine = VllmEngine(
        folder,
        trainer.shape,
        generation,
        EngineSettings(max_model_tokens=256, kv_cache_bytes=64 * 2**20, dtype="bfloat16"),
        identity=f"gpu-test-{os.getpid()}",
    )
    plan = compile_plan(trainer.layout, engine.layout, (0,), bucket_elements=4 * 2**20)
    transport = PointToPointTransport(registry.new(((0,),)))
    return HybridEngine(plan, 0, trainer, engine, transport), engine


def _columns(tokens: list[int]) -> dict[str, torch.Tensor]:
    count = len(tokens) - len(PROMPT)
    positions = torch.arange(len(PROMPT) - 1, len(tokens) - 1).unsqueeze(0)
    return {
        "tokens": torch.tensor([tokens]),
        "positions": positions,
        "mask": torch.ones(1, count, dtype=torch.bool),
    }


def _log_probs(trainer, tokens: list[int]) -> torch.Tensor:
    def output(predictions, columns):
        values, _ = response_log_probs(predictions, columns, 1.0)
        return {"log_probs": values}

    return trainer.forward([_columns(tokens)], output)[0]["log_probs"][0].cpu()


def test_the_shim_is_never_active_here():
    assert not shim.is_needed()
    with shim.device_shim():
        assert torch.zeros(1, device="cuda").is_cuda


TOKENS = [*PROMPT, *range(100, 100 + RESPONSE_TOKENS)]


def _step(trainer) -> float | None:
    """Take an optimizer step towards `TOKENS`; return the gradient's norm."""

    def loss(predictions, columns):
        values, _ = response_log_probs(predictions, columns, 1.0)
        return -values.sum(), torch.tensor(values.numel(), dtype=torch.int, device="cuda"), None

    return trainer.train_step([_columns(TOKENS)], loss).grad_norm


def test_a_megatron_step_lowers_the_loss(trainer):
    before = _log_probs(trainer, TOKENS).sum()
    norms = [_step(trainer) for _ in range(5)]
    assert all(norm is not None and norm > 0 for norm in norms)
    assert _log_probs(trainer, TOKENS).sum() > before + 1


def test_a_checkpoint_written_while_training_goes_on_brings_everything_back(trainer, tmp_path):
    def state() -> dict[str, torch.Tensor]:
        found = {name: trainer.weights[name].cpu().clone() for name in trainer.weights.names}
        for name, part in trainer.optimizer_parts().items():
            found |= {f"{moment} {name}": value.cpu().clone() for moment, value in part.moments.items()}
            found[f"master {name}"] = part.master.cpu().clone()
        return found | {name: torch.tensor(count) for name, count in trainer.counters().items()}

    saved = state()
    save = BackgroundSave(trainer, tmp_path, {})
    _step(trainer)
    while (outcome := save.end(last=False)) is False:
        time.sleep(0.05)
    assert outcome is True
    assert any(not torch.equal(value, saved[name]) for name, value in state().items())
    load_checkpoint(trainer, tmp_path)
    assert all(torch.equal(value, saved[name]) for name, value in state().items())


def test_a_switch_gives_and_takes_memory_as_the_ledger_says(hybrid, trainer):
    engine, generation = hybrid
    weights = {name: trainer.weights[name].cpu().clone() for name in trainer.weights.names}
    rounding = ALLOCATOR_ROUNDING * (len(trainer.weights.names) + len(generation.weights.names))
    torch.cuda.synchronize()
    training = torch.cuda.memory_allocated()
    there = engine.to_generate()
    generating = torch.cuda.memory_allocated() - generation.kv_cache_bytes
    assert there.redundant_bytes == 0 and there.received_bytes == 0
    assert trainer.weights.live_bytes == 0 and trainer.gradient_bytes == 0
    released = training - generating
    assert released >= 4 * sum(weight.numel() for weight in weights.values()) - rounding, (
        "float32 gradients at least"
    )
    generated = generate(generation, [PROMPT], [7], [SamplingSettings(RESPONSE_TOKENS)])[0]
    back = engine.to_train()
    assert back.redundant_bytes == 0 and generation.weights.live_bytes == 0 and generation.kv_cache_bytes == 0
    torch.cuda.synchronize()
    assert abs(torch.cuda.memory_allocated() - training) <= rounding
    assert all(torch.equal(weight, trainer.weights[name].cpu()) for name, weight in weights.items())
    assert there.peak_weight_bytes <= max(trainer.weights.total_bytes, generation.weights.total_bytes) + max(
        sum(generation.weights[name].nbytes for name in bucket.destinations[0])
        for bucket in engine.plan.buckets
    )
    expected = _log_probs(trainer, [*PROMPT, *generated.token_ids])
    assert (expected - torch.tensor(generated.log_probs)).abs().max() < 5e-2
