"""Runs on each rank: a Megatron trainer and a vLLM engine in one HybridEngine, over three round trips."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from hybridengine.backends.engine import Response, SamplingSettings, generate
from hybridengine.backends.megatron.groups import initialize_globals
from hybridengine.backends.megatron.trainer import MegatronTrainer
from hybridengine.backends.megatron.weights import load_weights, save_weights, start_adapters
from hybridengine.backends.predictions import Predictions
from hybridengine.backends.vllm.construction import EngineSettings
from hybridengine.backends.vllm.engine import VllmEngine
from hybridengine.backends.vllm.groups import SHARED_MEMORY
from hybridengine.config.role_sections import OptimizerSection
from hybridengine.errors import StorageError
from hybridengine.models.shapes import ModelShape
from hybridengine.reshard.compiler import compile_plan
from hybridengine.reshard.domains import domains
from hybridengine.topology.generation import GenerationGrid
from hybridengine.topology.grid import Grid, RankOrder, group_with
from hybridengine.topology.sizes import GenSizes, TrainSizes
from hybridengine.weights.hybrid_engine import HybridEngine
from hybridengine.weights.ledger import SwitchReport
from hybridengine.weights.process_groups import ProcessGroups
from hybridengine.weights.storage import return_memory_to_system
from hybridengine.weights.transport import PointToPointTransport
from tests.full.engines.vllm_ranks import take_place
from tests.gloo.adapters_by_hand import ADAPTERS

KV_CACHE_BYTES = 64 * 2**20
MAX_TOKENS = 256
BUCKET_ELEMENTS = 20_000
NEW_TOKENS = 6
TEMPERATURE = 0.7
SEEDS = tuple(range(100, 106))
OTHER_SEEDS = tuple(range(200, 206))


def prompts_of(replica: int) -> list[list[int]]:
    """Return the prompts of one engine: short ones, and two that fill whole blocks of the KV cache and share them."""
    rng = random.Random(replica)
    shared = [rng.randrange(131) for _ in range(150)]
    short = [[rng.randrange(131) for _ in range(length)] for length in (1, 3, 7, 16)]
    return [*short, shared, [*shared[:140], 5, 6]]


@dataclass(frozen=True)
class Round:
    """One switch to generation, the responses, and the trainer's log-probabilities of them after the way back."""

    to_generate: SwitchReport
    to_train: SwitchReport
    greedy: list[Response]
    sampled: list[Response]
    sampled_again: list[Response]
    """The same requests a second time, with their prompts in the prefix cache."""
    sampled_otherwise: list[Response]
    """The same requests with other seeds."""
    megatron_log_probs: list[list[list[float]]]
    """Log-probabilities of each engine's `sampled` tokens, [replica][request][token]; only on the last stage."""
    kv_cache_bytes: tuple[int, int]
    """Bytes of the KV cache during generation, and afterwards."""
    resident_bytes: tuple[int, int, int]
    """Resident bytes before the switch, during generation, and afterwards."""
    is_unchanged: bool
    """True if the training weights are bitwise equal to those before the switch."""


@dataclass
class Outcome:
    """Observations of one rank."""

    replica: int
    vllm_parameters: dict[str, tuple[int, ...]]
    layout_parameters: dict[str, tuple[int, ...]]
    generators_kept: dict[str, bool]
    """Random number generator -> True if its state is the same after the engine was built."""
    num_threads: int
    """Number of threads after 2 were requested."""
    caches_prefixes: bool
    block_tokens: int
    error_while_training: str
    shared_memory: list[str]
    """Names of the job's shared memory; a killed rank would leave it behind."""
    rounds: list[Round] = field(default_factory=list)


