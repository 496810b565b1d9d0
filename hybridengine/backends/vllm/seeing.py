"""Qwen2.5-VL in vLLM without its vision tower: requests bring the embeddings of their images.

vLLM's own class holds a second tower, and reads images by a processor that needs torchvision and a tokenizer. This one is
its Qwen2, whose parameters have the same names, with embeddings in the places of images and positions on three axes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from vllm import ModelRegistry
from vllm.inputs.engine import mm_input
from vllm.model_executor.models.interfaces import SupportsMRoPE, SupportsMultiModal
from vllm.model_executor.models.qwen2 import Qwen2ForCausalLM
from vllm.model_executor.models.utils import _merge_multimodal_embeddings
from vllm.multimodal import MULTIMODAL_REGISTRY
from vllm.multimodal.inputs import (
    MultiModalBatchedField,
    MultiModalFieldElem,
    MultiModalKwargsItem,
    MultiModalKwargsItems,
    PlaceholderRange,
)
from vllm.multimodal.processing import BaseProcessingInfo

from hybridengine.backends.engine import Request
from hybridengine.backends.vision import ImagePlace, VisionTower, identity, image_places, positions
from hybridengine.families.registry import FAMILIES
from hybridengine.families.sizes import VisionSizes

OPTIONS: Mapping[str, Any] = {
    "enable_mm_embeds": True,
    "limit_mm_per_prompt": {"image": 0},  # but for embeddings
    "mm_processor_cache_gb": 0,
}
"""Arguments of an `LLM` whose requests bring embeddings."""


class _Info(BaseProcessingInfo):
    def get_supported_mm_limits(self) -> Mapping[str, int | None]:
        return {"image": None}

    def get_mm_max_tokens_per_item(self, seq_len: int, mm_counts: Mapping[str, int]) -> Mapping[str, int]:
        return {"image": seq_len}


def _no_processor(info: _Info, dummy_inputs: None) -> Any:
    """Return what vLLM asks of a processor of images although it gets none."""
    return SimpleNamespace(info=info, get_dummy_mm_inputs=lambda *_, **__: None)


@MULTIMODAL_REGISTRY.register_processor(_no_processor, info=_Info, dummy_inputs=lambda info: None)  # type: ignore[arg-type]
class SeeingQwen2(Qwen2ForCausalLM, SupportsMultiModal, SupportsMRoPE):
    """vLLM's Qwen2 with images."""

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        whole = vllm_config.model_config.hf_config
        whole.get_text_config().tie_word_embeddings = (
            whole.tie_word_embeddings
        )  # which transformers keeps in one only
        super().__init__(vllm_config=vllm_config, prefix=prefix)

    def get_language_model(self) -> Any:
        """Return the whole model, since it has no tower."""
        return self

    def embed_multimodal(self, *, image_embeds: Sequence[Tensor], **_: object) -> Sequence[Tensor]:
        """Return the embeddings that requests have brought."""
        return list(image_embeds)

    def embed_input_ids(  # type: ignore[override]
        self, input_ids: Tensor, multimodal_embeddings: Any = None, *, is_multimodal: Tensor | None = None
    ) -> Tensor:
        """Return the embeddings of tokens, with those of images in their places."""
        embeddings = self.model.embed_input_ids(input_ids)
        if multimodal_embeddings is None or len(multimodal_embeddings) == 0:
            return embeddings
        return _merge_multimodal_embeddings(embeddings, multimodal_embeddings, is_multimodal)  # type: ignore[arg-type]

    def get_mrope_input_positions(self, input_tokens: list[int], mm_features: Any) -> tuple[Tensor, int]:
        """Return the positions of a prompt's tokens [3, T], and the distance of later positions from token numbers."""
        places = [
            ImagePlace(feature.mm_position.offset, *feature.data["image_grid"].data.tolist())
            for feature in sorted(mm_features, key=lambda feature: feature.mm_position.offset)
        ]
        found = positions(len(input_tokens), places)
        return torch.from_numpy(found), int(found.max()) + 1 - len(input_tokens)


def register() -> None:
    """Let vLLM build `SeeingQwen2` for checkpoints of Qwen2.5-VL in this process."""
    (architecture,) = FAMILIES["qwen2_5_vl"].architectures
    ModelRegistry.register_model(architecture, SeeingQwen2)


def with_images(request: Request, vision: VisionSizes, tower: VisionTower, cache_salt: str) -> Any:
    """Return vLLM's input for a request with images."""
    items, hashes, ranges = list[Any](), list[str](), list[Any]()
    for place, image in zip(
        image_places(request.prompt_token_ids, request.images, vision), request.images, strict=True
    ):
        brought = {
            "image_embeds": tower.embed(image),
            "image_grid": torch.tensor([place.height, place.width]),
        }
        items.append(
            MultiModalKwargsItem(
                {
                    name: MultiModalFieldElem(data=one, field=MultiModalBatchedField())
                    for name, one in brought.items()
                }
            )
        )
        hashes.append(identity(image))
        ranges.append(PlaceholderRange(place.begin, place.num_tokens))
    return mm_input(
        list(request.prompt_token_ids),
        MultiModalKwargsItems({"image": items}),
        {"image": hashes},
        {"image": ranges},
        cache_salt=cache_salt,
    )
