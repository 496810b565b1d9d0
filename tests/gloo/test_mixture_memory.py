"""Memory and messages of Megatron-core's own layer with experts, in a forward and a backward pass, against the planner's.

Transformer Engine's grouped matrices, which need a GPU, are replaced by one that keeps the same: its input and weights.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from megatron.core.fusions import fused_bias_swiglu
from megatron.core.parallel_state import get_global_memory_buffer
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer import ModuleSpec
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.moe import router
from megatron.core.transformer.moe.experts import TEGroupedMLP
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from hybridengine.backends.megatron.groups import build_groups, initialize_globals
from hybridengine.backends.megatron.model import transformer_config
from hybridengine.backends.megatron.shim import device_shim
from hybridengine.config.role_sections import MegatronSettings
from hybridengine.families.family import NameSet
from hybridengine.families.sizes import ExpertSizes
from hybridengine.models.shapes import ModelShape
from hybridengine.planning.costs import mixtures
from hybridengine.rehearsal.counting import StorageCounter
from hybridengine.topology.grid import Grid
from hybridengine.topology.sizes import TrainSizes
from hybridengine.weights.process_groups import ProcessGroups
from tests.gloo.ranks import RankLauncher

TOKENS = 4096
"""Tokens that the tensor ranks of a replica have together."""
NARROW = ModelShape("qwen3_moe", 1, 256, 256, 8, 4, 32, 1000, 4096, experts=ExpertSizes(8, 2, 96))
WIDE = replace(NARROW, hidden_size=64, experts=ExpertSizes(16, 4, 512, normalizes=False))
SHARED = replace(NARROW, experts=ExpertSizes(8, 2, 96, num_shared=3))
SIZES = {
    1: ("1-1-1",),
    2: ("1-1-2 e=2", "1-2-1", "1-2-1 e=2 etp=1"),
    4: ("1-2-2 e=2 etp=1", "1-2-2 e=2", "1-1-4 e=4"),
}


class _Grouped(torch.autograd.Function):
    """A matrix for each expert, which keeps what Transformer Engine's does: the rows of all experts, and the weights."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, counts: list[int], *weights: Tensor) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(rows, *weights)
        ctx.counts = counts
        output = rows.new_empty(len(rows), len(weights[0]))
        for part, out, weight in zip(rows.split(counts), output.split(counts), weights, strict=True):
            torch.mm(part, weight.T, out=out)
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        rows, *weights = ctx.saved_tensors
        found = torch.empty_like(rows)
        for part, out, weight in zip(grad.split(ctx.counts), found.split(ctx.counts), weights, strict=True):
            torch.mm(part, weight, out=out)
        return found, None, *([None] * len(weights))  # gradients of weights go to their buffer


