"""Ages of the tokens of an asynchronous batch, the mask of tokens that are fresh enough, and metrics of both.

The version of the weights is the number of iterations that have trained them. A token drawn at version v has the age
i - v for the update that starts from version i, and is stale if that exceeds `staleness.max_versions`.

Shape suffixes: B sequences, R response tokens.
"""

from __future__ import annotations

import torch
from tensordict import TensorDictBase
from torch import Tensor

from hybridengine.algorithms.across import ONE_PROCESS, Across
from hybridengine.algorithms.masking import check_shapes, masked_max, masked_sum
from hybridengine.errors import StalenessError
from hybridengine.rows.batch import columns_of
from hybridengine.rows.micro_batches import loss_mask
from hybridengine.rows.protocols import ROW_NUMBERS

NUM_QUARTERS = 4


def fresh_tokens(versions_BR: Tensor, mask_BR: Tensor, version: int, max_versions: int) -> Tensor:
    """Return a mask, bool [B, R], of the valid tokens that are not stale.

    A token from the future (v > i) is a defect and stays True, so that `check_ages` finds it.

    Args:
        version: version of the weights that are trained, i.
        max_versions: largest age of a fresh token.
    """
    check_shapes(versions_BR=versions_BR, mask_BR=mask_BR)
    return mask_BR & (version - versions_BR <= max_versions)


def check_ages(rows: TensorDictBase, version: int | None, max_versions: int) -> None:
    """Raise StalenessError if a token in the loss is stale or from the future, or if its age is unknown.

    Rows without `versions` are from a synchronous dataflow, where `version` is None, and pass.

    Args:
        rows: rows of an update (`loss_mask`), with `versions` [B, R].
        version: version of the weights that are trained.
    """
    has_versions = "versions" in columns_of(rows)
    if version is None and not has_versions:
        return
    if version is None or not has_versions:
        raise StalenessError(
            f"an update of version {version} was called with rows {'with' if has_versions else 'without'} the column"
            " 'versions', so that the ages of their tokens are unknown; pass both, or neither in a synchronous dataflow"
        )
    mask_BR = loss_mask(rows, rows["versions"].size(1))
    ages_BR = version - rows["versions"]
    wrong = (mask_BR & ((ages_BR > max_versions) | (ages_BR < 0))).nonzero()
    if not len(wrong):
        return
    row, place = wrong[0].tolist()
    age = int(ages_BR[row, place])
    number = int(rows[ROW_NUMBERS][row]) if ROW_NUMBERS in columns_of(rows) else row
    token = (
        f"response token {place} of row {number} was drawn by version {version - age} of the weights, and version"
        f" {version} is trained ({len(wrong)} such tokens here)"
    )
    if age < 0:
        raise StalenessError(
            f"{token}: its age of {age} must be at least 0; call the update with the version that it starts from"
        )
    raise StalenessError(
        f"{token}: its age of {age} exceeds staleness.max_versions={max_versions}; mask older tokens"
        " (pass the column `fresh` to the advantages), or raise the bound"
    )


@torch.no_grad()
def staleness_metrics(
    versions_BR: Tensor, mask_BR: Tensor, version: int, max_versions: int, across: Across = ONE_PROCESS
) -> dict[str, float]:
    """Return the distribution of the ages of the valid tokens of all ranks.

    staleness/age_mean and age_max; as shares of the tokens: staleness/age_A_share for each age A up to `max_versions`,
    and staleness/older_share for the stale ones, which are masked; and staleness/older_share_quarter_Q, the share of
    stale tokens in quarter Q, 1 to 4, of the R positions. All are 0 if there are no tokens. Collective.
    """
    check_shapes(versions_BR=versions_BR, mask_BR=mask_BR)
    width, num_bins = versions_BR.size(1), max_versions + 2
    ages_BR = version - versions_BR.long()
    quarters_R = torch.arange(width, device=versions_BR.device) * NUM_QUARTERS // max(width, 1)
    cells_BR = quarters_R * num_bins + ages_BR.clamp(0, num_bins - 1)
    counts = torch.bincount(cells_BR[mask_BR], minlength=NUM_QUARTERS * num_bins).double()
    totals = across.sum(torch.cat([counts, masked_sum(ages_BR, mask_BR).double()[None]]))
    by_quarter, by_age = totals[:-1].view(NUM_QUARTERS, -1), totals[:-1].view(NUM_QUARTERS, -1).sum(0)
    count = max(float(by_age.sum()), 1.0)
    ages = {f"staleness/age_{age}_share": float(n) / count for age, n in enumerate(by_age[:-1])}
    older = {
        f"staleness/older_share_quarter_{quarter}": float(bins[-1]) / max(float(bins.sum()), 1.0)
        for quarter, bins in enumerate(by_quarter, start=1)
    }
    return {
        "staleness/age_mean": float(totals[-1]) / count,
        "staleness/age_max": float(across.max(masked_max(ages_BR.double(), mask_BR))),
        **ages,
        "staleness/older_share": float(by_age[-1]) / count,
        **older,
    }
