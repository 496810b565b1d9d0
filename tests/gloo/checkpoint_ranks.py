"""Functions of the checkpoint tests that run on each rank."""

from __future__ import annotations

import gc
import resource
import time
import weakref
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import SavePlan

from hybridengine.backends.megatron import checkpoint
from hybridengine.backends.megatron.checkpoint import BackgroundSave, BoxPlanner, load_checkpoint
from hybridengine.backends.megatron.offload import HostBuffer
from hybridengine.backends.megatron.trainer import MegatronTrainer
from hybridengine.checkpoints.digests import digests_of
from hybridengine.checkpoints.folders import ROLE_FILES, FileList, read_kept
from hybridengine.checkpoints.tensors import TensorFolder
from hybridengine.errors import CheckpointError
from hybridengine.models.shapes import ModelShape
from hybridengine.topology.grid import Grid, RankOrder
from hybridengine.topology.sizes import TrainSizes
from hybridengine.weights.process_groups import ProcessGroups
from tests.gloo.megatron_training import copy_weights, make_trainer, step

LIMIT_S = 60.0


def state_of(trainer: MegatronTrainer) -> dict[str, Tensor]:
    """Return copies of everything that a step depends on and changes."""
    found = copy_weights(trainer)
    for name, part in trainer.optimizer_parts().items():
        found[f"master {name}"] = part.master.clone()
        found |= {f"{moment} {name}": value.clone() for moment, value in part.moments.items()}
    return found | {key: torch.tensor(value) for key, value in trainer.counters().items()}


def differing(one: dict[str, Tensor], other: dict[str, Tensor]) -> list[str]:
    """Return the names whose bits differ."""
    assert one.keys() == other.keys()
    return [name for name in one if not torch.equal(one[name], other[name])]


def empty_folder(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    dist.barrier()
    return folder


def copied(save: BackgroundSave) -> None:
    """Wait until this rank has copied its state."""
    while not save.copy_more():
        time.sleep(0.01)


def ended(save: BackgroundSave) -> None:
    """Wait until the folder is complete.

    Raises:
        CheckpointError: the folder will not be complete; raised on all ranks.
    """
    copied(save)
    deadline, told = time.monotonic() + LIMIT_S, [save.end(last=False)]
    while dist.get_rank() == 0 and told[0] is False:
        time.sleep(0.01)
        told = [save.end(last=time.monotonic() > deadline)]
    dist.broadcast_object_list(told)
    if isinstance(told[0], CheckpointError):
        raise told[0]


def save_while_training(
    rank: int, source: Path, layouts: list[tuple[str, str]], dtype: str, checkpoints: Path
) -> list[list[str]]:
    """Compare two steps with one step, a save during the second, and the second after loading it; return the
    differences for every layout."""
    registry, shape = ProcessGroups(), ModelShape.from_folder(source)
    outcomes = []
    for sizes, order in layouts:
        grid = Grid(TrainSizes.parse(sizes), RankOrder[order])
        folder = empty_folder(checkpoints / f"{sizes}-{order}")
        trainer = make_trainer(shape, grid, rank, registry, source, dtype)
        step(trainer, 0)
        save = BackgroundSave(trainer, folder, {"updates": 7})
        copied(save)
        step(trainer, 1)
        ended(save)
        listed = read_kept(folder / ROLE_FILES, FileList).files
        there = {one.name for one in folder.iterdir()} - {ROLE_FILES}
        assert listed == digests_of(folder, there), "a file changed after its digest was taken"
        resumed = make_trainer(shape, grid, rank, registry, source, dtype)
        role = load_checkpoint(resumed, folder)
        assert role["updates"] == 7
        step(resumed, 1)
        outcomes.append(differing(state_of(trainer), state_of(resumed)))
    return outcomes


def load_and_save(
    rank: int, source: Path, loads: list[tuple[str, str, str]], dtype: str, checkpoints: Path, out: Path
) -> None:
    """Load a checkpoint of one layout in another one, (folder, sizes, rank order), and save it again."""
    registry, shape = ProcessGroups(), ModelShape.from_folder(source)
    for written, sizes, order in loads:
        grid = Grid(TrainSizes.parse(sizes), RankOrder[order])
        trainer = make_trainer(shape, grid, rank, registry, source, dtype)
        load_checkpoint(trainer, checkpoints / written)
        ended(BackgroundSave(trainer, empty_folder(out / f"{written} in {sizes}-{order}"), {}))


def load_converted(rank: int, source: Path, checkpoint: Path) -> list[str]:
    """Return the differences from a trainer that read the Hugging Face folder itself, before and after a step."""
    registry, shape = ProcessGroups(), ModelShape.from_folder(source)
    grid = Grid(TrainSizes(2, 2, 1))
    plain = make_trainer(shape, grid, rank, registry, source, "bfloat16")
    loaded = make_trainer(shape, grid, rank, registry, source, "bfloat16")
    for name in loaded.weights.names:
        loaded.weights[name].zero_()
    step(loaded, 3)  # creates moments and counters that loading must replace
    load_checkpoint(loaded, checkpoint)
    found = differing(state_of(plain), state_of(loaded))
    for trainer in (plain, loaded):
        step(trainer, 0)
    return found + differing(state_of(plain), state_of(loaded))


def load_what_is_refused(rank: int, source: Path, checkpoint: Path) -> tuple[str, bool]:
    """Return (error, True if the weights are untouched) for a checkpoint that belongs to another model or does harm."""
    registry, shape = ProcessGroups(), ModelShape.from_folder(source)
    trainer = make_trainer(shape, Grid(TrainSizes(1, 1, dist.get_world_size())), rank, registry, source)
    before = state_of(trainer)
    try:
        load_checkpoint(trainer, checkpoint)
    except CheckpointError as error:
        return str(error), not differing(before, state_of(trainer))
    return "none", False


def save_where_the_disk_fills(
    rank: int, source: Path, folder: Path, before: str, most: int
) -> tuple[list[str], int]:
    """Return (errors of two saves, number of tensors in the second); in the first, rank 0 may write only `most` bytes
    from the call of `before` on."""
    shape = ModelShape.from_folder(source)
    trainer = make_trainer(shape, Grid(TrainSizes(1, 1, 2)), rank, ProcessGroups(), source)
    errors, limits = list[str](), resource.getrlimit(resource.RLIMIT_FSIZE)
    owner: Any = checkpoint if hasattr(checkpoint, before) else checkpoint._RankWriter
    function = getattr(owner, before)

    def limited(*arguments: object, **named: object) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, limits[1]))
        function(*arguments, **named)

    for name, attempt in {"one": limited, "other": function}.items():
        setattr(owner, before, attempt)
        try:
            ended(BackgroundSave(trainer, empty_folder(folder / name), {}))
            errors.append("none")
        except CheckpointError as error:
            errors.append(str(error))
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    return errors, len(TensorFolder(folder / "other").shapes)


