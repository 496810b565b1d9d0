"""Checkpoints of a trainer with Megatron-core's dist_checkpointing, under the names and shapes of logical tensors.

    weights.NAME        in the model's type
    master.NAME         float32 weights of the optimizer, where the model's type is another one
    exp_avg.NAME, exp_avg_sq.NAME

Every tensor is written once: a rank writes those elements of its shard that its part of the distributed optimizer owns,
as boxes of logical tensors; where several shards hold the same elements, the first one writes. So nothing in a checkpoint
depends on the sizes it was written with, and any others can read it.
"""

from __future__ import annotations

import json
import pickle
import threading
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.storage import WriteResult

from hybridengine.backends.megatron import compat
from hybridengine.backends.megatron.shim import device_shim
from hybridengine.backends.megatron.trainer import MegatronTrainer
from hybridengine.checkpoints.conversion import ROLE_FILE, WEIGHTS, read_role
from hybridengine.checkpoints.digests import FileDigest, settled_digests
from hybridengine.checkpoints.making import end_role
from hybridengine.checkpoints.random_states import load_random_states, random_states
from hybridengine.checkpoints.tensors import read_metadata
from hybridengine.errors import CheckpointError
from hybridengine.reshard.boxes import Box, extents, starts
from hybridengine.reshard.flat_ranges import RangePiece, pieces_in_range
from hybridengine.reshard.layout import Piece
from hybridengine.runtime.process_groups import world_store

T = TypeVar("T")

MASTER = "master"
PROBE_BYTES = 65_536
"""More than the files that a save writes before all ranks have met."""
POLL_S, LONGEST_POLL_S = 0.05, 1.0
"""Between two looks of rank 0 for what the others have written: at first, and after a while."""
MOST_BYTES = 4 * 2**20
"""Under one key of a store: TCPStore closes the connection at twice as many."""