def live_through_rounds(
    rank: int, folder: Path, sizes: tuple[str, str, RankOrder], exports: Path, adapters: Path | None = None
) -> Outcome:
    """Two rounds, two optimizer steps, an export and a third round; `adapters` are trained, if they are given."""
    identity = take_place(rank)
    initialize_globals(1)
    registry = ProcessGroups()
    shape = ModelShape.from_folder(folder).with_adapters(ADAPTERS if adapters else None)
    train, gen, order = sizes
    grid = Grid(TrainSizes.parse(train), order)
    generation = GenerationGrid(grid, GenSizes.parse(gen))
    trainer = MegatronTrainer(shape, grid, rank, registry)
    load_weights(trainer, folder)
    start_adapters(trainer, 0, adapters)
    trainer.start_optimizer(OptimizerSection(lr=0.02))

    trainer.leave_training()
    states = _generator_states()
    settings = EngineSettings(MAX_TOKENS, kv_cache_bytes=KV_CACHE_BYTES, seed=17)
    engine = VllmEngine(folder, shape, generation, settings, identity)
    kept = {name: state == states[name] for name, state in _generator_states().items()}
    torch.set_num_threads(2)
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)

    hybrid = _hybrid(rank, trainer, engine, registry, BUCKET_ELEMENTS)
    dist.barrier()
    cache = engine._llm.llm_engine.vllm_config.cache_config
    outcome = Outcome(
        replica=generation.coordinate(rank).replica_rank,
        vllm_parameters={name: tuple(engine.weights[name].shape) for name in engine.weights.names},
        layout_parameters={p.name: p.shape for p in engine.layout.shard(rank).parameters},
        generators_kept=kept,
        num_threads=num_threads,
        caches_prefixes=cache.enable_prefix_caching,
        block_tokens=cache.block_size,
        error_while_training=_error_of(lambda: generate(engine, [[1]], [0], [SamplingSettings(1)])),
        shared_memory=[path.name for path in SHARED_MEMORY.glob(f"{identity}-*")],
    )
    for number in range(3):
        if number == 2:
            _train(trainer, shape)
            save_weights(trainer, registry, exports, folder)
        outcome.rounds.append(_round(number, trainer, engine, hybrid, outcome.replica, shape))
    return outcome


@dataclass(frozen=True)
class Memory:
    """Bytes of one rank in both modes."""

    training_bytes: int
    generating_bytes: int
    gradient_bytes: int
    cache_bytes: int
    resident_training: list[int]
    """Resident bytes after each return to training."""
    resident_generating: list[int]
    """Resident bytes after each switch to generation."""


def measure_memory(rank: int, folder: Path, train: str, gen: str) -> Memory:
    """Four round trips without a request."""
    identity = take_place(rank)
    initialize_globals(1)
    registry = ProcessGroups()
    shape = ModelShape.from_folder(folder)
    grid = Grid(TrainSizes.parse(train))
    generation = GenerationGrid(grid, GenSizes.parse(gen))
    trainer = MegatronTrainer(shape, grid, rank, registry)
    load_weights(trainer, folder)
    trainer.leave_training()
    engine = VllmEngine(
        folder, shape, generation, EngineSettings(64, kv_cache_bytes=KV_CACHE_BYTES), identity
    )
    hybrid = _hybrid(rank, trainer, engine, registry, 2**21)
    training, generating = [], []
    cache_bytes = 0
    for _ in range(4):
        hybrid.to_generate()
        return_memory_to_system()  # memory that the heap keeps for the next tensors
        generating.append(_resident_bytes())
        cache_bytes = engine.kv_cache_bytes
        hybrid.to_train()
        trainer.enter_training()
        for buffer in trainer._gradients:
            buffer.zero_()  # as the next step does; the system provides the pages only then
        return_memory_to_system()  # free memory that the allocator keeps for the next tensors
        training.append(_resident_bytes())
    return Memory(
        training_bytes=trainer.weights.total_bytes,
        generating_bytes=engine.weights.total_bytes,
        gradient_bytes=trainer.gradient_bytes,
        cache_bytes=cache_bytes,
        resident_training=training[:-1],
        resident_generating=generating[1:],  # each after the training before it
    )


def _hybrid(
    rank: int,
    trainer: MegatronTrainer,
    engine: VllmEngine,
    registry: ProcessGroups,
    bucket_elements: int,
) -> HybridEngine:
    groups = domains(trainer.layout, engine.layout)
    return HybridEngine(
        compile_plan(trainer.layout, engine.layout, group_with(rank, groups), bucket_elements),
        rank,
        trainer,
        engine,
        PointToPointTransport(registry.new(groups)),
    )


