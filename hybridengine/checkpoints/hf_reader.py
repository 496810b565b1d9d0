"""Reading of Hugging Face checkpoints, folders with safetensors files, one box at a time."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from hybridengine.errors import CheckpointError
from hybridengine.models.checkpoint_files import check_checkpoint, tensors_of
from hybridengine.models.shapes import EMBEDDING, LM_HEAD, ModelShape
from hybridengine.reshard.boxes import Box

COMPARED_ROWS = 4096
"""Number of rows of two tensors compared at a time."""


class SafetensorsFolder:
    """Tensors of a Hugging Face checkpoint, read from disk box by box on request."""

    def __init__(self, folder: str | Path) -> None:
        """Locate the tensors.

        Raises:
            CheckpointError: a file is missing or damaged.
        """
        self._files = {name: tensor.file for name, tensor in tensors_of(folder).items()}

    def __contains__(self, tensor: str) -> bool:
        return tensor in self._files

    def read(self, tensor: str, box: Box) -> Tensor:
        """Return the elements of one box of a tensor, possibly mapped from the file.

        Raises:
            CheckpointError: an element is NaN or infinite.
        """
        file = self._files[tensor]
        # Opened anew: pages of a file that were read count as memory of this process while it is mapped.
        with safe_open(file, framework="pt") as opened:
            found = opened.get_slice(tensor)[tuple(slice(a, b) for a, b in box)]
        # The extremes propagate NaN, and need no second tensor of this size.
        if found.numel() and not all(torch.isfinite(extreme) for extreme in torch.aminmax(found)):
            raise CheckpointError(
                f"{file}: {tensor} has values that are NaN or infinite; weights must be finite: copy the file again from"
                " where it came, or use another checkpoint"
            )
        return found


def check_weights(folder: Path) -> ModelShape:
    """Return the shape of a checkpoint as `check_checkpoint` does; a stored tied head must equal the embedding.

    transformers 5 loads such a head as stored, whatever config.json says.

    Raises:
        CheckpointError: a file is missing or damaged, config.json describes other tensors, or the head differs.
    """
    shape, files = check_checkpoint(folder), SafetensorsFolder(folder)
    for first in (
        range(0, shape.vocab_size, COMPARED_ROWS) if shape.tied_embeddings and LM_HEAD in files else ()
    ):
        rows = (first, min(first + COMPARED_ROWS, shape.vocab_size)), (0, shape.hidden_size)
        if not torch.equal(files.read(LM_HEAD, rows), files.read(EMBEDDING, rows)):
            raise CheckpointError(
                f"{folder}: {LM_HEAD} is stored and differs from {EMBEDDING}, where config.json has"
                " tie_word_embeddings=true; set it to false, or restore the original pair"
            )
    return shape
