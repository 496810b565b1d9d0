"""Streams: vLLM may move the process to a stream of its own, and a training step must not cross from one to another."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from vllm.utils.torch_utils import current_stream

from tests.gpu import one_device
from tests.gpu.one_device import SMALL

pytestmark = pytest.mark.gpu


@dataclass(frozen=True)
class Streams:
    stays: bool
    """True if asking vLLM for its stream leaves the process on the stream on which its models were built."""
    warned: list[str]
    """Warnings of the step that speak of streams."""
    grad_norms: list[float]
    """Norms of the same gradient, before and after."""


def step_after_vllm_takes_a_stream(rank: int, folder: Path) -> Streams:
    """Ask vLLM for its stream as its communicators do with t_g > 1, between two passes over the same rows."""
    _, registry = one_device.begin(rank)
    trainer = one_device.make_trainer(folder, registry)
    rows = one_device.drawn_rows(8, 8, 24, trainer.shape.vocab_size)
    stream = _stream()
    before = one_device.step(trainer, rows).grad_norm
    other = one_device.make_trainer(folder, registry)  # its hooks remember the stream that is current now
    current_stream()
    stays = _stream() == stream
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        after = one_device.step(other, rows).grad_norm
    warned = [str(one.message) for one in caught if "stream" in str(one.message).lower()]
    return Streams(stays, warned, [before, after])


def _stream() -> int:
    return torch.cuda.current_stream().cuda_stream if torch.cuda.is_available() else 0


def test_a_step_stays_on_one_stream(on_device, folder, note):
    """Passes if vLLM's `current_stream()`, called after Megatron's DistributedDataParallel was built, changes
    nothing: the process stays on its stream, autograd does not warn of another one, and the gradient of the same
    rows is the same.
    """
    one_device.write_config(folder, **SMALL)
    [streams] = on_device(1, step_after_vllm_takes_a_stream, folder)
    note(f"warnings of streams: {len(streams.warned)}")
    assert not streams.warned
    assert streams.stays
    assert streams.grad_norms[1] == pytest.approx(streams.grad_norms[0], rel=1e-2)
