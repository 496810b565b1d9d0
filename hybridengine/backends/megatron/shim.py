"""Shim that runs Megatron-core on machines without a GPU by redirecting its CUDA calls to the CPU.

Megatron-core queries the current CUDA device, creates tensors with `device="cuda"`, and its distributed optimizer
expects `Tensor.type()` to name a CUDA type.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import random as megatron_random
from megatron.core.transformer.moe import token_dispatcher
from torch.overrides import TorchFunctionMode

_CPU = torch.device("cpu")


@functools.cache
def is_needed() -> bool:
    """True if there is no GPU; evaluated once, before the shim simulates one."""
    return not torch.cuda.is_available()


_all_gather, _reduce_scatter = dist.all_gather, dist.reduce_scatter


def _gather(outputs: list[torch.Tensor], tensor: torch.Tensor, **settings: Any) -> Any:
    """Gather tensors that may differ in their first dim, which Gloo refuses: padded to the longest."""
    if not _are_uneven(outputs):
        return _all_gather(outputs, tensor, **settings)
    padded = tensor.new_zeros(max(output.size(0) for output in outputs), *tensor.shape[1:])
    padded[: tensor.size(0)] = tensor
    whole = [torch.empty_like(padded) for _ in outputs]
    _all_gather(whole, padded, **settings)
    for output, part in zip(outputs, whole, strict=True):
        output.copy_(part[: output.size(0)])


def _scatter(output: torch.Tensor, tensors: list[torch.Tensor], *, group: dist.ProcessGroup) -> Any:
    """Sum tensors that may differ in their first dim, which Gloo refuses, and keep this rank's."""
    if not _are_uneven(tensors):
        return _reduce_scatter(output, tensors, group=group)
    whole = torch.cat(tensors)
    dist.all_reduce(whole, group=group)
    output.copy_(whole.split([tensor.size(0) for tensor in tensors])[group.rank()])


def _are_uneven(tensors: list[torch.Tensor]) -> bool:
    return len({tensor.shape for tensor in tensors}) > 1


class _CudaToCpu(TorchFunctionMode):
    """Creates tensors requested on a GPU or in pinned memory on the CPU, and reports CUDA tensor type names."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            return func(*args).replace("torch.", "torch.cuda.")
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.to:
            args = (args[0], *(_CPU if _names_cuda(argument) else argument for argument in args[1:]))
        if kwargs and _names_cuda(kwargs.get("device")):
            kwargs = {**kwargs, "device": _CPU}
        if kwargs.get("pin_memory"):
            kwargs = {**kwargs, "pin_memory": False}
        return func(*args, **kwargs)


def _names_cuda(device: Any) -> bool:
    if isinstance(device, torch.device):
        return device.type == "cuda"
    return isinstance(device, str) and device.startswith("cuda")


def _nothing(*args: Any, **kwargs: Any) -> None:
    return None


def _no_stream(*args: Any, **kwargs: Any) -> Any:
    """Replace a CUDA stream, which is unnecessary because CPU operations run in order."""
    methods = dict.fromkeys(("wait_stream", "wait_event", "synchronize"), _nothing)
    return SimpleNamespace(**methods, record_event=lambda *_: SimpleNamespace(synchronize=_nothing))


def _random_state(*args: Any, **kwargs: Any) -> torch.Tensor:
    return torch.get_rng_state()


def _set_random_state(state: torch.Tensor, *args: Any, **kwargs: Any) -> None:
    torch.set_rng_state(state)


_ANSWERS: dict[str, Any] = {
    "current_device": lambda: _CPU,
    "set_device": _nothing,
    "synchronize": _nothing,
    "empty_cache": _nothing,
    "get_rng_state": _random_state,
    "set_rng_state": _set_random_state,
    "manual_seed": torch.manual_seed,
    "current_stream": _no_stream,
    "default_stream": _no_stream,
    "Stream": _no_stream,
    "stream": lambda *args, **kwargs: contextlib.nullcontext(),
    "nvtx.range_push": _nothing,
    "nvtx.range_pop": _nothing,
    "random.get_rng_state": _random_state,
    "random.set_rng_state": _set_random_state,
}


def _as_host_tensor(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor


_OTHER_ANSWERS: tuple[tuple[Any, str, Any], ...] = (
    # Megatron-core's own would queue each new state, with a stack, until CUDA is initialized: for ever.
    (megatron_random, "_set_cuda_rng_state", _set_random_state),
    # Its own converts only tensors that come from a GPU to NumPy's.
    (token_dispatcher, "maybe_move_tensor_to_cpu", _as_host_tensor),
    # Experts that several ranks share are sent as many tokens as they are routed.
    (dist, "all_gather", _gather),
    (dist, "reduce_scatter", _scatter),
)

_is_active = False


@contextlib.contextmanager
def device_shim() -> Iterator[None]:
    """Map Megatron's CUDA calls to the CPU while the context is open; do nothing if there is a GPU."""
    global _is_active
    if not is_needed() or _is_active:
        yield
        return
    kept = list[tuple[Any, str, Any]]()
    _is_active = True
    try:
        answers = [(torch.cuda, path, answer) for path, answer in _ANSWERS.items()]
        for start, path, answer in (*answers, *_OTHER_ANSWERS):
            *owners, name = path.split(".")
            owner = functools.reduce(getattr, owners, start)
            kept.append((owner, name, getattr(owner, name)))
            setattr(owner, name, answer)
        with _CudaToCpu():
            yield
    finally:
        _is_active = False
        for owner, name, function in kept:
            setattr(owner, name, function)


def device() -> torch.device:
    """Return the device of this rank's tensors."""
    return _CPU if is_needed() else torch.device("cuda", torch.cuda.current_device())
