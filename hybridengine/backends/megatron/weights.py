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

from hybridengine.backends.megatron.shim import device
from hybridengine.backends.megatron.trainer import MegatronModel
from hybridengine.errors import CheckpointError
from hybridengine.model_shapes import SCORE_HEAD, ModelShape
from hybridengine.reshard.hf import hf_layout
from hybridengine.reshard.layout import Piece
from hybridengine.reshard.planner import compile_plan
from hybridengine.runtime.executor import PlanExecutor
from hybridengine.runtime.ledger import StorageLedger
from hybridengine.runtime.process_groups import ProcessGroups
from hybridengine.runtime.storage import WeightStorage
from hybridengine.runtime.transport import PointToPointTransport

COMPANIONS = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "vocab.json",
    "merges.txt",
)
"""Files beside the weights that make a checkpoint folder complete."""


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
    """
    transport = PointToPointTransport(registry.of(model.grid.groups("pp", "dp", "tp")))
    replica = model.grid.group_of(0, "pp", "tp")
    if model.rank in replica:
        destination = hf_layout(model.shape, ranks=(0,))
        plan = compile_plan(model.layout, destination, replica)
        tensors = {}
        if model.rank == 0:
            dtype = next(iter(model.weights.names))
            tensors = {
                name: torch.empty(shape, dtype=model.weights[dtype].dtype, device=device())
                for name, shape in model.shape.tensors.items()
            }
        whole = WeightStorage(tensors)
        whole.release()
        ledger = StorageLedger({"source": model.weights, "destination": whole})
        executor = PlanExecutor(
            plan, model.rank, model.weights, whole, transport, ledger, release_source=False
        )
        writer = _CheckpointWriter(Path(folder), whole, model.shape, max_file_bytes)
        executor.run(after_bucket=writer.add)
        if model.rank == 0:
            writer.close(None if companions is None else Path(companions))
    dist.barrier(group=registry.of(model.grid.groups("pp", "dp", "tp")))


class _CheckpointWriter:
    """Collects tensors into files of bounded size, then writes the index."""

    def __init__(self, folder: Path, weights: WeightStorage, shape: ModelShape, max_file_bytes: int) -> None:
        self._folder, self._partial = folder, folder.with_name(folder.name + ".partial")
        self._weights, self._shape, self._max_file_bytes = weights, shape, max_file_bytes
        shutil.rmtree(self._partial, ignore_errors=True)  # what an export that failed has left
        self._pending: dict[str, Tensor] = {}
        self._pending_bytes = 0
        self._files: list[list[str]] = []

    def add(self, names: tuple[str, ...]) -> None:
        """Take tensors over from the storage that just received them."""
        for name in names:
            tensor = self._weights[name].to("cpu", copy=True)
            num_bytes = tensor.numel() * tensor.element_size()
            if self._pending_bytes + num_bytes > self._max_file_bytes:
                self._flush()
            self._pending[name] = tensor
            self._pending_bytes += num_bytes
        self._weights.release(names)

    def _flush(self) -> None:
        if self._pending:
            self._partial.mkdir(parents=True, exist_ok=True)
            save_file(self._pending, self._partial / f"part-{len(self._files)}", metadata={"format": "pt"})
            self._files.append(list(self._pending))
            self._pending, self._pending_bytes = {}, 0

    def close(self, companions: Path | None) -> None:
        """Name the files as Hugging Face does, and put the folder in its place."""
        self._flush()
        count = len(self._files)
        weight_map = {}
        for number, names in enumerate(self._files):
            name = "model.safetensors" if count == 1 else f"model-{number + 1:05d}-of-{count:05d}.safetensors"
            (self._partial / f"part-{number}").rename(self._partial / name)
            weight_map |= dict.fromkeys(names, name)
        if count > 1:
            size = {"total_size": sum(self._sizes.values())}
            (self._partial / "model.safetensors.index.json").write_text(
                json.dumps({"metadata": size, "weight_map": weight_map}, indent=2)
            )
        for name in COMPANIONS if companions is not None else ():
            if (companions / name).exists():  # type: ignore[operator]
                shutil.copyfile(companions / name, self._partial / name)  # type: ignore[operator]
        if self._folder.exists():
            shutil.rmtree(self._folder)
        self._partial.rename(self._folder)

    @property
    def _sizes(self) -> dict[str, int]:
        return {name: self._weights[name].numel() * self._weights[name].element_size() for name in self._shape.tensors}