class BackgroundSave:
    """One save of a trainer, of which a copy in host memory is written while training goes on.

    A thread of each rank writes its files, and one of rank 0 completes the folder as soon as all have: nothing waits for
    the ranks themselves, which may be in the middle of a step then.

    Args:
        folder: an empty one that all ranks see.
        more: what else role.json keeps.

    Raises:
        StorageError: the generation engine has the weights.
        CheckpointError: on all ranks: one cannot write to the folder, or has no memory for the copy.
    """

    def __init__(self, trainer: MegatronTrainer, folder: Path, more: dict[str, Any]) -> None:
        trainer.expect_weights()
        self._rank, self._folder = trainer.rank, folder
        tensors, refused = dict[str, ShardedTensor](), _probe(folder, self._rank)
        try:
            for place, name, box, whole, part in _saved(trainer):
                tensors[place] = _sharded(name, box, whole, part.detach().to("cpu", copy=True).contiguous())
        except (MemoryError, RuntimeError) as error:  # torch's, where there is no memory for it
            refused = refused or error.with_traceback(None)  # whose frame would hold the copies
            tensors.clear()
        self._role = {"shape": _shape_json(trainer), "dtype": trainer.dtype, **trainer.counters(), **more}
        with device_shim():
            tracker: Any = get_cuda_rng_tracker()
            tracked = {name: state.cpu() for name, state in tracker.get_states().items()}
        self._random = random_states(tracked)
        self._group = trainer.groups.intra_dist_opt
        self._agree_on(refused)
        with device_shim():
            planned = compat.begin_save(tensors, folder)
        self._store = world_store(f"save into {folder}")
        self._late = set(range(self._group.size()))
        self._refused = list[str]()
        self._given_up = threading.Event()
        self._outcome: bool | CheckpointError = False
        self._thread = threading.Thread(target=self._write, args=(planned,), name="checkpoint", daemon=True)
        self._thread.start()

    def _agree_on(self, refused: Exception | None) -> None:
        """Have all ranks raise where one of them is refused: none waits for another that has given up."""
        for rank, why in enumerate(_gathered(_text_of(refused), self._group)):
            if why:
                raise CheckpointError(f"{self._folder} cannot be written to by rank {rank}: {why}")

    def _write(self, planned: compat.PlannedSave) -> None:
        try:
            told: _Written | str = self._write_own(planned)
        except Exception as error:
            told = _text_of(error)
        try:
            self._tell(pickle.dumps(told))
            if self._rank == 0:
                self._complete(planned)
                self._outcome = True
        except Exception as error:
            if not isinstance(error, CheckpointError):
                error = CheckpointError(f"{self._folder} could not be completed by rank 0: {_text_of(error)}")
            self._outcome = error.with_traceback(None)  # whose frames would hold the copy

    def _write_own(self, planned: compat.PlannedSave) -> _Written:
        """What this rank is to write; where it is, and its digests, once it is on disk."""
        results = compat.write_save(planned)
        own = [one.name for one in self._folder.glob(f"__{self._rank}_*.distcp")]
        own.append(_random_file(self._rank))
        torch.save(self._random, self._folder / own[-1])
        if self._rank == 0:
            own.append(ROLE_FILE)
            (self._folder / ROLE_FILE).write_text(json.dumps(self._role, indent=1) + "\n")
        return results, settled_digests(self._folder, own)

    def _tell(self, told: bytes) -> None:
        """Have rank 0 find what this rank has to say: in pieces that a store takes, then how many there are."""
        pieces = [told[at : at + MOST_BYTES] for at in range(0, len(told), MOST_BYTES)]
        for number, piece in enumerate(pieces):
            self._store.set(f"{self._rank}/{number}", piece)  # pyright: ignore[reportArgumentType]
        self._store.set(str(self._rank), str(len(pieces)))

    def _taken_from(self, rank: int) -> bytes:
        """What a rank has told."""
        told = b""
        for number in range(int(self._store.get(str(rank)))):
            told += self._store.get(key := f"{rank}/{number}")
            self._store.delete_key(key)
        self._store.delete_key(str(rank))
        return told

    def _complete(self, planned: compat.PlannedSave) -> None:
        """On rank 0: wait for all ranks, and write what says that the folder is whole.

        Raises:
            CheckpointError: a rank could not write.
            OSError: this one cannot.
        """
        results, digests, pause = dict[int, list[WriteResult]](), dict[str, FileDigest](), POLL_S
        while self._late and not self._given_up.is_set():
            for rank in sorted(self._late):
                if self._store.check([str(rank)]):
                    told: _Written | str = pickle.loads(self._taken_from(rank))
                    self._late.discard(rank)
                    if isinstance(told, str):  # the others are still waited for: they write into the folder
                        self._refused.append(f"by rank {rank}: {told}")
                    else:
                        results[rank] = told[0]
                        digests |= told[1]
            if self._late:
                self._given_up.wait(pause)
                pause = min(2 * pause, LONGEST_POLL_S)
        if self._refused or self._given_up.is_set():
            raise self._unwritten()
        compat.end_save(planned, [results[rank] for rank in sorted(results)], self._folder)
        others = [one.name for one in self._folder.iterdir() if one.name not in digests]
        end_role(self._folder, digests | settled_digests(self._folder, others))

    def end(self, last: bool) -> bool | CheckpointError:
        """Whether the folder is whole, or why it will not be. Rank 0 knows; others, what keeps them from telling it.

        Args:
            last: whoever has not written by now has given up.
        """
        if last and self._outcome is False and self._rank == 0:
            self._given_up.set()
            return self._unwritten()
        return self._outcome

    def _unwritten(self) -> CheckpointError:
        """Why there will be no folder: what a rank was refused, or who has not ended."""
        late = ", ".join(map(str, sorted(self._late) or [0]))
        late = f"by rank {late}: it has not ended in time; raise timeouts.save_s"
        return CheckpointError(f"{self._folder} could not be written {next(iter(self._refused), late)}")

    def some_rank_writes(self) -> bool:
        """Whether a rank is still at it, also where it has been given up. Collective."""
        return any(_gathered(self._thread.is_alive(), self._group))


_Written = tuple[list[WriteResult], dict[str, FileDigest]]
"""Where a rank has written what, and its files."""


def _probe(folder: Path, rank: int) -> Exception | None:
    """Why this rank cannot write there; None where it can."""
    file = folder / f"probe-{rank}"
    try:
        file.write_bytes(bytes(PROBE_BYTES))
        file.unlink()
    except OSError as error:
        return error
    return None


def _text_of(error: Exception | None) -> str:
    return "" if error is None else f"{type(error).__name__}: {error}"


def _gathered(value: T, group: dist.ProcessGroup) -> list[T]:
    """What each rank of the group has. Collective."""
    values: list[Any] = [None] * group.size()
    with device_shim():
        dist.all_gather_object(values, value, group=group)
    return values


def load_checkpoint(trainer: MegatronTrainer, folder: Path) -> dict[str, Any]:
    """Weights, optimizer and schedule as they were saved, into any sizes. Collective. Returns what role.json keeps.

    The optimizer must have been started. A checkpoint without optimizer state leaves it fresh, on the new weights.

    Raises:
        CheckpointError: the checkpoint is another model's, or damaged, or has things that are no tensors.
    """
    role = read_role(folder)
    problems = shape_problems(role, trainer)
    if problems:
        raise CheckpointError(f"{folder} is the checkpoint of another model: {'; '.join(problems)}")
    names = read_metadata(folder).state_dict_metadata
    has_optimizer = any(name.startswith(f"{compat.MOMENTS[0]}.") for name in names)
    wanted = {
        place: _sharded(name, box, whole, part)
        for place, name, box, whole, part in _loaded(trainer, has_optimizer)
    }
    missing = sorted({one.key for one in wanted.values()} - set(names))
    if missing:
        raise CheckpointError(
            f"{folder} has no {missing[0]}, and lacks {len(missing)} tensors; use a complete checkpoint"
        )
    try:
        with device_shim():
            compat.load_tensors(wanted, folder)
    except CheckpointException as error:  # of several ranks, each with torch's advice to trust the file
        kinds = sorted({type(failure).__name__ for failure, _ in error.failures.values()})
        raise CheckpointError(f"{folder} cannot be read ({', '.join(kinds)})") from None
    except (OSError, CheckpointingException) as error:
        raise CheckpointError(f"{folder} cannot be read ({error})") from None
    if has_optimizer:
        trainer.set_counters(role)
    else:
        trainer.restart_optimizer()
    return role


