"""Registry of the supported model families, one line each."""

from __future__ import annotations

from hybridengine.families.deepseek_v3 import DEEPSEEK_V3
from hybridengine.families.family import Family
from hybridengine.families.gemma3 import GEMMA3
from hybridengine.families.glm4 import GLM4
from hybridengine.families.granite import GRANITE
from hybridengine.families.llama import LLAMA
from hybridengine.families.mistral import MISTRAL
from hybridengine.families.mixtral import MIXTRAL
from hybridengine.families.phi3 import PHI3
from hybridengine.families.qwen2 import QWEN2
from hybridengine.families.qwen2_5_vl import QWEN2_5_VL
from hybridengine.families.qwen3 import QWEN3
from hybridengine.families.qwen3_moe import QWEN3_MOE

FAMILIES: dict[str, Family] = {
    family.name: family
    for family in (
        LLAMA,
        QWEN2,
        QWEN3,
        MISTRAL,
        PHI3,
        GEMMA3,
        GLM4,
        GRANITE,
        QWEN3_MOE,
        MIXTRAL,
        DEEPSEEK_V3,
        QWEN2_5_VL,
    )
}
"""Name -> family."""

ARCHITECTURES: dict[str, Family] = {
    architecture: family for family in FAMILIES.values() for architecture in family.architectures
}
"""Hugging Face architecture -> family."""
