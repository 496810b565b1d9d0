"""Colours that are distinguishable with any colour vision; a phase has the same colour in every figure.

Source: Okabe and Ito, "Color Universal Design", 2008; lighter shades for the second of a pair.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

STYLE: dict[Any, Any] = {
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "svg.hashsalt": "hybridengine",
    "text.parse_math": False,
}
"""Settings of matplotlib: equal drawings produce equal files, and dollar signs in names are literal."""

OTHERS = "others"
"""Name of the parts that are merged into one because there are too many."""
PALETTE = ("#0072b2", "#e69f00", "#009e73", "#d55e00", "#56b4e9", "#cc79a7", "#7a6a00", "#332288")

_PHASES = {
    "generate": "#0072b2",
    "switch": "#e69f00",
    "switch_to_generate": "#e69f00",
    "switch_to_train": "#f3cf80",
    "log_probs": "#009e73",
    "ref_log_probs": "#80cfb9",
    "values": "#56b4e9",
    "scores": "#cc79a7",
    "rewards": "#cc79a7",
    "updates": "#d55e00",
    "update": "#d55e00",
    "update_actor": "#d55e00",
    "update_critic": "#eaaf80",
    "update_cost_critic": "#b07040",
    "cost_values": "#aad8f2",
    "costs": "#e3bcd1",
    "advantages": "#332288",
    "prompts": "#7a6a00",
    "statistics": "#999933",
    "other": "#5c7c8a",
    "transfers": "#26323a",
    OTHERS: "#b8bfc4",
}
_RESERVE = ("#882255", "#44aa99", "#8a5a3c", "#aa4499", "#117733", "#ddcc77", "#6699cc", "#994455")


def phase_colours(phases: Iterable[str]) -> dict[str, str]:
    """Return the colour of each phase, in the given order; "log-probs" and "log_probs" share one."""
    colours, reserve = {}, 0
    for phase in dict.fromkeys(phases):
        known = _PHASES.get(phase.replace("-", "_").lower())
        colours[phase] = known or _RESERVE[reserve % len(_RESERVE)]
        reserve += known is None
    return colours
