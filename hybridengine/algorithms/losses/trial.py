"""Trial of a loss of the user's before ranks start: it is called once, with the columns of an update of its algorithm."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from hybridengine.algorithms.losses.aggregation import PER_TOKEN
from hybridengine.config.algorithm import Algorithm
from hybridengine.config.loss_sections import LossKind
from hybridengine.config.role_sections import ActorSection

COLUMNS: Mapping[LossKind, tuple[str, ...]] = {
    "advantages": ("log_probs", "advantages", "weights", "ref_log_probs", "covariant"),
    "preferences": ("ref_log_probs", "told"),
    "demonstrations": (),
}
"""Columns of the actor's updates in addition to `mask`, also those that only some batches have."""
ALL = {name for names in COLUMNS.values() for name in names}
FLAGS = ("mask", "covariant", "told")


def missing_input(function: Callable[..., Any], algorithm: Algorithm, kind: LossKind | None) -> str | None:
    """Return what a loss reads and an update of the algorithm does not have, as "columns['told']"; None if there is none.

    With an unknown `kind` of the algorithm's updates, all columns are there. Any other error of the function is ignored:
    this process may lack its GPU or its process group, and two rows of zeros are no batch.
    """
    names = ALL if kind is None else COLUMNS[kind]
    columns = {name: torch.zeros(2, 2, dtype=torch.bool if name in FLAGS else None) for name in names}
    columns["mask"] = torch.ones(2, 2, dtype=torch.bool)
    try:
        function(torch.zeros(2, 2, requires_grad=True), columns, algorithm, ActorSection(), PER_TOKEN)
    except KeyError as error:
        if error.args[0] in ALL - columns.keys():
            return f"columns[{error.args[0]!r}]"
    except AttributeError as error:
        if error.obj is algorithm:
            return f"algorithm.{error.name}"
    except Exception:
        pass  # see above: only what is missing is looked for
    return None