class GroupedLinear(nn.Module):
    def __init__(
        self, num_experts: int, width: int, out: int, *, config: Any, pg_collection: Any, **_: Any
    ) -> None:
        super().__init__()
        shards = pg_collection.expt_tp.size()
        widens = width == config.hidden_size and out != config.hidden_size
        size = (out // shards, width) if widens else (out, width // shards)
        self.experts = nn.ParameterList(
            nn.Parameter(torch.randn(size, dtype=torch.bfloat16)) for _ in range(num_experts)
        )

    def forward(self, rows: Tensor, counts: list[int]) -> tuple[Tensor, None]:
        return _Grouped.apply(rows, counts, *self.experts), None  # type: ignore[return-value]


def gate(both: Tensor, weights: Tensor) -> Tensor:
    """Return the product of a kernel without intermediate results."""
    return both.new_empty(len(both), both.size(-1) // 2)


class Counting(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.storages = StorageCounter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.storages.observe(func, args, result)
        return result


def measure(rank: int, sizes: list[str], shape: ModelShape, recompute: str) -> list[dict[str, float]]:
    """Return kept and peak bytes and the bytes given to collectives by a layer on this rank, at each of the sizes."""
    initialize_globals(1)
    registry = ProcessGroups()
    found = []
    for text in sizes:
        every = [_measured(TrainSizes.parse(text), registry, shape, recompute) for _ in range(3)]
        # A thread of Gloo may let go of a message late.
        found.append({name: min(one[name] for one in every) for name in every[0]})
    return found


def _measured(
    sizes: TrainSizes, registry: ProcessGroups, shape: ModelShape, recompute: str
) -> dict[str, float]:
    groups = build_groups(Grid(sizes), registry)
    settings = MegatronSettings.model_validate({"recompute": recompute})
    sent: dict[str, float] = {"all_to_all": 0.0}
    all_to_all, experts = torch.distributed.all_to_all_single, shape.experts
    assert experts is not None

    def even(logits: Tensor) -> Tensor:
        """Return logits by which all experts get equally many tokens."""
        chosen = torch.zeros_like(logits).view(-1, experts.num_experts)
        for number in range(experts.num_active):
            tokens = torch.arange(len(chosen))
            chosen[tokens, (tokens * experts.num_active + number) % experts.num_experts] = 1
        return logits * 0 + chosen.view_as(logits)

    def counted(output: Tensor, rows: Tensor, *arguments: Any, **named: Any) -> Any:
        sent["all_to_all"] += rows.nbytes
        return all_to_all(output, rows, *arguments, **named)

    with (
        device_shim(),
        mock.patch.object(fused_bias_swiglu, "weighted_swiglu", gate),
        mock.patch.object(
            fused_bias_swiglu,
            "weighted_swiglu_back",
            lambda grad, both, weights: (torch.empty_like(both), torch.empty_like(weights)),
        ),
        mock.patch.object(torch.distributed, "all_to_all_single", counted),
        mock.patch.object(router, "apply_random_logits", even),
    ):
        config = transformer_config(shape, sizes, "bfloat16", NameSet.LOCAL, settings)
        config.bias_activation_fusion = config.moe_router_force_load_balancing = True
        config.moe_shared_expert_intermediate_size = experts.shared_size or None
        linear = MLPSubmodules(linear_fc1=GroupedLinear, linear_fc2=GroupedLinear)
        whole = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
        parts = MoESubmodules(
            ModuleSpec(TEGroupedMLP, submodules=linear), ModuleSpec(SharedExpertMLP, submodules=whole)
        )
        layer = MoELayer(config, parts, 1, pg_collection=groups)
        layer.to(torch.bfloat16)
        for weight in layer.parameters():
            nn.init.normal_(weight)
        own = {weight.untyped_storage()._cdata: weight.nbytes for weight in layer.parameters()}
        kept: dict[int, int] = {}

        def keep(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            if storage._cdata not in own:
                kept[storage._cdata] = storage.nbytes()
            return tensor

        rows = torch.randn(TOKENS // sizes.tp_size, 1, shape.hidden_size).bfloat16().requires_grad_()
        mode = Counting()
        with mode, torch.no_grad():
            layer(rows)
        inference_peak = mode.storages.peak_bytes
        mode = Counting()
        with mode, torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            output, _ = layer(rows)
            gradient = torch.ones_like(output)
            forward_peak = mode.storages.peak_bytes
            dispatcher: Any = layer.token_dispatcher
            if recompute == "none":
                keep(dispatcher.probs)
                keep(dispatcher.routing_map)
            kept_bytes = sum(kept.values())
            mode.storages.restart_peak()
            forward_sent = sent["all_to_all"] / 2  # there was an inference pass before
            output.backward(gradient)
        # Transformer Engine has no buffer for the gathered parts of a sequence.
        buffers = get_global_memory_buffer().buffer.values() if sizes.tp_size > 1 else ()
        others = sum(own.values()) + sum(one.nbytes for one in buffers)
        return {
            "inference_peak": inference_peak - others,
            "kept": kept_bytes,
            "forward_peak": forward_peak - others,
            # The output and its gradient are the caller's.
            "backward_peak": mode.storages.peak_bytes - others - 2 * output.nbytes,
            "all_to_all": forward_sent,
            "all_to_all_back": sent["all_to_all"] - 2 * forward_sent,
        }


@pytest.mark.parametrize("shape", [NARROW, WIDE, SHARED], ids=["narrow", "wide", "shared"])
@pytest.mark.parametrize("num_ranks", SIZES)
def test_a_layer_keeps_and_sends_what_the_planner_counts(
    num_ranks: int, shape: ModelShape, run_ranks: RankLauncher
) -> None:
    by_rank = run_ranks(num_ranks, measure, list(SIZES[num_ranks]), shape, "none", timeout_s=120)
    assert shape.experts is not None
    for index, text in enumerate(SIZES[num_ranks]):
        sizes = TrainSizes.parse(text)
        found = {name: min(one[index][name] for one in by_rank) for name in by_rank[0][index]}
        each = mixtures.mixture_bytes(shape, sizes, "bfloat16", sequence_parallel=True)
        assert found["kept"] == pytest.approx(each.kept * TOKENS, rel=1e-6), text
        chosen = TOKENS / sizes.tp_size * shape.experts.num_active
        # NCCL copies equal parts for a reduce-scatter into one tensor, which Gloo does not.
        copied = sizes.expert_shards > 1 == sizes.expert_parts
        less = copied * chosen * sizes.expert_shards * 2 * shape.hidden_size
        peak, most = max(found["forward_peak"], found["backward_peak"]), (each.kept + each.working) * TOKENS
        assert most - less <= 1.005 * peak <= 1.01 * most, text
        peak = found["inference_peak"] + TOKENS * 2 * shape.hidden_size / sizes.tp_size  # and the residual
        assert each.forward * TOKENS - less <= 1.02 * peak <= 1.04 * each.forward * TOKENS, text
        there = (
            chosen * 2 * (shape.hidden_size + 1) if sizes.expert_parts > 1 else 0
        )  # with their probabilities
        back = chosen * 2 * shape.hidden_size if sizes.expert_parts > 1 else 0
        assert found["all_to_all"] == found["all_to_all_back"] == there + back, text


def test_a_layer_computed_again_keeps_the_norms_output_alone(run_ranks: RankLauncher) -> None:
    sizes = TrainSizes.parse("1-2-1 e=2 etp=1")
    each = mixtures.mixture_bytes(NARROW, sizes, "bfloat16", sequence_parallel=True)
    for ((found,),) in zip(
        run_ranks(2, measure, [str(sizes)], NARROW, "selective", timeout_s=120), strict=True
    ):
        assert found["kept"] == 2 * NARROW.hidden_size * TOKENS / 2
        assert found["backward_peak"] == pytest.approx((each.kept + each.working) * TOKENS, rel=0.05)
        assert found["all_to_all_back"] == pytest.approx(2 * found["all_to_all"])
