"""A vLLM engine inside the rank's own process, whose weights and KV cache can give up their memory.

All ranks of an engine run the same requests in lockstep (vLLM's external launcher); every request has a seed of its own,
so that tensor-parallel peers, which sample for themselves, draw equal tokens.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hybridengine.backends.vllm.groups import install_groups
from hybridengine.backends.vllm.lockstep import LockstepDecoder
from hybridengine.errors import DataError, StorageError
from hybridengine.importing import nothing_collected
from hybridengine.model_shapes import ModelShape
from hybridengine.reshard.layout import Layout
from hybridengine.reshard.vllm import vllm_layout
from hybridengine.runtime.storage import StoragePart, WeightStorage, return_memory_to_system
from hybridengine.topology.generation import GenerationGrid


@dataclass(frozen=True)
class EngineSettings:
    """How an engine is built."""

    max_model_tokens: int
    """Longest prompt and response together."""
    max_sequences: int = 256
    """Sequences that run at the same time."""
    kv_cache_bytes: int = 256 * 2**20
    """KV cache of one rank."""
    dtype: str = "float32"
    seed: int = 0
    cuda_graphs: bool = False
    """Capture CUDA graphs; their addresses must not change, so weights then go through vLLM's sleep mode."""


@dataclass(frozen=True)
class SamplingSettings:
    """How responses are drawn."""

    max_tokens: int
    temperature: float = 1.0
    """0 is greedy."""
    stop_token_ids: tuple[int, ...] = ()
    """What ends a response; nothing else does."""


@dataclass(frozen=True)
class Generated:
    """One response."""

    token_ids: list[int]
    log_probs: list[float]
    """Log-probability of each token under the distribution it was drawn from."""


