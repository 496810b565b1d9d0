"""How the commands' pictures look."""

from __future__ import annotations

from typing import Any

STYLE: dict[Any, Any] = {
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "svg.hashsalt": "hybridengine",
}
"""Of matplotlib; the salt makes equal pictures equal SVG files."""
