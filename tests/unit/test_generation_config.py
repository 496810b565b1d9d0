"""Engines on a pool of their own in a configuration: what is refused, and what a dry run prints."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from hybridengine.config import RunConfig, load_config, model_shape
from hybridengine.config.algorithm import Algorithm
from hybridengine.drivers.async_grpo import AsyncGrpo
from hybridengine.drivers.ppo import Ppo
from hybridengine.drivers.remax import Remax
from hybridengine.errors import ConfigError
from hybridengine.planning.budget import budget_of
from hybridengine.planning.costs.memory import engine_weight_bytes
from hybridengine.planning.engine_memory import engine_activations
from hybridengine.planning.simulation.bound_prices import bound_warning, relative_setting
from hybridengine.training.dry_run import cost_of, print_dry_run
from tests.unit.test_config import problems_of

ROOT = Path(__file__).parents[2]
BASE: dict[str, Any] = {
    "cluster": {
        "ranks_per_node": [2],
        "pools": {"engines": {"roles": ["generation"], "ranks_per_node": [4]}},
    },
    "model": {"build": {"num_layers": 4, "num_heads": 4, "num_kv_heads": 2, "ffn_hidden_size": 384}},
    "data": {"batch_size": 24, "task": {}},
    "actor": {"parallel": "1-1-2"},
    "rollout": {"samples_per_prompt": 2},
    "generation": {"parallel": "1-2"},
    "algorithm": {"name": "async_grpo"},
}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A valid configuration: 2 ranks that train, and 2 engines of 2 ranks."""
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(BASE))
    return path


def loaded(file: Path, *overrides: str) -> RunConfig:
    return load_config(file, overrides, dry_run=True)


class AsyncPpo(Ppo):
    """PPO with the role generation."""

    roles = ("actor", "generation", "critic", "reference", "reward")


class AsyncRemax(Remax):
    """ReMax with the role generation."""

    roles = ("actor", "generation", "reference", "reward")


def named(kind: type[Algorithm]) -> str:
    return f"algorithm.name={kind.__module__}:{kind.__name__}"


def test_the_configuration_of_these_tests_is_valid(file: Path) -> None:
    config = loaded(file)
    assert config.engines == ((2,), (2,))
    assert config.pools["main"].roles == ("actor", "reference", "reward")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["cluster.pools.engines.roles=[generation,reward]"],
            "cluster.pools.engines.roles names generation and reward, and engines generate all the time, so that other"
            " roles cannot share their ranks; give generation a pool of its own",
        ),
        (
            ["cluster.pools.engines.ranks_per_node=[2,1]"],
            "generation.parallel=1-2: engines of p_g·t_g = 1·2 = 2 ranks do not divide the 3 of"
            " cluster.pools.engines.ranks_per_node=[2, 1]; choose p_g·t_g from 1, 3, or give the pool a multiple of 2",
        ),
        (
            ["generation.parallel=1-8", "cluster.pools.engines.ranks_per_node=[8]"],
            "generation.parallel=1-8: t_g=8 does not divide num_heads=4; choose t_g from 1, 2 or 4",
        ),
        (
            ["generation.parallel=5-1", "cluster.pools.engines.ranks_per_node=[5]"],
            "generation.parallel=5-1: p_g=5 pipeline stages need as many layers, the model has num_layers=4;"
            " choose p_g <= 4",
        ),
        (
            ["staleness.max_versions=-1"],
            "staleness.max_versions=-1 must be at least 0; correct it",
        ),
        (
            ["staleness.bound=group"],
            "staleness.bound=\"group\" must be 'token' or 'response'",
        ),
        (
            [named(AsyncPpo)],
            f"staleness.max_versions=1 admits tokens of older weights, and {named(AsyncPpo)} needs those of the current"
            " ones: returns and clipped ratios take the weights that drew the rows for the current ones; choose"
            " staleness.max_versions=0, or give algorithm.correction",
        ),
        (
            [named(AsyncRemax), "algorithm.correction.name=token_tis"],
            "the baseline is the reward of the greedy response of the same weights; choose staleness.max_versions=0",
        ),
    ],
)
def test_what_engines_on_a_pool_must_keep(file: Path, overrides: list[str], message: str) -> None:
    (found,) = problems_of(file, *overrides, dry_run=True)
    assert message in found
    assert ("or give algorithm.correction" in found) == (AsyncPpo.__name__ in found)


