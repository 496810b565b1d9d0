"""Release of KV cache and weights in an engine with CUDA graphs. There is no GPU: its worker's answers are stand-ins."""

from __future__ import annotations

from pathlib import Path

from tests.full.engines.sleep_ranks import sleep_and_wake
from tests.gloo.ranks import RankLauncher
from tests.gloo.tiny_models import write_model


def test_the_cache_is_released_before_the_weights_go_back(tmp_path: Path, run_ranks: RankLauncher) -> None:
    write_model(tmp_path, "llama", head_dim=32)
    (slept,) = run_ranks(1, sleep_and_wake, tmp_path)
    for turn in range(2):
        calls = {step.partition(" ")[2]: made for step, made in slept.calls.items() if step[0] == str(turn)}
        assert calls == {
            "leave": [("discard", ("kv_cache",))],  # also after requests that have just ended
            "release": [("unmap",)] * slept.num_parameters,
            "materialise": [("map",)] * slept.num_parameters,
            "enter": [("wake_up", ["kv_cache"])],
        }
    assert slept.before == slept.after
    assert all(len(tokens) == 6 for tokens in slept.after)
