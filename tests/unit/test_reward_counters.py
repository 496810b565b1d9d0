"""Counters of reward functions, summed over ranks and over the groups of a run."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from hybridengine.drivers.roles import Roles, Scorers


def _functions(*ranks: dict[str, float]) -> Any:
    """Return a group of functions, one per rank, whose counters restart when they are read."""
    counters = [dict(rank) for rank in ranks]

    def take_metrics() -> Any:
        taken = [dict(rank) for rank in counters]
        for rank in counters:
            rank.update(dict.fromkeys(rank, 0.0))
        return SimpleNamespace(get=lambda: taken, answers=lambda timeout_s: taken[:1])

    return SimpleNamespace(take_metrics=take_metrics)


def _model() -> Any:
    return SimpleNamespace()


def test_counts_of_all_ranks_and_sections_are_summed_once() -> None:
    reward = Scorers(
        [
            _functions(
                {"reward/calls": 3.0, "reward/retries": 1.0}, {"reward/calls": 4.0, "reward/retries": 0.5}
            ),
            _model(),
        ],
        _model(),
        {},
    )
    cost = Scorers([_functions({"cost/calls": 2.0})], _model(), {})
    roles = Roles(actor=_model(), reward=reward, cost=cost)
    assert roles.take_scorer_metrics() == {"reward/calls": 7.0, "reward/retries": 1.5, "cost/calls": 2.0}
    assert roles.take_scorer_metrics() == {"reward/calls": 0.0, "reward/retries": 0.0, "cost/calls": 0.0}


def test_models_alone_count_nothing() -> None:
    assert Roles(actor=_model(), reward=Scorers([_model()], _model(), {})).take_scorer_metrics() == {}
