"""A model family as data. The defaults are those of a dense decoder such as Llama; a family overrides the rest.

A family describes a backend's parameters as tables of rows and columns of logical tensors, those of the Hugging Face
checkpoint. Entries describe one decoder layer, without the layer prefix; `hybridengine.reshard.layout` turns them into
the parameters of one rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from hybridengine.families.sizes import DecoderSizes, ExpertSizes, LatentSizes, Multipliers, VisionSizes


class NameSet(str, Enum):
    """Layer spec that determines the names of Megatron's parameters."""

    LOCAL = "local"
    TRANSFORMER_ENGINE = "transformer_engine"
    """The norms before QKV and before the MLP are fused into the following linear layers."""


@dataclass(frozen=True)
class Rows:
    """Rows [start, stop) of a logical tensor, divided in whole units: heads, or single rows of an MLP."""

    tensor: str
    start: int
    stop: int
    units: int
    """Number of equal units. Where there are more tensor ranks than units, consecutive ranks hold the same unit."""


@dataclass(frozen=True)
class Whole:
    """A parameter that is a whole logical tensor, the same on every tensor rank."""

    name: str
    tensor: str


@dataclass(frozen=True)
class Columns:
    """A parameter that is an equal share of the columns of a logical tensor."""

    name: str
    tensor: str


@dataclass(frozen=True)
class Stack:
    """A parameter that stacks a share of the rows of each section, in order."""

    name: str
    sections: tuple[Rows, ...]
    groups: int | None = None
    """Number of groups stacked one after another, as Megatron's QKV does per key head; None for a single stack."""


Entry = Whole | Columns | Stack

INPUT_NORM = "input_layernorm.weight"
_NORMS = {
    NameSet.LOCAL: ("input_layernorm.weight", "pre_mlp_layernorm.weight"),
    NameSet.TRANSFORMER_ENGINE: (
        "self_attention.linear_qkv.layer_norm_weight",
        "mlp.linear_fc1.layer_norm_weight",
    ),
}
_OUTPUT_NORMS = (
    "self_attention.linear_proj.post_layernorm.weight",
    "mlp.linear_fc2.post_layernorm.weight",
)
_GATE_UP = "mlp.gate_up_proj.weight"


