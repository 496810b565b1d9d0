"""Training on a GPU: Transformer Engine's layers, the fused optimizer, offloading, and a checkpoint."""

from __future__ import annotations

import importlib.util
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from hybridengine.backends.megatron import shim
from hybridengine.backends.megatron.checkpoint import BackgroundSave, load_checkpoint
from hybridengine.backends.megatron.model import available_names
from hybridengine.backends.megatron.shim import device
from hybridengine.backends.megatron.trainer import MegatronModel
from hybridengine.backends.megatron.weights import load_weights
from hybridengine.families.family import NameSet
from hybridengine.machine import held_bytes
from hybridengine.models.shapes import ModelShape
from tests.gloo.tiny_models import write_model
from tests.gpu import one_device
from tests.gpu.one_device import ALONE, GIB, MIB, OPTIMIZER, SMALL

pytestmark = pytest.mark.gpu

HOST_SLACK_BYTES = 96 * MIB
"""Growth of a process's host memory for other reasons between two times of leaving training."""
ROUNDING = 2.0
"""Largest ratio of Megatron's errors in bfloat16 to those of transformers in bfloat16."""
MODEL: dict[str, Any] = {
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 512,
}
"""A model that transformers runs too; with an odd vocabulary."""


@dataclass(frozen=True)
class Compared:
    """Log-probs of the same rows, [B, R]."""

    names: str
    """Name set of Megatron's layers."""
    found: Tensor
    """Megatron's, in bfloat16."""
    rounded: Tensor
    """Those of transformers in bfloat16."""
    expected: Tensor
    """Those of transformers in float32."""

    @property
    def errors(self) -> tuple[Tensor, Tensor]:
        """Errors of Megatron and of transformers in bfloat16."""
        return (self.found - self.expected).abs(), (self.rounded - self.expected).abs()

    def check(self) -> None:
        ours, theirs = self.errors
        assert ours.mean() < ROUNDING * theirs.mean()
        assert ours.max() < ROUNDING * theirs.max()


def compare_with_transformers(rank: int, folder: Path) -> Compared:
    _, registry = one_device.begin(rank)
    shape = ModelShape.from_folder(folder)
    model = MegatronModel(shape, ALONE, 0, registry, dtype="bfloat16", names=available_names())
    load_weights(model, folder)
    rows = one_device.drawn_rows(4, 32, 96, shape.vocab_size)
    found = one_device.log_probs_of(model, rows)
    tokens = rows["tokens"].to(device())
    by_dtype = []
    for dtype in (torch.bfloat16, torch.float32):
        reference = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
        torch.nn.Module.to(reference, device())
        with torch.no_grad():
            log_probs = reference(tokens).logits[:, 31:-1].float().log_softmax(-1)
        by_dtype.append(log_probs.gather(-1, tokens[:, 32:, None])[..., 0].cpu())
    return Compared(model.names.name, found, *by_dtype)


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_log_probs_are_those_of_transformers(on_device, folder, note, family):
    """Passes if the model has Transformer Engine's layers where it is installed, and its log-probs are as near to
    those of transformers in float32 as transformers' in bfloat16, with biases (Qwen2) and with norms of queries and
    keys (Qwen3)."""
    write_model(folder, family, dtype="bfloat16", **MODEL)
    [compared] = on_device(1, compare_with_transformers, folder)
    has_engine = importlib.util.find_spec("transformer_engine") is not None
    assert compared.names == (NameSet.TRANSFORMER_ENGINE if has_engine else NameSet.LOCAL).name
    ours, theirs = compared.errors
    note(
        f"{compared.names}: mean error {ours.mean():.3g}, that of transformers in bfloat16 {theirs.mean():.3g}"
    )
    compared.check()


@dataclass(frozen=True)
class Steps:
    """Three optimizer steps towards the same tokens."""

    states: list[dict[str, Tensor]]
    """`one_device.optimizer_state` after each step."""
    log_probs: list[float]
    """Sum of the rows' log-probs before the first and after each step."""


