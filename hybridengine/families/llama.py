"""Llama 2 and 3: the plainest dense decoder."""

from __future__ import annotations

from hybridengine.families.family import Family

LLAMA = Family(name="llama", hf_prefix="Llama", defaults={"max_position_embeddings": 2048})
