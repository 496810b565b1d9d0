"""A server's ranks without processes: which errors of calls mean that the ranks need a restart."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from hybridengine.controller.failures import RankFailure, failure_of, rank_failed
from hybridengine.errors import RanksLostError
from hybridengine.serving.engine_ranks import EngineRanks
from hybridengine.serving.ranks import ModelFacts

FACTS = ModelFacts("tiny", "tiny", vocabulary_size=8, context_tokens=32)


def ranks_of(**methods: Any) -> EngineRanks:
    """Return ranks whose actor has these methods."""
    config = SimpleNamespace(actor=SimpleNamespace(parallel=SimpleNamespace(dp_size=1)))
    groups: Any = SimpleNamespace(config=config, actor=SimpleNamespace(**methods))
    return EngineRanks(groups, FACTS)


@pytest.mark.parametrize(
    ("failure", "unforeseen"),
    [(failure_of(1, OverflowError("too large")), True), (RankFailure(1, "gone", died=True), False)],
)
def test_a_call_tells_a_lost_rank_from_an_error_that_it_may_have_caused(
    failure: RankFailure, unforeseen: bool
) -> None:
    def begin_model() -> None:
        raise rank_failed(failure, [])

    with pytest.raises(RanksLostError) as caught:
        ranks_of(begin_model=begin_model).begin_model()
    assert caught.value.unforeseen == unforeseen
