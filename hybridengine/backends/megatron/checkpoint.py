"""Checkpoints of a trainer in PyTorch's distributed format, with the names and shapes of logical tensors.

    weights.NAME        in the model's type
    master.NAME         float32 weights of the optimizer, if the model's type is different
    exp_avg.NAME, exp_avg_sq.NAME

Every tensor is written once: a rank writes the elements of its shard that its part of the distributed optimizer owns, as
boxes of logical tensors; of several shards with the same elements, the first one writes. A checkpoint therefore does not
depend on the parallel sizes at which it was written, and can be read at any others.
"""

from __future__ import annotations

import json
import threading
import traceback
from collections.abc import Iterator
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from torch import Tensor
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemWriter, SavePlan, SavePlanner
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.checkpoint.utils import _DistWrapper
from torch.futures import Future

from hybridengine.backends.megatron import compat
from hybridengine.backends.megatron.offload import HostBuffer
from hybridengine.backends.megatron.shim import device_shim
from hybridengine.backends.megatron.trainer import MegatronTrainer
from hybridengine.checkpoints.conversion import ROLE_FILE, WEIGHTS, read_role_of
from hybridengine.checkpoints.digests import FileDigest, settled_digests
from hybridengine.checkpoints.making import end_role
from hybridengine.checkpoints.random_states import load_random_states, random_states
from hybridengine.checkpoints.tensors import TensorFolder
from hybridengine.errors import CheckpointError
from hybridengine.families.adapters import is_of_adapter
from hybridengine.families.family import is_float32, is_of_expert
from hybridengine.reshard.boxes import Box, extents, starts
from hybridengine.reshard.flat_ranges import RangePiece, pieces_in_range

T = TypeVar("T")

MASTER = "master"
PROBE_BYTES = 65_536
"""Probe size, larger than the files that a save writes before all ranks have met."""
HELD_BYTES = 4
"""Bytes for each parameter of a rank's shard, below which the copies of a save stay."""
LONGEST_SAVE = timedelta(days=1)
"""Time limit of the threads' messages; the run's own limit, which names the late ranks, is timeouts.save_s."""