def test_engines_need_a_pool(file: Path) -> None:
    file.write_text(yaml.safe_dump(BASE | {"cluster": {"ranks_per_node": [2]}}))
    (found,) = problems_of(file, dry_run=True)
    assert found == (
        "algorithm.name=async_grpo has the role generation, whose engines need ranks of their own, and no pool of"
        " cluster.pools has it; add cluster.pools.engines with roles=[generation] and ranks_per_node"
    )


def test_the_kv_cache_of_an_engine_holds_one_sequence(file: Path) -> None:
    """4 layers, 2 of keys and values, 1 head of 2 on each rank, 4 bytes: at t_g = 1 twice as much as at t_g = 2."""
    config = loaded(file)
    shape = config.model.build.shape() if config.model.build else None
    assert shape is not None
    width = config.max_tokens
    one_head = 2 * 4 * shape.head_dim * 4 * width
    fits = f"rollout.kv_cache_bytes={one_head}"
    (found,) = problems_of(file, fits, "actor.generate=1-2", "generation.parallel=1-1", dry_run=True)
    assert (
        f"must hold one sequence of {width} tokens, which takes {2 * one_head} bytes at p_g-t_g = 1-1"
        in found
    )
    loaded(file, fits, "actor.generate=1-2", "generation.parallel=1-2")


def test_on_policy_algorithms_are_allowed_with_eta_0_or_a_correction(file: Path) -> None:
    for kind in (AsyncPpo, AsyncRemax):
        loaded(file, named(kind), "staleness.max_versions=0")
    loaded(file, named(AsyncPpo), "algorithm.correction.name=token_tis")
    loaded(file, named(AsyncGrpo), "staleness.max_versions=8")


def test_sections_that_a_synchronous_algorithm_does_not_read(file: Path, tmp_path: Path) -> None:
    sections = {key: value for key, value in BASE.items() if key != "generation"}
    sections |= {"cluster": {"ranks_per_node": [2]}, "algorithm": {"name": "grpo"}}
    file.write_text(yaml.safe_dump(sections))
    found = problems_of(file, "staleness.max_versions=2", "generation.kv=recompute", dry_run=True)
    assert found == [
        "generation.kv=recompute is not read by algorithm.name=grpo, which has no role generation; leave it out, or"
        " choose an asynchronous algorithm",
        "staleness.max_versions=2 is not read by algorithm.name=grpo, which has no role generation; leave it out, or"
        " choose an asynchronous algorithm",
    ]
    # The file that a run writes has every section, with its defaults.
    written = tmp_path / "written.yaml"
    written.write_text(yaml.safe_dump(loaded(file).described()))
    loaded(written)


# ---- dry run ----------------------------------------------------------------------------------------------------------


def printed(config: RunConfig, capsys: pytest.CaptureFixture[str]) -> str:
    print_dry_run(config)
    return capsys.readouterr().out


