"""Parts of the checks on a rank: models without checkpoint files, a trainer and an engine in one HybridEngine, figures.

Everything runs on the device of the machine, so that the same functions run on a CPU
(tests/full/engines/test_gpu_checks.py).
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from tensordict import TensorDict
from torch import Tensor

from hybridengine.backends.engine import Response, SamplingSettings, generate
from hybridengine.backends.megatron.groups import initialize_globals
from hybridengine.backends.megatron.model import available_names
from hybridengine.backends.megatron.outputs import response_log_probs
from hybridengine.backends.megatron.shim import device
from hybridengine.backends.megatron.trainer import MegatronModel, MegatronTrainer
from hybridengine.backends.policy import StepResult
from hybridengine.backends.predictions import Predictions
from hybridengine.backends.vllm.construction import EngineSettings
from hybridengine.backends.vllm.engine import VllmEngine
from hybridengine.config.role_sections import MegatronSettings, OptimizerSection
from hybridengine.models.shapes import ModelShape
from hybridengine.reshard.compiler import compile_plan
from hybridengine.rows.micro_batches import cut_rows, gather_rows
from hybridengine.topology.generation import GenerationGrid
from hybridengine.topology.grid import Grid
from hybridengine.topology.sizes import GenSizes, TrainSizes
from hybridengine.weights.executor import Verify
from hybridengine.weights.hybrid_engine import HybridEngine
from hybridengine.weights.process_groups import ProcessGroups
from hybridengine.weights.storage import WeightStorage
from hybridengine.weights.transport import PointToPointTransport
from tests.full.engines.vllm_ranks import take_place

MIB, GIB = 2**20, 2**30
ALONE = Grid(TrainSizes(1, 1, 1))
BUCKET_ELEMENTS = 8 * MIB
OPTIMIZER = OptimizerSection(lr=1e-3)

SMALL = {
    "vocab_size": 4096,
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 4,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": False,
}
"""A model of 50 million parameters."""
BILLIONS = {
    "vocab_size": 151936,
    "hidden_size": 1536,
    "intermediate_size": 8960,
    "num_hidden_layers": 28,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
}
"""Sizes of Qwen2.5-1.5B."""
WEIGHT_STD = 0.02
"""Standard deviation of weights, as most models have it at their start; larger ones amplify the rounding of bfloat16."""


@dataclass(frozen=True)
class DeviceBytes:
    """Memory of the GPU, in bytes; zeros on a CPU."""

    allocated: int = 0
    """Bytes of tensors in torch's caching allocator."""
    peak: int = 0
    """Largest `allocated` since the last `forget_peak`."""
    used: int = 0
    """Bytes that the device has given away, to any allocator and any process."""
    mallocs: int = 0
    """Number of allocations that torch's allocator has asked of the device since the process began."""


def device_bytes() -> DeviceBytes:
    if not torch.cuda.is_available():
        return DeviceBytes()
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    stats = torch.cuda.memory_stats()
    return DeviceBytes(
        torch.cuda.memory_allocated(),
        torch.cuda.max_memory_allocated(),
        total - free,
        stats.get("num_device_alloc", 0),
    )


def pinned_bytes() -> int:
    """Return the bytes of torch's allocator of pinned host memory, used or cached; 0 on a CPU."""
    if not torch.cuda.is_available():
        return 0
    return torch.cuda.host_memory_stats()["allocated_bytes.current"]


def forget_peak() -> None:
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()


def fill_cache(left: int) -> None:
    """Leave all of the GPU's memory but `left` bytes in the cache of torch's allocator; nothing on a CPU."""
    if torch.cuda.is_available():
        torch.empty(max(torch.cuda.mem_get_info()[0] - left, 0), dtype=torch.uint8, device="cuda")


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def share_of_device(share: float, otherwise: int) -> int:
    """Return a share of the GPU's memory in bytes; `otherwise` on a CPU."""
    return int(share * torch.cuda.mem_get_info()[1]) if torch.cuda.is_available() else otherwise


def write_config(folder: Path, **sizes: Any) -> Path:
    """Write the `config.json` of a Qwen2 model: engines and shapes read nothing else of a folder."""
    config = transformers.Qwen2Config(**sizes, architectures=["Qwen2ForCausalLM"])
    config.save_pretrained(folder)
    return folder


def begin(rank: int) -> tuple[str, ProcessGroups]:
    """Take the place of `rank` on the only device; return the job's name for an engine, and a registry of groups."""
    if torch.cuda.is_available():
        torch.cuda.set_device(0)
    identity = take_place(rank)
    initialize_globals(1)
    return identity, ProcessGroups(timeout_s=120)


def fill(weights: WeightStorage) -> None:
    """Draw each parameter from a seed that follows from its name: all processes have equal weights on equal devices."""
    for name in weights.names:
        generator = torch.Generator(weights[name].device).manual_seed(zlib.crc32(name.encode()))
        mean = 1.0 if "norm" in name and not name.endswith("bias") else 0.0
        weights[name].normal_(mean, WEIGHT_STD, generator=generator)


def make_trainer(
    folder: Path,
    registry: ProcessGroups,
    offload: str = "none",
    settings: MegatronSettings = MegatronSettings(),
) -> MegatronTrainer:
    """Return a trainer in bfloat16 that is alone, of drawn weights, with a fresh optimizer."""
    shape, names = ModelShape.from_folder(folder), available_names()
    trainer = MegatronTrainer(shape, ALONE, 0, registry, "bfloat16", names, settings)
    fill(trainer.weights)
    trainer.start_optimizer(OPTIMIZER, offload=offload)
    return trainer


