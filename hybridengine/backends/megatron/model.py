"""Construction of a Megatron-core GPTModel from a model shape, a grid and explicit process groups."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.extensions.transformer_engine import HAVE_TE
from megatron.core.models.gpt import GPTModel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    set_tensor_model_parallel_attributes,
)
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.transformer import MLATransformerConfig, TransformerConfig
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor, nn

from hybridengine.backends.megatron.adapters import add_adapters
from hybridengine.backends.megatron.compat import fusion_without_apex, stage_spec
from hybridengine.backends.megatron.rotary import set_frequencies, softmax_scale
from hybridengine.backends.megatron.routing import connect_routers
from hybridengine.backends.megatron.shim import device, device_shim, is_needed
from hybridengine.backends.megatron.sight import open_eyes
from hybridengine.backends.places import Places
from hybridengine.backends.predictions import Predictions
from hybridengine.config.role_sections import MegatronSettings
from hybridengine.errors import ConfigError
from hybridengine.families.family import NameSet, is_of_expert
from hybridengine.families.registry import FAMILIES
from hybridengine.models.shapes import ModelShape, padded_vocab_size
from hybridengine.topology.sizes import TrainSizes

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}

RECOMPUTE: dict[str, dict[str, Any]] = {
    "none": {},
    "selective": {"recompute_granularity": "selective", "recompute_modules": ["mlp", "moe"]},
    "full": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
}
"""Megatron-core's settings by `MegatronSettings.recompute`."""

FP8: dict[str, dict[str, Any]] = {
    "none": {},
    "tensorwise": {"fp8": "hybrid", "fp8_recipe": "tensorwise"},
    "blockwise": {"fp8": "e4m3", "fp8_recipe": "blockwise"},
    "mxfp8": {"fp8": "e4m3", "fp8_recipe": "mxfp8"},
}
"""Megatron-core's settings by `MegatronSettings.fp8`; delayed scaling needs its global process groups."""

ACTIVATIONS: dict[str, Any] = {
    "silu": F.silu,
    "gelu_tanh": functools.partial(F.gelu, approximate="tanh"),
}
"""Activation of gates by its name in `Family.megatron_config`."""


def available_names() -> NameSet:
    """Return Transformer Engine's names if Megatron-core could import it and there is a GPU, else the local ones."""
    return NameSet.TRANSFORMER_ENGINE if HAVE_TE and not is_needed() else NameSet.LOCAL


class OutputHead(nn.Module, ABC):
    """Output layer in place of Megatron-core's: of all tokens it keeps those whose outputs are wanted."""

    partial_gradients = False
    """True if a tensor-parallel rank computes a part of the gradient, False if all compute the same."""

    def __init__(self, group: dist.ProcessGroup, sequence_parallel: bool) -> None:
        super().__init__()
        self._group, self._sequence_parallel = group, sequence_parallel
        self.wanted_N = torch.empty(0, dtype=torch.int64)
        """Indices among this rank's tokens; set before each forward pass."""

    def forward(self, hidden_S1H: Tensor, **_: Any) -> tuple[Tensor, None]:
        """Return the hidden states of the wanted tokens, [N, 1, H], from those of all S tokens or of this rank's part."""
        if self._sequence_parallel:
            hidden_S1H = gather_from_sequence_parallel_region(
                hidden_S1H, tensor_parallel_output_grad=self.partial_gradients, group=self._group
            )
        return hidden_S1H[self.wanted_N], None

    @abstractmethod
    def outputs(self, hidden_1NH: Tensor, places: Places, model: GPTModel) -> Any:
        """Return the outputs of [B, R] `places` from the output of `model`, whose head this is."""


class ScoreHead(OutputHead):
    """Output layer of a value or reward model: scores [B, R, num_labels], equal on all tensor-parallel ranks."""

    def __init__(
        self, hidden_size: int, num_labels: int, group: dist.ProcessGroup, sequence_parallel: bool
    ) -> None:
        super().__init__(group, sequence_parallel)
        self.weight = nn.Parameter(torch.zeros(num_labels, hidden_size, device=device()))

    def outputs(self, hidden_1NH: Tensor, places: Places, model: GPTModel) -> Tensor:
        return places.spread(F.linear(hidden_1NH.squeeze(0), self.weight).float())


