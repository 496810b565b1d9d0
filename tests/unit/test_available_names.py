"""Choice of Megatron's layer spec. There is no GPU and no Transformer Engine: patches stand in for both answers."""

from __future__ import annotations

from unittest import mock

import pytest
from megatron.core.models.common.embeddings import rope_utils

from hybridengine.backends.megatron import model
from hybridengine.config.role_sections import MegatronSettings
from hybridengine.families.family import NameSet
from hybridengine.models.presets import resolve_model
from hybridengine.topology.sizes import TrainSizes


@pytest.mark.parametrize(
    ("has_te", "on_cpu", "expected"),
    [
        (True, False, NameSet.TRANSFORMER_ENGINE),
        (True, True, NameSet.LOCAL),
        (False, False, NameSet.LOCAL),
        (False, True, NameSet.LOCAL),
    ],
)
def test_transformer_engine_needs_a_gpu(has_te: bool, on_cpu: bool, expected: NameSet) -> None:
    with mock.patch.multiple(model, HAVE_TE=has_te, is_needed=lambda: on_cpu):
        assert model.available_names() is expected


@pytest.mark.parametrize(
    ("names", "wanted", "name", "expected"),
    [
        (NameSet.TRANSFORMER_ENGINE, True, "llama2-7b", (True, True)),
        (NameSet.TRANSFORMER_ENGINE, False, "llama2-7b", (False, False)),
        (NameSet.LOCAL, True, "llama2-7b", (False, False)),
        (NameSet.TRANSFORMER_ENGINE, True, "glm4-32b", (False, True)),  # rotates neighbouring dims
    ],
)
def test_fusions_need_transformer_engine_and_their_key(
    names: NameSet, wanted: bool, name: str, expected: tuple[bool, bool]
) -> None:
    kernels = dict.fromkeys(("fused_apply_rotary_pos_emb", "fused_apply_rotary_pos_emb_thd"), object())
    with mock.patch.multiple(rope_utils, **kernels):
        config = model.transformer_config(
            resolve_model(name),
            TrainSizes(1, 1, 1),
            "bfloat16",
            names,
            MegatronSettings(fusions=wanted),
        )
    assert (config.apply_rope_fusion, config.gradient_accumulation_fusion) == expected
