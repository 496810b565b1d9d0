"""All code that depends on the version of megatron-core, 0.16 or 0.19, or on its private interfaces.

latent projections             0.16's own, without Transformer Engine, gathers over a group of its global state
one DDP bucket per parameter   DistributedDataParallel splits buckets by size only with overlap and on the first stage;
                               a parameter marked `shared_embedding` always gets its own bucket, on any stage
uneven stages                  a stage's layers are passed as a list: the pipeline layout of 0.16 counts them for the
                               global parallel state's stage instead of the stage of the groups
fused gradients without apex   the output layer, which is replaced, refuses to be built without its kernel
gradients reduced in groups    buckets are those of the switch, one per parameter; groups of them are reduced together
buffers released by bucket     the contiguous parameter buffer is replaced by one tensor per bucket
optimizer state by parameter   ranges and moments of a distributed optimizer are read from its internal structures
weights in 8 bits              modules of Transformer Engine keep copies, also while another mode needs the memory
routers                        parts of a layer of experts are named in its spec, or in a partial function
one replica                    reduce-scatter and all-gather within one rank, which copy everything, are skipped
routers                        0.16 looks up Transformer Engine's product, also without Transformer Engine
settings of one step           parameter groups hold a multiple of the weight decay; the optimizers' config the clipping
"""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.extensions.transformer_engine import HAVE_TE
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.tensor_parallel import layers
from megatron.core.transformer import TransformerConfig, multi_latent_attention
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from torch import nn

from hybridengine.backends.megatron.attention import (
    LayerAttention,
    PackedAttention,
    RmsNorm,
    WholeLinear,
    normed,
)
from hybridengine.backends.megatron.routing import Router
from hybridengine.config.role_sections import OptimizerSection
from hybridengine.families.family import NameSet
from hybridengine.families.registry import FAMILIES
from hybridengine.models.shapes import ModelShape

if not hasattr(moe_utils, "te_general_gemm"):
    moe_utils.te_general_gemm = None  # type: ignore[attr-defined]


multi_latent_attention.Linear = WholeLinear  # type: ignore[attr-defined]  # it takes known classes only
multi_latent_attention.HAVE_TE = HAVE_TE  # 0.16 looks for what is missing without Transformer Engine


def stage_spec(names: NameSet, shape: ModelShape, layers: range) -> TransformerBlockSubmodules:
    """Return the spec of a pipeline stage with these layers of a decoder, with parameters named as in `names`."""
    specs = [_layer_spec(names, shape, layer) for layer in layers]
    if names is NameSet.TRANSFORMER_ENGINE:
        from megatron.core.extensions.transformer_engine import TENorm

        return TransformerBlockSubmodules(layer_specs=specs, layer_norm=TENorm)  # type: ignore[arg-type]
    return TransformerBlockSubmodules(layer_specs=specs, layer_norm=RmsNorm)  # type: ignore[arg-type]


def _layer_spec(names: NameSet, shape: ModelShape, layer: int) -> ModuleSpec:
    family, experts, window = FAMILIES[shape.family], shape.expert_layer(layer), shape.window(layer)
    is_latent = shape.latent is not None
    features: dict[str, Any] = {
        "qk_layernorm": family.qk_norm or is_latent,
        "num_experts": experts.num_experts if experts else None,
        "multi_latent_attention": is_latent,
    }
    norm: Any = RmsNorm
    if names is NameSet.TRANSFORMER_ENGINE:
        from megatron.core.extensions.transformer_engine import TENorm

        norm = TENorm
        spec = get_gpt_layer_with_transformer_engine_spec(**features, moe_grouped_gemm=experts is not None)
    else:
        spec = get_gpt_layer_local_spec(**features, normalization="RMSNorm")
    parts: Any = spec.submodules
    attention: Any = parts.self_attention.submodules
    if names is NameSet.LOCAL:
        attention.core_attention = (
            functools.partial(PackedAttention, window=window) if window else PackedAttention
        )
        parts.input_layernorm = parts.pre_mlp_layernorm = RmsNorm
        if is_latent:
            attention.linear_q_down_proj = attention.linear_kv_down_proj = WholeLinear
            attention.q_layernorm = attention.kv_layernorm = RmsNorm
        elif family.qk_norm:
            attention.q_layernorm = attention.k_layernorm = RmsNorm
    elif window:
        attention.core_attention = functools.partial(_windowed, attention.core_attention, window)
    if shape.window_rope_theta is not None:
        parts.self_attention.module = LayerAttention
        parts.self_attention.params = {**parts.self_attention.params, "rotary": int(window > 0)}
    if family.post_norms:
        attention.linear_proj = normed(attention.linear_proj, norm)
        mlp = _mlp_parts(parts)
        mlp.linear_fc2 = normed(mlp.linear_fc2, norm)
    if experts:
        _mlp_parts(parts).router = Router
    return spec


def _windowed(attention: Any, window: int, *, config: TransformerConfig, **named: Any) -> nn.Module:
    """Return Transformer Engine's attention to the last `window` positions.

    Megatron-core counts layers with a window for the stages of its global state, which these may not be.
    """
    own = copy.copy(config)
    own.window_size, own.window_attn_skip_freq = (window - 1, 0), None
    return attention(config=own, **named)  # type: ignore[no-any-return]


