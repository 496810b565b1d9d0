"""Reads a Hugging Face checkpoint a box at a time: a folder with safetensors files."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from hybridengine.checkpoint_files import tensors_of
from hybridengine.errors import CheckpointError
from hybridengine.reshard.boxes import Box


class SafetensorsFolder:
    """Slices of the tensors of a Hugging Face checkpoint, read from disk when asked for."""

    def __init__(self, folder: str | Path) -> None:
        """Find the tensors.

        Raises:
            CheckpointError: a file is missing or damaged.
        """
        self._files = {name: tensor.file for name, tensor in tensors_of(folder).items()}

    def __contains__(self, tensor: str) -> bool:
        return tensor in self._files

    def read(self, tensor: str, box: Box) -> Tensor:
        """The elements of one box of a tensor; they may be mapped from the file.

        Raises:
            CheckpointError: one of them is NaN or infinite, which training would be blamed for.
        """
        file = self._files[tensor]
        # Opened anew: pages of the file that have been read count as memory of this process as long as it is mapped.
        with safe_open(file, framework="pt") as opened:
            found = opened.get_slice(tensor)[tuple(slice(a, b) for a, b in box)]
        # The extremes carry a NaN along, and need no second tensor as large as the first.
        if found.numel() and not all(torch.isfinite(extreme) for extreme in torch.aminmax(found)):
            raise CheckpointError(
                f"{file}: {tensor} has values that are NaN or infinite; weights must be finite: copy the file again from"
                " where it came, or use another checkpoint"
            )
        return found
