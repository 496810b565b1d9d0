"""Qwen2.5-VL: the decoder of Qwen2, which reads the outputs of a frozen vision tower in the places of images.

Rotary positions have three axes: frame, row and column. A token of text has the same position on all of them.
Source: Qwen2.5-VL, arXiv 2502.13923, section 2.1.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from hybridengine.errors import ConfigError, shown
from hybridengine.families.qwen2 import WINDOW, Qwen2
from hybridengine.families.sizes import DecoderSizes, VisionSizes

_VISION = {
    "depth": 32,
    "hidden_size": 3584,
    "intermediate_size": 3420,
    "patch_size": 14,
    "spatial_merge_size": 2,
}
_VISION |= {"temporal_patch_size": 2, "in_channels": 3, "hidden_act": "silu", "out_hidden_size": 3584}
_TOKENS = {"image_token_id": 151655, "vision_start_token_id": 151652, "vision_end_token_id": 151653}
_RESTORE = "restore the model's original config.json"


class Qwen25Vl(Qwen2):
    """Qwen2.5-VL, whose config.json has the decoder's keys in `text_config`, or beside its other keys."""

    @property
    def architectures(self) -> tuple[str, ...]:
        return (f"{self.hf_prefix}ForConditionalGeneration",)

    def completed(self, config: Mapping[str, Any]) -> dict[str, Any]:
        text = config.get("text_config", {})
        found = {**self.defaults, **text, **config}
        # As transformers does, which wrote it into one or the other.
        found["tie_word_embeddings"] = any(part.get("tie_word_embeddings", False) for part in (text, config))
        for key in ("rope_scaling", "rope_parameters"):
            # Older files name the axes as a kind of frequencies, which are plain ones.
            nested = {
                "rope_type" if name == "type" else name: one for name, one in found.get(key, {}).items()
            }
            if nested.get("rope_type") == "mrope":
                nested["rope_type"] = "default"
            if nested:
                found[key] = nested
        return found

    def vision_of(self, config: Mapping[str, Any]) -> VisionSizes:
        """Return the vision tower; ConfigError if config.json has no valid sizes of it."""
        tower = {**_VISION, **config.get("vision_config", {})}
        sections = next(
            (
                config[key]["mrope_section"]
                for key in ("rope_parameters", "rope_scaling")
                if "mrope_section" in config.get(key, {})
            ),
            None,
        )
        numbers = {
            **{f"vision_config.{key}": tower[key] for key in _VISION if key != "hidden_act"},
            **{key: config[key] for key in _TOKENS},
            **{f"mrope_section[{place}]": one for place, one in enumerate(sections or ())},
        }
        wrong = [
            f"{key}={shown(value)}"
            for key, value in numbers.items()
            if type(value) is not int or not 0 < value < 2**24
        ]
        if wrong:
            raise ConfigError(f"{', '.join(wrong)} must be positive integers; {_RESTORE}")
        head_dim = config["hidden_size"] // config["num_attention_heads"]
        if not isinstance(sections, list) or len(sections) != 3 or sum(sections) * 2 != head_dim:
            raise ConfigError(
                f"mrope_section={shown(sections)} must be three numbers that add up to half of head_dim={head_dim};"
                f" {_RESTORE}"
            )
        return VisionSizes(
            image_token=config["image_token_id"],
            begin_token=config["vision_start_token_id"],
            end_token=config["vision_end_token_id"],
            patch_size=tower["patch_size"],
            merge_size=tower["spatial_merge_size"],
            num_frames=tower["temporal_patch_size"],
            sections=(sections[0], sections[1], sections[2]),
            depth=tower["depth"],
            hidden_size=tower["hidden_size"],
            ffn_hidden_size=tower["intermediate_size"],
        )

    def refusals(self, config: Mapping[str, Any]) -> Iterator[str]:
        yield from super().refusals(config)
        tower = {**_VISION, **config.get("vision_config", {})}
        needed = {"in_channels": 3, "hidden_act": "silu", "out_hidden_size": config["hidden_size"]}
        for key, value in needed.items():
            if tower[key] != value:
                yield f"vision_config.{key}={shown(tower[key])} is not supported; it must be {value!r}"
        for key in _TOKENS:
            if config[key] >= config["vocab_size"]:
                yield f"{key}={config[key]} must be below vocab_size={config['vocab_size']}; {_RESTORE}"

    def vision_tensors(self, sizes: DecoderSizes) -> dict[str, tuple[int, ...]]:
        vision = sizes.vision
        assert vision is not None, "every model of this family has a tower"
        hidden, ffn, merged = (
            vision.hidden_size,
            vision.ffn_hidden_size,
            vision.hidden_size * vision.merge_size**2,
        )
        linear = {
            "attn.qkv": (3 * hidden, hidden),
            "attn.proj": (hidden, hidden),
            "mlp.gate_proj": (ffn, hidden),
            "mlp.up_proj": (ffn, hidden),
            "mlp.down_proj": (hidden, ffn),
        }
        patch = (hidden, 3, vision.num_frames, vision.patch_size, vision.patch_size)
        tensors: dict[str, tuple[int, ...]] = {"patch_embed.proj.weight": patch}
        for block in range(vision.depth):
            prefix = f"blocks.{block}."
            tensors |= {f"{prefix}norm{number}.weight": (hidden,) for number in (1, 2)}
            for name, shape in linear.items():
                tensors |= {f"{prefix}{name}.weight": shape, f"{prefix}{name}.bias": shape[:1]}
        tensors["merger.ln_q.weight"] = (hidden,)
        for place, shape in ((0, (merged, merged)), (2, (sizes.hidden_size, merged))):
            tensors |= {f"merger.mlp.{place}.weight": shape, f"merger.mlp.{place}.bias": shape[:1]}
        return {f"visual.{name}": shape for name, shape in tensors.items()}


QWEN2_5_VL = Qwen25Vl(
    name="qwen2_5_vl",
    hf_prefix="Qwen2_5_VL",
    defaults={
        **WINDOW,
        **_TOKENS,
        "max_position_embeddings": 32768,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e6,
    },
    rope_types=("default",),
    has_classifier=False,
    has_vision=True,
    qkv_bias=True,
)