class VllmEngine:
    """One rank's part of a generation engine. Built by all ranks of the world together.

    Args:
        folder: a checkpoint folder, of which only `config.json` is read; weights are filled in by a switch.
        identity: names the job in shared memory.
    """

    def __init__(
        self,
        folder: str | Path,
        shape: ModelShape,
        generation: GenerationGrid,
        settings: EngineSettings,
        identity: str,
    ) -> None:
        self.layout: Layout = vllm_layout(shape, generation)
        self._on_gpu = torch.cuda.is_available()
        stages = shape.gen_stage_layers(generation.train.sizes.pp_size, generation.sizes.pp_size)
        with nothing_collected():  # else vLLM imports them while it builds
            importlib.import_module("vllm.entrypoints.llm")
            importlib.import_module("vllm.v1.engine.core")
        with _process_state_kept():
            install_groups(generation, identity)
            self._llm = _build(folder, generation, settings, stages, self._on_gpu)
        self._runner = self._llm.llm_engine.model_executor.driver_worker.worker.model_runner
        _prepare_pipeline(self._runner, generation)
        self.weights = (
            SleepingWeights(self._parameters(), self._llm)
            if settings.cuda_graphs
            else WeightStorage(self._parameters(), current=self._parameters)
        )
        self._caches = _cache_storages(self._runner.kv_caches)
        self._lockstep = (
            None if self._on_gpu or generation.sizes.pp_size > 1 else LockstepDecoder(self._runner)
        )
        self._max_sequences, self._max_model_tokens = settings.max_sequences, settings.max_model_tokens
        self._sleeps = settings.cuda_graphs
        self._is_ready = True

    def _parameters(self) -> dict[str, Tensor]:
        return dict(self._runner.model.named_parameters())

    @property
    def kv_cache_bytes(self) -> int:
        """Bytes that the KV cache owns now."""
        return sum(storage.nbytes() for storage, _ in self._caches)

    def leave_generation(self) -> None:
        """Release the KV cache. Weights are released by the HybridEngine."""
        self._is_ready = False
        if not self._sleeps:
            for storage, _ in self._caches:
                storage.resize_(0)

    def enter_generation(self) -> None:
        """Take the KV cache back, zeroed, and forget cached prefixes: they were computed with other weights."""
        # The cache is one piece, which the heap's gaps cannot hold, or comes from vLLM's own allocator.
        return_memory_to_system(if_short=True)
        if self._sleeps:
            self._llm.wake_up(tags=["kv_cache"])
        else:
            for storage, num_bytes in self._caches:
                storage.resize_(num_bytes)
                _as_bytes(storage).zero_()
        if not self._llm.llm_engine.reset_prefix_cache():
            raise StorageError(
                "vLLM kept its prefix cache because requests are running; finish them before a switch"
            )
        self._is_ready = True

    def generate(
        self, prompts: Sequence[Sequence[int]], seeds: Sequence[int], sampling: SamplingSettings
    ) -> list[Generated]:
        """A response to each prompt (token ids), in order. All ranks of an engine call with the same arguments.

        Raises:
            StorageError: in training mode, when the weights are elsewhere.
            DataError: an empty prompt, or one that leaves no room for its response.
        """
        if not self._is_ready:
            raise StorageError("the engine has no weights in training mode; switch to generation first")
        longest = self._max_model_tokens - sampling.max_tokens
        for row, prompt in enumerate(prompts):
            if not 1 <= len(prompt) <= longest:
                raise DataError(
                    f"prompt {row} has {len(prompt)} tokens, and a response up to {sampling.max_tokens}; the engine takes"
                    f" prompts of 1 to {longest}"
                )
        if self._lockstep is not None:
            return self._advance_together(self._lockstep, prompts, seeds, sampling)
        return self._schedule(prompts, seeds, sampling)

    def _advance_together(
        self,
        decoder: LockstepDecoder,
        prompts: Sequence[Sequence[int]],
        seeds: Sequence[int],
        sampling: SamplingSettings,
    ) -> list[Generated]:
        generated = []
        for rows in decoder.batches(prompts, sampling.max_tokens, self._max_sequences):
            part = slice(rows.start, rows.stop)
            drawn = decoder.generate(
                prompts[part], seeds[part], sampling.max_tokens, sampling.temperature, sampling.stop_token_ids
            )
            found = zip(drawn.tokens.tolist(), drawn.log_probs.tolist(), drawn.lengths.tolist(), strict=True)
            generated += [Generated(tokens[:end], log_probs[:end]) for tokens, log_probs, end in found]
        return generated

    def _schedule(
        self, prompts: Sequence[Sequence[int]], seeds: Sequence[int], sampling: SamplingSettings
    ) -> list[Generated]:
        from vllm import SamplingParams

        params = [
            SamplingParams(
                max_tokens=sampling.max_tokens,
                temperature=sampling.temperature,
                seed=seed,
                stop_token_ids=list(sampling.stop_token_ids),
                ignore_eos=True,  # what ends a response is said once, for every way of generating
                logprobs=0,
                detokenize=False,
            )
            for seed in seeds
        ]
        inputs: Any = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
        outputs = self._llm.generate(inputs, params, use_tqdm=False)
        return [_generated(output.outputs[0]) for output in outputs]


class SleepingWeights(WeightStorage):
    """Weights whose addresses must not change: vLLM's sleep mode takes and gives their memory, all at once.

    The first bucket of a switch therefore materialises everything, and the ledger reports the higher peak.
    """

    def __init__(self, tensors: dict[str, Tensor], llm: Any) -> None:
        self._llm, self._awake, self._released = llm, True, set[str]()
        super().__init__(tensors)

    @property
    def live_bytes(self) -> int:
        return self.total_bytes if self._awake else 0

    def is_live(self, name: str) -> bool:
        return self._awake

    def part(self, names: Iterable[str], zero: Iterable[str] = ()) -> StoragePart:
        return _SleepingPart(self, tuple(names), tuple(zero))

    def fall_asleep(self, released: Iterable[str]) -> None:
        """Note what nobody needs any more; the memory goes with the last of it."""
        self._released |= set(released)
        if self._awake and self._released >= set(self.names):
            self._llm.sleep(level=2)
            self._awake, self.counted_bytes = False, 0

    def wake_up(self) -> None:
        """Take the memory of all weights, where it is gone."""
        if not self._awake:
            self._llm.wake_up(tags=["weights"])
            self._awake, self._released, self.counted_bytes = True, set(), self.total_bytes