def test_a_dry_run_prints_what_the_bound_costs(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small = ("rollout.max_response_tokens=64", "rollout.max_num_seqs=16", "staleness.bound=response")
    text = printed(loaded(file, *small, "staleness.max_versions=10"), capsys)
    assert (
        "engines: 2 of 1-2 (p_g-t_g) in pool engines; generation waits for the bound alone: no trained token is"
        " older than max_versions=10 (bound: response)" in text
    )
    table = text[text.index("price of the bound") :].splitlines()
    assert "48 responses an iteration, 32 slots" in table[0] and "no cluster file is read" in table[0]
    rows = [line.split() for line in table[2:12]]
    assert [int(row[0]) for row in rows] == [*range(9), 10]
    assert [row[5:] for row in rows] == [*[[]] * 9, ["configured,", "response"]]
    assert rows[0][2] == "0%" and rows[0][1] == rows[0][3]
    assert "both bounds are free" in table[12]


def test_a_dry_run_warns_of_a_bound_below_the_longest_responses(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    few = ("data.batch_size=4", "rollout.max_num_seqs=16")
    text = printed(loaded(file, *few, "staleness.max_versions=1"), capsys)
    assert "warning: the longest responses take" in text
    response = printed(loaded(file, *few, "staleness.max_versions=1", "staleness.bound=response"), capsys)
    assert "warning" not in response
    warning = bound_warning(loaded(file, *few, "staleness.max_versions=1"))
    assert warning is not None and warning in text
    needed = re.search(r"choose at least (\d+), or", warning)
    assert needed and bound_warning(loaded(file, *few, f"staleness.max_versions={needed[1]}")) is None
    assert bound_warning(loaded(file, *few, "staleness.max_versions=0")) is None


def test_a_dry_run_of_a_synchronous_run_has_no_bound(built: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(load_config(built, dry_run=True), capsys)
    assert "bound" not in text and "engines:" not in text


def test_memory_of_an_engines_rank(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Weights of an unsharded engine are the whole model's; those of two shards, about half."""
    whole = loaded(file, "generation.parallel=1-1", "model.dtype=bfloat16", "rollout.kv_cache_bytes=1MiB")
    shape = whole.model.build.shape() if whole.model.build else None
    assert shape is not None
    text = printed(whole, capsys)
    memory = text[text.index("memory per rank of pool engines") :].splitlines()
    kib = shape.weight_bytes("bfloat16") / 1024
    assert memory[1].split(",")[0].split() == ["generation", "weights", *_size(kib)]
    assert memory[1].endswith("KV cache 1.0 MiB")


def _size(kib: float) -> list[str]:
    return [f"{kib / 1024:.1f}", "MiB"] if kib >= 1024 else [f"{kib:.1f}", "KiB"]


def test_the_doctor_counts_an_engines_weights_and_cache(file: Path) -> None:
    config = loaded(file, "rollout.kv_cache_bytes=1GiB")
    budget = budget_of(config, "engines", cost_of(config), on_gpus=False)
    held = engine_weight_bytes(config) + 2**30
    computing = held + engine_activations(config, model_shape(config), config.generation.parallel)
    switch = held + config.actor.bucket_bytes
    assert budget.device_bytes == {"start": computing, "switch": switch, "generation": computing}


def test_the_relative_setting_keeps_the_ratio_of_batch_and_slots(file: Path) -> None:
    """Slots are limited by max_num_seqs or by the cache; large batches are scaled down with the slots."""
    one = relative_setting(loaded(file, "rollout.max_num_seqs=16"))
    assert (one.batch_size, one.num_engines * one.max_running, one.samples_per_prompt) == (48, 32, 2)
    assert one.train_token_s * one.num_engines * one.max_running == pytest.approx(1)
    large = relative_setting(loaded(file, "rollout.max_num_seqs=320", "data.batch_size=480"))
    assert large.batch_size <= 256
    assert large.num_engines * large.max_running / large.batch_size == pytest.approx(640 / 960, rel=0.05)
    # 16 tokens of prompt and the mean position: room for 3 at most, with a byte less for 2.
    by_cache = relative_setting(loaded(file, "rollout.kv_cache_bytes=4MiB"))
    assert by_cache.max_running < one.max_running * 16


def test_the_70b_configuration(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    config = load_config("configs/async-70b.yaml", ["algorithm.name=async_grpo"], dry_run=True)
    assert (config.num_ranks, config.engines) == (128, ((8,),) * 4)
    text = printed(config, capsys)
    assert "3                     " in text and "configured, token" in text
    assert "both bounds are free (at most 2% masked or slower) from staleness.max_versions=3 on" in text
    assert "warning" not in text


def test_a_run_does_not_repeat_the_file_that_it_writes(file: Path) -> None:
    own = loaded(file).calls_file
    with pytest.raises(
        ConfigError, match=r"is the file that this run writes itself; copy it, or choose another run.name"
    ):
        loaded(file, f"generation.replay={own}")
    assert loaded(file, f"generation.replay={own}", "run.name=again").calls_file != own


def test_an_order_of_calls_that_is_not_there_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"^generation.replay=/no/calls.jsonl is not a file; name one that exists$"
    ):
        load_config(str(ROOT / "configs/async-grpo.yaml"), ["generation.replay=/no/calls.jsonl"])
