"""Tables of low-rank adapters, derived from those of the weights that they adapt: no family has any of its own.

A layer with the weight W [out, in] has two factors, A [rank, in] and B [out, rank]; its rows are those of B, its columns
those of A. The logical tensors have the names of PEFT's files. Where Megatron-core fuses projections, they share one A,
whose logical tensor is that of the first projection.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

from hybridengine.families.family import Columns, Entry, Rows, Stack, Whole
from hybridengine.families.sizes import AdapterSizes

MODULES = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")
"""Linear layers of Megatron's decoder layers, those of experts among them."""
_LATENT = ("linear_q_down_proj", "linear_q_up_proj", "linear_kv_down_proj", "linear_kv_up_proj")
_LAYERS = {"linear_qkv": ("linear_qkv", *_LATENT)}
"""Module -> its layers where they are others than itself: queries, keys and values may come from latent attention."""
FACTORS = ("lora_a", "lora_b")
"""Names of Megatron's parameters A and B, which belong to the layer itself."""


def is_of_adapter(name: str) -> bool:
    """Return True for the names of an adapter's parameters and logical tensors."""
    return ".lora_" in name


def is_adapted(layer: str, adapters: AdapterSizes) -> bool:
    """Return True if the linear layer with this name is one of `adapters.modules`."""
    name = layer.rpartition(".")[2]
    return any(name in _LAYERS.get(module, (module,)) for module in adapters.modules)


def factor_of(tensor: str, factor: str) -> str:
    """Return the logical tensor of factor `A` or `B` of a logical tensor."""
    return f"{tensor.removesuffix('.weight')}.lora_{factor}.weight"


def adapter_tensors(
    entries: Iterable[Entry], adapters: AdapterSizes, tensors: Mapping[str, tuple[int, ...]]
) -> dict[str, tuple[int, ...]]:
    """Return the logical tensors of the adapters of Megatron's `entries`, whose own ones are `tensors`: name -> shape."""
    found: dict[str, tuple[int, ...]] = {}
    for entry in _adapted(entries, adapters):
        weights = _weights(entry)
        found[factor_of(weights[0], "A")] = (adapters.rank, tensors[weights[0]][1])
        found |= {factor_of(weight, "B"): (tensors[weight][0], adapters.rank) for weight in weights}
    return found


def peft_tensors(entries: Iterable[Entry], adapters: AdapterSizes) -> dict[str, str]:
    """Return name in PEFT's files -> logical tensor, for the adapters of Megatron's `entries`."""
    found: dict[str, str] = {}
    for entry in _adapted(entries, adapters):
        weights = _weights(entry)
        found |= {factor_of(weight, "A"): factor_of(weights[0], "A") for weight in weights}
        found |= {factor_of(weight, "B"): factor_of(weight, "B") for weight in weights}
    return found


def megatron_adapters(entries: Iterable[Entry], adapters: AdapterSizes | None) -> Iterator[Entry]:
    """Yield the parameters of the adapters of Megatron's `entries`."""
    for entry in _adapted(entries, adapters):
        names = (f"{entry.name.removesuffix('weight')}{factor}" for factor in FACTORS)
        yield from _factors(entry, *names)


def vllm_adapters(
    entries: Iterable[Entry],
    megatron_entries: Iterable[Entry],
    adapters: AdapterSizes | None,
    *,
    whole_slots: bool,
) -> Iterator[Entry]:
    """Yield the parameters of the adapters of vLLM's `entries`, which has an A and a B for each projection, or for the
    whole of a fused layer if it has `whole_slots`."""
    adapted = {weight for entry in _adapted(megatron_entries, adapters) for weight in _weights(entry)}
    for entry in entries:
        if isinstance(entry, Whole) or not adapted.issuperset(_weights(entry)):
            continue
        layer, first = entry.name.removesuffix(".weight"), _weights(entry)[0]
        parts: list[Stack | Columns] = [entry]
        if isinstance(entry, Stack) and not whole_slots:
            parts = [Stack(entry.name, (section,)) for section in entry.sections]
        for number, part in enumerate(parts):
            yield from _factors(part, f"{layer}.lora_a[{number}]", f"{layer}.lora_b[{number}]", first)


def _adapted(entries: Iterable[Entry], adapters: AdapterSizes | None) -> Iterator[Entry]:
    for entry in entries if adapters else ():
        layer, _, kind = entry.name.rpartition(".")
        if kind == "weight" and is_adapted(layer, adapters):  # type: ignore[arg-type]
            yield entry


def _weights(entry: Entry) -> tuple[str, ...]:
    """Return the logical tensors of an entry."""
    return tuple(one.tensor for one in entry.sections) if isinstance(entry, Stack) else (entry.tensor,)


def _factors(entry: Entry, name_a: str, name_b: str, first: str | None = None) -> Iterator[Entry]:
    """Yield A and B of an entry; A is that of the logical tensor `first`, by default the entry's first one."""
    tensor_a = factor_of(first or _weights(entry)[0], "A")
    if isinstance(entry, Stack):
        yield Whole(name_a, tensor_a)
        yield replace(entry, name=name_b, sections=tuple(map(_rows_of_b, entry.sections)))
    else:
        yield replace(entry, name=name_a, tensor=tensor_a)
        yield Whole(name_b, factor_of(entry.tensor, "B"))


def _rows_of_b(rows: Rows) -> Rows:
    return replace(rows, tensor=factor_of(rows.tensor, "B"))
