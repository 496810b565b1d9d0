"""A client's rows for every loss, and the configuration of an actor that takes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import yaml
from tensordict import TensorDict

from hybridengine.config import RunConfig, load_config

SIZES: dict[str, Any] = {"head_dim": 32, "vocab_size": 59}
LENGTHS = [7, 1, 12, 4, 9]
WIDTH = 12


def make_rows() -> TensorDict:
    """Return rows for every loss; targets are not the next tokens, and some sampler's log-probs are far off."""
    generator = torch.Generator().manual_seed(4)
    shape = len(LENGTHS), WIDTH
    mask = torch.arange(WIDTH) < torch.tensor(LENGTHS).unsqueeze(1)
    columns = {name: torch.randint(0, 59, shape, generator=generator) for name in ("tokens", "targets")}
    columns["logprobs"] = -4.0 + torch.randn(shape, generator=generator)
    columns["advantages"] = torch.randn(shape, generator=generator)
    columns["weights"] = torch.randn(shape, generator=generator)
    masked = {name: column.masked_fill(~mask, 0) for name, column in columns.items()}
    return TensorDict({**masked, "lengths": torch.tensor(LENGTHS)}, batch_size=[len(LENGTHS)])


def of_loss(rows: TensorDict, *names: str) -> TensorDict:
    return rows.select("tokens", "targets", "lengths", *names)


def load_run(folder: Path, parallel: str) -> RunConfig:
    sections = {
        "run": {"steps": 1, "folder": str(folder / f"runs-{parallel}")},
        "cluster": {"ranks_per_node": [1 if parallel == "1-1-1" else 2]},
        "model": {"path": str(folder / "policy")},
        "data": {"batch_size": 4, "train_file": str(folder / "rows.jsonl")},
        "actor": {"parallel": parallel, "generate": "1-1", "micro_batch_tokens": 16},
        "reference": {"parallel": parallel},
        "reward": {"function": "tests.unit.reward_cases:answer_lengths"},
        "rollout": {"max_prompt_tokens": 8, "max_response_tokens": 8},
    }
    path = folder / f"{parallel}.yaml"
    path.write_text(yaml.safe_dump(sections))
    return load_config(path)
