"""megatron-core: `megatron.core.resharding`, through its public interface."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Sequence
from datetime import timedelta
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import torch
import torch.distributed as dist
from megatron.core.resharding import swap_model_weights
from megatron.core.resharding.copy_services.gloo_copy_service import GlooCopyService
from megatron.core.resharding.copy_services.nccl_copy_service import NCCLCopyService
from torch import Tensor, nn

from hybridengine.backends.megatron.shim import device_shim, is_needed
from hybridengine.bench.reshard.actor import Actor
from hybridengine.bench.reshard.methods.method import GENERATING, TRAINING, Method
from hybridengine.topology.grid import Grid
from hybridengine.topology.sizes import TrainSizes
from hybridengine.weights.ledger import StorageLedger, SwitchReport


class _Counting:
    """Mixin for a copy service that reports received bytes and staging buffers to a ledger."""

    send_ops: list[Any]
    recv_ops: list[Any]
    _copy_stream: Any

    def __init__(self, ledger: StorageLedger, models: Sequence[nn.Module]) -> None:
        super().__init__()
        self._ledger = ledger
        self._weights = {p.untyped_storage()._cdata for model in models for p in model.parameters()}

    def run(self) -> None:
        """Send all submitted messages; at this point all buffers of the call exist except those that `run` creates."""
        # The gloo service pairs each message with the tensor to which it is copied afterwards.
        received = [
            operation if isinstance(operation, tuple) else (operation,) for operation in self.recv_ops
        ]
        own_rank = dist.get_rank()
        self._ledger.receive(sum(pair[0].tensor.nbytes for pair in received if pair[0].src_rank != own_rank))
        tensors: list[Tensor] = [operation.tensor for operation in self.send_ops]
        for pair in received:
            tensors += [pair[0].tensor, *pair[1:]]
        storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage() for tensor in tensors}
        staged = sum(storage.nbytes() for key, storage in storages.items() if key not in self._weights)
        self._ledger.stage(staged)
        # The service copies what stays on this rank on a stream that does not wait for the work that made it.
        self._copy_stream.wait_stream(torch.cuda.current_stream())
        super().run()  # type: ignore[misc]
        self._ledger.unstage(staged)


class MegatronCore(Method):
    """Slices move point to point into a second GPTModel with the generation sizes; on the way back nothing moves.

    Source: megatron-core, megatron/core/resharding/refit.py.
    """

    def prepare(self) -> None:
        actor, gen = self.actor, self.pair.gen
        sizes = TrainSizes(
            gen.pp_size,
            gen.tp_size,
            actor.grid.num_ranks // gen.num_ranks,
            expert_parts=gen.expert_parts,
            expert_shards=gen.expert_shards,
        )
        target = Actor(
            actor.shape, Grid(sizes, actor.grid.order), actor.rank, actor.registry, actor.dtype_name
        )
        self.layout, self.destination = target.layout, target.weights
        self._source, self._target = _Renamed(actor), _Renamed(target)
        models = [actor.module, target.module]
        self.ledger = StorageLedger({TRAINING: actor.weights, GENERATING: self.destination})
        with device_shim():
            service = GlooCopyService if is_needed() else NCCLCopyService
            self._service: Any = type("Counting", (_Counting, service), {})(self.ledger, models)
        if is_needed():
            # The service creates its own group, whose default timeout is half an hour.
            group = cast(dist.ProcessGroup, self._service.gloo_pg)
            backend = group._get_backend(torch.device("cpu"))
            backend._set_default_timeout(timedelta(seconds=self.spec.timeout_s))

    def there(self) -> SwitchReport:
        self.ledger.begin()
        with _cuda_calls():
            swap_model_weights([self._source], [self._target], self._service)  # type: ignore[arg-type]
        return self.ledger.finish("to_generate", GENERATING)

    def back(self) -> SwitchReport:
        self.ledger.begin()
        return self.ledger.finish("to_train", TRAINING)


@contextlib.contextmanager
def _cuda_calls() -> Iterator[None]:
    """Patch the few CUDA calls of a switch on a CPU; the device shim would slow every tensor operation down."""
    if not is_needed():
        yield
        return

    def empty(*sizes: Any, pin_memory: bool = False, **arguments: Any) -> Tensor:
        return pageable_empty(*sizes, **arguments)  # only a GPU's copies need pinned memory

    pageable_empty = torch.empty
    with contextlib.ExitStack() as stack:
        for name, answer in _ANSWERS.items():
            stack.enter_context(mock.patch(f"torch.cuda.{name}", answer))
        stack.enter_context(mock.patch("torch.empty", empty))
        yield


_STREAM = SimpleNamespace(wait_stream=lambda other: None, synchronize=lambda: None)

_ANSWERS: dict[str, Any] = {
    "current_stream": lambda: _STREAM,
    "stream": lambda stream: contextlib.nullcontext(),
    "synchronize": lambda: None,
}


class _Renamed(nn.Module):
    """A model whose weights have the names that they have in the whole model, which ranks then agree on.

    Megatron-core's own names are right for even stages, and for the experts of Transformer Engine's grouped layers; and
    its version 0.16 leaves buffers out.
    """

    def __init__(self, model: Actor) -> None:
        super().__init__()
        self.config, self.pg_collection = model.module.config, model.groups
        place, sizes = model.grid.coordinate(model.rank), model.grid.sizes
        first = {"layers": model.shape.split_layers(sizes.pp_size)[place.pp_rank].start}
        if (experts := model.shape.experts) is not None:
            first["local_experts"] = (
                experts.num_experts // sizes.expert_parts * dist.get_rank(model.groups.ep)
            )

        def renamed(name: str) -> str:
            return re.sub(
                r"\b(layers|local_experts)\.(\d+)", lambda at: f"{at[1]}.{int(at[2]) + first[at[1]]}", name
            )

        self._renamed = {renamed(name): weight for name, weight in model.tensors().items()}
        for name, weight in self._renamed.items():
            if "linear_fc1" in name:
                weight.partition_stride = 2  # type: ignore[attr-defined]  # rows of gate and up, each divided

    def named_parameters(self, *arguments: Any, **named: Any) -> Iterator[tuple[str, Any]]:
        yield from self._renamed.items()