def load_random(folder: Path, rank: int) -> bool:
    """Set this process's generators to what they were; False where the checkpoint has no such rank."""
    file = folder / _random_file(rank)
    if not file.is_file():
        return False
    states = load_random_states(file)
    with device_shim():
        tracker: Any = get_cuda_rng_tracker()
        tracker.set_states({**tracker.get_states(), **states})
    return True


def shape_problems(role: dict[str, Any], trainer: MegatronTrainer) -> list[str]:
    """Fields of the model's shape in which a checkpoint differs."""
    own, saved = json.loads(json.dumps(_shape_json(trainer))), role.get("shape") or {}
    found = [
        f"{key} is {saved.get(key)!r}, not {value!r}" for key, value in own.items() if saved.get(key) != value
    ]
    if role.get("dtype") != trainer.dtype:
        found.append(f"dtype is {role.get('dtype')}, not {trainer.dtype}")
    return found


def _shape_json(trainer: MegatronTrainer) -> dict[str, Any]:
    return asdict(trainer.shape)


def _random_file(rank: int) -> str:
    return f"rng-{rank:05d}.pt"


_Part = tuple[str, str, Box, tuple[int, ...], Tensor]
"""Name in the dictionary, tensor's name, box, whole shape, and a view of the elements."""


def _saved(trainer: MegatronTrainer) -> Iterator[_Part]:
    """What this rank writes."""
    shard, key = trainer.layout.shard(trainer.rank), trainer.layout.keys[trainer.rank]
    for name, part in trainer.optimizer_parts().items():
        parameter = shard.by_name[name]
        flat = trainer.weights[name].reshape(-1)[part.start : part.stop]
        for piece in pieces_in_range(parameter, part.start, part.stop):
            if _first_holder(trainer, piece.tensor, piece.box) == key:
                yield from _parts_of(trainer, piece, {WEIGHTS: flat, **_state(trainer, part)})


def _loaded(trainer: MegatronTrainer, with_optimizer: bool) -> Iterator[_Part]:
    """What this rank reads: all its weights, and its part of the optimizer's state."""
    shard = trainer.layout.shard(trainer.rank)
    for parameter in shard.parameters:
        for piece in parameter.pieces:
            view = trainer.weights[parameter.name][piece.index]
            yield _part(trainer, WEIGHTS, piece.tensor, piece.box, view)
    for name, part in trainer.optimizer_parts().items() if with_optimizer else ():
        for piece in pieces_in_range(shard.by_name[name], part.start, part.stop):
            yield from _parts_of(trainer, piece, _state(trainer, part))


def _state(trainer: MegatronTrainer, part: compat.OptimizerPart) -> dict[str, Tensor]:
    own = part.moments if trainer.dtype == "float32" else {MASTER: part.master, **part.moments}
    return {kind: tensor.reshape(-1) for kind, tensor in own.items()}


def _parts_of(trainer: MegatronTrainer, piece: RangePiece, flats: dict[str, Tensor]) -> Iterator[_Part]:
    for kind, flat in flats.items():
        view = flat.as_strided(piece.shape, piece.strides, flat.storage_offset() + piece.offset)
        yield _part(trainer, kind, piece.tensor, piece.box, view)


def _part(trainer: MegatronTrainer, kind: str, tensor: str, box: Box, view: Tensor) -> _Part:
    name = f"{kind}.{tensor}"
    return f"{name} {box}", name, box, trainer.shape.tensors[tensor], view


def _sharded(name: str, box: Box, whole: tuple[int, ...], data: Tensor) -> ShardedTensor:
    """For dist_checkpointing: a box of a logical tensor, to be written or to be filled in place."""
    return ShardedTensor(name, data, data.dtype, extents(box), whole, starts(box), axis_fragmentations=None)


def _first_holder(trainer: MegatronTrainer, tensor: str, box: Box) -> tuple[int, ...]:
    """Key of the first shard that has these elements, among those that have the same."""
    return next(key for key, piece in trainer.layout.holders[tensor] if _covers(piece, box))


def _covers(piece: Piece, box: Box) -> bool:
    return all(a <= c and d <= b for (a, b), (c, d) in zip(piece.box, box, strict=True))
