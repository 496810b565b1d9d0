"""vLLM's own LoRA: an adapter that a switch fills, its slots parameters like any others, or several from files."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hybridengine.errors import DataError
from hybridengine.families.adapters import is_of_adapter
from hybridengine.families.sizes import AdapterSizes
from hybridengine.models.checkpoint_files import ADAPTER_FILE
from hybridengine.reshard.layout import Layout

ID = 1
"""vLLM's number of the adapter."""


def lora_options(adapters: AdapterSizes, layout: Layout, num_loaded: int = 0) -> dict[str, Any]:
    """Return vLLM's options for adapters of the layers that are adapted in a layout: one, or several that it loads.

    The scale (`scaled`) is part of compiled layers, so that it must be part of the key by which vLLM keeps those on disk.
    """
    names = (one.name for shard in layout.shards.values() for one in shard.parameters)
    modules = {name.rpartition(".lora_")[0].rpartition(".")[2] for name in names if is_of_adapter(name)}
    return {
        "enable_lora": True,
        "max_loras": num_loaded or 1,
        "max_lora_rank": adapters.rank,
        "lora_target_modules": sorted(modules),
        "additional_config": {"lora_scale": 1.0 if num_loaded else adapters.scale},
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


class LoadedAdapters:
    """Adapters that vLLM loads from PEFT folders when requests name them, those used last instead of the oldest."""

    def __init__(self, runner: Any, on_gpu: bool) -> None:
        self._ids: dict[str, int] = {}
        for wrapper in runner.lora_manager._adapter_manager.punica_wrapper_mapping.values():
            if not on_gpu:
                wrapper.add_shrink = _without_bare_rows(wrapper)

    def request(self, folder: str) -> Any:
        """Return vLLM's request for the adapters of a folder, whose name also keeps cached prefixes apart; None for none.

        Raises DataError if the folder is not there: vLLM would fail in the middle of a step.
        """
        from vllm.lora.request import LoRARequest

        if not folder:
            return None
        if not (Path(folder) / ADAPTER_FILE).is_file():
            raise DataError(f"{folder} has no {ADAPTER_FILE}; give a folder of adapters that have been saved")
        number = self._ids.setdefault(folder, len(self._ids) + 1)
        return LoRARequest(lora_name=folder, lora_int_id=number, lora_path=folder)


def _without_bare_rows(wrapper: Any) -> Any:
    """Return the product with A for a CPU, where vLLM multiplies rows without an adapter by that of the last slot."""
    shrink = wrapper.add_shrink

    def add_shrink(
        y: tuple[Tensor, ...] | Tensor, x: Tensor, a: tuple[Tensor, ...], scale: float, **more: Any
    ) -> None:
        shrink(y, x, a, scale, **more)
        bare = wrapper.token_lora_indices < 0
        for part in y:
            part.view(-1, part.size(-1))[bare] = 0

    return add_shrink


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
