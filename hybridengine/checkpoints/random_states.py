"""The states of a process's random number generators, as tensors that no code needs to run to read."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor


@dataclass(frozen=True)
class RandomStates:
    """Of torch (CPU and the present GPU), NumPy and Python, and of other generators."""

    tensors: dict[str, Tensor]
    texts: dict[str, str]
    """What is no tensor, as JSON."""

    @classmethod
    def now(cls, more: Mapping[str, Tensor]) -> RandomStates:
        """This process's at the moment, and `more`, by name."""
        kind, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
        states = {
            "torch": torch.get_rng_state(),
            "numpy": torch.from_numpy(np.asarray(keys, dtype=np.int64)),
            **{f"more.{name}": state for name, state in more.items()},
        }
        if torch.cuda.is_available():
            states["cuda"] = torch.cuda.get_rng_state()
        texts = {
            "numpy": json.dumps([kind, int(position), int(has_gauss), float(gauss)]),
            "python": json.dumps(random.getstate()),
        }
        return cls({name: state.clone() for name, state in states.items()}, texts)

    def save(self, file: Path) -> None:
        """Write them.

        Raises:
            OSError: that failed.
        """
        file.write_bytes(save(self.tensors, metadata=self.texts))


def load_random_states(file: Path) -> dict[str, Tensor]:
    """Set them to what was written; returns those of `more`."""
    with safe_open(file, framework="pt") as opened:
        states = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
        texts = opened.metadata()
    torch.set_rng_state(states["torch"])
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])
    kind, position, has_gauss, gauss = json.loads(texts["numpy"])
    np.random.set_state((kind, states["numpy"].numpy().astype(np.uint32), position, has_gauss, gauss))
    version, words, following = json.loads(texts["python"])
    random.setstate((version, tuple(words), following))
    return {name.removeprefix("more."): state for name, state in states.items() if name.startswith("more.")}
