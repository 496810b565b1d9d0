"""A run whose models cannot fit in the memory of its ranks' devices is refused before any model is built."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from hybridengine.config import load_config
from hybridengine.controller.worker_group import WorkerGroup
from hybridengine.errors import ConfigError
from hybridengine.machine import total_bytes
from hybridengine.training.run import train
from tests.full.tiny_runs import SECTIONS


def test_a_run_that_does_not_fit_is_refused_before_models_are_built(
    ray_cluster: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A KV cache of a quarter of the node's memory on each of four ranks leaves nothing for the models."""
    built = list[str]()
    monkeypatch.setattr(WorkerGroup, "__init__", lambda self, *_, role, **__: built.append(role))
    changes = {
        "run": SECTIONS["run"] | {"folder": str(tmp_path / "runs")},
        "rollout": SECTIONS["rollout"] | {"kv_cache_bytes": total_bytes() // 4},
    }
    (tmp_path / "large.yaml").write_text(yaml.safe_dump(SECTIONS | changes))
    with pytest.raises(
        ConfigError, match=r"phase 'generation' of pool main .* are missing; lower rollout\.kv_cache"
    ) as found:
        train(load_config(tmp_path / "large.yaml"))
    assert "its 4 rank(s) on node" in str(found.value)
    assert not built
