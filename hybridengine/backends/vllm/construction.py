"""Construction of a vLLM engine in a shared process, whose random states, threads and process groups are preserved."""

from __future__ import annotations

import contextlib
import os
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from hybridengine.backends.vllm.plain_weights import keep_plain_weights
from hybridengine.backends.vllm.quantized import BLOCK
from hybridengine.config import RunConfig
from hybridengine.topology.generation import GenerationGrid

MAX_BATCHED_TOKENS = 8192
"""Largest number of prompt tokens in a forward pass, which needs memory for each."""
FP8 = {
    "quantization_config": {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "weight_block_size": [BLOCK, BLOCK],
    }
}
"""Entries of config.json with which vLLM makes matrices in FP8 with scales of their blocks."""
MEMORY_SHARE = 0.01
"""Share of the device that vLLM demands to be free at its start, although the KV cache has a size of its own."""


@dataclass(frozen=True)
class EngineSettings:
    """Settings for building an engine."""

    max_model_tokens: int
    """Largest total length of prompt and response."""
    max_sequences: int = 256
    """Largest number of sequences that run at once."""
    kv_cache_bytes: int = 256 * 2**20
    """Size of the KV cache of one rank."""
    dtype: str = "float32"
    seed: int = 0
    cuda_graphs: bool | None = None
    """Capture CUDA graphs, by default on a GPU; weights then use vLLM's sleep mode, since their addresses are fixed."""
    quantization: Literal["none", "fp8"] = "none"
    """Type of the matrices of all layers: that of the model, or FP8 with a scale for each block."""
    keep_routes: bool = False
    """Keep the experts that compute each token, and tell them with the responses."""
    keep_supports: bool = False
    """Keep the tokens that could be drawn where a token was drawn, and tell them with the responses."""
    tokenizer: str | None = None
    """Tokenizer folder, required for stop strings and formats; None for an engine that only handles tokens."""
    num_loaded_adapters: int = 0
    """Number of adapters that the engine loads from files and has at once; 0 if a switch fills those of the model."""

    @classmethod
    def of(cls, run: RunConfig, tokenizer: str | None = None) -> EngineSettings:
        """Return the settings of a run's engines."""
        return cls(
            max_model_tokens=run.max_tokens,
            max_sequences=run.rollout.max_num_seqs,
            kv_cache_bytes=run.rollout.kv_cache_bytes,
            dtype=run.model.dtype,
            seed=run.run.seed,
            cuda_graphs=run.rollout.cuda_graphs,
            quantization=run.rollout.quantization,
            keep_routes=run.rollout.routing_replay,
            keep_supports=run.rollout.restricts,
            tokenizer=tokenizer or (str(run.tokenizer_folder) if run.rollout.reads_text else None),
            num_loaded_adapters=run.num_loaded_adapters,
        )


def build_llm(
    folder: str | Path,
    generation: GenerationGrid,
    settings: EngineSettings,
    stages: Sequence[range],
    on_gpu: bool,
    options: Mapping[str, Any] | None = None,
) -> Any:
    """Return vLLM's `LLM`, without weights; `options` are further arguments."""
    from vllm import LLM

    if not on_gpu:
        keep_plain_weights()
    os.environ.pop("VLLM_CPU_KVCACHE_SPACE", None)  # it would override kv_cache_memory_bytes
    os.environ["VLLM_PP_LAYER_PARTITION"] = ",".join(str(len(stage)) for stage in stages)
    return LLM(
        model=str(folder),
        tokenizer=settings.tokenizer,
        skip_tokenizer_init=settings.tokenizer is None,
        load_format="dummy",
        dtype=settings.dtype,  # type: ignore[arg-type]
        tensor_parallel_size=generation.sizes.tp_size,
        pipeline_parallel_size=generation.sizes.pp_size,
        enable_expert_parallel=generation.sizes.expert_parts > 1,
        # Other kernels for GPUs put experts and scales into an order of their own, which a switch could not fill.
        moe_backend="triton" if on_gpu else "auto",
        linear_backend="triton" if on_gpu and settings.quantization == "fp8" else "auto",
        hf_overrides=FP8 if settings.quantization == "fp8" else {},
        # For latent attention on a CPU with AMX, vLLM would choose one that replaces weights.
        attention_backend=None if on_gpu else "CPU_MLA",  # type: ignore[arg-type]
        distributed_executor_backend="external_launcher",
        enforce_eager=not settings.cuda_graphs,
        enable_sleep_mode=bool(settings.cuda_graphs),
        gpu_memory_utilization=MEMORY_SHARE,
        kv_cache_memory_bytes=settings.kv_cache_bytes,
        max_model_len=settings.max_model_tokens,
        max_num_seqs=settings.max_sequences,
        max_num_batched_tokens=max(settings.max_model_tokens, MAX_BATCHED_TOKENS),
        # A partial prompt draws a token that is discarded, and resets the generator by an offset, which
        # CPU generators do not support.
        enable_chunked_prefill=False,
        seed=settings.seed,
        logprobs_mode="processed_logprobs",
        async_scheduling=False,  # decision 0044
        structured_outputs_config={
            "backend": "xgrammar"
        },  # others would take what it refuses, request by request
        disable_log_stats=True,
        **(options or {}),
    )


def prepare_pipeline(runner: Any, generation: GenerationGrid) -> None:
    """Allocate the input buffer of a later stage, which vLLM creates in a warm-up run that its CPU worker skips."""
    if generation.sizes.pp_size > 1 and getattr(runner, "intermediate_tensors", None) is None:
        runner.intermediate_tensors = runner.model.make_empty_intermediate_tensors(
            batch_size=runner.max_num_tokens, dtype=runner.model_config.dtype, device=runner.device
        )


@contextlib.contextmanager
def process_state_kept() -> Iterator[None]:
    """Restore the random generators and `torch.set_num_threads`, which building an engine changes."""
    from vllm.v1.engine import core

    # The end of an engine would destroy the default process group, which the trainer uses.
    core.cleanup_dist_env_and_memory = lambda *args, **kwargs: None
    states, set_num_threads = (random.getstate(), np.random.get_state()), torch.set_num_threads
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    try:
        with torch.random.fork_rng(devices):
            yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_num_threads = set_num_threads
