"""Simulated bounds on staleness, compared with a run that is played step by step, and their prices."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from itertools import pairwise, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridengine.planning.costs.lengths import Lengths
from hybridengine.planning.simulation.bound_prices import (
    NEGLIGIBLE,
    Price,
    bound_prices,
    largest_lag,
    late_line,
    longest_span,
)
from hybridengine.planning.simulation.simulation import (
    Bound,
    Setting,
    _lengths,
    simulate_asynchronous,
    simulate_synchronous,
)
from tests.unit.test_planning_simulation import setting

BOUNDS: tuple[Bound, ...] = ("token", "response")


def played(one: Setting) -> tuple[list[Counter[int]], list[float]]:
    """Return the ages of each step's tokens and the ends of the steps, for one engine whose step takes a second.

    Every token is kept with its version, and every second is one pass of the loop.
    """
    lengths, version, now = _lengths(one), 0, 0.0
    running: dict[int, tuple[int, list[int]]] = {}  # number: length, version of each token
    ended: dict[int, list[int]] = {}  # in the order in which responses end
    begun, training = 0, None
    ages: list[Counter[int]] = []
    ends: list[float] = []

    def next_batch() -> list[int] | None:
        size, samples = one.batch_size, one.samples_per_prompt
        if one.bound == "response":
            batch = list(range(len(ends) * size, (len(ends) + 1) * size))
            return batch if ended.keys() >= set(batch) else None
        last = [
            number
            for place, number in enumerate(ended)
            if _completes(list(ended)[: place + 1], number, samples)
        ]
        groups = [number // samples for number in last][: size // samples]
        return (
            [group * samples + k for group in groups for k in range(samples)]
            if len(groups) * samples == size
            else None
        )

    def start(moment: float) -> tuple[float, list[list[int]]] | None:
        if (batch := next_batch()) is None:
            return None
        rows = [ended.pop(number) for number in batch]
        return moment + one.train_token_s * sum(map(len, rows)), rows

    while True:
        while len(running) < one.max_running and begun // one.batch_size <= version + one.max_staleness:
            running[begun] = next(lengths), []
            begun += 1
        training = training or start(now)
        if not running:
            assert training is not None, "somebody works"
            now = training[0]
        drawn_by = version
        while training and training[0] <= now + (1 if running else 0):
            moment, rows = training
            ages.append(Counter(version - drawn for row in rows for drawn in row))
            ends.append(moment)
            version += 1
            if len(ends) == one.num_steps:
                return ages, ends
            training = start(moment)
        if running:
            now += 1.0
        for number, (length, versions) in list(running.items()):
            versions.append(drawn_by)
            if len(versions) == length:
                ended[number] = running.pop(number)[1]


def _completes(ended: list[int], number: int, samples: int) -> bool:
    """True if the last one that ended, `number`, completes its group."""
    return sum(other // samples == number // samples for other in ended) == samples


@pytest.mark.parametrize("bound", BOUNDS)
@pytest.mark.parametrize("samples", [1, 3])
def test_a_simulated_run_equals_one_that_is_played_token_by_token(bound: Bound, samples: int) -> None:
    for eta, running, token_s, seed in product((0.0, 1.0, 3.0), (2, 5, 24), (0.01717, 0.1371), (0, 1)):
        one = setting(
            num_steps=7,
            batch_size=6,
            num_engines=1,
            max_running=running,
            prompt_tokens=0.0,
            lengths=Lengths.of("lognormal:mean=12,cv=0.8", 40),
            step_s=lambda count, tokens: 1.0,
            prefill_s=0.0,
            train_token_s=token_s,
            update_s=0.0,
            max_staleness=eta,
            bound=bound,
            samples_per_prompt=samples,
            seed=seed,
        )
        found, (ages, ends) = simulate_asynchronous(one), played(one)
        assert found.step_ends == pytest.approx(ends), one
        assert [dict(step) for step in found.step_ages] == ages, one


@settings(deadline=None, max_examples=60)
@given(
    num_prompts=st.integers(1, 8),
    samples=st.integers(1, 5),
    num_engines=st.integers(1, 5),
    max_running=st.integers(1, 9),
    eta=st.integers(0, 4),
    update_s=st.sampled_from([0.0, 0.05, 3.0]),
    train_tokens_per_s=st.sampled_from([300.0, 4000.0, 1e6]),
    seed=st.integers(0, 5),
)
def test_laws_of_the_bounds(
    num_prompts: int, samples: int, eta: int, train_tokens_per_s: float, **changes: object
) -> None:
    """Under `response` no token is older than eta; under `token` the masked ones are those that are."""
    token, response = (
        simulate_asynchronous(
            setting(
                batch_size=num_prompts * samples,
                samples_per_prompt=samples,
                max_staleness=float(eta),
                bound=bound,
                train_token_s=1 / train_tokens_per_s,
                **changes,
            )
        )
        for bound in BOUNDS
    )
    assert response.largest_staleness <= eta and response.masked_share == 0
    older = sum(count for age, count in token.staleness_counts.items() if age > eta)
    assert token.masked_share == older / token.tokens
    assert all(sum(step.values()) > 0 for step in (*token.step_ages, *response.step_ages))


@settings(deadline=None, max_examples=30)
@given(
    num_prompts=st.integers(1, 8),
    samples=st.integers(1, 4),
    num_engines=st.integers(1, 4),
    seed=st.integers(0, 9),
)
def test_with_nothing_ahead_both_bounds_are_the_synchronous_run(
    num_prompts: int, samples: int, **changes: object
) -> None:
    one = setting(
        batch_size=num_prompts * samples,
        samples_per_prompt=samples,
        update_s=0.0,
        max_staleness=0.0,
        **changes,
    )
    synchronous = simulate_synchronous(one)
    assert synchronous.staleness_counts == {0: synchronous.tokens}
    for bound in BOUNDS:
        assert simulate_asynchronous(replace(one, bound=bound)) == synchronous


# ---- prices -----------------------------------------------------------------------------------------------------------


def balanced(batch_size: int, **changes: object) -> Setting:
    """Return 8 engines of 32 slots with a trainer that takes what they generate; a lone response's step takes half."""
    values = {
        "num_steps": 40,
        "batch_size": batch_size,
        "num_engines": 8,
        "max_running": 32,
        "prompt_tokens": 0.0,
        "lengths": Lengths.of("lognormal:mean=400,cv=0.8", 2048),
        "step_s": lambda count, tokens: 0.5 + count / 64,
        "prefill_s": 0.0,
        "train_token_s": 1 / 256,
        "update_s": 0.0,
    }
    return setting(**values | changes)


