"""Construction of a Megatron-core GPTModel from a model shape, a grid and explicit process groups."""

from __future__ import annotations

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
from megatron.core.tensor_parallel.mappings import copy_to_tensor_model_parallel_region
from megatron.core.transformer import TransformerConfig
from torch import Tensor, nn

from hybridengine.backends.megatron.compat import stage_spec
from hybridengine.backends.megatron.shim import device, device_shim, is_needed
from hybridengine.backends.predictions import Predictions
from hybridengine.errors import ConfigError
from hybridengine.families.family import NameSet
from hybridengine.families.registry import FAMILIES
from hybridengine.models.shapes import ModelShape, padded_vocab_size
from hybridengine.topology.sizes import TrainSizes

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}

LLAMA3_ROPE = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""Values fixed in megatron-core's rotary scaling, in which only `factor` can be set."""


def available_names() -> NameSet:
    """Return Transformer Engine's names if Megatron-core could import it and there is a GPU, else the local ones."""
    return NameSet.TRANSFORMER_ENGINE if HAVE_TE and not is_needed() else NameSet.LOCAL


class ScoreHead(nn.Module):
    """Output layer of a value or reward model: scores of the last hidden state, equal on all tensor-parallel ranks."""

    def __init__(self, hidden_size: int, num_labels: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(num_labels, hidden_size, device=device()))

    def forward(self, hidden: Tensor, **_: Any) -> tuple[Tensor, None]:
        """Return the scores [T, B, num_labels] in float32 of hidden states [T, B, H]."""
        return F.linear(hidden, self.weight).float(), None


class VocabularyHead(nn.Module):
    """Output layer of a language model: it selects positions, and leaves the logits to `Predictions`."""

    def __init__(self, layer: ColumnParallelLinear, vocab_size: int, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.weight = layer.weight
        """Rows of this rank; None if they are those of the embedding."""
        self._vocab_size, self._group = vocab_size, group
        self.positions_BR: Tensor | None = None
        """Positions that are wanted; None for all."""

    def forward(self, hidden_TBH: Tensor, **_: Any) -> tuple[Tensor, None]:
        """Return the hidden states at the wanted positions, [1, B·R, H], or all."""
        if self.positions_BR is not None:
            num_rows = hidden_TBH.size(1)
            rows = torch.arange(num_rows, device=hidden_TBH.device).unsqueeze(1)
            places = (self.positions_BR * num_rows + rows).flatten()
            hidden_TBH = hidden_TBH.flatten(0, 1).index_select(0, places).unsqueeze(0)
        return hidden_TBH, None

    def predictions(self, output: Tensor, weight_WH: Tensor) -> Predictions:
        """Return what a model's output, which it has transposed, predicts at the positions of its forward pass."""
        if self.positions_BR is not None:
            output = output.view(*self.positions_BR.shape, -1)
        # Not in the forward pass: Megatron-core sums contiguous gradients alone, which that of a transpose is not.
        hidden = copy_to_tensor_model_parallel_region(output, group=self._group)
        return Predictions(hidden, weight_WH, self._vocab_size, self._group)


def transformer_config(
    shape: ModelShape, sizes: TrainSizes, dtype: str, recompute: bool = False
) -> TransformerConfig:
    on_gpu = not is_needed()
    settings = FAMILIES[shape.family].megatron_config()
    settings["activation_func"] = getattr(F, settings["activation_func"])
    return TransformerConfig(
        **settings,
        num_layers=shape.num_layers,
        hidden_size=shape.hidden_size,
        ffn_hidden_size=shape.ffn_hidden_size,
        num_attention_heads=shape.num_heads,
        num_query_groups=shape.num_kv_heads,
        kv_channels=shape.head_dim,
        tensor_model_parallel_size=sizes.tp_size,
        pipeline_model_parallel_size=sizes.pp_size,
        pipeline_dtype=DTYPES[dtype],
        params_dtype=DTYPES[dtype],
        bf16=dtype == "bfloat16",
        layernorm_epsilon=shape.norm_eps,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        attention_softmax_in_fp32=True,
        variable_seq_lengths=True,
        moe_token_dispatcher_type="alltoall",  # the default rejects variable lengths, even without experts
        calculate_per_token_loss=True,
        perform_initialization=False,
        use_cpu_initialization=not on_gpu,
        gradient_accumulation_fusion=False,
        bias_activation_fusion=on_gpu,
        masked_softmax_fusion=on_gpu,
        persist_layer_norm=on_gpu,
        bias_dropout_fusion=False,
        apply_rope_fusion=False,
        recompute_granularity="full" if recompute else None,
        recompute_method="uniform" if recompute else None,
        recompute_num_layers=1 if recompute else None,
    )


def build_model(
    shape: ModelShape,
    sizes: TrainSizes,
    groups: ProcessGroupCollection,
    dtype: str = "float32",
    names: NameSet = NameSet.LOCAL,
    recompute: bool = False,
) -> GPTModel:
    """Return this rank's part of the model, uninitialised; raises ConfigError for an unsupported rotary scaling."""
    scaling = dict(shape.rope_scaling)
    factor = float(scaling.pop("factor", 8.0))
    if scaling and scaling != LLAMA3_ROPE:
        raise ConfigError(
            f"rope_scaling={scaling} is not supported by megatron-core; it must be {LLAMA3_ROPE}"
        )
    stage, num_stages = groups.pp.rank(), groups.pp.size()
    num_layers, last = len(shape.split_layers(sizes.pp_size)[stage]), stage == num_stages - 1
    with device_shim():
        config = transformer_config(shape, sizes, dtype, recompute)
        model = GPTModel(
            config=config,
            transformer_layer_spec=stage_spec(names, config.qk_layernorm, num_layers),  # type: ignore[arg-type]
            vocab_size=padded_vocab_size(shape.vocab_size, sizes.tp_size),
            max_sequence_length=shape.max_positions,
            pre_process=stage == 0,
            post_process=last,
            parallel_output=True,
            share_embeddings_and_output_weights=shape.tied_embeddings,
            position_embedding_type="rope",
            rotary_base=shape.rope_theta,  # pyright: ignore[reportArgumentType]  # any number: it is raised to powers
            rope_scaling=bool(shape.rope_scaling),
            rope_scaling_factor=factor,
            pg_collection=groups,
        )
        _mark_sharded(model)
        if last:
            model.output_layer = (  # type: ignore[assignment]
                ScoreHead(shape.hidden_size, shape.num_labels)
                if shape.num_labels
                else VocabularyHead(model.output_layer, shape.vocab_size, groups.tp)
            )
        return model.to(device=device(), dtype=DTYPES[dtype])


def _mark_sharded(model: GPTModel) -> None:
    """Mark sharded weights as Megatron's initialisation does, so that the gradient norm excludes duplicates."""
    for module in model.modules():
        if isinstance(module, ColumnParallelLinear | VocabParallelEmbedding | RowParallelLinear):
            dim = 1 if isinstance(module, RowParallelLinear) else 0
            weight = module.weight
            if weight is not None and not getattr(weight, "tensor_model_parallel", False):
                set_tensor_model_parallel_attributes(weight, True, dim, 1)