def _mlp_parts(layer: Any) -> Any:
    """Return what the MLP of a layer, or its experts, are made of; megatron-core 0.19 has it in a partial function."""
    return (
        layer.mlp.keywords["submodules"] if isinstance(layer.mlp, functools.partial) else layer.mlp.submodules
    )


@contextlib.contextmanager
def fusion_without_apex() -> Iterator[None]:
    """Let Megatron-core build its output layer with fused gradients while the context is open.

    Its own layers fuse by a kernel of apex, and refuse to be built without it; Transformer Engine's have their own. The
    output layer is Megatron-core's in any case, and is replaced before it computes anything.
    """
    available = layers._grad_accum_fusion_available
    layers._grad_accum_fusion_available = True
    try:
        yield
    finally:
        layers._grad_accum_fusion_available = available


@contextlib.contextmanager
def one_bucket_per_parameter(chunks: Iterable[nn.Module]) -> Iterator[None]:
    """Give every parameter of the modules its own DistributedDataParallel bucket while the context is open."""
    every = (parameter for chunk in chunks for parameter in chunk.parameters())
    marked = [parameter for parameter in every if not hasattr(parameter, "shared_embedding")]
    for parameter in marked:
        parameter.shared_embedding = True  # type: ignore[attr-defined]
    try:
        yield
    finally:
        for parameter in marked:
            del parameter.shared_embedding  # type: ignore[attr-defined]


def split_parameter_buffers(replicated: Iterable[Any]) -> dict[nn.Parameter, torch.Tensor]:
    """Give each DDP bucket its own tensor, before an optimizer views the parameters; return parameter -> tensor."""
    tensors: dict[nn.Parameter, torch.Tensor] = {}
    for buffer in buffers(replicated):
        for bucket in buffer.buckets:
            own = torch.zeros_like(bucket.param_data)
            for parameter in bucket.params:
                start, stop, _ = buffer.param_index_map[parameter]
                view = own[start - bucket.offset : stop - bucket.offset].view(parameter.shape)
                view.copy_(parameter.data)
                parameter.data = view
                tensors[parameter] = own
            bucket.param_data = own
        buffer.param_data = None
    return tensors


REDUCTION_ELEMENTS = 40_000_000
"""Gradients that are reduced together, at least: Megatron-core's own number."""


def group_buckets(replicated: Iterable[Any]) -> None:
    """Reduce the gradients of consecutive buckets together, which DistributedDataParallel does with all of a module."""
    for chunk in replicated:
        chunk.bucket_groups = [part for whole in chunk.bucket_groups for part in _parts(whole)]
        chunk.expert_parallel_bucket_groups = [
            part for whole in chunk.expert_parallel_bucket_groups for part in _parts(whole)
        ]
        chunk.param_to_bucket_group = {
            parameter: one for one in bucket_groups([chunk]) for parameter in one.params
        }


def _parts(whole: Any) -> list[Any]:
    """Return a group of buckets as several groups of about `REDUCTION_ELEMENTS`."""
    parts, count = [[]], 0
    for bucket in whole.buckets:
        if count >= REDUCTION_ELEMENTS:
            parts, count = [*parts, []], 0
        parts[-1].append(bucket)
        count += bucket.grad_data.numel()
    ranks = whole.intra_distributed_optimizer_instance_group, whole.intra_distributed_optimizer_instance_size
    return [type(whole)(part, whole.ddp_config, *ranks) for part in parts]


def buffers(replicated: Iterable[Any]) -> list[Any]:
    """Return the buffers of weights and gradients, those of experts last: they have replicas of their own."""
    return [buffer for chunk in replicated for buffer in chunk.buffers + chunk.expert_parallel_buffers]


def bucket_groups(replicated: Iterable[Any]) -> list[Any]:
    """Return the groups of buckets that are reduced together, those of experts last."""
    return [
        group for chunk in replicated for group in chunk.bucket_groups + chunk.expert_parallel_bucket_groups
    ]


def start_reductions(replicated: Iterable[Any]) -> None:
    """Start the reductions of gradients that no backward pass has started, where they are asynchronous."""
    for group in bucket_groups(replicated):
        if group.ddp_config.overlap_grad_reduce and group.grad_reduce_handle is None:
            group.start_grad_sync()


def drop_reductions(replicated: Iterable[Any]) -> None:
    """Wait for reductions of gradients that nobody needs any more."""
    for group in bucket_groups(replicated):
        if group.grad_reduce_handle is not None:
            group.grad_reduce_handle.wait()
            group.grad_reduce_handle = None


def drop_fp8_weights(chunks: Iterable[nn.Module]) -> None:
    """Release the copies of weights in 8 bits that Transformer Engine's modules keep; the next pass makes them again."""
    for module in (module for chunk in chunks for module in chunk.modules()):
        getattr(module, "_fp8_workspaces", {}).clear()


