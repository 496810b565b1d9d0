"""Names of metrics, and numbers as text at their rounding edges."""

from __future__ import annotations

import math

import pytest

from hybridengine.formatting import format_bytes, format_seconds
from hybridengine.report import keys


def test_phase_names_and_keys_are_inverse() -> None:
    assert keys.time_key("switch_to_train") == "time/switch_to_train_s"
    assert keys.phase_of("time/switch_to_train_s") == "switch_to_train"
    assert keys.phase_of("reward/mean") is None
    assert keys.phase_of("throughput/tokens_per_s") is None


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1023.6, "1.0 KiB"),
        (1024, "1.0 KiB"),
        (1536, "1.5 KiB"),
        (2**20 - 1, "1.0 MiB"),
        (3.25 * 2**20, "3.2 MiB"),
        (5 * 2**30, "5.0 GiB"),
        (810 * 2**30, "810.0 GiB"),
        (2**40, "1.0 TiB"),
        (5000 * 2**50, "5000.0 PiB"),
        (-1536, "-1.5 KiB"),
        (math.nan, "nan"),
    ],
)
def test_format_bytes(num_bytes: float, text: str) -> None:
    assert format_bytes(num_bytes) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0 ms"),
        (0.0042, "4 ms"),
        (0.0994, "99 ms"),
        (0.0999, "0.10 s"),
        (1.254, "1.25 s"),
        (9.994, "9.99 s"),
        (9.996, "10.0 s"),
        (59.94, "59.9 s"),
        (59.96, "1 min 00 s"),
        (125.4, "2 min 05 s"),
        (3599.4, "59 min 59 s"),
        (3599.7, "1 h 00 min"),
        (3599.4 + 60 * 60, "2 h 00 min"),
        (7325.0, "2 h 02 min"),
        (-1.5, "-1.50 s"),
        (math.nan, "nan"),
        (math.inf, "inf"),
    ],
)
def test_format_seconds(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text
