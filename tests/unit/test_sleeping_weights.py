"""Weights under vLLM's sleep mode, which needs a GPU: a stand-in records its calls here."""

from __future__ import annotations

from unittest import mock

import torch

from hybridengine.backends.vllm.sleeping import SleepingWeights


def test_requests_are_kept_while_weights_sleep() -> None:
    llm = mock.Mock()
    weights = SleepingWeights({"a": torch.ones(2), "b": torch.ones(3)}, llm)
    weights.part(["a"]).release()
    assert weights.live_bytes == 20
    assert llm.mock_calls == []
    weights.part(["b"]).release()
    assert weights.live_bytes == 0
    weights.part(["a"]).materialise()
    weights.part(["b"]).materialise()
    assert weights.live_bytes == 20
    assert llm.mock_calls == [mock.call.sleep(level=2, mode="keep"), mock.call.wake_up(tags=["weights"])]
