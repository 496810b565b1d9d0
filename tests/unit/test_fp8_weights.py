"""Copies of weights in FP8, which modules of Transformer Engine keep, are released with the gradients."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import nn

from hybridengine.backends.megatron.compat import drop_fp8_weights


def test_copies_are_released_wherever_a_module_keeps_them() -> None:
    inner: Any = nn.Linear(2, 2)
    kept, chunk = torch.empty(4), nn.Sequential(nn.Linear(2, 2), nn.Sequential(inner))
    inner._fp8_workspaces = {"weight": kept}
    there = weakref.ref(kept)
    del kept
    drop_fp8_weights([chunk])
    assert there() is None
    assert inner._fp8_workspaces == {}, "a module makes them again in its next pass"