def _round(
    number: int,
    trainer: MegatronTrainer,
    engine: VllmEngine,
    hybrid: HybridEngine,
    replica: int,
    shape: ModelShape,
) -> Round:
    before = {name: trainer.weights[name].clone() for name in trainer.weights.names}
    prompts = prompts_of(replica)
    sampling = SamplingSettings(NEW_TOKENS, TEMPERATURE)
    return_memory_to_system()  # memory that the requests of an earlier round left behind
    resident = [_resident_bytes()]
    to_generate = hybrid.to_generate()
    resident.append(_resident_bytes())
    cache_bytes = [engine.kv_cache_bytes]
    greedy = generate(engine, prompts, SEEDS, [SamplingSettings(NEW_TOKENS, 0.0)] * len(prompts))
    sampled = generate(engine, prompts, SEEDS, [sampling] * len(prompts))
    # Trained weights do not change how seeds are followed: the third round compares only its tokens.
    repeated = number < 2
    again = generate(engine, prompts, SEEDS, [sampling] * len(prompts)) if repeated else []
    otherwise = generate(engine, prompts, OTHER_SEEDS, [sampling] * len(prompts)) if repeated else []
    to_train = hybrid.to_train()
    cache_bytes.append(engine.kv_cache_bytes)
    resident.append(_resident_bytes())
    by_replica: dict[int, list[Response]] = {}
    everywhere: list[tuple[int, list[Response]] | None] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, (replica, sampled))
    by_replica = dict(sorted(entry for entry in everywhere if entry is not None))
    return Round(
        to_generate=to_generate,
        to_train=to_train,
        greedy=greedy,
        sampled=sampled,
        sampled_again=again,
        sampled_otherwise=otherwise,
        megatron_log_probs=_log_probs(trainer, shape, by_replica),
        kv_cache_bytes=(cache_bytes[0], cache_bytes[1]),
        resident_bytes=(resident[0], resident[1], resident[2]),
        is_unchanged=all(torch.equal(before[name], trainer.weights[name]) for name in before),
    )


def _log_probs(
    trainer: MegatronTrainer, shape: ModelShape, by_replica: dict[int, list[Response]]
) -> list[list[list[float]]]:
    """Return the trainer's log-probabilities of generated tokens; one micro-batch per engine."""
    batches = []
    for replica, outputs in by_replica.items():
        rows = [p + output.token_ids for p, output in zip(prompts_of(replica), outputs, strict=True)]
        tokens = torch.zeros(len(rows), max(map(len, rows)), dtype=torch.int64)
        for row, sequence in enumerate(rows):
            tokens[row, : len(sequence)] = torch.tensor(sequence)
        batches.append({"tokens": tokens})

    def output(predictions: Predictions, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        log_probs, _ = predictions[:, :-1].log_probs(batch["tokens"][:, 1:], TEMPERATURE)
        return {"log_probs": log_probs}

    results = trainer.forward(batches, output)
    if not trainer.is_last_stage:
        return []
    return [
        [
            result["log_probs"][row, len(prompt) - 1 : len(prompt) - 1 + len(generated.token_ids)].tolist()
            for row, (prompt, generated) in enumerate(zip(prompts_of(replica), outputs, strict=True))
        ]
        for (replica, outputs), result in zip(by_replica.items(), results, strict=True)
    ]


def _train(trainer: MegatronTrainer, shape: ModelShape) -> None:
    """Take two large optimizer steps towards random tokens, the same on every replica."""
    tokens = torch.randint(0, shape.vocab_size, (4, 20), generator=torch.Generator().manual_seed(1))

    def loss(predictions: Predictions, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor, None]:
        log_probs, _ = predictions[:, :-1].log_probs(batch["tokens"][:, 1:])
        return -log_probs.sum(), torch.tensor(log_probs.numel(), dtype=torch.int32), None

    for _ in range(2):
        trainer.train_step([{"tokens": tokens}], loss)


def _generator_states() -> dict[str, object]:
    name, keys, *rest = np.random.get_state()
    return {
        "torch": torch.get_rng_state().tolist(),
        "python": random.getstate(),
        "numpy": (name, np.asarray(keys).tolist(), rest),
    }


def _error_of(call: Callable[[], object]) -> str:
    try:
        call()
    except StorageError as error:
        return str(error)
    return ""


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
