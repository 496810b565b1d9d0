"""A tiny PPO run: its configuration, and the files that it leaves."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hybridengine.config import RunConfig
from hybridengine.report.step_rows import Row

STEPS = 3
SECTIONS: dict[str, Any] = {
    "run": {"steps": STEPS, "eval_every": 2, "seed": 7},
    "cluster": {"ranks_per_node": [4]},
    "model": {
        "build": {
            "family": "qwen3",
            "num_layers": 3,
            "hidden_size": 64,
            "ffn_hidden_size": 96,
            "num_heads": 4,
            "num_kv_heads": 2,
            "head_dim": 32,
            "max_positions": 64,
        }
    },
    "data": {
        "batch_size": 8,
        "task": {"name": "arithmetic", "train_rows": 64, "eval_rows": 6},
    },
    "warmup": {"steps": 1, "batch_size": 8, "lr": 3e-3},
    "actor": {
        "parallel": "2-2-1",
        "generate": "1-1",
        "bucket_bytes": "32KiB",
        "mini_batches": 2,
        "optimizer": {"lr": 1e-3},
    },
    "critic": {"parallel": "1-2-2", "mini_batches": 2, "optimizer": {"lr": 1e-3}},
    "reference": {"parallel": "2-2-1"},
    "reward": {"function": "hybridengine.data.tasks:length_cost"},  # some score that every response gets
    "rollout": {
        "max_prompt_tokens": 32,
        "max_response_tokens": 12,
        "samples_per_prompt": 2,
        "kv_cache_bytes": "16MiB",
    },
}


MEASURED = ("time/", "idle/", "throughput/", "memory/", "transfer/", "controller/", "reward/call_s")
"""Metrics of the machine, not of the computation."""


def computed(rows: Iterable[Row]) -> list[Row]:
    """Return the rows without the values that depend on the machine."""
    return [{key: row[key] for key in row if not key.startswith(MEASURED)} for row in rows]


@dataclass(frozen=True)
class Run:
    """A run that has ended."""

    config: RunConfig
    folder: Path
    rows: list[Row]
    console: str

    @property
    def steps(self) -> list[Row]:
        """Rows of the training steps."""
        return self.rows[1:]


def value(row: Row, key: str) -> float:
    """Return a metric that must exist."""
    found = row[key]
    assert found is not None
    return float(found)
