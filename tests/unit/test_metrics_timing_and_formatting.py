"""The stopwatch with a clock of its own, and numbers as text at their rounding edges."""

from __future__ import annotations

import math

import pytest

from hybridengine.metrics import keys
from hybridengine.metrics.formatting import format_bytes, format_seconds
from hybridengine.metrics.timing import Stopwatch


class _Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s

    def pass_and_break(self, seconds: float) -> None:
        self.now_s += seconds
        raise ValueError("broken")


def test_phases_add_up_nest_and_survive_errors() -> None:
    clock = _Clock()
    watch = Stopwatch(clock)
    with watch("step"):
        for seconds in (1.5, 2.0):
            with watch("generate"):
                clock.now_s += seconds
        clock.now_s += 0.25
        with pytest.raises(ValueError, match="broken"), watch("update_actor"):
            clock.pass_and_break(4.0)
    taken = watch.take()
    assert taken == {"time/generate_s": 3.5, "time/update_actor_s": 4.0, "time/step_s": 7.75}
    assert list(taken) == [keys.GENERATE_S, keys.UPDATE_ACTOR_S, keys.STEP_S]
    assert watch.take() == {}


def test_real_clock_measures_real_seconds() -> None:
    import time

    watch = Stopwatch()
    with watch("generate"):
        time.sleep(0.02)
    assert 0.015 < watch.take()["time/generate_s"] < 5.0


def test_phase_names_and_keys_are_inverse() -> None:
    assert keys.time_key("switch_to_train") == keys.SWITCH_TO_TRAIN_S == "time/switch_to_train_s"
    assert keys.phase_of("time/switch_to_train_s") == "switch_to_train"
    assert keys.phase_of("reward/mean") is None
    assert keys.phase_of("throughput/tokens_per_s") is None


def test_row_keys_are_those_that_a_run_promises() -> None:
    promised = """step reward/mean kl/mean time/generate_s time/switch_to_generate_s time/switch_to_train_s
        time/update_actor_s time/update_critic_s time/step_s switch/received_bytes switch/peak_weight_bytes
        switch/redundant_bytes rollout/log_prob_abs_diff_max transfer/bytes controller/payload_bytes
        controller/overhead_s"""
    assert set(keys.TRAINING_STEP_KEYS) == set(promised.split())
    assert keys.EXACT_MATCH == "eval/exact_match"


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
