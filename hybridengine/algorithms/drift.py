"""Distance between the engine's and the trainer's log-probs, for the same tokens and weights in two layouts."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from tensordict import TensorDictBase
from torch import Tensor

from hybridengine.algorithms.masking import masked_sum
from hybridengine.errors import DriftError
from hybridengine.rows.micro_batches import drawn_tokens

FOLDER = "drift"
ROW_COLUMNS = ("tokens", "prompt_lengths", "response_lengths", "rollout_log_probs")


def check_drift(
    rollout: TensorDictBase,
    log_probs_BR: Tensor,
    bound: float,
    keep: Callable[[dict[str, Tensor], float], Path],
) -> None:
    """Raise DriftError if the mean |difference| of log-probs over the response tokens exceeds `bound`, or is NaN.

    `rollout` has tokens, lengths and `rollout_log_probs` [B, R]. If the check fails, `keep` saves the rows; it is called
    with them and the mean.
    """
    mask = drawn_tokens(rollout, log_probs_BR.size(1))
    difference = (log_probs_BR.detach().cpu() - rollout["rollout_log_probs"].cpu()).abs()
    mean = float(masked_sum(difference, mask.cpu()) / mask.sum().clamp(min=1))
    if mean <= bound:
        return
    rows = {name: rollout[name].cpu().contiguous() for name in ROW_COLUMNS}
    file = keep({**rows, "log_probs": log_probs_BR.detach().cpu().contiguous()}, mean)
    why = "the weights of the two differ, or their arithmetic does"
    if not log_probs_BR.cpu()[mask.cpu()].isfinite().all():
        why = "those of the trainer are not numbers: the model has diverged, so lower the learning rate"
    raise DriftError(
        f"log-probs of engine and trainer are {mean:.3g} apart (mean over {int(mask.sum())} response tokens), and"
        f" guards.log_prob_drift={bound:g}; {why}: tokens, both log-probs, layouts and digests are in {file.parent}, and"
        " actor.verify=always finds a switch that damages weights"
    )


def save_reproduction(run_folder: Path, rank: int, rows: dict[str, Tensor], told: Mapping[str, Any]) -> Path:
    """Write rows and their context into RUN/drift; return the path of the rows."""
    folder = run_folder / FOLDER
    folder.mkdir(exist_ok=True)
    file = folder / f"rank-{rank:05d}.safetensors"
    save_file(rows, file)
    file.with_suffix(".json").write_text(json.dumps(told, indent=1) + "\n")
    return file
