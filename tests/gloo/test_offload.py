"""Optimizer state in host memory between steps, and host memory during a save, counted by tensors."""

from __future__ import annotations

import threading
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hybridengine.backends.megatron.checkpoint import HELD_BYTES, BackgroundSave, BoxPlanner, load_checkpoint
from hybridengine.backends.megatron.offload import ALIGNMENT, PART_BYTES, HostBuffer, WeightOffload
from hybridengine.models.shapes import ModelShape
from hybridengine.topology.grid import Grid
from hybridengine.topology.sizes import TrainSizes
from hybridengine.weights.process_groups import ProcessGroups
from tests.gloo.checkpoint_ranks import differing, ended, state_of
from tests.gloo.megatron_training import SETTINGS, make_trainer, step
from tests.gloo.ranks import RankLauncher
from tests.gloo.tiny_models import write_model
from tests.gloo.training_reference import DECAY_STEPS


def train_with_offload(rank: int, folder: Path, checkpoint: Path, dtype: str) -> dict[str, Any]:
    """Take four steps with and without offload, with a save in host memory; return what was seen."""
    shape, grid = ModelShape.from_folder(folder), Grid(TrainSizes(1, 1, 2))
    plain, moved, loaded = (make_trainer(shape, grid, rank, ProcessGroups(), folder, dtype) for _ in range(3))
    for trainer in (moved, loaded):
        trainer.start_optimizer(SETTINGS, DECAY_STEPS, offload="optimizer")
    places, on_device, host_bytes = list[set[int]](), list[bool](), list[tuple[int, int, int]]()
    for index in range(4):
        for trainer in (plain, moved):
            step(trainer, index)
        in_fp8 = {"weight": torch.zeros(2)}
        setattr(moved._chunks[0].decoder, "_fp8_workspaces", in_fp8)  # noqa: B010  # as layers of Transformer Engine
        moved.leave_training()
        assert not in_fp8
        moved.leave_training()  # a switch that has failed begins once more
        state = moved.optimizer_parts().values()
        masters = [part.master for part in state if dtype == "bfloat16"]  # else views of the weights
        tensors = masters + [moment for part in state for moment in part.moments.values()]
        places.append({tensor.untyped_storage().data_ptr() for tensor in tensors})
        held = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
        host_bytes.append((sum(held.values()), sum(tensor.nbytes for tensor in tensors), len(tensors)))
        if index == 2:
            ended(BackgroundSave(moved, checkpoint, {}))
            loaded.leave_training()
            load_checkpoint(loaded, checkpoint)
            loaded.enter_training()
        moved.enter_training()
        moved.enter_training()
        on_device.append(not places[-1] & {t.untyped_storage().data_ptr() for t in _moments(moved)})
    step(loaded, 3)
    return {
        "differing": differing(state_of(plain), state_of(moved)),
        "differing after loading": differing(state_of(plain), state_of(loaded)),
        "places": places,
        "on_device": on_device,
        "host_bytes": host_bytes,
    }


def _moments(trainer: Any) -> list[Tensor]:
    return [moment for part in trainer.optimizer_parts().values() for moment in part.moments.values()]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_steps_with_offload_equal_those_without(dtype: str, tmp_path: Path, run_ranks: RankLauncher) -> None:
    write_model(tmp_path / "model", "qwen3", tied=True, dtype=dtype)
    (tmp_path / "saved").mkdir()
    for seen in run_ranks(2, train_with_offload, tmp_path / "model", tmp_path / "saved", dtype):
        assert seen["differing"] == seen["differing after loading"] == []
        assert all(len(places) == 1 for places in seen["places"]), "the state is in one buffer"
        assert len(set().union(*seen["places"])) == 1, "which is persistent"
        assert all(seen["on_device"])
        for held, state, num_tensors in seen["host_bytes"]:
            assert state <= held <= state + num_tensors * ALIGNMENT


def compute_with_offload(rank: int, folder: Path) -> list[tuple[int, bool]]:
    """Return (bytes of weights between passes, True if outputs are those of weights that stay), over two passes."""
    model = make_trainer(
        ModelShape.from_folder(folder), Grid(TrainSizes(1, 1, 1)), rank, ProcessGroups(), folder
    )

    def outputs() -> Tensor:
        tokens = {"tokens": torch.arange(12).view(2, 6)}
        targets = tokens["tokens"][:, 1:]
        return model.forward([tokens], lambda found, _: {"of": found[:, :-1].log_probs(targets)[0]})[0]["of"]

    expected, seen = outputs(), list[tuple[int, bool]]()
    offload = WeightOffload(model.weights)
    for _ in range(2):
        held = model.weights.live_bytes
        with offload.on_device():
            seen.append((held, torch.equal(outputs(), expected)))
    assert model.weights.live_bytes == 0
    return seen


