"""Names and labels of the metrics that a run exports, as Ray's exporter writes them."""

from __future__ import annotations

from hybridengine.controller.metrics import COUNTERS, MEMORY, PHASE_COUNTERS, STEP, full_name

CONTROLLER_NAMES = frozenset({f"ray_{full_name(STEP)}"})
NAMES = CONTROLLER_NAMES | {
    f"ray_{full_name(MEMORY)}",
    *(f"ray_{full_name(name)}_total" for name in (*COUNTERS, *PHASE_COUNTERS)),
}
RANK_LABELS = {"run", "pool", "rank", "host"}
