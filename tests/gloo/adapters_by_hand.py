"""Adapters by plain PyTorch: layers of a transformers model with A and B beside their weights, and PEFT's folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn.utils.parametrize import register_parametrization

from hybridengine.families.adapters import MODULES
from hybridengine.families.sizes import AdapterSizes

RANK, ALPHA = 8, 12.0
ADAPTERS = AdapterSizes(RANK, ALPHA, MODULES)
FUSED = {"k_proj": "q_proj", "v_proj": "q_proj", "up_proj": "gate_proj"}
"""Projection -> the one whose A it shares."""
PROJECTIONS = (
    "q_proj",
    "k_proj",
    "v_proj",
    "qkv_proj",
    "q_a_proj",
    "q_b_proj",
    "kv_a_proj_with_mqa",
    "kv_b_proj",
    "o_proj",
    "gate_proj",
    "up_proj",
    "gate_up_proj",
    "down_proj",
)


class Adapted(nn.Module):
    """A frozen linear layer with an adapter."""

    def __init__(self, layer: nn.Linear, lora_a: nn.Parameter, lora_b: nn.Parameter) -> None:
        super().__init__()
        self.layer, self.lora_a, self.lora_b = layer, lora_a, lora_b

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + ALPHA / RANK * F.linear(F.linear(x, self.lora_a), self.lora_b)


class LowRank(nn.Module):
    """Adds an adapter to each of the stacked weights [E, out, in]."""

    def __init__(self, weight: Tensor, generator: torch.Generator) -> None:
        super().__init__()
        num_experts, rows, columns = weight.shape
        self.lora_a = nn.Parameter(0.1 * torch.randn(num_experts, RANK, columns, generator=generator))
        self.lora_b = nn.Parameter(0.1 * torch.randn(num_experts, rows, RANK, generator=generator))

    def forward(self, weight: Tensor) -> Tensor:
        return weight + ALPHA / RANK * self.lora_b @ self.lora_a


def _adapt_experts(prefix: str, experts: Any, generator: torch.Generator) -> dict[str, Any]:
    found: dict[str, Any] = {}
    fused, down = (LowRank(getattr(experts, name), generator) for name in ("gate_up_proj", "down_proj"))
    register_parametrization(experts, "gate_up_proj", fused)
    register_parametrization(experts, "down_proj", down)
    for number, lora_b in enumerate(fused.lora_b.data):
        halves = dict(zip(("gate_proj", "up_proj"), lora_b.chunk(2), strict=True))
        for half, rows in {**halves, "down_proj": down.lora_b.data[number]}.items():
            lora_a = (down if half == "down_proj" else fused).lora_a.data[number]
            found[f"{prefix}.{number}.{half}.lora_A.weight"] = lora_a
            found[f"{prefix}.{number}.{half}.lora_B.weight"] = rows
    return found


def adapt(model: nn.Module, values: dict[str, Tensor] | None = None) -> dict[str, nn.Parameter]:
    """Freeze the model and give its projections adapters with `values`, by default random; return them by PEFT's names.

    transformers stacks the experts of a layer, so that theirs are views of stacks.
    """
    generator, found = torch.Generator().manual_seed(3), dict[str, nn.Parameter]()
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    layers = [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and name.rpartition(".")[2] in PROJECTIONS
    ]
    for name, layer in layers:
        parent, _, last = name.rpartition(".")
        first = f"{parent}.{FUSED.get(last, last)}"
        lora_b = nn.Parameter(0.1 * torch.randn(layer.out_features, RANK, generator=generator))
        if name == first:
            lora_a = nn.Parameter(0.1 * torch.randn(RANK, layer.in_features, generator=generator))
        else:
            lora_a = found[f"base_model.model.{first}.lora_A.weight"]
        setattr(model.get_submodule(parent), last, Adapted(layer, lora_a, lora_b))
        found[f"base_model.model.{name}.lora_A.weight"] = lora_a
        found[f"base_model.model.{name}.lora_B.weight"] = lora_b
    for name, module in list(model.named_modules()):
        if name.endswith(".experts"):
            found |= _adapt_experts(f"base_model.model.{name}", module, generator)
    for name, value in (values or {}).items():
        found[name].data.copy_(value)
    return found


def write_peft(folder: Path, adapters: dict[str, nn.Parameter], **more: Any) -> None:
    """Write adapters as peft does."""
    folder.mkdir()
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "target_modules": PROJECTIONS, **more}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    tensors = {name: one.detach().clone() for name, one in adapters.items()}
    save_file(tensors, folder / "adapter_model.safetensors")
