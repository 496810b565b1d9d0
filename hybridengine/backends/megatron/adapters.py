"""Low-rank adapters of Megatron-core's linear layers, as parameters of the layers themselves.

The sharded factor of a layer has the layer's shards; the other one is the same on all tensor-parallel ranks, as are the
`rank` numbers per token between them, the only ones that adapters exchange:

    column-parallel layer   A whole, B sharded   the numbers are copied, or gathered from the parts of the sequence
    row-parallel layer      A sharded, B whole   they are summed, or summed and scattered over the parts of the sequence
    whole layer             A whole, B whole     nothing: down projections of latent attention

With sequence parallelism a rank computes a part of the whole factor's gradient, which Megatron-core sums by its mark.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.models.gpt import GPTModel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from torch import Tensor, nn

from hybridengine.errors import ConfigError
from hybridengine.families.adapters import FACTORS, is_adapted
from hybridengine.families.family import is_of_expert
from hybridengine.families.sizes import AdapterSizes
from hybridengine.weights.storage import WeightStorage

ROW_PARALLEL = ("linear_proj", "linear_fc2")
WHOLE = ("linear_q_down_proj", "linear_kv_down_proj")


def add_adapters(
    model: GPTModel, adapters: AdapterSizes, groups: ProcessGroupCollection, sequence_parallel: bool
) -> None:
    """Freeze the weights of a stage, and add adapters, without values, to its linear layers.

    Raises ConfigError for experts that are sharded, or grouped by Transformer Engine.
    """
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    for name, layer in list(model.named_modules()):
        if name.startswith("decoder.") and is_adapted(name, adapters):
            group = groups.expt_tp if is_of_expert(name) else groups.tp
            if not hasattr(layer, "weight"):
                raise ConfigError(
                    f"actor.lora.modules={list(adapters.modules)} adapt {name}, whose experts Transformer Engine groups"
                    " on GPUs; set actor.lora.modules=[linear_qkv, linear_proj]"
                )
            if is_of_expert(name) and group.size() > 1:
                raise ConfigError(
                    f"actor.lora.modules={list(adapters.modules)} adapt {name}, whose experts are sharded (etp > 1); set"
                    " etp=1, or actor.lora.modules=[linear_qkv, linear_proj]"
                )
            _Adapter(layer, name.rpartition(".")[2], adapters, group, sequence_parallel)
            if is_of_expert(name):
                for factor in (layer.lora_a, layer.lora_b):
                    factor.allreduce = False  # type: ignore[union-attr]  # over the replicas of the rest
                    # No tensor-parallel rank has a duplicate: each has other experts.
                    factor.tensor_model_parallel = True  # type: ignore[union-attr]
    if model.pre_process:
        model.embedding.register_forward_hook(_with_gradient)


def _with_gradient(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    """Give the output of a frozen embedding a gradient: without one, recomputed layers would have none, silently."""
    return output.requires_grad_() if torch.is_grad_enabled() else output


class _Adapter:
    """Adds the adapter's result to that of a layer, in whose forward hook it is called."""

    def __init__(
        self,
        layer: Any,
        kind: str,
        adapters: AdapterSizes,
        group: dist.ProcessGroup,
        sequence_parallel: bool,
    ) -> None:
        self._scale, self._group = adapters.scale, group
        self._is_row_parallel, self._is_whole = kind in ROW_PARALLEL, kind in WHOLE
        self._sequence_parallel = sequence_parallel and group.size() > 1
        num_rows, num_columns = layer.weight.shape
        like = {"dtype": layer.weight.dtype, "device": layer.weight.device}
        layer.lora_a = nn.Parameter(torch.zeros(adapters.rank, num_columns, **like))
        layer.lora_b = nn.Parameter(torch.zeros(num_rows, adapters.rank, **like))
        factors = [layer.lora_a, layer.lora_b]
        if not self._is_whole:
            sharded = factors.pop(0 if self._is_row_parallel else 1)
            set_tensor_model_parallel_attributes(sharded, True, 1 if self._is_row_parallel else 0, 1)
        for whole in factors:
            whole.sequence_parallel = self._sequence_parallel
        layer.adapter = self
        layer.register_forward_hook(self.add, prepend=True)  # before the norm of an output
        self.is_on = True

    def add(self, layer: Any, args: tuple[Any, ...], output: tuple[Tensor, Tensor | None]) -> Any:
        """Return the layer's output with the adapter's added; its bias, if not added yet, stays."""
        if not self.is_on:
            return output
        result, bias = output
        inner = F.linear(_product_input(layer, args[0]), layer.lora_a)
        if self._group.size() > 1 and not self._is_whole:
            inner = self._exchanged(inner)
        return torch.add(result, F.linear(inner, layer.lora_b), alpha=self._scale), bias

    def _exchanged(self, inner: Tensor) -> Tensor:
        if self._is_row_parallel:
            if self._sequence_parallel:
                return reduce_scatter_to_sequence_parallel_region(inner, group=self._group)
            return reduce_from_tensor_model_parallel_region(inner, group=self._group)
        if self._sequence_parallel:
            return gather_from_sequence_parallel_region(inner, group=self._group)
        return copy_to_tensor_model_parallel_region(inner, group=self._group)


def _product_input(layer: Any, given: Tensor) -> Tensor:
    """Return what the layer multiplies: Transformer Engine's fused layers normalise their input first."""
    weight = getattr(layer, "layer_norm_weight", None)
    if weight is None:
        return given
    return F.rms_norm(given, weight.shape, weight + 1 if layer.zero_centered_gamma else weight, layer.eps)


@contextlib.contextmanager
def adapters_off(chunks: Sequence[nn.Module]) -> Iterator[None]:
    """Compute with the frozen weights alone while the context is open."""
    modules = (module for chunk in chunks for module in chunk.modules())
    found: list[Any] = [module.adapter for module in modules if hasattr(module, "adapter")]
    for adapter in found:
        adapter.is_on = False
    try:
        yield
    finally:
        for adapter in found:
            adapter.is_on = True


class KeptBase:
    """Frozen weights of adapted layers, kept while an engine has them with the adapters merged in.

    They do not come back by subtraction: bits that the sum rounds away are lost.
    """

    def __init__(self, weights: WeightStorage, scale: float) -> None:
        self._weights, self._scale = weights, scale
        tensors: dict[str, Tensor] = {}
        for name in weights.names:
            if f"{name.removesuffix('weight')}lora_a" in weights and name.endswith(".weight"):
                tensors[name] = torch.empty_like(weights[name])
                tensors[name].untyped_storage().resize_(0)
        self.storage = WeightStorage(tensors)
        """The kept weights, by the names of those that they are copies of."""

    def merge(self) -> None:
        """Keep the weights, and add the adapters to those that a switch moves, rounded once."""
        for name in self.storage.names:
            if self.storage.is_live(name):
                continue
            own, layer = self._weights[name], name.removesuffix("weight")
            lora_a, lora_b = (self._weights[layer + factor].float() for factor in FACTORS)
            merged = torch.addmm(own.float(), lora_b, lora_a, alpha=self._scale)
            self.storage.materialise([name])
            self.storage[name].copy_(own)
            own.copy_(merged)

    def restore(self) -> None:
        """Put the weights back that `merge` has changed, and release their copies."""
        for name in self.storage.names:
            if self.storage.is_live(name):
                self._weights[name].copy_(self.storage[name])
                self.storage.release([name])