class _SleepingPart(StoragePart):
    """A part of weights that come and go all at once."""

    def __init__(self, weights: SleepingWeights, names: tuple[str, ...], zero: tuple[str, ...]) -> None:
        super().__init__(weights, [weights[name] for name in names], [weights[name] for name in zero])
        self._weights, self._names = weights, names

    def materialise(self) -> None:
        self._weights.wake_up()
        if self._zeroed:
            torch._foreach_zero_(self._zeroed)

    def release(self) -> None:
        self._weights.fall_asleep(self._names)


def _build(
    folder: str | Path,
    generation: GenerationGrid,
    settings: EngineSettings,
    stages: Sequence[range],
    on_gpu: bool,
) -> Any:
    from vllm import LLM

    if not on_gpu:
        _keep_plain_weights()
    os.environ.pop("VLLM_CPU_KVCACHE_SPACE", None)  # it would override kv_cache_memory_bytes
    os.environ["VLLM_PP_LAYER_PARTITION"] = ",".join(str(len(stage)) for stage in stages)
    return LLM(
        model=str(folder),
        skip_tokenizer_init=True,
        load_format="dummy",
        dtype=settings.dtype,  # type: ignore[arg-type]
        tensor_parallel_size=generation.sizes.tp_size,
        pipeline_parallel_size=generation.sizes.pp_size,
        distributed_executor_backend="external_launcher",
        enforce_eager=not settings.cuda_graphs,
        enable_sleep_mode=settings.cuda_graphs,
        kv_cache_memory_bytes=settings.kv_cache_bytes,
        max_model_len=settings.max_model_tokens,
        max_num_seqs=settings.max_sequences,
        max_num_batched_tokens=max(settings.max_model_tokens, 8192),
        seed=settings.seed,
        logprobs_mode="processed_logprobs",
        async_scheduling=False,
        disable_log_stats=True,
    )


def _keep_plain_weights() -> None:
    """Keep vLLM's CPU linear layers from repacking their weights into handles that a switch could not fill."""
    from vllm.model_executor.layers import utils

    def plain_linear(layer: Any, remove_weight: bool) -> None:
        layer.cpu_linear = torch.nn.functional.linear

    utils.dispatch_cpu_unquantized_gemm = plain_linear


def _prepare_pipeline(runner: Any, generation: GenerationGrid) -> None:
    """Make the buffer for a later stage's input, which vLLM makes in a warm-up run that its CPU worker leaves out."""
    if generation.sizes.pp_size > 1 and getattr(runner, "intermediate_tensors", None) is None:
        runner.intermediate_tensors = runner.model.make_empty_intermediate_tensors(
            batch_size=runner.max_num_tokens, dtype=runner.model_config.dtype, device=runner.device
        )


@contextlib.contextmanager
def _process_state_kept() -> Iterator[None]:
    """Building an engine reseeds every generator and takes `torch.set_num_threads` away; put both back.

    Also keeps the end of an engine from destroying the default process group, which the trainer uses.
    """
    from vllm.v1.engine import core

    core.cleanup_dist_env_and_memory = lambda *args, **kwargs: None
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()
    on_gpu = torch.cuda.get_rng_state() if torch.cuda.is_available() else None
    set_num_threads = torch.set_num_threads
    try:
        yield
    finally:
        torch.set_rng_state(states[0])
        random.setstate(states[1])
        np.random.set_state(states[2])
        if on_gpu is not None:
            torch.cuda.set_rng_state(on_gpu)
        torch.set_num_threads = set_num_threads


def _cache_storages(caches: Sequence[Any]) -> list[tuple[torch.UntypedStorage, int]]:
    """Every storage behind the KV cache tensors, once, with its size."""
    found: dict[int, tuple[torch.UntypedStorage, int]] = {}
    for cache in caches:
        for tensor in cache if isinstance(cache, list | tuple) else [cache]:
            storage = tensor.untyped_storage()
            found[storage._cdata] = (storage, storage.nbytes())
    return list(found.values())


def _as_bytes(storage: torch.UntypedStorage) -> Tensor:
    return torch.tensor([], dtype=torch.uint8, device=storage.device).set_(storage)


def _generated(output: Any) -> Generated:
    token_ids = list(output.token_ids)
    log_probs = [entry[token].logprob for token, entry in zip(token_ids, output.logprobs, strict=True)]
    return Generated(token_ids, log_probs)