def save_where_a_rank_is_refused(rank: int, source: Path, folder: Path) -> tuple[str, bool, int, str]:
    """Return (error, True if a rank still writes, copies of tensors left on this rank without a garbage collection,
    error of the next save). Rank 1 is refused at once, while rank 0 writes for a second."""
    trainer = make_trainer(
        ModelShape.from_folder(source), Grid(TrainSizes(1, 1, 2)), rank, ProcessGroups(), source
    )
    write, limits = checkpoint._RankWriter.write_data, resource.getrlimit(resource.RLIMIT_FSIZE)
    copies, errors = list[weakref.ref[Tensor]](), list[str]()

    def recorded(buffer: HostBuffer, tensor: Tensor) -> Tensor:
        copies.append(weakref.ref(copy := host_copy(buffer, tensor)))
        return copy

    def write_in_own_time(writer: Any, plan: SavePlan, planner: BoxPlanner) -> Any:
        if rank == 0:
            time.sleep(1)
        return write(writer, plan, planner)

    host_copy, HostBuffer.host_copy = HostBuffer.host_copy, recorded  # type: ignore[method-assign]
    checkpoint._RankWriter.write_data = write_in_own_time  # type: ignore[method-assign,assignment]
    gc.disable()
    for name in ("refused", "next"):
        if rank == 1 and name == "refused":
            resource.setrlimit(resource.RLIMIT_FSIZE, (checkpoint.PROBE_BYTES, limits[1]))
        save = BackgroundSave(trainer, empty_folder(folder / name), {})
        try:
            ended(save)
            errors.append("none")
        except CheckpointError as error:
            errors.append(str(error))
        if name == "refused":
            writes, left = save.some_rank_writes(), sum(one() is not None for one in copies)
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    gc.enable()
    assert copies, "this rank saves nothing"
    return errors[0], writes, left, errors[1]


def save_at_once(rank: int, source: Path, folder: Path) -> None:
    """Save a model that no step has changed."""
    shape = ModelShape.from_folder(source)
    trainer = make_trainer(shape, Grid(TrainSizes(2, 2, 1)), rank, ProcessGroups(), source)
    ended(BackgroundSave(trainer, empty_folder(folder), {}))
