"""Adapters as PEFT's folders, which peft and vLLM load: adapter_config.json and adapter_model.safetensors."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from hybridengine.checkpoints.hf_files import HfWriter
from hybridengine.errors import CheckpointError, UnreadableError
from hybridengine.files import read_object
from hybridengine.models.checkpoint_files import ADAPTER_CONFIG as CONFIG
from hybridengine.models.checkpoint_files import ADAPTER_FILE as TENSORS
from hybridengine.models.checkpoint_files import read_header
from hybridengine.models.shapes import ModelShape
from hybridengine.reshard.boxes import Box, full_box

PLAIN = {
    "peft_type": "LORA",
    "bias": "none",
    "use_rslora": False,
    "use_dora": False,
    "fan_in_fan_out": False,
    "modules_to_save": None,
    "layers_to_transform": None,
    "rank_pattern": {},
    "alpha_pattern": {},
    "trainable_token_indices": None,
    "alora_invocation_tokens": None,
    "layer_replication": None,
    "use_qalora": False,
    "arrow_config": None,
}
"""Entries of adapter_config.json whose other values mean something else than W + alpha / rank * B A."""
CHANGES_BASE = ("pissa", "corda", "olora", "mica", "loftq", "lora_ga")
"""Beginnings of peft's initializations that change the base weights as well, which such a folder does not have."""


class PeftFolder:
    """The adapters of a PEFT folder, read box by box.

    Raises:
        CheckpointError: the folder is damaged, or its adapters are of another base model, rank, alpha or layers.
    """

    def __init__(self, folder: Path, shape: ModelShape) -> None:
        assert shape.adapters is not None, "the model has adapters"
        self._folder, self._file = folder, folder / TENSORS
        problem = next(self._problems(shape), None)
        if problem is not None:
            raise CheckpointError(f"{folder}: {problem}")
        self._names = {tensor: name for name, tensor in shape.peft_tensors.items()}
        self._check_shared(shape)

    def _problems(self, shape: ModelShape) -> Iterator[str]:
        try:
            config = read_object(self._folder / CONFIG)
        except (FileNotFoundError, UnreadableError) as error:
            yield f"{CONFIG} cannot be read ({error}); name a folder that peft has written"
            return
        adapters = shape.adapters
        assert adapters is not None
        for key, value in PLAIN.items():
            if config.get(key, value) != value and (config[key] or value):
                yield f"{key}={config[key]!r} is not supported; it must be {value!r}"
        start = config.get("init_lora_weights")
        if isinstance(start, str) and start.lower().startswith(CHANGES_BASE):
            yield (
                f"init_lora_weights={start!r} is not supported, because it has changed the base weights as well; convert"
                " the adapters with peft's save_pretrained(path_initial_model_for_weight_conversion=...)"
            )
        for key, ours, setting in (("r", adapters.rank, "rank"), ("lora_alpha", adapters.alpha, "alpha")):
            if config.get(key) != ours:
                yield (
                    f"{key}={config.get(key)} differs from actor.lora.{setting}={ours}; set actor.lora.{setting} to it"
                )
        if not self._file.is_file():
            yield f"{TENSORS} does not exist; name a folder that peft has written"
            return
        found = {tensor.name: tensor.shape for tensor in read_header(self._file)}
        expected = {name: shape.tensors[tensor] for name, tensor in shape.peft_tensors.items()}
        differing = sorted(name for name in {*found, *expected} if found.get(name) != expected.get(name))
        if differing:
            name = differing[0]
            yield (
                f"the adapters are of another base model, or of other layers than actor.lora.modules="
                f"{list(adapters.modules)}: {len(differing)} tensors differ, such as {name}, which has the shape"
                f" {found.get(name, 'missing')} and should have {expected.get(name, 'none')}; use those of this model"
            )

    def _check_shared(self, shape: ModelShape) -> None:
        """Raise CheckpointError if projections that share their A here have different ones in the file."""
        for name, tensor in shape.peft_tensors.items():
            whole, first = full_box(shape.tensors[tensor]), self._names[tensor]
            if name != first and not torch.equal(self._read(name, whole), self._read(first, whole)):
                raise CheckpointError(
                    f"{self._folder}: {name} differs from {first}, and Megatron-core's fused projections share one A;"
                    " train the adapters here from the start, or merge them into the base model with peft"
                )

    def read(self, tensor: str, box: Box) -> Tensor:
        """Return a box of a logical tensor."""
        return self._read(self._names[tensor], box)

    def _read(self, name: str, box: Box) -> Tensor:
        from safetensors import safe_open

        with safe_open(self._file, framework="pt") as opened:
            return opened.get_slice(name)[tuple(slice(*ends) for ends in box)]


class PeftWriter(HfWriter):
    """Writes adapters as a PEFT folder (`HfWriter`); `base` is the folder of the frozen weights."""

    def __init__(self, folder: Path, shape: ModelShape, dtype: torch.dtype, base: str | Path) -> None:
        assert shape.adapters is not None, "the model has adapters"
        self._copies: dict[str, list[str]] = {}
        for name, tensor in shape.peft_tensors.items():
            self._copies.setdefault(tensor, []).append(name)
        names = sorted(shape.peft_tensors.items())
        sizes = {name: shape.tensors[tensor] for name, tensor in names}
        super().__init__(folder, sizes, dtype, max_file_bytes=2**60, stem="adapter_model")
        self._config = {
            **PLAIN,
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": str(base),
            "inference_mode": True,
            "r": shape.adapters.rank,
            "lora_alpha": shape.adapters.alpha,
            "lora_dropout": 0.0,
            "target_modules": sorted({name.split(".")[-3] for name in shape.peft_tensors}),
        }

    def write(self, name: str, tensor: Tensor) -> None:
        """Write a logical tensor to all of its places."""
        for copy in self._copies[name]:
            super().write(copy, tensor)

    def _finish(self) -> None:
        (self._partial / CONFIG).write_text(json.dumps(self._config, indent=2) + "\n")
        super()._finish()
