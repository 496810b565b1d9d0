"""Stages of vLLM's models with the ends that they use alone: some have the embedding, last norm and head on each."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch import nn

from hybridengine.models.shapes import EMBEDDING, FINAL_NORM, LM_HEAD


@contextlib.contextmanager
def unused_ends_dropped(*, tied: bool) -> Iterator[None]:
    """Build models whose stages have only the ends that they use, as those of most of vLLM's families do by themselves.

    They go before vLLM fills them and its sleep mode lists what to keep, so that no copy of them takes memory.

    Args:
        tied: the head is the embedding, which the last stage then needs.
    """
    from vllm.distributed.parallel_state import get_pp_group
    from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader
    from vllm.model_executor.models.utils import PPMissingLayer

    loader_class: Any = DummyModelLoader
    load = loader_class.load_weights

    def load_weights(loader: DummyModelLoader, model: nn.Module, model_config: Any) -> None:
        stage = get_pp_group()
        used = {
            EMBEDDING: stage.is_first_rank or (tied and stage.is_last_rank),
            FINAL_NORM: stage.is_last_rank,
            LM_HEAD: stage.is_last_rank,
        }
        for name, is_used in used.items():
            if not is_used:
                model.set_submodule(name.removesuffix(".weight"), PPMissingLayer())
        load(loader, model, model_config)

    loader_class.load_weights = load_weights
    try:
        yield
    finally:
        loader_class.load_weights = load
