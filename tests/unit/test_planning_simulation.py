"""Simulated runs, compared with sums worked out by hand and with laws that hold for any run, and in known regimes."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridengine.planning.costs.lengths import Lengths
from hybridengine.planning.simulation.simulation import Setting, simulate_asynchronous, simulate_synchronous


def setting(**changes: object) -> Setting:
    """Return four engines of eight places, with batches of 32 responses of 1 to 100 tokens."""
    values = {
        "num_steps": 6,
        "batch_size": 32,
        "num_engines": 4,
        "max_running": 8,
        "prompt_tokens": 10.0,
        "lengths": Lengths.of("uniform:1-100", 100),
        "step_s": lambda count, tokens: 0.01 + 1e-4 * count + 1e-7 * tokens,
        "prefill_s": 0.002,
        "train_token_s": 1 / 4000,
        "update_s": 0.05,
    }
    return Setting(**values | changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(("batch_size", "rounds"), [(16, [4, 4]), (12, [4, 2])])
def test_a_synchronous_run_of_equal_responses_is_a_plain_sum(batch_size: int, rounds: list[int]) -> None:
    """Responses on 2 engines of 4 places: rounds of 50 steps with equal shares, then the switch and training."""
    one = setting(
        num_steps=3,
        batch_size=batch_size,
        num_engines=2,
        max_running=4,
        lengths=Lengths.of("constant:50", 100),
        step_s=lambda count, tokens: 0.01 * count,
        prefill_s=0.5,
        train_token_s=1 / 100,
        update_s=2.0,
    )
    found = simulate_synchronous(one)
    generated = sum(count * 0.5 + 50 * 0.01 * count for count in rounds)
    trained = batch_size * (50 + 10) / 100
    assert found.seconds == pytest.approx(3 * (generated + 2.0 + trained))
    assert found.tokens == 3 * batch_size * 50
    assert found.staleness_counts == {0: found.tokens}
    assert found.train_busy_s == pytest.approx(3 * trained)
    assert found.generate_idle_s == pytest.approx(2 * 3 * (2.0 + trained))
    assert found.step_ends == pytest.approx([(step + 1) * found.seconds / 3 for step in range(3)])


def test_an_asynchronous_run_whose_trainer_is_infinitely_fast_takes_what_generation_takes() -> None:
    """One engine, equal responses, four at once: a batch of four every 50 steps, each token at most one policy old."""
    one = setting(
        num_steps=5,
        batch_size=4,
        num_engines=1,
        max_running=4,
        lengths=Lengths.of("constant:50", 100),
        step_s=lambda count, tokens: 0.02,
        prefill_s=0.0,
        train_token_s=0.0,
        update_s=0.0,
        max_staleness=math.inf,
    )
    found = simulate_asynchronous(one)
    assert found.seconds == pytest.approx(5 * 50 * 0.02)
    assert found.tokens == 5 * 4 * 50
    assert found.train_idle_share == 1.0
    assert found.largest_staleness <= 1


@pytest.mark.parametrize("length", [48, 50])
def test_engines_of_several_steps_per_call_pause_between_calls(length: int) -> None:
    """Four calls for a batch, the last of which ends with its responses; weights come between two calls."""
    one = setting(
        num_steps=5,
        batch_size=4,
        num_engines=1,
        max_running=4,
        lengths=Lengths.of(f"constant:{length}", 100),
        step_s=lambda count, tokens: 0.02,
        prefill_s=0.0,
        train_token_s=0.0,
        update_s=0.0,
        steps_per_call=16,
        call_s=0.1,
    )
    found, calls = simulate_asynchronous(one), math.ceil(length / 16)
    assert found.seconds == pytest.approx(
        5 * (length * 0.02 + (1 + calls) * 0.1)
    )  # a call begins the responses
    assert found.generate_idle_s == pytest.approx(5 * (1 + calls) * 0.1)
    slow = simulate_asynchronous(replace(one, num_steps=20, train_token_s=0.9 / length))
    assert length % 16 or all(count % 64 == 0 for ages in slow.step_ages for count in ages.values())
    assert len(slow.staleness_counts) > 1


def test_responses_arrive_at_the_end_of_a_call() -> None:
    """Responses of 1 or 10 tokens, two at once, in calls of 8 steps."""
    one = setting(
        num_steps=2,
        batch_size=1,
        num_engines=1,
        max_running=2,
        lengths=Lengths("by hand", np.array([1.0, *[0.5] * 9])),
        step_s=lambda count, tokens: 0.01 * count,
        prefill_s=0.0,
        train_token_s=0.0,
        update_s=0.0,
        max_staleness=1.0,
        steps_per_call=8,
    )
    first = {round(simulate_asynchronous(replace(one, seed=seed)).step_ends[0], 9) for seed in range(40)}
    # Of two short ones, the call ends with them; the short one of different ones waits for 7 steps of the long one.
    assert first == {0.02, 0.09, 0.2}


@settings(deadline=None, max_examples=60)
@given(
    num_steps=st.integers(1, 8),
    batch_size=st.integers(1, 40),
    num_engines=st.integers(1, 6),
    max_running=st.integers(1, 9),
    max_staleness=st.sampled_from([0.0, 1.0, 3.0, math.inf]),
    train_tokens_per_s=st.sampled_from([300.0, 4000.0, 1e6]),
    lengths=st.sampled_from([Lengths.of("uniform:1-100", 100), Lengths.of("constant:30", 100)]),
    synchronous=st.booleans(),
    seed=st.integers(0, 5),
)
def test_laws_of_every_run(
    num_steps: int, train_tokens_per_s: float, synchronous: bool, **changes: object
) -> None:
    """Tokens are counted once, devices always work or wait, the bound is kept, and nothing depends on chance."""
    one = setting(num_steps=num_steps, train_token_s=1 / train_tokens_per_s, **changes)
    simulate = simulate_synchronous if synchronous else simulate_asynchronous
    found = simulate(one)
    assert sum(found.staleness_counts.values()) == found.tokens
    assert len(found.step_ends) == num_steps
    assert found.step_ends == sorted(found.step_ends)
    assert found.seconds == found.step_ends[-1]
    assert 0 <= found.train_busy_s <= found.seconds + 1e-9
    assert -1e-9 < found.generate_idle_s < found.seconds * one.num_engines + 1e-9
    moments = [moment for moment, _ in found.queue]
    assert moments == sorted(moments) and moments[-1] <= found.seconds + 1e-9
    # Responses are queued one by one and removed in batches, those of a step before its training begins.
    for (_, before), (_, after) in pairwise(found.queue):
        assert after in (before + 1, before - one.batch_size)
    if synchronous:
        assert found.largest_staleness == 0
    else:
        # If responses end in the order in which they begin, a response that begins at most eta batches ahead is trained
        # on at most eta steps later; a long one may be overtaken.
        if one.lengths.name.startswith("constant") and one.num_engines == 1:
            assert found.largest_staleness <= one.max_staleness
        assert max(count for _, count in found.queue) <= one.batch_size * (1 + one.max_staleness)
    assert simulate(one) == found


def test_staleness_of_every_token_of_a_run_that_can_be_done_by_hand() -> None:
    """One engine, four responses of 50 tokens at once, 1 s a batch; training takes as long, so that a batch always waits.

    Batch 1 comes from policy 0. While it is trained on, batch 2 is generated, also from policy 0. Each later batch begins
    when the one before has just been trained on: batch n + 2 is from policy n, and trained on as step n + 2, whose
    policy is n + 1.
    """
    one = setting(
        num_steps=5,
        batch_size=4,
        num_engines=1,
        max_running=4,
        lengths=Lengths.of("constant:50", 100),
        step_s=lambda count, tokens: 0.02,
        prefill_s=0.0,
        train_token_s=(1.0 - 1e-6) / (4 * (50 + 10)),
        update_s=0.0,
        max_staleness=1.0,
    )
    found = simulate_asynchronous(one)
    assert found.staleness_counts == {0: 4 * 50, 1: 4 * 4 * 50}
    assert found.seconds == pytest.approx(6.0, abs=1e-4)


def test_too_many_trainers_wait_and_too_many_samplers_make_the_data_old() -> None:
    """The two regimes of the applied-RL talk: an idle trainer; and a queue and a staleness that grow without bound."""
    starving = simulate_asynchronous(setting(num_steps=20, train_token_s=1 / 1e5, max_staleness=math.inf))
    assert starving.train_idle_share > 0.5
    assert starving.mean_staleness < 2

    def flooded(num_steps: int) -> float:
        many = setting(num_steps=num_steps, train_token_s=1 / 300, max_staleness=math.inf)
        found = simulate_asynchronous(many)
        assert found.train_idle_share < 0.1
        return found.mean_staleness

    assert flooded(40) > 1.7 * flooded(20) > 3 * flooded(5)
    bounded = simulate_asynchronous(setting(num_steps=40, train_token_s=1 / 300, max_staleness=1.0))
    assert bounded.mean_staleness <= 1
    assert bounded.generate_idle_share > 0.5


# ---- PipelineRL -------------------------------------------------------------------------------------------------------

DEVICES, GENERATING, RUNNING, BATCH, LENGTHS = 128, 44, 192, 128, Lengths.of("uniform:1-4096", 4096)


Utilisation = Callable[[float], float]
"""U(h): fraction of its best rate that a device reaches with h responses at once."""


def conventional_generation_s(num_responses: int, use: Utilisation, token_s: float) -> float:
    """Return the seconds until all responses of an iteration are complete: sum over l of (h(l) / N) · f / U(h(l) / N).

    At every position l, the h(l) responses that still run are distributed over all devices.
    """
    each = [running / DEVICES for running in num_responses * LENGTHS.survival_T if running > 0]
    return sum(running * token_s / use(running) for running in each)


def pipeline_rate(use: Utilisation, num_generating: int, tau: float) -> float:
    """Return the rate of responses if generation never stops, that of the slower side: min(U(H)·I, (N - I) / tau)."""
    return min(use(RUNNING) * num_generating, (DEVICES - num_generating) / tau)


def test_the_vector_of_pipeline_rl() -> None:
    """N = 128, B = 128, uniform lengths, H = 192, I = 44: r_conv 10.7, r_pipe 16.9, ratio 1.58, g_max 132.

    The paper does not print U and tau. One knee for U and one tau must give them all: tau and U(192) follow from r_pipe
    at equal pace of both sides, the knee's sharpness from r_conv. The rate at any other number of generating devices is
    then below 16.9, and the simulation, which uses no formula, gives the same rate and lag.

    Source: PipelineRL, arXiv 2509.19128, appendix A.
    """
    tau, at_running, sharpness = (DEVICES - GENERATING) / 16.9, 16.9 / GENERATING, 1.87
    bend = RUNNING * (at_running**-sharpness - 1) ** (1 / sharpness)

    def use(running: float) -> float:
        return running / (running**sharpness + bend**sharpness) ** (1 / sharpness)

    lag = math.ceil(RUNNING * GENERATING * LENGTHS.max_tokens / (LENGTHS.mean * BATCH))
    assert lag == 132
    rates = {generating: pipeline_rate(use, generating, tau) for generating in range(1, DEVICES)}
    assert max(rates, key=rates.__getitem__) == GENERATING
    responses = lag * BATCH  # an iteration of the conventional run may be as old
    generation = conventional_generation_s(responses, use, 1 / LENGTHS.mean)
    conventional = responses / (generation + responses * tau / DEVICES)
    assert conventional == pytest.approx(10.7, abs=0.05)
    assert rates[GENERATING] / conventional == pytest.approx(1.58, abs=0.01)

    simulated = simulate_asynchronous(
        Setting(
            num_steps=260,
            batch_size=BATCH,
            num_engines=GENERATING,
            max_running=RUNNING,
            prompt_tokens=0.0,
            lengths=LENGTHS,
            step_s=lambda count, tokens: count / LENGTHS.mean / use(count),
            prefill_s=0.0,
            train_token_s=tau / LENGTHS.mean / (DEVICES - GENERATING),
            update_s=0.0,
            max_staleness=math.inf,
        )
    )
    settled = simulated.step_ends[159]  # by then, every engine has ended its first responses
    assert 100 * BATCH / (simulated.seconds - settled) == pytest.approx(16.9, rel=0.02)
    assert simulated.largest_staleness == pytest.approx(lag, rel=0.1)
