"""Stand-ins of a rehearsal for files: folders with a model's configuration, weights without values, and rows."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

from hybridengine.config import ModelHolder, RunConfig
from hybridengine.families.registry import ARCHITECTURES
from hybridengine.models.checkpoint_files import CONFIG_FILE
from hybridengine.models.presets import find_preset
from hybridengine.reshard.boxes import Box, extents
from hybridengine.rows.protocols import ROW_NUMBERS

PROMPT_COLUMNS = ("prompt_tokens",)
TOKEN_COLUMNS = ("tokens",)


def write_model_config(config: RunConfig, holder: ModelHolder, folder: Path) -> None:
    """Write the `config.json` of a holder's model into a new folder."""
    folder.mkdir(parents=True)
    described = holder.hf_config if holder.path is not None else config.model.hf_config
    own = Path(holder.path or config.model.path or "") / CONFIG_FILE
    if holder.path is None and config.model.build is not None:
        values: dict[str, Any] = config.model.build.hf_config()
    elif (holder.path or config.model.path) and own.exists():
        shutil.copyfile(own, folder / CONFIG_FILE)
        return
    else:
        assert described is not None, "checked with the configuration"
        preset = find_preset(described)
        if preset is None:
            file = Path(described)
            shutil.copyfile(file / CONFIG_FILE if file.is_dir() else file, folder / CONFIG_FILE)
            return
        values = dict(preset.config)
    values.setdefault("model_type", ARCHITECTURES[values["architectures"][0]].name)
    (folder / CONFIG_FILE).write_text(json.dumps(values))


class WeightsWithoutValues:
    """Stands in for `checkpoints.hf_files.SafetensorsFolder`: it has every tensor, and reads boxes in bfloat16."""

    def __init__(self, folder: str | Path) -> None:
        pass

    def __contains__(self, tensor: str) -> bool:
        return True

    def fingerprint(self) -> str:
        return ""

    def read(self, tensor: str, box: Box) -> Tensor:
        return torch.empty(extents(box), dtype=torch.bfloat16)


def longest_rows(config: RunConfig, num_rows: int, columns: Sequence[str], vocab_size: int) -> TensorDict:
    """Return rows with the longest prompts and responses that the run allows, as `columns` of a worker's method.

    No two rows have the same prompt, so that an engine shares no prefix.
    """
    prompt, response = config.rollout.max_prompt_tokens, config.rollout.max_response_tokens
    numbers = torch.arange(num_rows)
    tokens = (numbers[:, None] + torch.arange(prompt + response)) % vocab_size
    known: dict[str, Any] = {
        "tokens": tokens,
        "prompt_tokens": tokens[:, :prompt],
        "prompt_lengths": torch.full((num_rows,), prompt),
        "response_lengths": torch.full((num_rows,), response),
        "dropped": torch.zeros(num_rows, dtype=torch.bool),
        "scores": numbers % 2 * -1.0,  # the first of each pair is better
        ROW_NUMBERS: numbers,
    }
    per_token = {name: torch.zeros(num_rows, response) for name in columns if name not in known}
    return TensorDict({name: (known | per_token)[name] for name in columns}, batch_size=[num_rows])
