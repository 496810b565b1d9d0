"""The configuration of a server: what it needs, and the key that clients can use."""

from __future__ import annotations

from pathlib import Path

import pytest

from hybridengine.config import load_config, model_holders
from hybridengine.errors import ConfigError
from hybridengine.training.dry_run import cost_of, layout_lines

FILE = Path("configs/serve.yaml").absolute()
SHAPES = "model.hf_config=llama3-70b"


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run where the file's checkpoint does not exist: `make train` may have made it here."""
    monkeypatch.chdir(tmp_path)


def test_a_server_needs_no_data() -> None:
    config = load_config(FILE, [SHAPES], dry_run=True, serves=True)
    assert config.run.name == "serve"
    assert config.grid("actor").sizes.num_ranks == config.num_ranks
    with pytest.raises(ConfigError, match="data must be given by exactly one of"):
        load_config(FILE, [SHAPES], dry_run=True)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("serve.api_key=secret", "a text that begins with tml-"),
        ("serve.port=70000", "serve.port"),
        ("serve.hots=0.0.0.0", "unknown key serve.hots; did you mean serve.host"),
    ],
)
def test_settings_that_cannot_be_served_are_refused(override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        load_config(FILE, [SHAPES, override], dry_run=True, serves=True)
    assert "secret" not in str(caught.value)


def test_a_server_has_the_actor_alone_or_a_reference_too() -> None:
    config = load_config(FILE, [SHAPES], dry_run=True, serves=True)
    assert [holder.name for holder in model_holders(config)] == ["actor"]
    (line,) = (line for line in layout_lines(config, cost_of(config)) if line.startswith("roles: "))
    assert line.startswith("roles: actor 1-2-1 (p-t-d)")
    own = ["serve.reference=true", "reference.parallel=1-1-3", "cluster.pools.small.roles=[reference]"]
    config = load_config(
        FILE, [SHAPES, *own, "cluster.pools.small.ranks_per_node=[3]"], dry_run=True, serves=True
    )
    assert [(holder.name, str(holder.sizes)) for holder in model_holders(config)] == [
        ("actor", "1-2-1"),
        ("reference", "1-1-3"),
    ]
    assert config.num_ranks == 5


ENGINES = ["cluster.pools.engines.roles=[generation]", "cluster.pools.engines.ranks_per_node=[4]"]


@pytest.mark.parametrize("reference", [False, True])
def test_a_server_has_engines_if_a_pool_has_them(reference: bool) -> None:
    overrides = [SHAPES, *ENGINES, "generation.parallel=1-2", f"serve.reference={reference}"]
    config = load_config(FILE, overrides, dry_run=True, serves=True)
    assert config.engines == ((2,), (2,))
    assert [holder.name for holder in model_holders(config)] == ["actor", "reference"][: 1 + reference]
    assert config.num_ranks == 6
    (line,) = (line for line in layout_lines(config, cost_of(config)) if line.startswith("engines: "))
    assert line == "engines: 2 of 1-2 (p_g-t_g) in pool engines; clients sample while the actor trains"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            [*ENGINES, "generation.parallel=1-3"],
            r"engines of p_g·t_g = 1·3 = 3 ranks do not divide the 4 of cluster.pools.engines.ranks_per_node",
        ),
        (
            ["serve.reference=true", "cluster.pools.engines.roles=[generation,reference]"],
            "names generation and reference, .*; give generation a pool of its own",
        ),
        (
            ["cluster.pools.b.roles=[critic]"],
            "cluster.pools.b.roles names critic, and this server has actor;",
        ),
        (
            ["cluster.pools.b.roles=[reference]"],
            "names reference, and this server has actor; .*serve.reference=true adds",
        ),
        (
            ["actor.lora.rank=8", "serve.reference=true"],
            "serve.reference=true with actor.lora.rank=8 would hold the frozen weights twice",
        ),
        (
            ["actor.lora.rank=8", "actor.lora.path=adapters"],
            "actor.lora.path=adapters is not read by a server",
        ),
        (
            ["actor.lora.rank=8", "model.hf_config=qwen3-235b-a22b"],
            r"actor.lora.rank=8 is not supported by a server of a mixture of experts \(qwen3_moe\)",
        ),
        (
            ["serve.reference=true", "reference.parallel=1-1-1"],
            "reference.parallel=1-1-1 takes p·t·d = 1·1·1 = 1 ranks",
        ),
    ],
)
def test_pools_and_sizes_that_a_server_cannot_use_are_refused(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(FILE, [SHAPES, *overrides], dry_run=True, serves=True)