class BackgroundSave:
    """One save of a trainer: a thread of each rank writes copies in host memory while training continues.

    Training may continue when `copy_more` returns True on all ranks. Copies that are not written yet take less than
    `HELD_BYTES` for each parameter of a rank's shard: at d >= 4 all of them fit, else the disk must take some first.

    The threads have their own process group, because the ranks may be in the middle of a step.

    Args:
        folder: empty folder visible to all ranks.
        more: additional entries of role.json.

    Raises:
        StorageError: the weights are in the generation engine.
        CheckpointError: on all ranks, if one cannot write to the folder, or has no memory for the optimizer's state.
    """

    def __init__(self, trainer: MegatronTrainer, folder: Path, more: dict[str, Any]) -> None:
        trainer.expect_weights()
        self._rank, self._folder = trainer.rank, folder
        num_parameters = sum(trainer.weights[name].numel() for name in trainer.weights.names)
        self._planner = planner = BoxPlanner(HELD_BYTES * num_parameters)
        refused = _probe(folder, self._rank)
        try:
            for name, box, part in _saved(trainer):
                planner.add(name, box, trainer.shape.tensors[name.partition(".")[2]], part.detach())
        except (MemoryError, RuntimeError) as error:  # raised by torch when there is no memory for moments
            refused = refused or error.with_traceback(None)
        self._role = {**_model_json(trainer), **trainer.counters(), **more}
        with device_shim():
            tracker: Any = get_cuda_rng_tracker()
            tracked = {name: state.cpu() for name, state in tracker.get_states().items()}
        self._random = random_states(tracked)
        self._ranks = trainer.groups.intra_dist_opt
        self._agree_on(refused)
        self._own_group = cast(dist.ProcessGroup, dist.new_group(timeout=LONGEST_SAVE, backend="gloo"))
        self._given_up, self._has_written = threading.Event(), threading.Event()
        self._outcome: bool | CheckpointError = False
        self._thread = threading.Thread(target=self._write, args=(planner,), name="checkpoint", daemon=True)
        self._thread.start()
        planner.copy_some()

    def _agree_on(self, refused: Exception | None) -> None:
        """Raise on all ranks if one of them is refused, so that none waits for another that has stopped."""
        own = f"{type(refused).__name__}: {refused}" if refused else ""
        for rank, why in enumerate(_gathered(own, self._ranks)):
            if why:
                raise CheckpointError(f"{self._folder} cannot be written to by rank {rank}: {why}")

    def _write(self, planner: BoxPlanner) -> None:
        try:
            writer = _RankWriter(self._folder, self._rank, self._random, self._has_written)
            dcp.save({}, storage_writer=writer, planner=planner, process_group=self._own_group)
            _DistWrapper(self._own_group, True, 0).all_reduce("digests", self._own_digests, self._complete)
            self._outcome = True
        except (Exception, CheckpointException) as error:  # torch's is not an Exception
            failures = error.failures if isinstance(error, CheckpointException) else {}
            rank, (why, _) = min(failures.items()) if failures else (self._rank, (error, None))
            traceback.clear_frames(error.__traceback__)  # the frames hold a copy
            reason = f"could not be written by rank {rank}: {type(why).__name__}: {why}"
            self._outcome = CheckpointError(f"{self._folder} {reason}")
        finally:
            planner.end()
            dist.destroy_process_group(self._own_group)

    def _own_digests(self) -> dict[str, FileDigest]:
        """Return the digests of the files that this rank has written, after flushing them to disk."""
        own = [one.name for one in self._folder.glob(f"__{self._rank}_*.distcp")] + [_random_file(self._rank)]
        if self._rank == 0:
            (self._folder / ROLE_FILE).write_text(json.dumps(self._role, indent=1) + "\n")
            own += [ROLE_FILE, ".metadata"]
        return settled_digests(self._folder, own)

    def _complete(self, digests: list[dict[str, FileDigest]]) -> None:
        """Write, on rank 0, the records that mark the folder as complete."""
        if self._given_up.is_set():
            raise self._late()
        end_role(self._folder, {name: digest for part in digests for name, digest in part.items()})

    def copy_more(self) -> bool:
        """Copy what there is room for; return True if training may continue, which changes what is not copied."""
        return self._planner.copy_some()

    def end(self, last: bool) -> bool | CheckpointError:
        """Return True if the folder is complete, False if not yet, or why not; if `last`, late ranks count as failed."""
        self.copy_more()
        if last and self._outcome is False:
            self._given_up.set()
            self._planner.fail(self._late())
            if self._rank == 0 or not self._has_written.is_set():
                return self._late()
        return self._outcome

    def _late(self) -> CheckpointError:
        who = "all ranks" if self._has_written.is_set() else f"rank {self._rank}"
        return CheckpointError(
            f"{self._folder} could not be written by {who}: it has not ended in time; raise timeouts.save_s"
        )

    def some_rank_writes(self) -> bool:
        """Return True if any rank is still writing, even if it was abandoned; when one ends, all do. Collective."""
        self._thread.join(10.0 if any(_gathered(bool(self._outcome), self._ranks)) else 0.0)
        return any(_gathered(self._thread.is_alive(), self._ranks))


