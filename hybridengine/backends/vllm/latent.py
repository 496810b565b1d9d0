"""Latent attention in vLLM, which splits the projection of keys and values into matrices of its own when it is built."""

from __future__ import annotations

from typing import Any

from torch import nn

from hybridengine.errors import ConfigError

_ABSORBED = "W_UK_T", "W_UV"


def own_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return vLLM's parameters by name, without those that are views of others (`view_absorbed`)."""
    return {name: one for name, one in model.named_parameters() if not name.endswith(_ABSORBED)}


def rotate_all_heads(model: nn.Module) -> None:
    """Rotate heads by torch, as vLLM's kernel for a CPU rotates only the first of those of latent attention."""
    from vllm.model_executor.layers.mla import MultiHeadLatentAttentionWrapper

    for module in model.modules():
        if isinstance(module, MultiHeadLatentAttentionWrapper):
            rotary: Any = module.rotary_emb
            rotary._forward_method = rotary.forward_native


def view_absorbed(model: nn.Module) -> None:
    """Make the matrices that latent attention absorbs into queries and outputs views of the projection they are from.

    So they follow its weights in every switch; copies would compute with those of the first.

    Raises:
        ConfigError: a kernel keeps these matrices in a form of its own.
    """
    from vllm.model_executor.layers.attention.mla_attention import MLAAttention

    for module in model.modules():
        if not isinstance(module, MLAAttention):
            continue
        latent: Any = module
        if not all(hasattr(latent, name) for name in _ABSORBED):
            raise ConfigError(
                f"vLLM's attention {latent.attn_backend.get_name()} keeps its projections in a form of its own, which a"
                " switch cannot fill; choose another with VLLM_ATTENTION_BACKEND"
            )
        dims = [latent.qk_nope_head_dim, latent.v_head_dim]
        rows_NDL = latent.kv_b_proj.weight.data.view(latent.num_heads, sum(dims), latent.kv_lora_rank)
        keys_NPL, values_NVL = rows_NDL.split(dims, dim=1)
        latent.W_UK_T.data, latent.W_UV.data = keys_NPL, values_NVL.transpose(1, 2)
