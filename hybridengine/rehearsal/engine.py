"""vLLM's own engine on tensors without values: its scheduler, model, sampler and KV cache, with the build for CPUs.

Weights and KV cache are allocated without memory; the buffers in which the engine prepares a batch are real. Questions to
the machine and to other ranks are answered here: how much memory there is, and which ranks share a node.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily

from hybridengine.backends.vllm import engine as engine_module
from hybridengine.rehearsal.replacing import all_replaced
from hybridengine.rehearsal.shapes_only import ShapesOnly
from hybridengine.topology.links import NodeMap


@contextmanager
def engine_without_values(mode: ShapesOnly, nodes: NodeMap) -> Iterator[None]:
    """Let engines be built in the context of `mode` while this one is open."""
    from vllm.distributed import parallel_state
    from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner
    from vllm.v1.worker.cpu_worker import CPUWorker

    build = engine_module.build_llm

    def build_with_values(*arguments: Any) -> Any:
        with unset_fake_temporarily():
            return build(*arguments)

    def in_mode(method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def run(*arguments: Any, **named: Any) -> Any:
            with mode.active():
                return method(*arguments, **named)

        return run

    def same_node(group: Any, source_rank: int = 0) -> list[bool]:
        ranks = torch.distributed.get_process_group_ranks(group)
        return [nodes.node_of(member) == nodes.node_of(ranks[source_rank]) for member in ranks]

    _register_shapes()
    with all_replaced(
        (engine_module, "build_llm", build_with_values),
        (CPUModelRunner, "load_model", in_mode(CPUModelRunner.load_model)),
        (CPUModelRunner, "initialize_kv_cache", in_mode(CPUModelRunner.initialize_kv_cache)),
        (CPUWorker, "determine_available_memory", lambda worker: worker.cache_config.kv_cache_memory_bytes),
        (CpuCommunicator, "_all_group_ranks_share_shm_group_name", lambda communicator: False),
        (parallel_state, "in_the_same_node_as", same_node),
    ):
        yield


@functools.cache
def _register_shapes() -> None:
    """Register the shape of the one operator on the engine's path for which vLLM gives none."""
    name = "fused_gumbel_argmax"
    if hasattr(torch.ops._C, name):
        torch.library.register_fake(
            f"_C::{name}", lambda logits, seeds: logits.new_empty(len(logits), dtype=torch.int64)
        )