@dataclass(frozen=True, eq=False)
class Family:
    """Definition of a model family: configuration, logical tensors, tables of both backends, and unsupported features."""

    name: str
    """`model_type` in config.json."""
    hf_prefix: str
    """Prefix of the family's class names in transformers."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Values that transformers uses for keys missing from config.json."""
    built_config: Mapping[str, Any] = field(default_factory=dict)
    """Additional config.json entries of a model that is built from sizes."""
    number_keys: tuple[str, ...] = ()
    """Keys of config.json whose values are positive numbers."""
    has_classifier: bool = True
    """True if transformers has the family with a score head, as critics and reward models are."""
    has_vision: bool = False
    """True if the model reads images by a vision tower, which is frozen."""
    has_window: bool = False
    """True if setting `sliding_window` alone enables windowed attention in all layers."""
    window_switch: bool = False
    """True if `use_sliding_window` enables windowed attention in the layers from `max_window_layers` on."""
    rope_types: tuple[str, ...] = ("default", "linear", "llama3", "yarn")
    """Supported kinds of rotary embeddings."""
    partial_rotary: bool = False
    """True if `partial_rotary_factor` may exclude the last dims of a head from rotary embeddings."""
    interleaved_rotary: bool = False
    """True if rotary embeddings rotate dims 0 and 1, 2 and 3, ...; False if they rotate those of two halves."""
    qkv_bias: bool | None = False
    """True if q, k and v have a bias; None if `attention_bias` in config.json decides."""
    qk_norm: bool = False
    """True if each query and key head has an RMS norm."""
    mlp_norm: str = "post_attention_layernorm.weight"
    """Norm before the MLP."""
    post_norms: tuple[str, ...] = ()
    """Norms of the outputs of attention and of the MLP, before they are added to the residual stream; empty for none."""
    fused_gate_up: bool = False
    """True if gate and up are one tensor on disk."""
    whole_slots: bool = False
    """True if vLLM's adapter of a fused layer is one for all of its rows; False if it is one for each projection."""
    scaled_embedding: bool = False
    """True if the embeddings of tokens are multiplied by the square root of the hidden size."""

    expert_keys: Mapping[str, str] = field(default_factory=dict)
    """Field of `ExpertSizes` -> key in config.json; empty for a dense family."""
    latent_keys: Mapping[str, str] = field(default_factory=dict)
    """Field of `LatentSizes` -> key in config.json; empty for plain attention."""

    @property
    def architectures(self) -> tuple[str, ...]:
        """Class names for `architectures` in config.json: language model, and model with a score head if there is one."""
        names = f"{self.hf_prefix}ForCausalLM", f"{self.hf_prefix}ForSequenceClassification"
        return names if self.has_classifier else names[:1]

    def completed(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Return the contents of a config.json with `defaults` filled in."""
        return {**self.defaults, **config}

    def experts_of(self, config: Mapping[str, Any]) -> ExpertSizes | None:
        """Return the experts that a completed config.json describes; None for a dense family."""
        if not self.expert_keys:
            return None
        return ExpertSizes(**{name: config[key] for name, key in self.expert_keys.items() if key in config})

    def latent_of(self, config: Mapping[str, Any]) -> LatentSizes | None:
        """Return the sizes of latent attention that a completed config.json describes; None for plain attention."""
        if not self.latent_keys:
            return None
        return LatentSizes(**{name: config[key] for name, key in self.latent_keys.items()})

    def vision_of(self, config: Mapping[str, Any]) -> VisionSizes | None:
        """Return the vision tower that a completed config.json describes; None for a family that reads no images."""
        return None

    def vision_tensors(self, sizes: DecoderSizes) -> dict[str, tuple[int, ...]]:
        """Return the tensors of the vision tower as stored on disk: name -> shape. They are frozen, and in no layout."""
        return {}

    def windows_of(self, config: Mapping[str, Any]) -> tuple[int, ...]:
        """Return the windows of all layers that a completed config.json describes; empty if no layer has one."""
        window = config.get("sliding_window")
        if window is None or not (self.has_window or (self.window_switch and config["use_sliding_window"])):
            return ()
        return tuple(window if kind == "sliding_attention" else 0 for kind in self.layer_kinds(config))

    def layer_kinds(self, config: Mapping[str, Any]) -> list[str]:
        """Return the kind of attention of each layer of a completed config.json, in the words of its `layer_types`."""
        num_layers = config["num_hidden_layers"]
        if self.has_window:
            return ["sliding_attention"] * num_layers
        first = config["max_window_layers"] if config.get("use_sliding_window") else num_layers
        kinds = [f"{'full' if layer < first else 'sliding'}_attention" for layer in range(num_layers)]
        return [str(kind) for kind in config.get("layer_types") or kinds]

    def window_theta_of(self, config: Mapping[str, Any]) -> float | None:
        """Return the rotary base of layers with a window; None if all layers have the same rotary embeddings."""
        return None

    def query_scalar_of(self, config: Mapping[str, Any]) -> float | None:
        """Return the number by whose square root attention scores are divided; None for head_dim."""
        return None

    def multipliers_of(self, config: Mapping[str, Any]) -> Multipliers | None:
        """Return the factors of the model's parts; None if there are none."""
        return None

    def refusals(self, config: Mapping[str, Any]) -> Iterator[str]:
        """Yield the features of a config.json, with `defaults` filled in, that the tables do not support."""
        yield from self.window_refusals(config)
        if config.get("attention_bias") and self.qkv_bias is False:
            yield (
                "attention_bias=true puts a bias on the output projection, which is not supported;"
                " use a model without it"
            )
        if config.get("mlp_bias"):
            yield "mlp_bias=true is not supported; use a model without biases in its MLP"
        if config.get("hidden_act", "silu") != "silu":
            yield f"hidden_act={config['hidden_act']!r} is not supported; it must be 'silu'"

    def window_refusals(self, config: Mapping[str, Any]) -> Iterator[str]:
        """Yield the settings of windowed attention in a completed config.json that are not supported."""
        kinds = {str(kind) for kind in config.get("layer_types") or ()}
        if not self.window_switch:
            if kinds - {"full_attention"}:
                yield (
                    f"layer_types={sorted(kinds - {'full_attention'})} are not supported; use a model with full attention"
                )
            if config.get("use_sliding_window"):
                yield "use_sliding_window=true is not supported; use a model with full attention"
        elif kinds - {"full_attention"} and not config["use_sliding_window"]:
            yield f"layer_types={sorted(kinds)} without use_sliding_window; restore the model's original config.json"
        elif len(found := set(self.layer_kinds(config))) > 1:
            yield (
                f"layer_types={sorted(found)} (layers before max_window_layers are full) are not supported, because"
                f" vLLM's {self.hf_prefix} has one window for all layers; use a model with one kind of attention"
            )

    def layer_tensors(self, sizes: DecoderSizes, layer: int) -> dict[str, tuple[int, ...]]:
        """Return the logical tensors of a decoder layer as stored on disk: name -> shape, in the model's order."""
        norm = (sizes.hidden_size,)
        return {
            INPUT_NORM: norm,
            **self.attention_tensors(sizes),
            **dict.fromkeys((self.mlp_norm, *self.post_norms), norm),
            **self.mlp_tensors(sizes, layer),
        }

    def attention_tensors(self, sizes: DecoderSizes) -> dict[str, tuple[int, ...]]:
        """Return the logical tensors of a layer's attention."""
        hidden = sizes.hidden_size
        tensors: dict[str, tuple[int, ...]] = {}
        for part, rows in (("q", sizes.q_size), ("k", sizes.kv_size), ("v", sizes.kv_size)):
            tensors[f"self_attn.{part}_proj.weight"] = (rows, hidden)
            if self.has_qkv_bias(sizes):
                tensors[f"self_attn.{part}_proj.bias"] = (rows,)
        if self.qk_norm:
            tensors |= {f"self_attn.{part}_norm.weight": (sizes.head_dim,) for part in "qk"}
        return tensors | {"self_attn.o_proj.weight": (hidden, sizes.q_size)}

    def mlp_tensors(self, sizes: DecoderSizes, layer: int) -> dict[str, tuple[int, ...]]:
        """Return the logical tensors of a layer's MLP."""
        hidden, ffn = sizes.hidden_size, sizes.ffn_hidden_size
        if self.fused_gate_up:
            return {_GATE_UP: (2 * ffn, hidden), "mlp.down_proj.weight": (hidden, ffn)}
        return gated_mlp("mlp.", hidden, ffn)

    def qkv_rows(self, sizes: DecoderSizes, kind: str) -> tuple[Rows, ...]:
        """Return the rows that hold the weights (`kind` "weight") or biases ("bias") of q, k and v."""
        return tuple(
            Rows(f"self_attn.{part}_proj.{kind}", 0, heads * sizes.head_dim, heads)
            for part, heads in (("q", sizes.num_heads), ("k", sizes.num_kv_heads), ("v", sizes.num_kv_heads))
        )

    def gate_up_rows(self, sizes: DecoderSizes) -> tuple[Rows, ...]:
        """Return the rows that hold the weights of the gate and up projections."""
        ffn = sizes.ffn_hidden_size
        if self.fused_gate_up:
            return Rows(_GATE_UP, 0, ffn, ffn), Rows(_GATE_UP, ffn, 2 * ffn, ffn)
        return tuple(Rows(f"mlp.{half}_proj.weight", 0, ffn, ffn) for half in ("gate", "up"))

    def megatron_layer(self, sizes: DecoderSizes, names: NameSet, layer: int) -> tuple[Entry, ...]:
        """Return the parameters of a Megatron-core GPTModel layer, without experts."""
        norms = zip(_OUTPUT_NORMS, self.post_norms, strict=bool(self.post_norms))
        return (
            *self.megatron_attention(sizes, names),
            *self.megatron_mlp(sizes, names, layer),
            *(Whole(name, tensor) for name, tensor in norms),
        )

    def megatron_attention(self, sizes: DecoderSizes, names: NameSet) -> tuple[Entry, ...]:
        """Return the parameters of a Megatron-core layer's attention and of the norm before it.

        Its QKV keeps the heads of each KV group together.
        """
        input_norm, _ = _NORMS[names]
        attention = "self_attention."
        entries: list[Entry] = [
            Whole(input_norm, INPUT_NORM),
            Columns(attention + "linear_proj.weight", "self_attn.o_proj.weight"),
        ]
        entries += [
            Stack(attention + f"linear_qkv.{kind}", self.qkv_rows(sizes, kind), groups=sizes.num_kv_heads)
            for kind in self._qkv_kinds(sizes)
        ]
        if self.qk_norm:
            entries += [
                Whole(attention + f"{x}_layernorm.weight", f"self_attn.{x}_norm.weight") for x in "qk"
            ]
        return tuple(entries)

    def megatron_mlp(self, sizes: DecoderSizes, names: NameSet, layer: int) -> tuple[Entry, ...]:
        """Return the parameters of a Megatron-core layer's MLP and of the norm before it, without experts."""
        return (
            Whole(_NORMS[names][1], self.mlp_norm),
            Stack("mlp.linear_fc1.weight", self.gate_up_rows(sizes)),
            Columns("mlp.linear_fc2.weight", "mlp.down_proj.weight"),
        )

    def megatron_expert(
        self, sizes: DecoderSizes, names: NameSet, number: int, place: int
    ) -> tuple[Entry, ...]:
        """Return the parameters of expert `number` of a layer, which is number `place` on its rank; a dense family has
        none."""
        return ()

    def megatron_config(self, sizes: DecoderSizes) -> dict[str, Any]:
        """Return Megatron-core's TransformerConfig settings other than sizes; `activation_func` is a name in torch."""
        return {
            "normalization": "RMSNorm",
            "gated_linear_unit": True,
            "activation_func": "silu",
            "add_bias_linear": False,
            "add_qkv_bias": self.has_qkv_bias(sizes),
            "qk_layernorm": self.qk_norm,
            "rotary_interleaved": self.interleaved_rotary,
        }

    def vllm_layer(self, sizes: DecoderSizes, layer: int) -> tuple[Entry, ...]:
        """Return the parameters of a layer of vLLM's model, without experts."""
        return (
            *self.vllm_attention(sizes),
            *self.vllm_mlp(sizes, layer),
            *(same(Whole, norm) for norm in (INPUT_NORM, self.mlp_norm, *self.post_norms)),
        )

    def vllm_attention(self, sizes: DecoderSizes) -> tuple[Entry, ...]:
        """Return the parameters of the attention of a layer of vLLM's model."""
        entries: list[Entry] = [
            Stack(f"self_attn.qkv_proj.{kind}", self.qkv_rows(sizes, kind)) for kind in self._qkv_kinds(sizes)
        ]
        entries.append(same(Columns, "self_attn.o_proj.weight"))
        if self.qk_norm:
            entries += [same(Whole, f"self_attn.{part}_norm.weight") for part in "qk"]
        return tuple(entries)

    def vllm_mlp(self, sizes: DecoderSizes, layer: int) -> tuple[Entry, ...]:
        """Return the parameters of the MLP of a layer of vLLM's model, without experts."""
        return (
            Stack(_GATE_UP, self.gate_up_rows(sizes)),
            same(Columns, "mlp.down_proj.weight"),
        )

    def vllm_expert(self, sizes: DecoderSizes, number: int, place: int) -> tuple[Entry, ...]:
        """Return the slices of vLLM's parameters that are expert `number` of a layer, number `place` on its rank; a dense
        family has none."""
        return ()

    def vllm_problems(self, sizes: DecoderSizes) -> list[str]:
        """Return the reasons why vLLM's model of this family rejects these sizes, at any degree of parallelism."""
        return []

    def has_qkv_bias(self, sizes: DecoderSizes) -> bool:
        """Return True if q, k and v of a model of these sizes have a bias."""
        return bool(sizes.qkv_bias if self.qkv_bias is None else self.qkv_bias)

    def _qkv_kinds(self, sizes: DecoderSizes) -> tuple[str, ...]:
        return ("weight", "bias") if self.has_qkv_bias(sizes) else ("weight",)


def is_of_expert(name: str) -> bool:
    """Return True for the tensors of experts that tokens choose: logical ones, and Megatron's parameters."""
    return ".experts." in name


FLOAT32_ENDS = ("gate.e_score_correction_bias", "router.expert_bias")
"""Last parts of the names of an expert bias: the logical tensor's and vLLM's, and Megatron's."""


def is_float32(name: str) -> bool:
    """Return True for logical tensors and parameters that are in float32 whatever the type of the model is.

    They are buffers, not trained: an expert bias, which decides on experts by small differences of large numbers.
    """
    return name.endswith(FLOAT32_ENDS)


def gated_mlp(prefix: str, hidden: int, ffn: int) -> dict[str, tuple[int, ...]]:
    """Return the logical tensors of a gated MLP."""
    return {
        f"{prefix}gate_proj.weight": (ffn, hidden),
        f"{prefix}up_proj.weight": (ffn, hidden),
        f"{prefix}down_proj.weight": (hidden, ffn),
    }


def same(kind: type[Whole] | type[Columns], name: str) -> Entry:
    """Return an entry whose parameter has the logical tensor's name."""
    return kind(name, name)