class VocabularyHead(OutputHead):
    """Output layer of a language model, which leaves the logits to `Predictions`."""

    partial_gradients = True

    def __init__(
        self,
        layer: ColumnParallelLinear,
        vocab_size: int,
        group: dist.ProcessGroup,
        sequence_parallel: bool,
        scale: float = 1.0,
    ) -> None:
        super().__init__(group, sequence_parallel)
        self.weight = layer.weight
        """Rows of this rank; None if they are those of the embedding."""
        self._vocab_size, self._scale = vocab_size, scale

    def outputs(self, hidden_1NH: Tensor, places: Places, model: GPTModel) -> Predictions:
        hidden_NH = hidden_1NH.squeeze(0)
        if not self._sequence_parallel:
            # Not in the forward pass: Megatron-core sums contiguous gradients alone, which that of a transpose is not.
            hidden_NH = copy_to_tensor_model_parallel_region(hidden_NH, group=self._group)
        weight_WH = model.shared_embedding_or_output_weight() if self.weight is None else self.weight
        if self._scale != 1.0:  # that of logits
            hidden_NH = hidden_NH * self._scale
        return Predictions(hidden_NH, weight_WH, self._vocab_size, self._group, places)


def transformer_config(
    shape: ModelShape, sizes: TrainSizes, dtype: str, names: NameSet, settings: MegatronSettings
) -> TransformerConfig:
    """Return Megatron-core's configuration of a model at these sizes; ConfigError for FP8 without Transformer Engine."""
    on_gpu, has_te = not is_needed(), names is NameSet.TRANSFORMER_ENGINE
    if settings.fp8 != "none" and not has_te:
        raise ConfigError(
            f"fp8={settings.fp8} needs a GPU and Transformer Engine, which this process does not have; install"
            " requirements/gpu.lock.txt on a machine with a GPU, or set fp8=none"
        )
    of_family = FAMILIES[shape.family].megatron_config(shape)
    of_family["activation_func"] = ACTIVATIONS[of_family["activation_func"]]
    config = (MLATransformerConfig if shape.latent else TransformerConfig)(
        **of_family,
        **RECOMPUTE[settings.recompute],
        num_layers=shape.num_layers,
        hidden_size=shape.hidden_size,
        ffn_hidden_size=shape.ffn_hidden_size,
        num_attention_heads=shape.num_heads,
        num_query_groups=shape.num_kv_heads,
        kv_channels=shape.head_dim,
        tensor_model_parallel_size=sizes.tp_size,
        pipeline_model_parallel_size=sizes.pp_size,
        context_parallel_size=sizes.cp_size,
        expert_model_parallel_size=sizes.expert_parts,
        expert_tensor_parallel_size=sizes.expert_shards,
        moe_token_dispatcher_type="alltoall",
        moe_router_load_balancing_type="none",
        moe_grouped_gemm=has_te and shape.experts is not None,
        batch_p2p_comm=False,  # batched sends wait for the device, and with one peer exchange activation and gradient
        overlap_p2p_comm=sizes.virtual_stages > 1,
        pipeline_dtype=DTYPES[dtype],
        params_dtype=DTYPES[dtype],
        bf16=dtype == "bfloat16",
        layernorm_epsilon=shape.norm_eps,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        attention_softmax_in_fp32=True,
        softmax_scale=None if shape.latent else softmax_scale(shape),
        sequence_parallel=settings.sequence_parallel and sizes.tp_size > 1,
        calculate_per_token_loss=True,
        perform_initialization=False,
        use_cpu_initialization=not on_gpu,
        gradient_accumulation_fusion=has_te and settings.fusions,
        bias_activation_fusion=on_gpu and of_family["activation_func"] is F.silu,
        masked_softmax_fusion=on_gpu,
        persist_layer_norm=on_gpu,
        bias_dropout_fusion=False,
        # For packed rows Megatron-core does not tell Transformer Engine's kernel that dims are interleaved, or that the
        # angles are those of tokens, not of a range of positions.
        apply_rope_fusion=has_te
        and settings.fusions
        and shape.latent is None
        and shape.vision is None
        and not of_family["rotary_interleaved"],
        **FP8[settings.fp8],
    )
    if sizes.virtual_stages > 1:  # set afterwards: the configuration's own check wants stages of equal size
        config.virtual_pipeline_model_parallel_size = sizes.virtual_stages
    return config