def take_steps(rank: int, folder: Path) -> Steps:
    _, registry = one_device.begin(rank)
    trainer = one_device.make_trainer(folder, registry)
    rows = one_device.drawn_rows(4, 8, 24, trainer.shape.vocab_size)
    log_probs, states = [float(one_device.log_probs_of(trainer, rows).sum())], []
    for _ in range(3):
        one_device.step(trainer, rows)
        states.append(one_device.optimizer_state(trainer))
        log_probs.append(float(one_device.log_probs_of(trainer, rows).sum()))
    return Steps(states, log_probs)


def check_adam(before: dict[str, Tensor], after: dict[str, Tensor]) -> float:
    """Assert that a step is AdamW's, in float64, for the gradient that follows from the first moment; return the largest
    error.

    The error is relative to the learning rate, which is about the size of an update.
    """
    (first, second), worst = OPTIMIZER.betas, 0.0
    steps = int(after["adam_steps"])
    assert steps == int(before["adam_steps"]) + 1
    for name in (key.removeprefix("master ") for key in after if key.startswith("master ")):
        master, m, v = (before[f"{kind} {name}"].double() for kind in ("master", "exp_avg", "exp_avg_sq"))
        new_master, new_m, new_v = (
            after[f"{kind} {name}"].double() for kind in ("master", "exp_avg", "exp_avg_sq")
        )
        gradient = (new_m - first * m) / (1 - first)
        torch.testing.assert_close(
            new_v, second * v + (1 - second) * gradient.square(), rtol=1e-3, atol=float(new_v.max()) * 1e-5
        )
        update = (new_m / (1 - first**steps)) / ((new_v / (1 - second**steps)).sqrt() + OPTIMIZER.eps)
        expected = master * (1 - OPTIMIZER.lr * OPTIMIZER.weight_decay) - OPTIMIZER.lr * update
        worst = max(worst, float((new_master - expected).abs().max()) / OPTIMIZER.lr)
    assert worst < 1e-2
    return worst


def test_steps_are_those_of_adamw(on_device, folder, note):
    """Passes if three steps raise the likelihood of their rows, and each changes master weights and moments as
    AdamW does, computed in float64; the weights in bfloat16 are the rounded master weights."""
    one_device.write_config(folder, **SMALL)
    [steps] = on_device(1, take_steps, folder)
    check_steps(steps)
    note(
        f"update differs from AdamW's in float64 by {check_adam(*steps.states[1:]):.2g} of the learning rate"
    )


def check_steps(steps: Steps) -> None:
    assert steps.log_probs == sorted(steps.log_probs)
    assert steps.log_probs[-1] > steps.log_probs[0] + 1
    for before, after in zip(steps.states, steps.states[1:], strict=False):
        check_adam(before, after)
    last = steps.states[-1]
    for name in (key.removeprefix("weight ") for key in last if key.startswith("weight ")):
        assert torch.equal(last[f"master {name}"].bfloat16().flatten(), last[f"weight {name}"].flatten()), (
            name
        )


@dataclass(frozen=True)
class Offloaded:
    is_unchanged: bool
    """True if weights, moments, master weights and counters are bitwise what they were before they left the device."""
    released_bytes: int
    """Bytes of the device that leaving training has released."""
    state_bytes: int
    """Bytes of moments and master weights."""
    gradient_bytes: int
    grad_norm: float
    """Norm of the gradient of the step that follows."""
    host_bytes: int
    """Bytes of the blocks of host memory in which moments and master weights wait."""
    is_pinned: bool
    """True if these blocks are pinned."""
    host_growth_bytes: int
    """Growth of the process's host memory since the state last waited there, when it was master weights only."""
    allocator_bytes: int
    """Growth of the memory that torch's allocator of pinned memory holds, over both."""