def skip_exchange_with_oneself(replicated: Iterable[Any]) -> None:
    """Skip collectives for gradients and weights that one rank holds alone, because these would copy them."""
    for group in bucket_groups(replicated):
        if group.intra_distributed_optimizer_instance_size > 1:
            continue
        factors = {bucket.gradient_scaling_factor for bucket in group.buckets}
        assert factors == {1.0}, "losses are sums over tokens, which Megatron-core leaves as they are"
        group.start_grad_sync = lambda force_all_reduce=False: None
        group.finish_grad_sync = lambda force_all_reduce=False: None
        group.start_param_sync = lambda force_sync=False: None


def fuse_steps(optimizer: Any) -> None:
    """Make torch's Adam, which replaces that of other packages, read the weights once instead of six times."""
    for one in plain_optimizers(optimizer):
        if isinstance(one.optimizer, torch.optim.Adam | torch.optim.AdamW):
            for group in one.optimizer.param_groups:
                group["fused"] = True


@contextlib.contextmanager
def settings_of_a_step(optimizer: Any, settings: OptimizerSection) -> Iterator[None]:
    """Make Megatron's optimizer step with other settings while the context is open; its schedule must not step in it."""
    parts = plain_optimizers(optimizer)
    # One by one: the optimizers may share a config, which they read `clip_grad` from at every step.
    configs = list({id(one.config): one.config for one in parts}.values())
    groups = [group for one in parts for group in one.param_groups]
    names = ("lr", "betas", "eps", "weight_decay")
    usual = [{name: group[name] for name in names} for group in groups]
    usual_clips = [config.clip_grad for config in configs]
    try:
        for group in groups:
            group |= {"lr": settings.lr, "betas": settings.betas, "eps": settings.eps}
            group["weight_decay"] = settings.weight_decay * group["wd_mult"]
        for config in configs:
            config.clip_grad = settings.clip_grad
        yield
    finally:
        for group, values in zip(groups, usual, strict=True):
            group |= values
        for config, clip in zip(configs, usual_clips, strict=True):
            config.clip_grad = clip


def plain_optimizers(optimizer: Any) -> list[Any]:
    """Return the optimizers inside Megatron's ChainedOptimizer."""
    return list(getattr(optimizer, "chained_optimizers", [optimizer]))


@dataclass(frozen=True)
class OptimizerPart:
    """A rank's part of the distributed optimizer's state for one parameter: a range of its elements, row by row."""

    start: int
    stop: int
    master: torch.Tensor
    """Weights that steps are applied to: a part of the parameter itself if it is in float32."""
    moments: dict[str, torch.Tensor]
    """Adam's moments by name."""


MOMENTS = ("exp_avg", "exp_avg_sq")


def optimizer_parts(optimizer: Any, parameters: Mapping[str, nn.Parameter]) -> dict[str, OptimizerPart]:
    """Return parameter name -> this rank's part of its optimizer state, creating it if no step has done so."""
    found = {}
    for one in plain_optimizers(optimizer):
        for name, parameter in parameters.items():
            if parameter not in one.model_param_group_index_map:  # entirely owned by another rank
                continue
            place = one._get_model_param_range_map(parameter)["param"]
            group, order = one.model_param_group_index_map[parameter]
            master = one.optimizer.param_groups[group]["params"][order]
            state = one.optimizer.state[master]
            if MOMENTS[0] not in state:
                state |= {moment: torch.zeros_like(master) for moment in MOMENTS}
                if _counts_by_parameter(one.optimizer):
                    state["step"] = torch.zeros((), device=master.device)
            found[name] = OptimizerPart(
                place.start, place.end, master.detach(), {moment: state[moment] for moment in MOMENTS}
            )
    return found


def weights_from_masters(optimizer: Any, replicated: Iterable[Any]) -> int:
    """Fill the weights from the master weights of all replicas; return the bytes that this rank receives."""
    for one in plain_optimizers(optimizer):
        one._copy_main_params_to_model_params()
    received = 0
    for module in replicated:
        module.start_param_sync()
        for buffer in buffers([module]):
            num_replicas = buffer.data_parallel_world_size
            received += (
                sum(bucket.param_data.nbytes for bucket in buffer.buckets)
                * (num_replicas - 1)
                // num_replicas
            )
    return received


def adam_steps(optimizer: Any) -> int:
    """Return the number of steps that Adam has taken, as used in its bias correction."""
    counts = {0}
    for one in plain_optimizers(optimizer):
        counts |= {int(state["step"]) for state in one.optimizer.state.values() if "step" in state}
        counts |= {int(group["step"]) for group in one.optimizer.param_groups if "step" in group}
    return max(counts)


def set_adam_steps(optimizer: Any, steps: int) -> None:
    """Set the number of steps that Adam has taken."""
    for one in plain_optimizers(optimizer):
        for group in one.optimizer.param_groups:
            if not _counts_by_parameter(one.optimizer):
                group["step"] = steps
                continue
            for parameter in group["params"]:
                one.optimizer.state[parameter]["step"] = torch.tensor(float(steps), device=parameter.device)


def _counts_by_parameter(optimizer: Any) -> bool:
    """True for torch's Adam; others count steps per group."""
    return isinstance(optimizer, torch.optim.Adam | torch.optim.AdamW)
