"""Conversion of weights between Hugging Face checkpoints and Megatron-core models, with the layouts of the switch."""

from __future__ import annotations

import contextlib
import hashlib
import math
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from hybridengine.backends.megatron.model import DTYPES
from hybridengine.backends.megatron.shim import device
from hybridengine.backends.megatron.trainer import MegatronModel
from hybridengine.checkpoints.hf_files import (
    HfWriter,
    SafetensorsFolder,
    frozen_tensors,
    read_parameters,
    type_of,
)
from hybridengine.checkpoints.peft_files import PeftFolder, PeftWriter
from hybridengine.families.adapters import FACTORS, is_of_adapter
from hybridengine.families.sizes import AdapterSizes
from hybridengine.files import writing
from hybridengine.models.shapes import SCORE_HEAD
from hybridengine.reshard.boxes import extents
from hybridengine.reshard.compiler import compile_plan
from hybridengine.reshard.domains import domains
from hybridengine.reshard.layout import Piece, hf_layout
from hybridengine.topology.grid import group_with
from hybridengine.weights.executor import PlanExecutor
from hybridengine.weights.ledger import StorageLedger
from hybridengine.weights.process_groups import ProcessGroups
from hybridengine.weights.storage import WeightStorage
from hybridengine.weights.transport import PointToPointTransport


def load_weights(model: MegatronModel, folder: str | Path) -> None:
    """Fill a rank's parameters from a checkpoint folder; every rank reads only its own boxes.

    A missing score head stays zero, so that a critic or reward model can start from a language model. Adapters are filled
    by `start_adapters`.

    Raises:
        StorageError: the weights are in the generation engine.
        CheckpointError: the checkpoint lacks a tensor, is damaged, or has non-finite weights.
    """
    model.expect_weights()
    shard = model.layout.shard(model.rank).parameters
    own = [parameter for parameter in shard if not is_of_adapter(parameter.name)]
    weights = {parameter.name: model.weights[parameter.name] for parameter in own}
    read_parameters(folder, own, weights, may_lack=(SCORE_HEAD,))


def fingerprint_of(folder: str | Path) -> str:
    """Return the fingerprint of the weights in a checkpoint folder (`SafetensorsFolder.fingerprint`)."""
    return SafetensorsFolder(folder).fingerprint()


def start_adapters(
    model: MegatronModel, seed: int, folder: str | Path | None = None, part: AdapterSizes | None = None
) -> None:
    """Fill a rank's adapters, if any, from a PEFT folder or as PEFT does: A at random, equal at all parallel sizes, B 0.

    With `part`, further rows of A are 0, and all of A in other modules. So is their gradient, and that of their part of B
    is 0 as well: training never changes them.

    Raises CheckpointError for the adapters of another model.
    """
    if model.shape.adapters is None:
        return
    saved = None if folder is None else PeftFolder(Path(folder), model.shape)
    for parameter in model.layout.shard(model.rank).parameters:
        for piece in parameter.pieces if is_of_adapter(parameter.name) else ():
            target = model.weights[parameter.name][piece.index]
            target.copy_(saved.read(piece.tensor, piece.box) if saved else _initial(model, seed, piece))
        layer, _, factor = parameter.name.rpartition(".")
        if part is not None and factor == FACTORS[0]:
            num_rows = part.rank if layer.rpartition(".")[2] in part.modules else 0
            model.weights[parameter.name][num_rows:] = 0


def _initial(model: MegatronModel, seed: int, piece: Piece) -> Tensor:
    """Return a box of an adapter's initial value."""
    _, width = shape = model.shape.tensors[piece.tensor]
    if piece.tensor.endswith("lora_B.weight"):
        return torch.zeros(extents(piece.box))
    digest = hashlib.blake2b(f"{seed} {piece.tensor}".encode(), digest_size=8).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
    bound = 1 / math.sqrt(width)  # kaiming_uniform_ with a = sqrt(5)
    whole = torch.empty(shape).uniform_(-bound, bound, generator=generator)
    return whole[tuple(slice(*ends) for ends in piece.box)]


def save_weights(
    model: MegatronModel,
    registry: ProcessGroups,
    folder: str | Path,
    companions: str | Path | None = None,
    max_file_bytes: int = 4 * 2**30,
    base: str | Path = "",
) -> None:
    """Write the model as a Hugging Face checkpoint, streamed bucket by bucket to rank 0. Collective over all ranks.

    The folder gets its final name only when it is complete. Config and tokenizer files are copied from `companions`.
    A model with adapters is written as a PEFT folder, which names `base` as the folder of the frozen weights. A vision
    tower is copied from `base`.

    Raises:
        StorageError: the weights are in the generation engine.
        OutputError: writing to disk failed; raised on rank 0.
    """
    model.expect_weights()
    world, fault = registry.of(model.grid.groups(*model.grid.axes)), None
    shapes = model.shape.adapter_tensors or model.shape.tensors
    checkpoint = hf_layout(model.shape, names=tuple(shapes))
    groups = domains(model.layout, checkpoint)
    own, senders = registry.of(groups), group_with(0, groups)
    if model.rank in senders:
        whole = _empty_checkpoint(model, shapes)
        executor = PlanExecutor(
            compile_plan(model.layout, checkpoint, senders),
            model.rank,
            model.weights,
            whole,
            PointToPointTransport(own),
            StorageLedger({"model": model.weights, "checkpoint": whole}),
            release_source=False,
        )
        if model.rank == 0:
            like, dtype = Path(companions) if companions else None, DTYPES[model.dtype]
            every = dict(sorted({**shapes, **model.shape.vision_tensors}.items()))
            files = (
                PeftWriter(Path(folder), model.shape, dtype, base)
                if model.shape.adapters
                else HfWriter(Path(folder), every, dtype, max_file_bytes, like)
            )
            fault = _receive(executor, files, whole, frozen_tensors(model.shape, base))
        else:
            executor.run()
    dist.barrier(group=world)
    if fault is not None:
        with writing(Path(folder)):
            raise fault


def _receive(
    executor: PlanExecutor, files: HfWriter, whole: WeightStorage, frozen: Iterable[tuple[str, Tensor]]
) -> OSError | None:
    """Write each bucket as it arrives, then frozen tensors; after a disk error, receive the rest, lest senders fail, and
    return it."""
    faults: list[OSError] = []

    def write(names: tuple[str, ...]) -> None:
        try:
            for name in () if faults else names:
                files.write(name, whole[name].clone())  # a copy, because the storage is released
        except OSError as error:
            faults.append(error)
        whole.release(names)

    try:
        with contextlib.ExitStack() as ends:
            try:
                ends.enter_context(files)
            except OSError as error:
                faults.append(error)
            executor.run(after_bucket=write)
            for name, tensor in frozen:
                files.write(name, tensor)
            if faults:
                raise faults[0]
    except OSError as error:
        return error
    return None


def _empty_checkpoint(model: MegatronModel, shapes: Mapping[str, tuple[int, ...]]) -> WeightStorage:
    """Return all logical tensors on rank 0, without memory until a bucket arrives; nothing on other ranks."""
    tensors = {}
    for name, shape in shapes.items() if model.rank == 0 else ():
        dtype = type_of(name, DTYPES[model.dtype])
        tensors[name] = torch.empty(shape, dtype=dtype, device=device())
        tensors[name].untyped_storage().resize_(0)
    return WeightStorage(tensors)
