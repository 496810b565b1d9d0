"""Pools in a configuration: any partition of the roles, and the rules for it."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import yaml

from hybridengine.config import RunConfig, load_config
from hybridengine.errors import ConfigError
from hybridengine.training.dry_run import print_dry_run

PPO_ROLES = ("actor", "critic", "reference", "reward")
RANKS = {"main": 4, "a": 2, "b": 6, "c": 1}
SECTIONS: dict[str, Any] = {
    "model": {"build": {"num_layers": 4, "num_heads": 4, "num_kv_heads": 4}},
    "data": {"batch_size": 24, "task": {}},
}


def load(folder: Path, **sections: Any) -> RunConfig:
    (folder / "run.yaml").write_text(yaml.safe_dump(SECTIONS | sections, sort_keys=False))
    return load_config(folder / "run.yaml")


def problems(folder: Path, **sections: Any) -> str:
    with pytest.raises(ConfigError) as error:
        load(folder, **sections)
    return str(error.value)


def test_every_partition_of_the_roles_is_a_configuration(tmp_path: Path):
    """Every assignment of three roles to the actor's pool and three others: 4^3."""
    for places in product(RANKS, repeat=3):
        pool_of = {"actor": "main", **dict(zip(PPO_ROLES[1:], places, strict=True))}
        pools = {
            name: {
                "roles": [role for role in PPO_ROLES if pool_of[role] == name],
                "ranks_per_node": [RANKS[name]],
            }
            for name in set(places) - {"main"}
        }
        models = {
            role: {"parallel": f"1-1-{RANKS[pool_of[role]]}"} for role in ("actor", "critic", "reference")
        }
        config = load(tmp_path, cluster={"ranks_per_node": [4], "pools": pools}, **models)
        for role in PPO_ROLES:
            assert config.pool_of(role) == pool_of[role]  # pyright: ignore[reportArgumentType]
            assert role in config.pools[pool_of[role]].roles
        assert sorted(role for pool in config.pools.values() for role in pool.roles) == sorted(PPO_ROLES)
        assert config.num_ranks == 4 + sum(RANKS[name] for name in set(places) - {"main"})
        assert next(iter(config.pools)) == "main"


def test_every_rank_that_works_by_itself_has_rows(tmp_path: Path):
    pools = {"scoring": {"roles": ["reward"], "ranks_per_node": [8]}}
    few = {"model": SECTIONS["model"], "data": {"batch_size": 4, "task": {}}}
    shared = {"cluster": {"ranks_per_node": [4], "pools": pools}, "actor": {"parallel": "2-2-1"}}
    text = problems(tmp_path, **few, **shared)
    assert (
        "each of the 8 ranks of cluster.pools.scoring.ranks_per_node=[8] calls the scorers of reward for rows of its"
        " own, and data.batch_size=4 · rollout.samples_per_prompt=1 leave 4 for all of them; raise data.batch_size, or"
        " take fewer ranks"
    ) in text
    sampled = {"rollout": {"samples_per_prompt": 2}}
    load(tmp_path, **few, **shared, **sampled, critic={"parallel": "2-2-1"})
    remax = {"algorithm": {"name": "remax"}}  # the greedy responses to 4 prompts are scored too
    assert "leave 4 for all of them" in problems(tmp_path, **few, **shared, **sampled, **remax)
    wide = {"cluster": {"ranks_per_node": [8]}, "actor": {"parallel": "2-4-1", "generate": "1-4"}}
    assert "each of the 8 ranks of cluster.ranks_per_node=[8] computes on rows of its own" in problems(
        tmp_path, **few, **wide, **remax
    )


def test_sizes_are_held_against_the_pool_of_the_role(tmp_path: Path):
    pools = {"values": {"roles": ["critic"], "ranks_per_node": [2, 1]}}
    cluster = {"ranks_per_node": [4], "pools": pools}
    found = problems(tmp_path, cluster=cluster, actor={"parallel": "1-1-4"}, critic={"parallel": "1-1-4"})
    assert (
        "critic.parallel=1-1-4 takes p·t·d = 1·1·4 = 4 ranks, which must equal the 3 of"
        " cluster.pools.values.ranks_per_node=[2, 1]; choose 1-1-3, or give the pool 4 ranks" in found
    )
    found = problems(tmp_path, cluster=cluster, actor={"parallel": "1-2-2", "generate": "1-1"})
    assert "of cluster.pools.values.ranks_per_node=[2, 1] that critic is on" in found
    assert "give critic sizes of its own" in found
    found = problems(tmp_path, cluster=cluster, actor={"parallel": "1-1-8"}, critic={"parallel": "1-1-3"})
    assert "actor.parallel=1-1-8" in found and "cluster.ranks_per_node=[4]; choose 1-1-4" in found


@pytest.mark.parametrize(
    ("pools", "words"),
    [
        (
            {"a": {"roles": ["actor"]}},
            "cluster.pools.a.roles[0]=\"actor\" must be 'generation', 'critic', 'cost_critic', 'reference',"
            " 'teacher', 'reward' or 'cost'",
        ),
        (
            {"a": {"roles": []}},
            "cluster.pools.a.roles=[] must be a list of at least 1 item",
        ),
        (
            {"a": {"roles": ["cost"]}},
            "cluster.pools.a.roles names cost, which algorithm.name=ppo does not use",
        ),
        (
            {"a": {"roles": ["critic"]}, "b": {"roles": ["reward", "critic"]}},
            "cluster.pools.b.roles names critic, and so does cluster.pools.a",
        ),
        ({"a": {"roles": ["critic", "critic"]}}, "cluster.pools.a.roles names critic, twice"),
        ({"main": {"roles": ["critic"]}}, "'main' cannot be the name of a pool"),
        ({"a b": {"roles": ["critic"]}}, "'a b' cannot be the name of a pool"),
        ({"a": {"roles": ["critik"]}}, "did you mean 'critic'?"),
        ({"a": {"rolse": ["critic"]}}, "did you mean cluster.pools.a.roles?"),
        ({"a": {"roles": ["critic"], "ranks_per_node": []}}, "cluster.pools.a.ranks_per_node"),
        (["critic"], "cluster.pools"),
    ],
)
def test_what_pools_must_keep(tmp_path: Path, pools: Any, words: str):
    assert words in problems(tmp_path, cluster={"ranks_per_node": [1], "pools": pools})


def test_a_dry_run_shows_each_pool(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    pools = {
        "values": {"roles": ["critic"], "ranks_per_node": [2]},
        "scoring": {"roles": ["reference", "reward"], "ranks_per_node": [1, 1]},
    }
    config = load(
        tmp_path,
        cluster={"ranks_per_node": [4], "pools": pools},
        actor={"parallel": "2-2-1", "generate": "1-1"},
        critic={"parallel": "1-2-1"},
        reference={"parallel": "2-1-1"},
    )
    print_dry_run(config)
    text = capsys.readouterr().out
    for line in (
        "pool main: ranks 4 on 1 node(s), for actor",
        "pool values: ranks 2 on 1 node(s), for critic",
        "pool scoring: ranks 2 on 2 node(s), for reference, reward",
        "ranks: 8 in all",
        "roles: actor 2-2-1, critic 1-2-1, reference 2-1-1",
        "groups (each pool counts its own ranks)",
    ):
        assert line in text
    memory = text.split("memory per rank of pool ")[1:]
    assert [part.split()[0] for part in memory] == ["main", "values", "scoring"]
    assert "actor" in memory[0] and "critic" not in memory[0] and "KV cache" in memory[0]
    assert "critic" in memory[1] and "KV cache" not in memory[1]
