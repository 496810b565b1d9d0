"""Random number generator states of a process, stored in a file that can be read without executing code."""

from __future__ import annotations

import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor


def random_states(more: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return the states of torch (CPU and current GPU), NumPy and Python, and `more` by name, for `torch.save`."""
    kind, keys, *rest = np.random.get_state(legacy=True)
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
        "numpy": (kind, torch.from_numpy(np.asarray(keys, dtype=np.int64)), *rest),
        "python": random.getstate(),
        "more": {name: state.clone() for name, state in more.items()},
    }


def load_random_states(file: Path) -> dict[str, Tensor]:
    """Set the generators to the states in a file, and return its additional states."""
    states = torch.load(file, map_location="cpu", weights_only=True)
    torch.set_rng_state(states["torch"])
    if states["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])
    kind, keys, *rest = states["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), *rest))
    random.setstate(states["python"])
    return states["more"]
