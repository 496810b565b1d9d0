"""`hybridengine simulate` and `plan` for a configuration with engines on a pool of their own."""

from __future__ import annotations

import contextlib
import io
import json
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import yaml

from hybridengine.cli.main import main
from hybridengine.config import load_config
from hybridengine.models.presets import resolve_model

ROOT = Path(__file__).parents[2]
A100 = str(ROOT / "configs" / "clusters" / "a100-80gb-16x8.yaml")
CONFIG: dict[str, Any] = {
    "cluster": {
        "ranks_per_node": [8],
        "pools": {"engines": {"roles": ["generation"], "ranks_per_node": [8]}},
        "device": "cuda",
    },
    "model": {"path": "elsewhere", "hf_config": "llama2-7b", "dtype": "bfloat16"},
    "data": {"train_file": "elsewhere", "batch_size": 32},
    "actor": {"parallel": "1-8-1", "recompute": "full"},
    "reference": {"parallel": "2-2-2"},
    "rollout": {
        "max_prompt_tokens": 256,
        "max_response_tokens": 1024,
        "samples_per_prompt": 4,
        "kv_cache_bytes": "16GiB",
        "max_num_seqs": 64,
    },
    "generation": {"parallel": "1-2"},
    "staleness": {"max_versions": 2, "bound": "response"},
    "algorithm": {"name": "async_grpo"},
}
ELSEWHERE: dict[str, Any] = {
    "cluster": {
        "ranks_per_node": [8],
        "pools": {
            "engines": {"roles": ["generation"], "ranks_per_node": [4]},
            "scoring": {"roles": ["reference"], "ranks_per_node": [4]},
        },
        "device": "cuda",
    },
    "reference": {"parallel": "2-2-1"},
}
"""Sections that put the reference on a pool of its own."""
LENGTHS = ("--lengths", "lognormal:mean=200,cv=0.8", "--steps", "12")


@pytest.fixture
def file(tmp_path: Path) -> str:
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(CONFIG))
    return str(tmp_path / "run.yaml")


@cache
def figures(*arguments: str, **sections: Any) -> dict[str, Any]:
    """Return the figures of a simulated run; equal arguments are simulated once."""
    with TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()) as out:
        file = Path(folder) / "run.yaml"
        file.write_text(yaml.safe_dump(CONFIG | (ELSEWHERE if "elsewhere" in sections else {})))
        assert main(["simulate", str(file), "--cluster", A100, *LENGTHS, *arguments, "--json"]) == 0
    return json.loads(out.getvalue())


def test_the_configured_pools_are_simulated() -> None:
    found = figures()
    one = found["asynchronous"]
    assert (one["num_training"], one["num_generating"], one["num_engines"]) == (8, 8, 4)
    assert (one["generate"], one["max_running"]) == ("1-2", 64)
    assert one["parallel"] == {"actor": "1-8-1", "reference": "2-2-2"}
    assert (found["num_devices"], found["max_staleness"], found["bound"]) == (16, 2.0, "response")
    assert len(found["sweep"]) == 1
    # Each of 8 devices receives half of the weights, all through the 25 GB/s of one node; norms are whole everywhere.
    half = resolve_model("llama2-7b").weight_bytes("bfloat16") / 2
    assert one["update_s"] == pytest.approx(8 * half / 25e9, rel=0.01)


def test_the_bound_of_the_configuration_holds_and_options_replace_it() -> None:
    response, token = figures(), figures("--bound", "token", "--staleness", "0")
    assert response["asynchronous"]["staleness_max"] <= 2
    assert response["asynchronous"]["masked_share"] == 0
    assert (token["bound"], token["max_staleness"]) == ("token", 0.0)
    assert token["asynchronous"]["staleness_max"] == 0
    assert token["asynchronous"]["tokens_per_s"] < response["asynchronous"]["tokens_per_s"]
    masked = figures("staleness.max_versions=1", "staleness.bound=token", "data.batch_size=8")["asynchronous"]
    ages = masked["staleness_tokens"]
    older = sum(count for age, count in ages.items() if int(age) > 1)
    assert 0 < masked["masked_share"] == pytest.approx(older / sum(ages.values()))


def test_the_reference_on_a_pool_of_its_own() -> None:
    """It works at the same time as the actor's log-probs, and nothing else of the run changes."""
    one = figures(elsewhere=True)["asynchronous"]
    assert (one["num_training"], one["num_generating"]) == (12, 4)
    assert one["update_s"] == pytest.approx(
        figures()["asynchronous"]["update_s"] / 2, rel=0.01
    )  # 4 devices receive
    assert one["parallel"] == {"actor": "1-8-1", "reference": "2-2-1"}
    # Its ranks and the actor's work at the same time, so that their shares of a step are more than the step.
    shares = one["role_idle_shares"]
    busy = sum(1 - shares[role] for role in ("actor", "reference", "reward"))
    assert busy > 1 - one["train_idle_share"] + 0.01
    alone = figures()["asynchronous"]
    busy = sum(1 - alone["role_idle_shares"][role] for role in ("actor", "reference", "reward"))
    assert busy == pytest.approx(1 - alone["train_idle_share"], abs=0.01)


def test_the_text_names_the_bound_and_shares_of_tokens(file: str, capsys: pytest.CaptureFixture[str]) -> None:
    overrides = ("staleness.bound=token", "staleness.max_versions=1", "data.batch_size=4")
    assert main(["simulate", file, "--cluster", A100, *LENGTHS, *overrides]) == 0
    text = capsys.readouterr().out
    for part in (
        "staleness bound 1 by token",
        "the configured division",
        "share of the tokens by staleness: 0:",
        "new weights in",
        "warning: the longest responses take",
    ):
        assert part in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--sweep"], "--sweep cannot change the pools and sizes"),
        (["--train-devices", "8"], "--train-devices cannot change the pools"),
        (["--fix", "actor=1-8-1"], "--fix cannot change the pools"),
        (["--devices", "8"], "--devices 8 must be the 16 ranks of the configuration's pools"),
        (["rollout.kv_cache_bytes=200GiB"], "GiB on a device, which has"),
        (["cluster.pools.engines.ranks_per_node=[7]"], "do not divide the 7"),
        (
            ["timeouts.call_s=61", "generation.steps_per_call=65536"],
            "and a call must take less than timeouts.call_s=61; lower the one or raise the other",
        ),
    ],
)
def test_what_contradicts_the_configured_pools(
    file: str, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["simulate", file, "--cluster", A100, *LENGTHS, *arguments]) == 2
    assert message in capsys.readouterr().err


def test_the_planner_keeps_the_engines_and_plans_the_others(
    file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    out = Path(file).with_name("planned.yaml")
    assert (
        main(["plan", file, "--cluster", A100, *LENGTHS[:2], "--placement", "colocate", "--out", str(out)])
        == 0
    )
    text = capsys.readouterr().out
    assert "engines: 4 of 1-2 (p_g-t_g) on 8 of the devices, as configured" in text
    assert "actor+reference on 8" in text
    planned = load_config(out, dry_run=True)
    assert planned.cluster.pools["engines"].ranks_per_node == (8,)
    assert sum(planned.cluster.ranks_per_node) == 8 and planned.engines == ((2,),) * 4