@pytest.mark.parametrize(
    ("ratio", "eta", "oldest", "masked", "lost"),
    [(1, 2, 7, 0.14, 0.41), (1, 4, 7, 0.01, 0.15), (4, 1, 2, 0.07, 0.25), (4, 2, 3, 0.00, 0.02)],
)
def test_what_an_exact_bound_costs(ratio: int, eta: int, oldest: int, masked: float, lost: float) -> None:
    """The figures that the choice of bounds was made by, from another simulation: a batch of `ratio` times the slots."""
    one = balanced(256 * ratio, max_staleness=float(eta))
    token, response = (simulate_asynchronous(replace(one, bound=bound)) for bound in BOUNDS)
    assert token.largest_staleness == oldest
    assert token.masked_share == pytest.approx(masked, abs=0.02)
    assert 1 - response.tokens_per_s / token.tokens_per_s == pytest.approx(lost, abs=0.04)
    assert response.largest_staleness == eta


def test_prices_fall_with_eta_until_both_bounds_are_free() -> None:
    prices = bound_prices(
        balanced(512, num_engines=4, train_token_s=1 / 128), range(6)
    )  # four batches in 128 slots
    assert [price.max_staleness for price in prices] == list(range(6))
    for before, after in pairwise(prices):
        assert after.response_speed >= before.response_speed - NEGLIGIBLE
        assert after.waiting_share <= before.waiting_share + NEGLIGIBLE
    assert prices[0].masked_share == 0 and prices[0].token_speed == prices[0].response_speed < 0.6
    lag = largest_lag(prices)
    assert lag == 2
    # Below it, one of them is not free.
    assert prices[lag - 1].masked_share > NEGLIGIBLE or prices[lag - 1].response_speed < 1 - NEGLIGIBLE
    assert prices[lag].response_speed >= 1 - NEGLIGIBLE and prices[lag].masked_share < NEGLIGIBLE
    # The wait for the first batch, an iteration of 40, is not counted.
    assert prices[-1].waiting_share < 0.01


def test_the_largest_lag_is_the_last_price_that_costs_something_plus_one() -> None:
    def prices(*free: bool) -> list[Price]:
        return [Price(eta, 1.0, 0.0 if one else 0.2, 1.0, 0.0) for eta, one in enumerate(free)]

    assert largest_lag(prices(True, False, True, True)) == 2
    assert largest_lag(prices(True, True)) == 0
    assert largest_lag(prices(True, False)) is None
    assert largest_lag([Price(0, 1.0, 0.0, 0.9, 0.1)]) is None


def test_the_span_of_the_longest_responses() -> None:
    """PipelineRL's g_max of 132 (H = 192, I = 44, B = 128, uniform lengths to 4096); with a bound, the gate's slots."""
    one = setting(batch_size=128, num_engines=44, max_running=192, lengths=Lengths.of("uniform:1-4096", 4096))
    assert math.ceil(longest_span(one, math.inf)) == 132
    assert longest_span(one, 0.0) == pytest.approx(4096 / 2048.5)


def test_a_bound_that_the_longest_responses_exceed_is_named_with_the_eta_that_they_need() -> None:
    for span, eta in product((0.4, 1.0, 2.5, 5.0), range(7)):
        line = late_line(span, eta, "token")
        assert (line is None) == (span < eta + 1 or not eta)
        assert line is None or f"choose at least {int(span)}," in line
        assert late_line(span, eta, "response") is None
