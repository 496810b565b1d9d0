"""The public API: every name is where the documentation says, and importing the package imports nothing heavy."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest

import hybridengine

HEAVY = ("torch", "ray", "megatron", "vllm", "transformers", "numpy", "pydantic")


@pytest.mark.parametrize("name", hybridengine.__all__)
def test_a_public_name_is_that_of_its_module(name: str) -> None:
    assert getattr(hybridengine, name) is getattr(importlib.import_module(hybridengine._MODULES[name]), name)


def test_planning_with_public_names_imports_nothing_heavy() -> None:
    code = f"""
import sys, hybridengine
assert not set({HEAVY}) & set(sys.modules)
from hybridengine import GenerationGrid, GenSizes, Grid, ModelShape, TrainSizes, compile_plan, domains, megatron_layout
from hybridengine import vllm_layout
shape = ModelShape.from_folder("configs/models/smollm2-135m-instruct.json")
grid = Grid(TrainSizes.parse("2-3-1"))
source, destination = megatron_layout(shape, grid), vllm_layout(shape, GenerationGrid(grid, GenSizes.parse("1-1")))
plan = compile_plan(source, destination, domains(source, destination)[0], 2**20)
heavy = set({HEAVY[:5]}) & set(sys.modules)
assert not heavy, heavy
print(len(plan.buckets))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 100


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'Trainer'"):
        hybridengine.Trainer  # noqa: B018
