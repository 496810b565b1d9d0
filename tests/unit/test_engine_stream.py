"""The stream on which gradients are accumulated. There is no GPU: vLLM's function and Megatron-core's are stand-ins."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from unittest import mock

import pytest

from hybridengine.backends.megatron import groups


@pytest.mark.parametrize(("on_cpu", "expected"), [(False, ["stream", "globals"]), (True, ["globals"])])
def test_vllms_stream_is_current_before_a_model_is_built(on_cpu: bool, expected: list[str]) -> None:
    calls = list[str]()
    state = mock.Mock(**{"model_parallel_is_initialized.return_value": False})
    state.initialize_model_parallel.side_effect = lambda *sizes: calls.append("globals")
    streams = SimpleNamespace(current_stream=lambda: calls.append("stream"))
    with (
        mock.patch.multiple(
            groups,
            is_needed=lambda: on_cpu,
            parallel_state=state,
            model_parallel_cuda_manual_seed=mock.Mock(),
            dist=mock.Mock(**{"get_rank.return_value": 0}),
            torch=mock.Mock(),
            np=mock.MagicMock(),
            random=mock.Mock(),
        ),
        mock.patch.dict(sys.modules, {"vllm.utils.torch_utils": streams}),  # type: ignore[dict-item]
    ):
        groups.initialize_globals(0)
    assert calls == expected
