"""Arguments of the commands that plan, and the type of the fixtures that run them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parents[2]
H100 = str(ROOT / "configs" / "clusters" / "h100-80gb.yaml")
A100 = str(ROOT / "configs" / "clusters" / "a100-80gb-16x8.yaml")

Plan = Callable[..., tuple[int, str, str]]
"""Runs the command with these arguments and returns (exit code, stdout, stderr)."""

GOOD = ("--train", "2-4-2", "--gen", "1-2")
