"""Families with a mixture of experts in most layers: a router, and experts that are gated MLPs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from hybridengine.families.family import Columns, Entry, Family, NameSet, Rows, Stack, Whole
from hybridengine.families.sizes import DecoderSizes

_MEGATRON_EXPERT = {
    NameSet.LOCAL: "mlp.experts.local_experts.{place}.{linear}.weight",
    NameSet.TRANSFORMER_ENGINE: "mlp.experts.{linear}.weight{place}",
}


@dataclass(frozen=True, eq=False)
class MixtureFamily(Family):
    """A family whose experts lie under `block`, one by one on disk."""

    block: str = "mlp."
    """Prefix of the layer's router and experts, in checkpoints and in vLLM."""
    halves: tuple[str, str] = ("gate_proj", "up_proj")
    """Names of the projections whose outputs are multiplied; the first one's goes through the activation."""
    down: str = "down_proj"

    def refusals(self, config: Mapping[str, Any]) -> Iterator[str]:
        yield from super().refusals(config)
        experts = self.experts_of(config)
        assert experts is not None, "a mixture has experts"
        if not 1 <= experts.num_active <= experts.num_experts:
            yield (
                f"{self.expert_keys['num_active']}={experts.num_active} must be between 1 and {experts.num_experts}, the"
                " number of experts; restore the model's original config.json"
            )
        elif experts.num_active == 1 and experts.normalizes:
            yield (
                f"{self.expert_keys['num_active']}=1 with weights that add up to 1 is not supported,"
                " because Megatron-core weights a single expert by its own score; use one with more active experts"
            )

    def mlp_tensors(self, sizes: DecoderSizes, layer: int) -> dict[str, tuple[int, ...]]:
        experts = sizes.expert_layer(layer)
        if experts is None:
            return super().mlp_tensors(sizes, layer)
        hidden, ffn = sizes.hidden_size, experts.ffn_hidden_size
        tensors: dict[str, tuple[int, ...]] = {f"{self.block}gate.weight": (experts.num_experts, hidden)}
        for number in range(experts.num_experts):
            tensors |= {self._weight(number, half): (ffn, hidden) for half in self.halves}
            tensors[self._weight(number, self.down)] = (hidden, ffn)
        return tensors

    def megatron_mlp(self, sizes: DecoderSizes, names: NameSet, layer: int) -> tuple[Entry, ...]:
        if sizes.expert_layer(layer) is None:
            return super().megatron_mlp(sizes, names, layer)
        return (
            Whole("pre_mlp_layernorm.weight", "post_attention_layernorm.weight"),
            Whole("mlp.router.weight", f"{self.block}gate.weight"),
        )

    def megatron_expert(
        self, sizes: DecoderSizes, names: NameSet, number: int, place: int
    ) -> tuple[Entry, ...]:
        name = _MEGATRON_EXPERT[names]
        return (
            Stack(name.format(place=place, linear="linear_fc1"), self._halves(sizes, number)),
            Columns(name.format(place=place, linear="linear_fc2"), self._weight(number, self.down)),
        )

    def megatron_config(self, sizes: DecoderSizes) -> dict[str, Any]:
        experts = sizes.experts
        assert experts is not None, "a mixture has experts"
        return super().megatron_config(sizes) | {
            "num_moe_experts": experts.num_experts,
            "moe_router_topk": experts.num_active,
            "moe_ffn_hidden_size": experts.ffn_hidden_size,
            "moe_layer_freq": [int(layer >= experts.num_dense_layers) for layer in range(sizes.num_layers)],
            # Softmax over the chosen experts alone is softmax over all of them, normalised.
            "moe_router_pre_softmax": not experts.normalizes,
        }

    def vllm_mlp(self, sizes: DecoderSizes, layer: int) -> tuple[Entry, ...]:
        if sizes.expert_layer(layer) is None:
            return super().vllm_mlp(sizes, layer)
        return (Whole(f"{self.block}gate.weight", f"{self.block}gate.weight"),)

    def vllm_expert(self, sizes: DecoderSizes, number: int, place: int) -> tuple[Entry, ...]:
        start = f"{self.block}experts.routed_experts."
        return (
            Stack(f"{start}w13_weight[{place}]", self._halves(sizes, number)),
            Columns(f"{start}w2_weight[{place}]", self._weight(number, self.down)),
        )

    def _halves(self, sizes: DecoderSizes, number: int) -> tuple[Rows, ...]:
        assert sizes.experts is not None, "a mixture has experts"
        ffn = sizes.experts.ffn_hidden_size
        return tuple(Rows(self._weight(number, half), 0, ffn, ffn) for half in self.halves)

    def _weight(self, number: int, projection: str) -> str:
        return f"{self.block}experts.{number}.{projection}.weight"