def test_offloaded_weights_compute_the_same(tmp_path: Path, run_ranks: RankLauncher) -> None:
    write_model(tmp_path, "qwen3", tied=False)
    (seen,) = run_ranks(1, compute_with_offload, tmp_path)
    assert seen == [(0, True), (0, True)]


def copy_to_host(rank: int, monkey_part: int) -> None:
    from hybridengine.backends.megatron import offload

    offload.PART_BYTES = monkey_part  # type: ignore[misc]
    buffer = HostBuffer()
    table = torch.arange(7 * 6, dtype=torch.float32).view(7, 6)
    for tensor in (
        table,
        table.t(),
        table[2:5, 1:3],
        table.bfloat16(),
        torch.tensor(3.0),
        table[:0],
        table[0],
    ):
        copy = buffer.host_copy(tensor)
        assert torch.equal(copy, tensor)
        assert copy.dtype == tensor.dtype
        assert copy.untyped_storage().nbytes() == copy.nbytes, "torch would copy it once more to save it"
    first = buffer.take([table, table[1]])
    assert [torch.equal(one, other) for one, other in zip(first, [table, table[1]], strict=True)] == [
        True,
        True,
    ]
    second = buffer.take([table + 1])
    assert torch.equal(first[0], second[0]), "a buffer is used again"


@pytest.mark.parametrize("part", [16, PART_BYTES])
def test_copies_part_by_part(part: int, run_ranks: RankLauncher) -> None:
    run_ranks(1, copy_to_host, part)


def save_slowly(rank: int, folder: Path, checkpoint: Path) -> dict[str, Any]:
    """Save with a disk that takes a tensor only when there is no room for another copy; return the bytes of copies."""
    trainer = make_trainer(
        ModelShape.from_folder(folder), Grid(TrainSizes(1, 1, 1)), rank, ProcessGroups(), folder, "bfloat16"
    )
    step(trainer, 0)
    copies, total, peak = list[weakref.ref[Tensor]](), 0, 0
    waits, buffers = threading.Event(), list[HostBuffer]()
    host_copy, copy_some, resolve = HostBuffer.host_copy, BoxPlanner.copy_some, BoxPlanner.resolve_data

    def counted(buffer: HostBuffer, tensor: Tensor) -> Tensor:
        nonlocal total, peak
        copy = host_copy(buffer, tensor)
        copies.append(weakref.ref(copy))
        held = [one().untyped_storage().nbytes() for one in copies if one() is not None]  # type: ignore[union-attr]
        total, peak = total + copy.nbytes, max(peak, sum(held))
        buffers[:] = [buffer]
        return copy

    def until_full(planner: BoxPlanner) -> bool:
        if not (all_copied := copy_some(planner)):
            waits.set()
        return all_copied

    def slow(planner: BoxPlanner, item: Any) -> Tensor:
        waits.wait(timeout=60)
        return resolve(planner, item)

    HostBuffer.host_copy, BoxPlanner.copy_some, BoxPlanner.resolve_data = counted, until_full, slow  # type: ignore
    before = state_of(trainer)
    save = BackgroundSave(trainer, checkpoint, {})
    ended(save)
    step(trainer, 1)
    load_checkpoint(trainer, checkpoint)
    return {
        "parameters": sum(trainer.weights[name].numel() for name in trainer.weights.names),
        "saved": trainer.shape.num_parameters,  # a padded vocabulary is not
        "total": total,
        "peak": peak,
        "buffer": buffers[0]._memory.nbytes,
        "left": sum(one() is not None for one in copies),
        "differing": differing(before, state_of(trainer)),
    }


def test_a_save_holds_less_than_four_bytes_a_parameter(tmp_path: Path, run_ranks: RankLauncher) -> None:
    write_model(tmp_path / "model", "llama", dtype="bfloat16")
    (tmp_path / "saved").mkdir()
    (seen,) = run_ranks(1, save_slowly, tmp_path / "model", tmp_path / "saved")
    assert seen["total"] == 14 * seen["saved"]  # weights 2, master weights 4, moments 8
    assert 2 * seen["parameters"] < seen["peak"] < HELD_BYTES * seen["parameters"] == 4 * seen["parameters"]
    assert seen["buffer"] <= PART_BYTES
    assert seen["left"] == 0
    assert seen["differing"] == []
