"""Llama 2 and 3: a dense decoder without special features."""

from __future__ import annotations

from hybridengine.families.family import Family

LLAMA = Family(name="llama", hf_prefix="Llama", defaults={"max_position_embeddings": 2048})