def make_hybrid(
    folder: Path,
    trainer: MegatronTrainer,
    registry: ProcessGroups,
    settings: EngineSettings,
    identity: str,
    verify: Verify = Verify.FIRST,
    bucket_elements: int = BUCKET_ELEMENTS,
) -> tuple[HybridEngine, VllmEngine]:
    """Return a HybridEngine and its engine for a trainer of one rank, built in the order of a run."""
    trainer.leave_training()
    engine = VllmEngine(folder, trainer.shape, GenerationGrid(ALONE, GenSizes(1, 1)), settings, identity)
    plan = compile_plan(trainer.layout, engine.layout, (0,), bucket_elements)
    transport = PointToPointTransport(registry.new(((0,),)))
    hybrid = HybridEngine(plan, 0, trainer, engine, transport, verify)
    return hybrid, engine


def largest_bucket_bytes(hybrid: HybridEngine, engine: VllmEngine) -> int:
    """Return the bytes of the largest bucket in the engine's layout."""
    return max(
        sum(engine.weights[name].nbytes for name in bucket.destinations[0]) for bucket in hybrid.plan.buckets
    )


def make_prompts(num: int, length: int, vocab_size: int, seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1, vocab_size, (num, length), generator=generator).tolist()


def draw(
    engine: VllmEngine, prompts: Sequence[Sequence[int]], num_tokens: int, temperature: float = 0.0
) -> list[Response]:
    """Return a response of exactly `num_tokens` to each prompt."""
    sampling = SamplingSettings(num_tokens, temperature)
    return generate(engine, prompts, range(len(prompts)), [sampling] * len(prompts))


def rows_of(prompts: Sequence[Sequence[int]], responses: Sequence[Sequence[int]]) -> TensorDict:
    """Return prompts and responses as the rows of a rollout, padded on the right."""
    tokens = [torch.tensor([*one, *other]) for one, other in zip(prompts, responses, strict=True)]
    return TensorDict(
        {
            "tokens": torch.nn.utils.rnn.pad_sequence(tokens, batch_first=True),
            "prompt_lengths": torch.tensor([len(one) for one in prompts]),
            "response_lengths": torch.tensor([len(one) for one in responses]),
        },
        batch_size=[len(tokens)],
    )


def drawn_rows(num: int, prompt: int, response: int, vocab_size: int) -> TensorDict:
    """Return rows of random tokens."""
    whole = make_prompts(num, prompt + response, vocab_size, seed=1)
    return rows_of([row[:prompt] for row in whole], [row[prompt:] for row in whole])


def negative_log_likelihood(
    predictions: Predictions, columns: dict[str, Tensor]
) -> tuple[Tensor, Tensor, Any]:
    """Return the loss of every check, the sum over response tokens, and their number; collect both."""
    log_probs, _ = response_log_probs(predictions, columns, 1.0)
    loss, num_tokens = -(log_probs * columns["mask"]).sum(), columns["mask"].sum().int()
    return loss, num_tokens, (loss.detach(), num_tokens)


def step(trainer: MegatronTrainer, rows: TensorDict, max_tokens: int = 16384) -> StepResult:
    """Take an optimizer step on the rows; on the last stage it collects (loss, tokens) of each micro-batch."""
    return trainer.train_step([part.columns for part in cut_rows(rows, max_tokens)], negative_log_likelihood)


def mean_loss(result: StepResult) -> float:
    """Return the mean loss of a step's tokens; NaN on a stage without losses."""
    losses, counts = ([float(one[place]) for one in result.collected] for place in (0, 1))
    return sum(losses) / sum(counts) if counts else math.nan


def log_probs_of(model: MegatronModel, rows: TensorDict, max_tokens: int = 16384) -> Tensor:
    """Return Megatron's log-probs of the response tokens, [B, R] float32 on the CPU, as a worker collects them."""

    def output(predictions: Predictions, columns: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"log_probs": response_log_probs(predictions, columns, 1.0)[0]}

    parts = cut_rows(rows, max_tokens)
    results = model.forward([part.columns for part in parts], output)
    pairs = [(part, result["log_probs"]) for part, result in zip(parts, results, strict=True)]
    return gather_rows(pairs, len(rows), int(rows["response_lengths"].max()))


def optimizer_state(trainer: MegatronTrainer) -> dict[str, Tensor]:
    """Return copies in host memory of weights, master weights, moments and counters."""
    found = {f"weight {name}": trainer.weights[name].cpu().clone() for name in trainer.weights.names}
    for name, part in trainer.optimizer_parts().items():
        found |= {f"{moment} {name}": value.cpu().clone() for moment, value in part.moments.items()}
        found[f"master {name}"] = part.master.cpu().clone()
    return found | {name: torch.tensor(count) for name, count in trainer.counters().items()}


def optimizer_bytes_on_device(trainer: MegatronTrainer) -> int:
    """Return the bytes of master weights and moments that are on the device of the weights now."""
    tensors = [
        tensor
        for part in trainer.optimizer_parts().values()
        for tensor in (part.master, *part.moments.values())
    ]
    return sum(tensor.nbytes for tensor in tensors if tensor.device == device())


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    """Return True if both have the same names and bitwise the same values."""
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
