"""What an evaluation says of a model, in one number."""

from __future__ import annotations

import math
from dataclasses import dataclass

from hybridengine.metrics import keys
from hybridengine.metrics.rows import Row


@dataclass(frozen=True)
class HeldOutResult:
    """Exact match on held-out problems where a function alone judges; else, there is no full score, the mean score.

    As text, a percentage or a plain number.
    """

    value: float
    """NaN where it was not finite."""
    is_share: bool
    """Whether it is the share of problems with full score, 0 to 1."""

    @classmethod
    def of(cls, row: Row) -> HeldOutResult | None:
        """A row's; None where the step was not evaluated."""
        for key, is_share in ((keys.EXACT_MATCH, True), (keys.SCORE_MEAN, False)):
            if key in row:
                value = row[key]
                return cls(math.nan if value is None else float(value), is_share)
        return None

    @property
    def name(self) -> str:
        """What it is."""
        return "exact match" if self.is_share else "held-out score"

    def __str__(self) -> str:
        return f"{100 * self.value:.1f}%" if self.is_share else f"{self.value:.3f}"
