"""The order in which trainer, engine and HybridEngine are built, so that both sides find room on a full device."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

from hybridengine.errors import StorageError
from hybridengine.weights import hybrid_engine
from hybridengine.weights.hybrid_engine import HybridEngine
from hybridengine.weights.storage import WeightStorage


def sides(gradient_bytes: int) -> mock.Mock:
    """Return a trainer and an engine, with the calls that they get in one list."""
    both = mock.Mock()
    both.training.gradient_bytes, both.training.weights = gradient_bytes, WeightStorage({})
    both.training.retained, both.training.take_back.return_value = WeightStorage({}), 0
    both.generation.weights = WeightStorage({"engine": torch.ones(3)})
    return both


def test_a_trainer_with_gradients_is_refused() -> None:
    both = sides(gradient_bytes=3 * 2**30)
    with pytest.raises(
        StorageError, match=r"rank 5: .* 3\.0 GiB of gradients.*leave_training\(\) before the engine"
    ):
        HybridEngine(mock.Mock(), 5, both.training, both.generation, mock.Mock())
    assert both.mock_calls == []


def hybrid_between(both: mock.Mock) -> HybridEngine:
    """Return a HybridEngine in training mode whose plan moves nothing; its calls follow those of both sides."""
    stand_ins = {name: mock.MagicMock() for name in ("PlanExecutor", "inverse_local", "_agreed")}
    with mock.patch.multiple(hybrid_engine, **stand_ins):
        hybrid = HybridEngine(mock.Mock(), 0, both.training, both.generation, mock.Mock())
    both.attach_mock(stand_ins["PlanExecutor"].return_value.run, "run")
    return hybrid


def test_the_engine_is_emptied_and_gradients_wait_for_a_pass() -> None:
    both = sides(gradient_bytes=0)
    hybrid_between(both)
    assert both.generation.weights.live_bytes == 0
    assert both.mock_calls == [mock.call.generation.leave_generation()]


def test_memory_returns_to_the_system_on_the_way_back() -> None:
    both = sides(gradient_bytes=0)
    hybrid = hybrid_between(both)
    hybrid.to_generate()
    both.reset_mock()
    with mock.patch.object(hybrid_engine, "return_memory_to_system", both.empty):
        hybrid.to_train()
    assert [call[0] for call in both.mock_calls] == [
        "generation.leave_generation",
        "run",
        "training.take_back",
        "empty",
    ]
