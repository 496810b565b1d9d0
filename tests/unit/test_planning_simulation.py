"""Simulated runs against sums that can be done by hand, against laws that hold for any run, and in known regimes."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridengine.errors import ConfigError
from hybridengine.planning.lengths import Lengths
from hybridengine.planning.simulation import Setting, simulate


def setting(**changes: object) -> Setting:
    """Four engines of eight places, batches of 32 responses of 1 to 100 tokens."""
    values = {
        "num_steps": 6,
        "batch_size": 32,
        "num_engines": 4,
        "max_running": 8,
        "prompt_tokens": 10.0,
        "lengths": Lengths.of("uniform:1-100", 100),
        "step_s": lambda count, tokens: 0.01 + 1e-4 * count + 1e-7 * tokens,
        "prefill_s": 0.002,
        "train_s": lambda tokens: tokens / 4000,
        "update_s": 0.05,
    }
    return Setting(**values | changes)  # type: ignore[arg-type]


def test_a_synchronous_run_of_equal_responses_is_a_plain_sum() -> None:
    """16 responses on 2 engines of 4 places: two rounds of 50 steps on each, then the switch and training."""
    one = setting(
        num_steps=3,
        batch_size=16,
        num_engines=2,
        max_running=4,
        lengths=Lengths.of("constant:50", 100),
        step_s=lambda count, tokens: 0.01 * count,
        prefill_s=0.5,
        train_s=lambda tokens: tokens / 100,
        update_s=2.0,
        synchronous=True,
    )
    found = simulate(one)
    generated, trained = 2 * (4 * 0.5 + 50 * 0.04), 16 * (50 + 10) / 100
    assert found.seconds == pytest.approx(3 * (generated + 2.0 + trained))
    assert found.tokens == 3 * 16 * 50
    assert found.staleness_counts == {0: found.tokens}
    assert found.train_busy_s == pytest.approx(3 * trained)
    assert found.generate_busy_s == pytest.approx(2 * 3 * generated)
    assert found.step_ends == pytest.approx([(step + 1) * found.seconds / 3 for step in range(3)])


def test_an_asynchronous_run_whose_trainer_is_infinitely_fast_takes_what_generation_takes() -> None:
    """One engine, equal responses, four at once: a batch of four every 50 steps, each token one policy old or less."""
    one = setting(
        num_steps=5,
        batch_size=4,
        num_engines=1,
        max_running=4,
        lengths=Lengths.of("constant:50", 100),
        step_s=lambda count, tokens: 0.02,
        prefill_s=0.0,
        train_s=lambda tokens: 0.0,
        update_s=0.0,
        max_staleness=math.inf,
    )
    found = simulate(one)
    assert found.seconds == pytest.approx(5 * 50 * 0.02)
    assert found.tokens == 5 * 4 * 50
    assert found.train_idle_share == 1.0
    assert found.largest_staleness <= 1


@settings(deadline=None, max_examples=60)
@given(
    num_steps=st.integers(1, 8),
    batch_size=st.integers(1, 40),
    num_engines=st.integers(1, 6),
    max_running=st.integers(1, 9),
    max_staleness=st.sampled_from([0.0, 1.0, 3.0, math.inf]),
    train_tokens_per_s=st.sampled_from([300.0, 4000.0, 1e6]),
    lengths=st.sampled_from([Lengths.of("uniform:1-100", 100), Lengths.of("constant:30", 100)]),
    drains=st.booleans(),
    synchronous=st.booleans(),
    seed=st.integers(0, 5),
)
def test_laws_of_every_run(num_steps: int, train_tokens_per_s: float, **changes: object) -> None:
    """Tokens are counted once, devices work or wait all the time, the bound holds, and nothing depends on chance."""
    one = setting(num_steps=num_steps, train_s=lambda tokens: tokens / train_tokens_per_s, **changes)
    found = simulate(one)
    assert sum(found.staleness_counts.values()) == found.tokens
    assert len(found.step_ends) == num_steps
    assert found.step_ends == sorted(found.step_ends)
    assert found.seconds == found.step_ends[-1]
    assert 0 <= found.train_busy_s <= found.seconds + 1e-9
    engines_s = found.generate_busy_s + found.generate_idle_s
    # Engines finish the token, the prompts and the weights that they are at when the run ends.
    beyond = 0.05 + one.max_running * 0.002 + 0.05
    assert found.seconds * one.num_engines - 1e-6 <= engines_s <= (found.seconds + beyond) * one.num_engines
    if one.synchronous:
        assert found.largest_staleness == 0
    else:
        # Where responses end in the order in which they begin, what is begun at most eta batches ahead is trained on at
        # most eta steps later; a long one may be overtaken.
        if one.lengths.name.startswith("constant") and one.num_engines == 1:
            assert found.largest_staleness <= one.max_staleness
        assert max(count for _, count in found.queue) <= one.batch_size * (1 + one.max_staleness)
    assert simulate(one) == found


def test_in_flight_weights_make_younger_tokens_than_weights_that_wait() -> None:
    both = [
        simulate(
            setting(num_steps=30, max_staleness=4.0, train_s=lambda tokens: tokens / 8000, drains=drains)
        )
        for drains in (False, True)
    ]
    assert both[0].mean_staleness < both[1].mean_staleness


def test_too_many_trainers_wait_and_too_many_samplers_make_the_data_old() -> None:
    """The two regimes of the applied-RL talk: the trainer idle; the queue and the staleness growing without a bound."""
    starving = simulate(setting(num_steps=20, train_s=lambda tokens: tokens / 1e5, max_staleness=math.inf))
    assert starving.train_idle_share > 0.5
    assert starving.mean_staleness < 2

    def flooded(num_steps: int) -> float:
        many = setting(num_steps=num_steps, train_s=lambda tokens: tokens / 300, max_staleness=math.inf)
        found = simulate(many)
        assert found.train_idle_share < 0.1
        return found.mean_staleness

    assert flooded(40) > 1.7 * flooded(20) > 3 * flooded(5)
    bounded = simulate(setting(num_steps=40, train_s=lambda tokens: tokens / 300, max_staleness=1.0))
    assert bounded.mean_staleness <= 1
    assert bounded.generate_idle_share > 0.5


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_engines": 0}, "num_engines=0 must be at least 1"),
        ({"batch_size": -3}, "batch_size=-3 must be at least 1"),
        ({"update_s": -1.0}, "update_s=-1.0 must be 0 or more"),
        ({"max_staleness": math.nan}, "max_staleness=nan must be 0 or more"),
    ],
)
def test_numbers_that_make_no_sense(changes: dict[str, float], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        simulate(replace(setting(), **changes))  # type: ignore[arg-type]