class BoxPlanner(DefaultSavePlanner):
    """Writes boxes of logical tensors, which the main thread copies and another one writes, in the order of `add`.

    Copies that are not written yet take less than `most_bytes`, or are a single one.
    """

    def __init__(self, most_bytes: int) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._most_bytes, self._held_bytes = most_bytes, 0
        self._items: list[WriteItem] = []
        self._boxes: dict[MetadataIndex, Tensor] = {}
        self._copies: dict[MetadataIndex, Tensor] = {}
        self._written: Tensor | None = None
        """Copy that is being written; it is whole when the next one is asked for."""
        self._changed = threading.Condition()
        self._buffer, self._fault = HostBuffer(), cast(Exception | None, None)
        self._has_ended = False

    def add(self, name: str, box: Box, whole: tuple[int, ...], part: Tensor) -> None:
        """Add the elements of one box of a tensor."""
        index = MetadataIndex(name, starts(box))
        chunk = ChunkStorageMetadata(torch.Size(starts(box)), torch.Size(extents(box)))
        data = TensorWriteData(chunk, TensorProperties(dtype=part.dtype), torch.Size(whole))
        self._items.append(WriteItem(index, WriteItemType.SHARD, tensor_data=data))
        self._boxes[index] = part

    def create_local_plan(self) -> SavePlan:
        self.plan = SavePlan(self._items)
        return self.plan

    def copy_some(self) -> bool:
        """Copy boxes to host memory while there is room; return True if nothing is left to copy.

        What fails here fails the writing thread.
        """
        try:
            for index, box in list(self._boxes.items()):
                with self._changed:
                    if self._held_bytes and self._held_bytes + box.nbytes >= self._most_bytes:
                        return False
                copy = self._buffer.host_copy(box)
                with self._changed:
                    if self._has_ended:
                        break
                    del self._boxes[index]
                    self._copies[index] = copy
                    self._held_bytes += copy.nbytes
                    self._changed.notify_all()
        except (MemoryError, RuntimeError) as error:  # raised by torch when memory is exhausted
            self.fail(error.with_traceback(None))
        return True

    def fail(self, fault: Exception) -> None:
        """Copy nothing more, and raise `fault` in the writing thread; do nothing if all is copied."""
        with self._changed:
            if self._boxes:
                self._fault = fault
                self._boxes.clear()
                self._changed.notify_all()

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        with self._changed:
            self._free()
            self._changed.wait_for(lambda: self._fault or write_item.index in self._copies)
            if self._fault:
                raise self._fault
            self._written = self._copies.pop(write_item.index)
            return self._written

    def _free(self) -> None:
        """Free the copy that has been written, to which the writer still has references."""
        if self._written is not None:
            self._held_bytes -= self._written.nbytes
            self._written.untyped_storage().resize_(0)
            self._written = None

    def end(self) -> None:
        """Free what is left, and copy nothing more."""
        with self._changed:
            self._has_ended = True
            self._boxes.clear()
            self._copies.clear()
            self._free()


class _RankWriter(FileSystemWriter):
    """Writes a rank's tensors, and then the states of its random number generators."""

    def __init__(self, folder: Path, rank: int, random: dict[str, Any], written: threading.Event) -> None:
        super().__init__(folder, per_thread_copy_ahead=0)  # it would sort tensors on a GPU
        self._written = written
        self._random_file, self._random = folder / _random_file(rank), random

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        written = super().write_data(plan, planner)
        torch.save(self._random, self._random_file)
        self._written.set()
        return written


def _probe(folder: Path, rank: int) -> Exception | None:
    """Return the reason why this rank cannot write to the folder; None if it can."""
    file = folder / f"probe-{rank}"
    try:
        file.write_bytes(bytes(PROBE_BYTES))
        file.unlink()
    except OSError as error:
        return error
    return None


def _gathered(value: T, group: dist.ProcessGroup) -> list[T]:
    """Return the value of each rank of the group. Collective."""
    values: list[Any] = [None] * group.size()
    with device_shim():
        dist.all_gather_object(values, value, group=group)
    return values


def load_checkpoint(trainer: MegatronTrainer, folder: Path) -> dict[str, Any]:
    """Load weights, optimizer and schedule at any parallel sizes; return the contents of role.json. Collective.

    The optimizer must have been started. Without optimizer state in the checkpoint it stays fresh, on the new weights.

    Raises:
        CheckpointError: the checkpoint describes another model, is damaged, or contains anything but tensors.
    """
    role = read_role_of(folder, trainer.shape, trainer.dtype)
    saved = TensorFolder(folder)
    has_optimizer = any(name.startswith(f"{compat.MOMENTS[0]}.") for name in saved.shapes)
    wanted = list(_loaded(trainer, has_optimizer))
    missing = sorted({name for name, *_ in wanted} - set(saved.shapes))
    if missing:
        raise CheckpointError(
            f"{folder} has no {missing[0]}, and lacks {len(missing)} tensors; use a complete checkpoint"
        )
    for name, box, part in wanted:
        part.copy_(saved.read(name, box))
    if has_optimizer:
        trainer.set_counters(role)
    else:
        trainer.restart_optimizer()
    return role


