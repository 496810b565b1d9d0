"""A server's ranks without processes: which errors need a restart, and what is not saved."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hybridengine.controller.failures import RankFailure, failure_of, rank_failed
from hybridengine.errors import RanksLostError, RequestError
from hybridengine.serving.engine_ranks import EngineRanks
from hybridengine.serving.ranks import ModelFacts
from workers.client_actor import ClientActor

FACTS = ModelFacts("tiny", "tiny", vocabulary_size=8, context_tokens=32)


def ranks_of(**methods: Any) -> EngineRanks:
    """Return ranks whose actor has these methods."""
    actor = SimpleNamespace(parallel=SimpleNamespace(dp_size=1), lora=SimpleNamespace(adapters=None))
    config = SimpleNamespace(actor=actor, engines=())
    groups: Any = SimpleNamespace(config=config, actor=SimpleNamespace(**methods))
    return EngineRanks(groups, FACTS)


@pytest.mark.parametrize(
    ("failure", "unforeseen"),
    [(failure_of(1, OverflowError("too large")), True), (RankFailure(1, "gone", died=True), False)],
)
def test_a_call_tells_a_lost_rank_from_an_error_that_it_may_have_caused(
    failure: RankFailure, unforeseen: bool
) -> None:
    def begin_model(*_: object) -> None:
        raise rank_failed(failure, [])

    with pytest.raises(RanksLostError) as caught:
        ranks_of(begin_model=begin_model).begin_model()
    assert caught.value.unforeseen == unforeseen


class Weights(dict[str, torch.Tensor]):
    """Weights of a rank, by name."""

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self)


@pytest.mark.parametrize("method", ["save", "save_sampler"])
@pytest.mark.parametrize("value", [torch.nan, -torch.inf])
def test_weights_that_are_not_finite_are_not_saved(method: str, value: float, tmp_path: Path) -> None:
    weights = Weights(first=torch.zeros(2), second=torch.tensor([0.0, value, 1.0]))
    worker: Any = SimpleNamespace(
        trainer=SimpleNamespace(weights=weights), trained_names=lambda: weights.names
    )
    found = [None, ClientActor.unsound_weight(worker)]
    ranks = ranks_of(unsound_weight=lambda: SimpleNamespace(get=lambda: found))
    with pytest.raises(RequestError, match="the weight second has values that are not finite"):
        getattr(ranks, method)(tmp_path / "saved")
    assert not (tmp_path / "saved").exists()
    weights["second"][1] = 3e38
    assert ClientActor.unsound_weight(worker) is None
