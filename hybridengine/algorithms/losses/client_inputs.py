"""Columns and settings that a client of the Tinker API sends for each loss of `client.py`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from hybridengine.errors import RequestError


@dataclass(frozen=True)
class ClientInputs:
    """Inputs of a loss."""

    columns: tuple[str, ...]
    """Columns that a row needs beside its targets, [T] each."""
    settings: Mapping[str, float] = field(default_factory=dict)
    """Settings that it takes, with their defaults."""
    is_wide: bool = False
    """True if a row may have K targets at each position, with a column value for each."""


def _thresholds(low: float, high: float) -> dict[str, float]:
    return {"clip_low_threshold": low, "clip_high_threshold": high}


POLICY_COLUMNS = ("logprobs", "advantages")
CLIENT_INPUTS: Mapping[str, ClientInputs] = {
    "cross_entropy": ClientInputs(("weights",), is_wide=True),
    "importance_sampling": ClientInputs(POLICY_COLUMNS),
    "ppo": ClientInputs(POLICY_COLUMNS, _thresholds(0.8, 1.2)),
    "cispo": ClientInputs(POLICY_COLUMNS, _thresholds(0.0, 4.0)),
    "dro": ClientInputs(POLICY_COLUMNS, {"beta": 0.05}),
    # The paper's range, arXiv 2507.18071, section 5.1: the API's documentation names no default.
    "gspo": ClientInputs((*POLICY_COLUMNS, "sequence_ratio_mask"), _thresholds(1 - 3e-4, 1 + 4e-4)),
}
"""Name of a loss in the API -> its inputs."""
FLOAT32_MAX, FLOAT32_TINY = (2 - 2**-23) * 2.0**127, 2.0**-126
LOSS_COLUMNS = tuple(dict.fromkeys(name for inputs in CLIENT_INPUTS.values() for name in inputs.columns))
"""Columns of all losses."""


def check_client_loss(loss: str, columns: Iterable[str], settings: Mapping[str, float]) -> dict[str, float]:
    """Return all settings of a loss, defaults included.

    Args:
        columns: columns of the client's rows, without their targets.
        settings: settings that differ from the defaults.

    Raises RequestError: an unknown loss or setting, a setting out of range, or rows that lack a column or have one
    that the loss would ignore.
    """
    if loss not in CLIENT_INPUTS:
        raise RequestError(f"loss_fn={loss!r} is not built here; choose one of {', '.join(CLIENT_INPUTS)}")
    known = CLIENT_INPUTS[loss]
    complete = dict(known.settings) | dict(settings)
    unknown = sorted(complete.keys() - known.settings.keys())
    if unknown:
        raise RequestError(
            f"loss_fn_config has {', '.join(unknown)}, and {loss} takes {_listed(known.settings)}; remove the others"
        )
    for name, value in complete.items():
        if not 0 <= value <= FLOAT32_MAX:
            raise RequestError(
                f"{name}={value} of {loss} must be a number of at least 0 and at most {FLOAT32_MAX:.7g}, the largest"
                " float32; choose another value"
            )
    low, high = (complete.get(f"clip_{end}_threshold", 0.0) for end in ("low", "high"))
    if low > high:
        raise RequestError(
            f"clip_low_threshold={low} of {loss} exceeds clip_high_threshold={high}; these bound the ratio itself,"
            " such as 0.8 and 1.2: exchange them"
        )
    found = set(columns)
    if found != set(known.columns):
        raise RequestError(
            f"loss_fn_inputs has {_listed(sorted(found))} beside the targets, and {loss} takes"
            f" {_listed(known.columns)}; send these for every datum, and no others"
        )
    return complete


def _listed(names: Iterable[str]) -> str:
    return ", ".join(names) or "nothing"