def build_chunks(
    shape: ModelShape,
    sizes: TrainSizes,
    groups: ProcessGroupCollection,
    dtype: str = "float32",
    names: NameSet = NameSet.LOCAL,
    settings: MegatronSettings = MegatronSettings(),
) -> list[GPTModel]:
    """Return this rank's virtual stages of the model, or its only stage, uninitialised.

    Raises ConfigError for FP8 where there is none.
    """
    blocks = shape.split_layers(*sizes.blocks)
    chunks = []
    with device_shim(), fusion_without_apex():
        config = transformer_config(shape, sizes, dtype, names, settings)
        for chunk, block in enumerate(range(groups.pp.rank(), len(blocks), sizes.pp_size)):
            last = block == len(blocks) - 1
            model = GPTModel(
                config=config,
                transformer_layer_spec=stage_spec(names, shape, blocks[block]),  # type: ignore[arg-type]
                vocab_size=padded_vocab_size(shape.vocab_size, sizes.tp_size),
                max_sequence_length=shape.max_positions,
                pre_process=block == 0,
                post_process=last,
                parallel_output=True,
                share_embeddings_and_output_weights=shape.tied_embeddings,
                position_embedding_type="rope",
                pg_collection=groups,
                vp_stage=chunk if sizes.virtual_stages > 1 else None,
            )
            if shape.latent is None:  # latent attention has rotary embeddings of its own
                set_frequencies(model, shape)
            if shape.vision is not None:
                open_eyes(model, shape.vision)
            _mark_sharded(model)
            if shape.experts is not None:
                coefs = settings.router_aux_loss_coef, settings.router_z_loss_coef
                connect_routers(model, blocks[block], shape.experts, coefs)
            _scale_parts(model, shape, DTYPES[dtype])
            if last:
                place = groups.tp, config.sequence_parallel
                model.output_layer = (  # type: ignore[assignment]
                    ScoreHead(shape.hidden_size, shape.num_labels, *place)
                    if shape.num_labels
                    else VocabularyHead(
                        model.output_layer,
                        shape.vocab_size,
                        *place,
                        scale=shape.multipliers.logits if shape.multipliers else 1.0,
                    )
                )
            if shape.adapters:
                add_adapters(model, shape.adapters, groups, config.sequence_parallel)
            model.to(device=device(), dtype=DTYPES[dtype])
            _freeze_expert_bias(model)
            chunks.append(model)
        config.moe_router_enable_expert_bias = False  # a step would change it
    return chunks


def _freeze_expert_bias(model: GPTModel) -> None:
    """Keep the bias by which routers choose experts in float32, and constant."""
    for module in model.modules():
        if isinstance(module, TopKRouter) and module.expert_bias is not None:
            module.expert_bias.data = module.expert_bias.data.float()
            module.enable_expert_bias = False  # which makes it count tokens for the change


def _scale_parts(model: GPTModel, shape: ModelShape, dtype: torch.dtype) -> None:
    """Multiply embeddings, and outputs of attention and MLP, by their factors; adapters add to outputs before that."""
    scales, factors = dict[nn.Module, float](), shape.multipliers
    if factors:
        for name, module in model.named_modules():
            if name.endswith((".self_attention.linear_proj", ".mlp.linear_fc2")):
                scales[module] = factors.residual
    if model.pre_process and factors:
        scales[model.embedding] = factors.embedding
    elif model.pre_process and FAMILIES[shape.family].scaled_embedding:
        scales[model.embedding] = (
            torch.tensor(shape.hidden_size**0.5).to(dtype).item()
        )  # rounded as weights are
    for module, scale in scales.items():
        if scale != 1.0:
            module.register_forward_hook(functools.partial(_scaled, scale))


def _scaled(scale: float, module: nn.Module, inputs: object, output: Any) -> Any:
    """Multiply the output of a module, or the first of two: a linear layer returns its bias as well."""
    return (output[0] * scale, *output[1:]) if isinstance(output, tuple) else output * scale


def _mark_sharded(model: GPTModel) -> None:
    """Mark sharded weights as Megatron's initialisation does, so that the gradient norm excludes duplicates.

    Experts have replicas of their own, which Megatron-core overlooks where all experts are on each rank (e = 1).
    """
    for name, parameter in model.named_parameters():
        if is_of_expert(name):
            parameter.allreduce = False  # type: ignore[attr-defined]
    for module in model.modules():
        if isinstance(module, ColumnParallelLinear | VocabParallelEmbedding | RowParallelLinear):
            dim = 1 if isinstance(module, RowParallelLinear) else 0
            weight = module.weight
            if weight is not None and not getattr(weight, "tensor_model_parallel", False):
                set_tensor_model_parallel_attributes(weight, True, dim, 1)
