"""A model's shape: its sizes, the tensors that follow from them, and how it can be sharded.

A *logical tensor* is a tensor of the Hugging Face model, identified by its name and global shape. All layouts are defined
in terms of logical tensors. Nothing here imports torch or transformers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any

from hybridengine.errors import CheckpointError, ConfigError, UnreadableError, raise_all
from hybridengine.families.adapters import adapter_tensors, peft_tensors
from hybridengine.families.family import Entry, NameSet, is_of_expert
from hybridengine.families.registry import ARCHITECTURES, FAMILIES
from hybridengine.families.sizes import AdapterSizes, DecoderSizes
from hybridengine.files import read_object
from hybridengine.models.attention_json import rotary_settings, window_sizes
from hybridengine.models.config_json import (
    MAX_PARAMETERS,
    check_features,
    check_kinds,
    check_numbers,
    check_sizes,
    without_nulls,
)

EMBEDDING = "model.embed_tokens.weight"
FINAL_NORM = "model.norm.weight"
LM_HEAD = "lm_head.weight"
SCORE_HEAD = "score.weight"
PEFT_PREFIX = "base_model.model."
"""Prefix of names in PEFT's files."""

VOCAB_MULTIPLE = 64
"""Multiple to which vLLM pads vocabularies; Megatron's padding uses it too, so that shards nest."""

FP8_BLOCK = 128
"""Rows and columns of a block of a matrix in FP8, which has one scale (DeepSeek-V3, arXiv 2412.19437, section 3.3.2)."""

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


def layer_prefix(layer: int) -> str:
    return f"model.layers.{layer}."