def load_random(folder: Path, rank: int) -> bool:
    """Restore this process's random number generators; return False if the checkpoint does not contain this rank."""
    file = folder / _random_file(rank)
    if not file.is_file():
        return False
    states = load_random_states(file)
    with device_shim():
        tracker: Any = get_cuda_rng_tracker()
        tracker.set_states({**tracker.get_states(), **states})
    return True


def _model_json(trainer: MegatronTrainer) -> dict[str, Any]:
    return {"shape": asdict(trainer.shape), "dtype": trainer.dtype}


def _random_file(rank: int) -> str:
    return f"rng-{rank:05d}.pt"


_Part = tuple[str, Box, Tensor]
"""(tensor name, box, view of the box's elements)."""


def _saved(trainer: MegatronTrainer) -> Iterator[_Part]:
    """Yield the parts that this rank writes."""
    shard, key = trainer.layout.shard(trainer.rank), trainer.layout.keys[trainer.rank]
    for name, part in trainer.optimizer_parts().items():
        parameter = shard.by_name[name]
        flat = trainer.weights[name].reshape(-1)[part.start : part.stop]
        for piece in pieces_in_range(parameter, part.start, part.stop):
            first = _first_holder(trainer, piece.tensor, piece.box)
            if _divided_by(name, first) == _divided_by(name, key):
                yield from _parts_of(piece, {WEIGHTS: flat, **_state(trainer, part)})
    for parameter in shard.parameters:
        for piece in parameter.pieces if is_float32(parameter.name) else ():  # a buffer, which has no state
            first = _first_holder(trainer, piece.tensor, piece.box)
            writer = next(rank for rank, other in trainer.layout.keys.items() if other == first)
            if writer == trainer.rank:
                yield f"{WEIGHTS}.{piece.tensor}", piece.box, trainer.weights[parameter.name][piece.index]


def _loaded(trainer: MegatronTrainer, with_optimizer: bool) -> Iterator[_Part]:
    """Yield the parts that this rank reads: all its weights that are trained, and its part of the optimizer's state."""
    shard = trainer.layout.shard(trainer.rank)
    for parameter in shard.parameters:
        is_frozen = trainer.shape.adapters is not None and not is_of_adapter(parameter.name)
        for piece in () if is_frozen else parameter.pieces:
            yield f"{WEIGHTS}.{piece.tensor}", piece.box, trainer.weights[parameter.name][piece.index]
    for name, part in trainer.optimizer_parts().items() if with_optimizer else ():
        for piece in pieces_in_range(shard.by_name[name], part.start, part.stop):
            yield from _parts_of(piece, _state(trainer, part))


def _state(trainer: MegatronTrainer, part: compat.OptimizerPart) -> dict[str, Tensor]:
    own = part.moments if trainer.dtype == "float32" else {MASTER: part.master, **part.moments}
    return {kind: tensor.reshape(-1) for kind, tensor in own.items()}


def _parts_of(piece: RangePiece, flats: dict[str, Tensor]) -> Iterator[_Part]:
    for kind, flat in flats.items():
        offset = flat.storage_offset() + piece.offset
        yield f"{kind}.{piece.tensor}", piece.box, flat.as_strided(piece.shape, piece.strides, offset)


def _divided_by(name: str, key: tuple[int, ...]) -> tuple[int, ...]:
    """Return the part of a shard's key by which a parameter is divided; other ranks share its optimizer's state."""
    return (key[0], *key[2:]) if is_of_expert(name) else key[:2]


def _first_holder(trainer: MegatronTrainer, tensor: str, box: Box) -> tuple[int, ...]:
    """Return the key of the first shard that holds these elements."""
    return next(
        key
        for key, piece in trainer.layout.holders[tensor]
        if all(a <= c and d <= b for (a, b), (c, d) in zip(piece.box, box, strict=True))
    )
