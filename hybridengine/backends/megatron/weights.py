"""Weights between Hugging Face checkpoints and Megatron-core models, by the same layouts as the switch."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from hybridengine.backends.megatron.model import DTYPES
from hybridengine.backends.megatron.shim import device
from hybridengine.backends.megatron.trainer import MegatronModel
from hybridengine.checkpoint_files import COMPANIONS
from hybridengine.errors import CheckpointError
from hybridengine.model_shapes import SCORE_HEAD
from hybridengine.reshard.hf import hf_layout
from hybridengine.reshard.layout import Piece
from hybridengine.reshard.planner import compile_plan
from hybridengine.runtime.executor import PlanExecutor
from hybridengine.runtime.ledger import StorageLedger
from hybridengine.runtime.process_groups import ProcessGroups
from hybridengine.runtime.storage import WeightStorage
from hybridengine.runtime.transport import PointToPointTransport


class SafetensorsFolder:
    """Slices of the tensors of a Hugging Face checkpoint, read from disk when asked for."""

    def __init__(self, folder: str | Path) -> None:
        self._folder = Path(folder)
        self._files = _files_by_tensor(self._folder)
        self._open: dict[Path, safe_open] = {}  # type: ignore[valid-type]

    def __contains__(self, tensor: str) -> bool:
        return tensor in self._files

    def read(self, piece: Piece) -> Tensor:
        """The elements of one box of a logical tensor."""
        path = self._files[piece.tensor]
        if path not in self._open:
            self._open[path] = safe_open(path, framework="pt")
        return self._open[path].get_slice(piece.tensor)[tuple(slice(a, b) for a, b in piece.box)]  # type: ignore[attr-defined]


def _files_by_tensor(folder: Path) -> dict[str, Path]:
    index = folder / "model.safetensors.index.json"
    if index.exists():
        return {name: folder / file for name, file in json.loads(index.read_text())["weight_map"].items()}
    single = folder / "model.safetensors"
    if not single.exists():
        raise CheckpointError(f"{folder} holds no model.safetensors; name a Hugging Face checkpoint folder")
    with safe_open(single, framework="pt") as file:
        return dict.fromkeys(file.keys(), single)


def load_weights(model: MegatronModel, folder: str | Path) -> None:
    """Fill a rank's parameters from a checkpoint folder; every rank reads just its own boxes.

    A missing score head stays zero: a critic or reward model may start from a language model.

    Raises:
        CheckpointError: the checkpoint lacks a tensor.
    """
    files = SafetensorsFolder(folder)
    for parameter in model.layout.shard(model.rank).parameters:
        target = model.weights[parameter.name]
        target.zero_()
        for piece in parameter.pieces:
            if piece.tensor not in files:
                if piece.tensor == SCORE_HEAD:
                    continue
                raise CheckpointError(
                    f"{folder} has no tensor {piece.tensor}, which {parameter.name} needs; use a complete checkpoint"
                )
            box = tuple(slice(start, stop) for start, stop in piece.local_box)
            target[box].copy_(files.read(piece))


def save_weights(
    model: MegatronModel,
    registry: ProcessGroups,
    folder: str | Path,
    companions: str | Path | None = None,
    max_file_bytes: int = 4 * 2**30,
) -> None:
    """Write the model as a Hugging Face checkpoint: streamed bucket by bucket to rank 0. Collective over all ranks.

    The folder appears under its name only when it is complete.

    Args:
        companions: a checkpoint folder whose config and tokenizer files are copied along.

    Raises:
        StorageError: the generation engine has the weights.
    """
    model.expect_weights()
    world = registry.of(model.grid.groups("pp", "dp", "tp"))
    replica = model.grid.group_of(0, "pp", "tp")
    if model.rank in replica:
        whole = _empty_checkpoint(model)
        executor = PlanExecutor(
            compile_plan(model.layout, hf_layout(model.shape), replica),
            model.rank,
            model.weights,
            whole,
            PointToPointTransport(world),
            StorageLedger({"model": model.weights, "checkpoint": whole}),
            release_source=False,
        )
        writer = _CheckpointWriter(Path(folder), whole, max_file_bytes)
        executor.run(after_bucket=writer.add)
        if model.rank == 0:
            writer.close(companions)
    dist.barrier(group=world)


def _empty_checkpoint(model: MegatronModel) -> WeightStorage:
    """Rank 0: all logical tensors, without memory until a bucket arrives. Other ranks: nothing."""
    tensors = {}
    for name, shape in model.shape.tensors.items() if model.rank == 0 else ():
        tensors[name] = torch.empty(shape, dtype=DTYPES[model.dtype], device=device())
        tensors[name].untyped_storage().resize_(0)
    return WeightStorage(tensors)


class _CheckpointWriter:
    """Collects tensors into files of bounded size, then writes the index."""

    def __init__(self, folder: Path, weights: WeightStorage, max_file_bytes: int) -> None:
        self._folder, self._partial = folder, folder.with_name(folder.name + ".partial")
        self._weights, self._max_file_bytes = weights, max_file_bytes
        shutil.rmtree(self._partial, ignore_errors=True)  # what an export that failed has left
        self._pending: dict[str, Tensor] = {}
        self._files: list[list[str]] = []
        self._total_bytes = 0

    def add(self, names: tuple[str, ...]) -> None:
        """Take tensors over from the storage that just received them."""
        for name in names:
            tensor = self._weights[name].to("cpu", copy=True)
            if self._pending_bytes + _num_bytes(tensor) > self._max_file_bytes:
                self._flush()
            self._pending[name] = tensor
        self._weights.release(names)

    @property
    def _pending_bytes(self) -> int:
        return sum(_num_bytes(tensor) for tensor in self._pending.values())

    def _flush(self) -> None:
        if not self._pending:
            return
        self._partial.mkdir(parents=True, exist_ok=True)
        save_file(self._pending, self._partial / f"part-{len(self._files)}", metadata={"format": "pt"})
        self._files.append(list(self._pending))
        self._total_bytes += self._pending_bytes
        self._pending = {}

    def close(self, companions: str | Path | None) -> None:
        """Name the files as Hugging Face does, and put the folder in its place."""
        self._flush()
        count = len(self._files)
        weight_map: dict[str, str] = {}
        for number, names in enumerate(self._files):
            file = "model.safetensors" if count == 1 else f"model-{number + 1:05d}-of-{count:05d}.safetensors"
            (self._partial / f"part-{number}").rename(self._partial / file)
            weight_map |= dict.fromkeys(names, file)
        if count > 1:
            index = {"metadata": {"total_size": self._total_bytes}, "weight_map": weight_map}
            (self._partial / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
        if companions is not None:
            for name in COMPANIONS:
                if (Path(companions) / name).exists():
                    shutil.copyfile(Path(companions) / name, self._partial / name)
        if self._folder.exists():
            shutil.rmtree(self._folder)
        self._partial.rename(self._folder)


def _num_bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
