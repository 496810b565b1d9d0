"""Settings of routers, which only a mixture of experts has."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hybridengine.config import load_config
from hybridengine.errors import ConfigError
from tests.unit.model_configs import plain


@pytest.mark.parametrize("key", ["actor.router_aux_loss_coef=0.01", "critic.router_z_loss_coef=0.01"])
def test_a_dense_model_has_no_router_losses(key: str) -> None:
    message = f"{key} needs a mixture of experts, found qwen2; set 0, or use another model"
    with pytest.raises(ConfigError, match=message):
        load_config("configs/arithmetic.yaml", [key], dry_run=True)


def test_a_dense_model_has_no_routes_to_replay() -> None:
    with pytest.raises(
        ConfigError, match=r"rollout\.routing_replay=true needs a mixture of experts, found qwen2"
    ):
        load_config("configs/arithmetic.yaml", ["rollout.routing_replay=true"], dry_run=True)


def test_routes_behind_a_window_cannot_be_replayed(tmp_path: Path) -> None:
    """vLLM lets go of what lies behind a window, and the routes with it."""
    described = {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "sliding_window": 32}
    config = tmp_path / "config.json"
    config.write_text(json.dumps(plain(num_attention_heads=4, num_local_experts=8, **described)))
    model = [
        "model.build=null",
        "model.path=absent",
        f"model.hf_config={config}",
        "actor.parallel=1-2-2 e=2 etp=1",
    ]
    load_config("configs/moe.yaml", model, dry_run=True)
    with pytest.raises(ConfigError, match=r"whose attention has a window \(32 tokens\)"):
        load_config("configs/moe.yaml", [*model, "rollout.routing_replay=true"], dry_run=True)


def test_a_mixture_has_both() -> None:
    given = ["rollout.routing_replay=true", "actor.router_aux_loss_coef=0.01"]
    config = load_config("configs/moe.yaml", given, dry_run=True)
    assert config.rollout.routing_replay
    assert config.actor.router_aux_loss_coef == 0.01
