"""vLLM's own LoRA with one adapter, whose factors a switch fills: its slots are parameters like any others."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from hybridengine.families.adapters import is_of_adapter
from hybridengine.families.sizes import AdapterSizes
from hybridengine.reshard.layout import Layout

ID = 1
"""vLLM's number of the adapter."""


def lora_options(adapters: AdapterSizes, layout: Layout) -> dict[str, Any]:
    """Return vLLM's options for the adapters of a layout: a single one, in the layers that are adapted.

    The scale (`scaled`) is part of compiled layers, so that it must be part of the key by which vLLM keeps those on disk.
    """
    names = (one.name for shard in layout.shards.values() for one in shard.parameters)
    modules = {name.rpartition(".lora_")[0].rpartition(".")[2] for name in names if is_of_adapter(name)}
    return {
        "enable_lora": True,
        "max_loras": 1,
        "max_lora_rank": adapters.rank,
        "lora_target_modules": sorted(modules),
        "additional_config": {"lora_scale": adapters.scale},
    }


@contextlib.contextmanager
def scaled(adapters: AdapterSizes) -> Iterator[None]:
    """Let layers of the engine that is built while the context is open multiply by the scale of the adapters.

    vLLM multiplies B by it when it loads a file; here B is the trainer's own. vLLM compiles layers, and captures CUDA
    graphs, while it builds: what is changed afterwards would not be computed.
    """
    from vllm.lora import model_manager

    get_wrapper = model_manager.get_punica_wrapper

    def get_scaled(*arguments: Any, **named: Any) -> Any:
        wrapper: Any = get_wrapper(*arguments, **named)
        wrapper.add_lora_linear = _scaled(wrapper.add_lora_linear, adapters.scale)
        return wrapper

    model_manager.get_punica_wrapper = get_scaled
    try:
        yield
    finally:
        model_manager.get_punica_wrapper = get_wrapper


def activate(runner: Any, adapters: AdapterSizes) -> Any:
    """Put an adapter without values into the only slot; return the request that names it."""
    from vllm.lora.lora_model import LoRAModel
    from vllm.lora.lora_weights import LoRALayerWeights
    from vllm.lora.request import LoRARequest

    manager = runner.lora_manager._adapter_manager
    none = torch.zeros(1, 1)  # of no layer: vLLM wants at least one
    named = LoRALayerWeights("", adapters.rank, adapters.rank, none, none)
    manager.add_adapter(LoRAModel(ID, adapters.rank, {"": named}))
    manager.activate_adapter(ID)
    return LoRARequest(lora_name="policy", lora_int_id=ID, lora_path="in memory")


def _scaled(add: Any, factor: float) -> Any:
    def add_lora_linear(
        y: Tensor,
        x: Tensor,
        a: tuple[Tensor, ...],
        b: tuple[Tensor, ...],
        scale: float,
        *rest: Any,
        **more: Any,
    ) -> Any:
        return add(y, x, a, b, scale * factor, *rest, **more)

    return add_lora_linear


def slots(model: Any) -> dict[str, Tensor]:
    """Return the memory of all factors by their names in the layout, [1, 1, rows, columns] each."""
    return {
        f"{name}.{factor}[{number}]": slot
        for name, module in model.named_modules()
        for factor in ("lora_a", "lora_b")
        for number, slot in enumerate(getattr(module, f"{factor}_stacked", ()))
    }


def base_name(name: str) -> str:
    """Return the name of a parameter without vLLM's wrapper of adapted layers."""
    return name.replace(".base_layer.", ".")
