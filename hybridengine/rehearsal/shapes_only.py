"""Tensors with shapes and without values, on which the code of a run works unchanged.

torch's FakeTensorMode computes the shape, type and strides of every result. The course of a run depends on some values:
row lengths, positions and masks. So an operation on nothing but real tensors is carried out, and small new tensors of
integers are real. Where code reads a number that has no value, a flag (a number computed from truth values) is 0, and any
other number is 1: gradients are finite, and their norm is clipped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import FakeWork
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only

from hybridengine.rehearsal.replacing import replaced

REAL_BYTES = 2**26
"""Largest new tensor of integers that has values."""

_CPU = torch.device("cpu")
Observer = Callable[[Any, Sequence[Any], Any], None]
"""Called with an operator, its arguments and its result."""


class ShapesOnly(FakeTensorMode):
    """Mode in which floating-point tensors have no values and no memory.

    Args:
        observers: called with every operation and its result.
    """

    def __init__(self, observers: Sequence[Observer] = ()) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self._observers = tuple(observers)
        self._is_inside = False
        """True while torch computes a shape, by other operations."""

    @contextmanager
    def active(self) -> Iterator[None]:
        """Work without values while the context is open; may be entered again inside of it."""

        def set_data(parameter: Tensor, applied: Tensor) -> None:
            parameter.data = applied.data

        # By swapping, Module.to would replace parameters that others refer to.
        with replaced(torch.utils, "swap_tensors", set_data), self, _NumbersRead():
            yield

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if (named := kwargs.get("device")) is not None and named.type == "cuda":
            kwargs["device"] = _CPU  # in the backward pass, which the shim of the CUDA calls does not reach
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        result = self._result(func, types, args, kwargs, tensors)
        if not self._is_inside:
            for observe in self._observers:
                observe(func, args, result)
        return result

    def _result(
        self, func: Any, types: Any, args: Sequence[Any], kwargs: Mapping[str, Any], tensors: list[Tensor]
    ) -> Any:
        if tensors and not any(isinstance(tensor, FakeTensor) for tensor in tensors):
            return func(*args, **kwargs)
        if func.namespace == "c10d":  # torch has no shape function for each of these
            work = FakeWork().boxed()
            return work if len(func._schema.returns) == 1 else (args[0], work)
        if func is torch.ops.aten._local_scalar_dense.default:
            return _number(tensors[0])
        if func is torch.ops.aten.masked_select.default and not isinstance(args[1], FakeTensor):
            return tensors[0].new_empty(int(args[1].expand(tensors[0].shape).sum()))
        if func is torch.ops.aten.nonzero.default:  # no flag is set
            return torch.empty(0, tensors[0].dim(), dtype=torch.int64)
        was_inside, self._is_inside = self._is_inside, True
        try:
            result = super().__torch_dispatch__(func, types, args, kwargs)
        finally:
            self._is_inside = was_inside
        if not isinstance(result, FakeTensor):
            return result
        if func._schema.is_mutable and not isinstance(
            args[0], FakeTensor
        ):  # written from tensors without values
            return args[0].fill_(_number(args[0]))
        if tensors:
            result.is_flag = result.dtype is torch.bool or (  # type: ignore[attr-defined]
                result.dim() == 0 and any(_is_flag(tensor) for tensor in tensors)
            )
        elif not was_inside and result.nbytes <= REAL_BYTES and _has_values(result, kwargs):
            return func(*args, **kwargs)
        return result


def _has_values(tensor: Tensor, kwargs: Mapping[str, Any]) -> bool:
    """Return True for a new tensor of integers, or of numbers from a generator of its own, which orders rows.

    Tensors of bytes have no values: they are memory of other tensors.
    """
    is_number = not tensor.dtype.is_floating_point and tensor.dtype is not torch.uint8
    return is_number or kwargs.get("generator") is not None


def _is_flag(tensor: Tensor) -> bool:
    return tensor.dtype is torch.bool or getattr(tensor, "is_flag", False)


def _number(tensor: Tensor) -> bool | int | float:
    """Return the number that code reads from a tensor without values."""
    if tensor.dtype is torch.bool:
        return False
    number = 0 if _is_flag(tensor) else 1
    return float(number) if tensor.dtype.is_floating_point else number


class _NumbersRead(TorchFunctionMode):
    """Answers code that reads the memory of tensors without values: `torch.tensor` of lists of them, and `numpy`."""

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is torch.tensor and isinstance(args[0], list):
            args = tree_map_only(FakeTensor, lambda one: one.item(), args[0]), *args[1:]
        elif func is Tensor.numpy and isinstance(args[0], FakeTensor):
            with unset_fake_temporarily():
                return torch.full(args[0].shape, _number(args[0]), dtype=args[0].dtype).numpy()
        return func(*args, **(kwargs or {}))