def leave_and_enter(rank: int, folder: Path) -> Offloaded:
    """Leave training before there are moments, as a run does to build its engine, and after two steps."""
    _, registry = one_device.begin(rank)
    trainer = one_device.make_trainer(folder, registry, offload="optimizer")
    rows = one_device.drawn_rows(4, 8, 24, trainer.shape.vocab_size)
    one_device.step(trainer, rows)  # loads kernels, which take host memory too
    trainer.restart_optimizer()
    allocator_bytes = one_device.pinned_bytes()
    trainer.leave_training()
    resident_bytes = held_bytes()["resident_bytes"]
    trainer.enter_training()
    for _ in range(2):
        one_device.step(trainer, rows)
    before, gradient_bytes = one_device.optimizer_state(trainer), trainer.gradient_bytes
    state_bytes = one_device.optimizer_bytes_on_device(trainer)
    copies_bytes = sum(tensor.nbytes for tensor in before.values())
    held = one_device.device_bytes().allocated
    trainer.leave_training()
    released = held - one_device.device_bytes().allocated
    growth = held_bytes()["resident_bytes"] - resident_bytes - copies_bytes
    state = [
        one for part in trainer.optimizer_parts().values() for one in (part.master, *part.moments.values())
    ]
    blocks = {one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in state}
    is_pinned = all(one.is_pinned() for one in state)
    trainer.enter_training()
    unchanged = one_device.same(before, one_device.optimizer_state(trainer))
    return Offloaded(
        unchanged,
        released,
        state_bytes,
        gradient_bytes,
        one_device.step(trainer, rows).grad_norm,
        sum(blocks.values()),
        is_pinned,
        growth,
        one_device.pinned_bytes() - allocator_bytes,
    )


def test_offloaded_state_comes_back_bitwise(on_device, folder, note):
    """Passes if leaving training releases gradients, moments and master weights on the device, and entering it again
    brings the state back bit by bit; and if the state takes its own bytes of pinned host memory and no more: a block
    that is rounded up, or one that stays from the time before there were moments, is larger.
    """
    one_device.write_config(folder, **SMALL)
    [found] = on_device(1, leave_and_enter, folder)
    note(
        f"{found.state_bytes / MIB:.0f} MiB of state in {found.host_bytes / MIB:.0f} MiB of pinned memory, of which"
        f" {found.host_growth_bytes / MIB:.0f} MiB were added for moments"
    )
    check_offloaded(found)
    assert found.released_bytes >= 0.99 * (found.state_bytes + found.gradient_bytes) > 0.5 * GIB
    assert found.is_pinned
    assert found.allocator_bytes == 0
    assert found.host_growth_bytes < 2 / 3 * found.state_bytes + HOST_SLACK_BYTES


def check_offloaded(found: Offloaded) -> None:
    """Assert what holds on any device."""
    assert found.is_unchanged
    assert found.grad_norm > 0
    assert found.state_bytes <= found.host_bytes < 1.01 * found.state_bytes


def save_and_load(rank: int, folder: Path, saved: Path) -> tuple[bool | str, bool, bool]:
    """Return the save's outcome; whether the step during the save changed the state; whether loading undid that."""
    _, registry = one_device.begin(rank)
    trainer = one_device.make_trainer(folder, registry, offload="optimizer")
    rows = one_device.drawn_rows(4, 8, 24, trainer.shape.vocab_size)
    one_device.step(trainer, rows)
    before = one_device.optimizer_state(trainer)
    save = BackgroundSave(trainer, saved, {})
    while not save.copy_more():  # the disk takes some of it first
        time.sleep(0.01)
    one_device.step(trainer, rows)
    while (outcome := save.end(last=False)) is False:
        time.sleep(0.05)
    changed = not one_device.same(before, one_device.optimizer_state(trainer))
    load_checkpoint(trainer, saved)
    restored = one_device.same(before, one_device.optimizer_state(trainer))
    return outcome if outcome is True else str(outcome), changed, restored


def test_a_checkpoint_written_during_a_step_restores_everything(on_device, folder, tmp_path):
    """Passes if a checkpoint has the state of the moment at which it was begun, bitwise, although a step ran
    meanwhile."""
    one_device.write_config(folder, **SMALL)
    (tmp_path / "saved").mkdir()
    assert on_device(1, save_and_load, folder, tmp_path / "saved") == [(True, True, True)]


def test_the_shim_is_never_active_here():
    """Passes if Megatron's calls of CUDA reach CUDA."""
    assert not shim.is_needed()
    with shim.device_shim():
        assert torch.zeros(1, device="cuda").is_cuda