def padded_vocab_size(vocab_size: int, tp_size: int) -> int:
    """Return the rows of the padded vocabulary: the least multiple of 64 and of `tp_size` that holds `vocab_size`."""
    multiple = math.lcm(VOCAB_MULTIPLE, tp_size)
    return -(-vocab_size // multiple) * multiple


@dataclass(frozen=True)
class ModelShape(DecoderSizes):
    """Sizes of a model and the tensors that follow from them."""

    @classmethod
    def from_hf_config(cls, config: Mapping[str, Any]) -> ModelShape:
        """Return the shape that a Hugging Face `config.json` describes; ConfigError if unsupported or incomplete."""
        config = without_nulls(config)
        check_kinds(config)
        names = [str(name) for name in config.get("architectures") or ()]
        known = [name for name in names if name in ARCHITECTURES]
        if not known:
            raise ConfigError(
                f"architectures={names} is not supported; use one of {', '.join(sorted(ARCHITECTURES))}"
            )
        family = ARCHITECTURES[known[0]]
        config = family.completed(config)
        check_kinds(config)  # of what was nested
        check_sizes(config, family)
        check_numbers({key: config[key] for key in family.number_keys})
        num_heads = config["num_attention_heads"]
        head_dim, rest = divmod(config["hidden_size"], num_heads)
        if config.get("head_dim") is None and rest:
            raise ConfigError(
                f"num_attention_heads={num_heads} does not divide hidden_size={config['hidden_size']} and head_dim is not"
                " given; restore the model's original config.json"
            )
        latent = family.latent_of(config)
        head_dim = latent.head_dim if latent else config.get("head_dim", head_dim)
        classifies = known[0] in family.architectures[1:]
        norm_eps = config.get("rms_norm_eps", 1e-6)
        check_numbers({"rms_norm_eps": norm_eps})
        shape = cls(
            family=family.name,
            num_layers=config["num_hidden_layers"],
            hidden_size=config["hidden_size"],
            ffn_hidden_size=config["intermediate_size"],
            num_heads=num_heads,
            num_kv_heads=config.get("num_key_value_heads") or num_heads,
            head_dim=head_dim,
            vocab_size=config["vocab_size"],
            max_positions=config["max_position_embeddings"],
            tied_embeddings=bool(config.get("tie_word_embeddings")) and not classifies,
            norm_eps=norm_eps,
            num_labels=(config.get("num_labels") or len(config.get("id2label") or (0, 1)))
            if classifies
            else 0,
            experts=family.experts_of(config),
            latent=latent,
            windows=window_sizes(config, family),
            qkv_bias=bool(config["attention_bias"]) if family.qkv_bias is None else None,
            query_scalar=family.query_scalar_of(config),
            multipliers=family.multipliers_of(config),
            vision=family.vision_of(config),
            **rotary_settings(config, family, head_dim),
        )
        if shape.num_heads % shape.num_kv_heads:
            raise ConfigError(
                f"num_key_value_heads={shape.num_kv_heads} does not divide num_attention_heads={shape.num_heads};"
                " restore the model's original config.json"
            )
        check_features(config, known[0], family)
        if shape.experts:
            check_numbers({family.expert_keys.get("scale", "scale"): shape.experts.scale})
        if shape.num_parameters > MAX_PARAMETERS:
            raise ConfigError(
                f"the sizes of config.json make {shape.num_parameters} parameters, which must be at most"
                f" {MAX_PARAMETERS}; restore the model's original config.json"
            )
        return shape

    @classmethod
    def from_folder(cls, folder: str | Path) -> ModelShape:
        """Return the shape of the Hugging Face checkpoint in `folder`, which may also be the path of a `config.json`."""
        path = Path(folder)
        path = path if path.suffix == ".json" else path / "config.json"
        try:
            config = read_object(path)
        except FileNotFoundError:
            raise CheckpointError(f"{path} does not exist; name a Hugging Face checkpoint folder") from None
        except UnreadableError as error:
            raise CheckpointError(f"{error}; restore the model's original file") from None
        return cls.from_hf_config(config)

    def layer_tensors(self, layer: int) -> dict[str, tuple[int, ...]]:
        """Return the logical tensors of one decoder layer: name -> shape, in the model's order."""
        tensors = FAMILIES[self.family].layer_tensors(self, layer)
        return {layer_prefix(layer) + name: shape for name, shape in tensors.items()}

    @cached_property
    def tensors(self) -> dict[str, tuple[int, ...]]:
        """All logical tensors: name -> shape, from the embedding to the head."""
        tensors: dict[str, tuple[int, ...]] = {EMBEDDING: (self.vocab_size, self.hidden_size)}
        for layer in range(self.num_layers):
            tensors |= self.layer_tensors(layer)
        tensors[FINAL_NORM] = (self.hidden_size,)
        if self.num_labels:
            tensors[SCORE_HEAD] = (self.num_labels, self.hidden_size)
        elif not self.tied_embeddings:
            tensors[LM_HEAD] = (self.vocab_size, self.hidden_size)
        return tensors | self.adapter_tensors

    @cached_property
    def vision_tensors(self) -> dict[str, tuple[int, ...]]:
        """Tensors of the frozen vision tower: name -> shape; empty for a model that reads no images."""
        return FAMILIES[self.family].vision_tensors(self) if self.vision else {}

    @property
    def num_frozen(self) -> int:
        """Number of weights of the vision tower, which each rank holds whole."""
        return sum(math.prod(shape) for shape in self.vision_tensors.values())

    @cached_property
    def adapter_tensors(self) -> dict[str, tuple[int, ...]]:
        """Logical tensors of the adapters: name -> shape, in the model's order."""
        found: dict[str, tuple[int, ...]] = {}
        for layer in range(self.num_layers) if self.adapters else ():
            tensors = FAMILIES[self.family].layer_tensors(self, layer)
            factors = adapter_tensors(self._linear_layers(layer), self.adapters, tensors)  # type: ignore[arg-type]
            found |= {layer_prefix(layer) + name: shape for name, shape in factors.items()}
        return found

    @cached_property
    def peft_tensors(self) -> dict[str, str]:
        """Name of a tensor in PEFT's file of the adapters -> its logical tensor; fused projections share their A."""
        return {
            f"{PEFT_PREFIX}{layer_prefix(layer)}{name}": layer_prefix(layer) + tensor
            for layer in range(self.num_layers if self.adapters else 0)
            for name, tensor in peft_tensors(self._linear_layers(layer), self.adapters).items()  # type: ignore[arg-type]
        }

    def _linear_layers(self, layer: int) -> Iterator[Entry]:
        """Yield Megatron's parameters of a decoder layer, with all experts."""
        family, experts = FAMILIES[self.family], self.expert_layer(layer)
        yield from family.megatron_layer(self, NameSet.LOCAL, layer)
        for number in range(experts.num_experts if experts else 0):
            yield from family.megatron_expert(self, NameSet.LOCAL, number, number)

    @property
    def num_parameters(self) -> int:
        return sum(math.prod(shape) for shape in self.tensors.values())

    @property
    def num_active_parameters(self) -> int:
        """Number of parameters that compute one token: of experts, those that the router chooses."""
        if self.experts is None:
            return self.num_parameters
        routed = sum(math.prod(shape) for name, shape in self.tensors.items() if is_of_expert(name))
        idle = self.experts.num_experts - self.experts.num_active
        return self.num_parameters - routed * idle // self.experts.num_experts

    @property
    def num_trained(self) -> int:
        """Number of weights that are trained: those of adapters, or all of a model without."""
        return sum(math.prod(shape) for shape in (self.adapter_tensors or self.tensors).values())

    def with_score_head(self) -> ModelShape:
        """Return this shape with one score per token instead of a vocabulary; ConfigError if its family has none."""
        raise_all(self.score_problems())
        return replace(self, num_labels=1, tied_embeddings=False)

    def score_problems(self) -> list[str]:
        """Return the reasons why the model cannot have a score head."""
        if FAMILIES[self.family].has_classifier:
            return []
        return [
            f"{self.family} has no model with a score head in transformers, as critics and reward models are; use a model"
            " of another family for them, or an algorithm without them"
        ]

    def with_adapters(self, adapters: AdapterSizes | None) -> ModelShape:
        """Return this shape with these adapters, or without."""
        return replace(self, adapters=adapters)

    def weight_bytes(self, dtype: str) -> int:
        """Return M of the paper's table 2: bytes of all weights, each counted once."""
        return self.num_parameters * DTYPE_BYTES[dtype]

    def split_layers(self, pp_size: int, name: str = "p") -> tuple[range, ...]:
        """Return the layers of each pipeline stage, one more in the first if uneven; ConfigError if a stage has none.

        The stages may be virtual ones, whose number `name` names in the error.
        """
        raise_all(self.pp_problems(pp_size, name))
        return _split_layers(self.num_layers, pp_size)

    def gen_stage_layers(self, train_pp_size: int, gen_pp_size: int) -> tuple[range, ...]:
        """Return the layers of each generation stage: p/p_g training stages, or even parts if p_g does not divide p."""
        if train_pp_size % gen_pp_size:
            return self.split_layers(gen_pp_size)
        stages, joined = self.split_layers(train_pp_size), train_pp_size // gen_pp_size
        return tuple(
            range(stages[first * joined].start, stages[(first + 1) * joined - 1].stop)
            for first in range(gen_pp_size)
        )

    def kv_token_bytes(self, train_pp_size: int, gen_pp_size: int, gen_tp_size: int, dtype: str) -> int:
        """Return the largest bytes of KV cache per token on any rank of an engine of (p_g, t_g)."""
        num_layers = max(map(len, self.gen_stage_layers(train_pp_size, gen_pp_size)))
        if self.latent:
            return num_layers * self.latent.cached_size * DTYPE_BYTES[dtype]
        num_heads = max(1, self.num_kv_heads // gen_tp_size)
        return 2 * num_layers * num_heads * self.head_dim * DTYPE_BYTES[dtype]

    def tp_problems(self, tp_size: int, name: str = "t") -> list[str]:
        """Return the reasons why the model cannot be sharded over `tp_size` tensor ranks."""
        sizes = {key: getattr(self, key) for key in ("num_heads", "num_kv_heads", *self._mlp_size)}
        broken = [
            f"{name}={tp_size} does not divide {key}={size}" for key, size in sizes.items() if size % tp_size
        ]
        if not broken:
            return []
        choices = [n for n in range(1, 65) if not any(size % n for size in sizes.values())]
        return [f"{rule}; choose {_one_of(choices)}" for rule in broken]

    @property
    def _mlp_size(self) -> tuple[str, ...]:
        """Name of the size of MLPs; none if all layers have experts."""
        return () if self.experts and not self.experts.num_dense_layers else ("ffn_hidden_size",)

    def expert_problems(self, parts: int, shards: int, names: tuple[str, str] = ("e", "etp")) -> list[str]:
        """Return the reasons why experts cannot be divided into `parts`, and each of them over `shards` ranks."""
        if self.experts is None:
            if parts == 1:
                return []
            return [f"{names[0]}={parts} divides experts, and {self.family} has none; choose {names[0]}=1"]
        counts = (
            (parts, "num_experts", self.experts.num_experts),
            (shards, "moe ffn_hidden_size", self.experts.ffn_hidden_size),
        )
        return [
            f"{name}={size} does not divide {what}={number}; choose one of its divisors"
            for name, (size, what, number) in zip(names, counts, strict=True)
            if number % size
        ]

    def pp_problems(self, pp_size: int, name: str = "p") -> list[str]:
        """Return the reasons why the model cannot be split into `pp_size` pipeline stages."""
        if pp_size <= self.num_layers:
            return []
        return [
            f"{name}={pp_size} pipeline stages need as many layers, the model has num_layers={self.num_layers};"
            f" choose {name} <= {self.num_layers}"
        ]

    def cp_problems(self, cp_size: int) -> list[str]:
        """Return the reasons why the tokens of a row cannot be divided over `cp_size` context ranks."""
        if cp_size == 1 or not self.windows:
            return []
        return [
            f"c={cp_size} divides rows, and {self.family} has layers that attend to the last {max(self.windows)}"
            " positions, for which Transformer Engine divides no packed rows; choose c=1"
        ]

    def gen_tp_problems(self, tp_size: int, train_tp_size: int) -> list[str]:
        """Return the reasons why vLLM cannot hold the model at t_g = `tp_size` when it trains at t = `train_tp_size`."""
        problems = FAMILIES[self.family].vllm_problems(self)
        if problems:
            return problems
        if not (faults := self._gen_tp_faults(tp_size, train_tp_size)):
            return []
        choices = [size for size in range(1, 65) if not self._gen_tp_faults(size, train_tp_size)]
        return [f"{fault}; choose t_g from {_one_of(choices)}" for fault in faults]

    def _gen_tp_faults(self, tp_size: int, train_tp_size: int) -> list[str]:
        faults = [
            f"t_g={tp_size} does not divide {field}={getattr(self, field)}"
            for field in ("num_heads", *self._mlp_size)
            if getattr(self, field) % tp_size
        ]
        if self.num_kv_heads % tp_size and tp_size % self.num_kv_heads:
            faults.append(
                f"t_g={tp_size} neither divides num_kv_heads={self.num_kv_heads} nor is a multiple of it"
            )
        rows, train_rows = (padded_vocab_size(self.vocab_size, size) for size in (1, train_tp_size))
        text = f"{rows}, which is vocab_size={self.vocab_size} padded to a multiple of {VOCAB_MULTIPLE} as vLLM does"
        if rows % tp_size:
            faults.append(f"t_g={tp_size} does not divide {text}")
        elif tp_size > 1 and train_tp_size % tp_size == 0 and rows != train_rows:
            # The ranks that gather one generation shard would lack some of its rows.
            faults.append(
                f"t={train_tp_size} does not divide {text}, so that the vocabulary's training shards do not nest in those"
                f" of t_g={tp_size}"
            )
        return faults


@lru_cache(maxsize=1024)
def _split_layers(num_layers: int, num_stages: int) -> tuple[range, ...]:
    each, longer = divmod(num_layers, num_stages)
    firsts = [stage * each + min(stage, longer) for stage in range(num_stages + 1)]
    return tuple(range(first, last) for first, last in pairwise(firsts))


def _one_of(choices: list[int]) -> str:
    texts = [str(choice) for choice in choices]
    return texts[0] if len(texts) == 1 else ", ".join(texts[:-1]) + " or " + texts[-1]
