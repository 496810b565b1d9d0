"""vLLM's own engine on tensors without values: its scheduler, model, sampler and KV cache, with the build for CPUs.

Weights and KV cache are allocated without memory; the buffers in which the engine prepares a batch are real. Questions to
the machine and to other ranks are answered here: how much memory there is, which ranks share a node, and what the other
stages of the engine send.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily

from hybridengine.backends.vllm import engine as engine_module
from hybridengine.backends.vllm.adapters import base_name, slots
from hybridengine.backends.vllm.latent import own_parameters
from hybridengine.rehearsal.replacing import all_replaced
from hybridengine.rehearsal.shapes_only import ShapesOnly
from hybridengine.topology.links import NodeMap
from hybridengine.weights.storage import WeightStorage


@contextmanager
def engine_without_values(mode: ShapesOnly, nodes: NodeMap) -> Iterator[None]:
    """Let engines be built in the context of `mode` while this one is open."""
    from vllm.distributed import parallel_state
    from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts
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

    def weights_without_pages(engine: Any, *_: Any) -> WeightStorage:
        model = engine._runner.model
        with mode.active():
            tensors: dict[str, Tensor] = {name: slot[0, 0] for name, slot in slots(model).items()}
        for name, parameter in own_parameters(model).items():
            if parameter.dim() < 3:
                tensors[base_name(name)] = parameter
                continue
            with mode.active():  # experts come and go one by one
                tensors |= {
                    f"{name}[{place}]": torch.empty_like(parameter[0]) for place in range(len(parameter))
                }
            parameter.untyped_storage().resize_(0)
        return WeightStorage(tensors, current=lambda: tensors)

    _register_shapes()
    with (
        _stages_answered(),
        all_replaced(
            (engine_module, "build_llm", build_with_values),
            (engine_module.VllmEngine, "_make_weights", weights_without_pages),
            (CPUUnquantizedExperts, "apply", _workspaces),
            (CPUModelRunner, "load_model", in_mode(CPUModelRunner.load_model)),
            (CPUModelRunner, "initialize_kv_cache", in_mode(CPUModelRunner.initialize_kv_cache)),
            (
                CPUWorker,
                "determine_available_memory",
                lambda worker: worker.cache_config.kv_cache_memory_bytes,
            ),
            (CpuCommunicator, "_all_group_ranks_share_shm_group_name", lambda communicator: False),
            (parallel_state, "in_the_same_node_as", same_node),
        ),
    ):
        yield


def _workspaces(
    experts: Any,
    output: Tensor,
    hidden_states: Tensor,
    w1: Tensor,
    w2: Tensor,
    weights: Tensor,
    *_: Any,
    **__: Any,
) -> None:
    """Need the two workspaces of vLLM's Triton experts, [tokens, active experts, ...], and compute nothing."""
    (num_tokens, num_active), hidden = weights.shape, w2.size(1)
    widths = max(w2.size(2), hidden), max(w1.size(1), hidden)
    spaces = [output.new_empty(num_tokens, num_active, width) for width in widths]
    del spaces


@contextmanager
def _stages_answered() -> Iterator[None]:
    """Let the other pipeline stages of an engine announce the tensors of each step while the context is open."""
    from vllm.distributed.parallel_state import GroupCoordinator, TensorMetadata
    from vllm.v1.worker.gpu_worker import Worker

    execute, broadcast = Worker.execute_model, GroupCoordinator.broadcast_object
    step: dict[str, Any] = {}

    def execute_model(worker: Any, scheduler_output: Any) -> Any:
        step.update(runner=worker.model_runner, output=scheduler_output)
        return execute(worker, scheduler_output)

    def announced(*sizes: tuple[str, torch.dtype, tuple[int, ...]]) -> list[tuple[str, Any]]:
        return [(name, TensorMetadata("cpu", dtype, torch.Size(size))) for name, dtype, size in sizes]

    def recv_object(group: Any, src: int) -> Any:
        given, num_tokens = step["runner"].intermediate_tensors, step["output"].total_num_scheduled_tokens
        sizes = [(name, one.dtype, (num_tokens, *one.shape[1:])) for name, one in given.tensors.items()]
        return announced(*sizes)

    def broadcast_object(group: Any, obj: Any = None, src: int = 0) -> Any:
        if obj is not None or group.world_size == 1:
            return broadcast(group, obj, src)
        config = step["runner"].model_config
        size = len(step["output"].num_scheduled_tokens), config.get_vocab_size()
        return announced(("logits", config.dtype, size))  # the last stage's, of which all draw

    with all_replaced(
        (Worker, "execute_model", execute_model),
        (GroupCoordinator, "recv_object", recv_object),
        (GroupCoordinator, "broadcast_object", broadcast_object),
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
