"""Routing of a mixture's tokens in training: replayed choices, losses of the router, and the experts' load.

All of it concerns a pack's own tokens: padding, and packs that only fill a schedule, are not counted. A pass that
recomputes a layer finds the same pack, and repeats its choices and figures.

Shapes: N tokens of this rank, L layers with experts, K experts of a token, E experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.models.gpt import GPTModel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler, compute_routing_scores_for_aux_loss
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor

from hybridengine.backends.megatron.shim import device
from hybridengine.families.sizes import ExpertSizes


@dataclass
class RoutedPack(PackedSeqParams):
    """A pack as Megatron-core's layers see it, and how its tokens are routed on this rank."""

    is_token_N: Tensor = field(default_factory=lambda: torch.ones(0, dtype=torch.bool))
    """False for padding."""
    routes_NLK: Tensor | None = None
    """Experts of each token; -1 where the router chooses. None if it always does."""
    weight: float = 0.0
    """Weight of the pack's router losses among those of a step: what its loss adds to the divisor of gradients."""
    load: dict[int, Tensor] = field(default_factory=dict)
    """Layer -> tokens of each expert, [E]."""
    losses: dict[int, Tensor] = field(default_factory=dict)
    """Layer -> this rank's part of the auxiliary loss and of the z-loss, [2], without coefficients."""


class Router(TopKRouter):
    """Megatron-core's router, which follows a pack's routes, counts tokens, and has losses of its own.

    Megatron-core's losses include padding, and their scale depends on its version and on what the policy's loss counts.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.router_replay: Any = SimpleNamespace(get_replay_topk=self._choose)
        self.pack: RoutedPack | None = None
        """Pack that the layer computes at present."""
        self.layer = 0
        """Number of the layer among those with experts, counted over all stages."""
        self.coefs = (0.0, 0.0)
        """Coefficients of the auxiliary loss and the z-loss."""

    def _choose(
        self, scores: Tensor, topk: int, num_groups: int | None, group_topk: int | None, usual: Any
    ) -> tuple[Tensor, Tensor]:
        """Return scores and numbers of each token's experts, [N, K] each."""
        chosen, experts = usual(scores, topk, num_groups=num_groups, group_topk=group_topk)
        assert self.pack is not None, "a layer is given a pack before its router"
        if self.pack.routes_NLK is None:
            return chosen, experts
        routes = self.pack.routes_NLK[:, self.layer].long()
        experts = torch.where(routes >= 0, routes, experts)
        return scores.gather(1, experts), experts

    def routing(self, logits: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return gates [N, E] and a mask of the experts that compute each token [N, E]."""
        gates, chosen = super().routing(logits, padding_mask)
        pack = self.pack
        assert pack is not None, "a layer is given a pack before its router"
        pack.load[self.layer] = load = (chosen & pack.is_token_N.unsqueeze(1)).sum(0)
        if any(self.coefs) and self.training and torch.is_grad_enabled():
            losses = self._losses(logits.view(-1, load.numel()), load, pack.is_token_N)
            pack.losses[self.layer] = losses.detach()
            total = sum(coef * one for coef, one in zip(self.coefs, losses, strict=True))
            gates = MoEAuxLossAutoScaler.apply(gates, total * pack.weight)
        return gates, chosen

    def _losses(self, logits_NE: Tensor, load_E: Tensor, is_token_N: Tensor) -> Tensor:
        """Return this rank's part of both losses, [2]; their sums over the ranks that share a pack are

            E · sum_i f_i P_i           f_i: share of the choices that are expert i, P_i: mean score of expert i
            mean (logsumexp logits)²    over the tokens

        Source: Switch Transformers (arXiv 2101.03961), equations 4 to 6; ST-MoE (arXiv 2202.08906), equation 5.
        """
        counts = torch.cat([load_E, is_token_N.sum().unsqueeze(0)]).float()
        dist.all_reduce(counts, group=self.tp_cp_group)
        num_tokens = counts[-1].clamp(min=1)
        shares_E = counts[:-1] / (num_tokens * self.topk)
        logits_NE = logits_NE.float()
        _, scores_NE = compute_routing_scores_for_aux_loss(logits_NE, self.topk, self.score_function)
        scores_E = (scores_NE * is_token_N.unsqueeze(1)).sum(0) / num_tokens
        squares_N = logits_NE.logsumexp(-1).square() * is_token_N
        return torch.stack([len(load_E) * (shares_E * scores_E).sum(), squares_N.sum() / num_tokens])


def connect_routers(
    chunk: GPTModel, layers: Sequence[int], experts: ExpertSizes, coefs: tuple[float, float]
) -> None:
    """Number the routers of a virtual stage with these `layers` of the decoder, and make layers hand them each pack."""
    for number, layer in zip(layers, chunk.decoder.layers, strict=True):
        router = getattr(layer.mlp, "router", None)
        if router is None:  # a dense layer
            continue
        router.layer, router.coefs = number - experts.num_dense_layers, coefs
        layer.register_forward_pre_hook(_give_pack, with_kwargs=True)


def _give_pack(layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    layer.mlp.router.pack = kwargs["packed_seq_params"]


class RoutingTotals:
    """Counts of the routers of this rank since the totals were last taken."""

    def __init__(self, experts: ExpertSizes, num_layers: int, groups: ProcessGroupCollection) -> None:
        self._experts, self._groups = experts, groups
        self._num_layers = num_layers - experts.num_dense_layers
        self.drop()

    def drop(self) -> None:
        """Begin anew."""
        shape, settings = self._num_layers, {"dtype": torch.float64, "device": device()}
        self._load = torch.zeros(shape, self._experts.num_experts, **settings)
        self._losses = torch.zeros(shape, 2, **settings)
        self._weight = 0.0

    def add(self, packs: Sequence[RoutedPack]) -> None:
        """Add the figures of packs that have been computed."""
        for pack in packs:
            self._weight += pack.weight
            for layer, load in pack.load.items():
                self._load[layer] += load
            for layer, losses in pack.losses.items():
                self._losses[layer] += losses * pack.weight

    def take(self) -> dict[str, float]:
        """Return the metrics of all ranks, means over layers, and begin anew. Collective over all ranks of the model."""
        figures = torch.cat([self._load, self._losses], 1)
        weight = torch.tensor(self._weight, dtype=torch.float64, device=device())
        self.drop()
        for tensor in (figures, weight):
            dist.all_reduce(tensor, group=self._groups.intra_dist_opt)
        load, losses = figures[:, :-2], figures[:, -2:].mean(0)
        copies = self._groups.tp_cp.size() * self._groups.pp.size()  # ranks that have counted the same pack
        aux, z = (losses / (weight / copies).clamp(min=1e-9)).tolist()
        return {
            "expert_load_max": float((load.amax(1) / load.mean(1).clamp(min=1e-9)).mean()),
            "expert_idle_share": float((load == 0).double().mean()),
            **(
                {"router_aux": aux, "router_z": z} if aux else {}
            ),  # without coefficients nobody has computed them
        }
