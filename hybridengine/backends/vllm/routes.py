"""Experts that an engine's routers choose, kept beside keys and values: a row for each slot of the KV cache.

A prompt whose keys and values are cached thus has its experts as well, and a request's experts are found as its keys are,
by its blocks. They are read before a request gives up its blocks: when it ends, and when it is preempted, aborted or
moved. A position that is computed again, after a preemption or on other weights, keeps the experts that drew the token
after it.

Shapes: S slots, L layers with experts, K experts of a token.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from hybridengine.errors import ConfigError
from hybridengine.families.sizes import ExpertSizes
from hybridengine.models.shapes import ModelShape


class RouteCache:
    """Experts by slot of the KV cache, on the device of a model runner, whose routers fill it."""

    def __init__(
        self, model: Any, kv_config: Any, experts: ExpertSizes, num_layers: int, device: Any
    ) -> None:
        from vllm.model_executor.layers.fused_moe.routed_experts_capturer import bind_routed_experts_capturer

        self.block_size: int = kv_config.kv_cache_groups[0].kv_cache_spec.block_size
        self._first = experts.num_dense_layers
        # One more: padded tokens have the slot -1.
        size = kv_config.num_blocks * self.block_size + 1, num_layers - self._first, experts.num_active
        self.experts_SLK = torch.zeros(size, dtype=route_dtype(experts), device=device)
        try:
            bind_routed_experts_capturer(model, self)  # pyright: ignore[reportArgumentType]
        except ValueError as error:
            raise ConfigError(
                f"rollout.routing_replay=true needs an engine that tells its experts, and vLLM refuses: {error} Set it to"
                " false"
            ) from None

    def capture(self, layer_id: int, experts_NK: Tensor) -> None:
        """Keep the experts of one layer's tokens; vLLM calls it in its forward pass, and inside CUDA graphs."""
        from vllm.forward_context import get_forward_context

        by_layer = get_forward_context().slot_mapping
        if not by_layer:  # a pass without requests, which measures memory
            return
        assert isinstance(by_layer, dict), "the engine does not divide a batch into micro-batches"
        slots_N = next(iter(by_layer.values()))[: len(experts_NK)]
        self.experts_SLK[slots_N.long(), layer_id - self._first] = experts_NK.to(self.experts_SLK.dtype)


def route_dtype(experts: ExpertSizes) -> torch.dtype:
    """Return the smallest type with -1 and all numbers of experts."""
    return torch.int8 if experts.num_experts <= 128 else torch.int16


@contextlib.contextmanager
def routes_cached(shape: ModelShape) -> Iterator[list[RouteCache]]:
    """Give a `RouteCache` to the engine that is built while the context is open, before it captures CUDA graphs."""
    from vllm.v1.worker.gpu_worker import Worker  # also the base of the CPU's

    experts = shape.experts
    if experts is None:
        raise ConfigError(
            f"rollout.routing_replay=true needs a mixture of experts, found {shape.family}; set it to false"
        )
    found, initialize = list[RouteCache](), Worker.initialize_from_config

    def with_cache(self: Worker, kv_cache_config: Any) -> None:
        initialize(self, kv_cache_config)
        runner: Any = self.model_runner
        with self._maybe_get_memory_pool_context(tag="kv_cache"):
            found.append(RouteCache(runner.model, kv_cache_config, experts, shape.num_layers, runner.device))

    Worker.initialize_from_config = with_cache
    try:
        yield found
    finally:
        Worker.initialize_from_config = initialize


@dataclass
class _Kept:
    """Experts of one request that have been read."""

    begin: int
    """First position of interest."""
    rows: list[Tensor] = field(default_factory=list)

    @property
    def end(self) -> int:
        return self.begin + sum(map(len, self.rows))


class RequestRoutes:
    """Experts of the requests of an engine, by vLLM's names of them."""

    def __init__(self, engine: Any, cache: RouteCache) -> None:
        from vllm.distributed.parallel_state import get_pp_group

        self._scheduler = engine.engine_core.engine_core.scheduler
        self._stages: dist.ProcessGroup = get_pp_group().cpu_group
        self._cache = cache
        self._kept: dict[str, _Kept] = {}
        self._none = cache.experts_SLK.new_empty(0, *cache.experts_SLK.shape[1:], device="cpu")
        self.none = self._none.numpy()
        """Experts of no tokens, [0, L, K]."""
        free = self._scheduler._free_request_blocks

        def read_and_free(request: Any) -> None:
            self._read(request)
            free(request)

        self._scheduler._free_request_blocks = read_and_free

    def begin(self, name: str, position: int) -> None:
        """Keep the experts of a request from this position on."""
        self._kept[name] = _Kept(position)

    def so_far(self, name: str) -> np.ndarray:
        """Return the experts of a request's tokens so far, [N, L, K]: the last one that was drawn has none yet.

        Collective over the stages of the engine.
        """
        request = self._scheduler.requests.get(name)
        if request is not None:
            self._read(request)
        rows = torch.cat([self._none, *self._kept[name].rows])
        if self._stages.size() > 1:  # each has filled the rows of its layers alone
            summed = rows.int()  # gloo adds no numbers of 16 bits
            dist.all_reduce(summed, group=self._stages)
            rows = summed.to(rows.dtype)
        return rows.numpy()

    def take(self, name: str) -> np.ndarray:
        """Return the experts of a request, and forget it."""
        rows = self.so_far(name)
        del self._kept[name]
        return rows

    def _read(self, request: Any) -> None:
        """Read what a request has computed since the last time."""
        kept = self._kept.get(request.request_id)
        # The number of computed tokens counts a step from its beginning, that of tokens from its end.
        end = min(request.num_computed_tokens, request.num_tokens - 1)
        if kept is None or end <= kept.end:
            return
        blocks = torch.tensor(self._scheduler.kv_cache_manager.get_block_ids(request.request_id)[0])
        positions, size = torch.arange(kept.end, end), self._cache.block_size
        slots = blocks[positions // size] * size + positions % size
        cached = self._cache.experts_SLK
        kept.rows.append(cached[slots.to(cached.device)].cpu())
