"""`hybridengine simulate` and `plan` for a configuration with engines on a pool of their own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from hybridengine.cli.main import main
from hybridengine.config import load_config
from hybridengine.models.presets import resolve_model
from tests.unit.async_algorithm import NAME

ROOT = Path(__file__).parents[2]
A100 = str(ROOT / "configs" / "clusters" / "a100-80gb-16x8.yaml")
CONFIG: dict[str, Any] = {
    "cluster": {
        "ranks_per_node": [8, 8],
        "pools": {"engines": {"roles": ["generation"], "ranks_per_node": [8]}},
        "device": "cuda",
    },
    "model": {"path": "elsewhere", "hf_config": "llama2-7b", "dtype": "bfloat16"},
    "data": {"train_file": "elsewhere", "batch_size": 32},
    "actor": {"parallel": "1-8-2", "recompute": "full"},
    "reference": {"parallel": "2-2-4"},
    "rollout": {
        "max_prompt_tokens": 256,
        "max_response_tokens": 1024,
        "samples_per_prompt": 4,
        "kv_cache_bytes": "16GiB",
        "max_num_seqs": 64,
    },
    "generation": {"parallel": "1-2"},
    "staleness": {"max_versions": 2, "bound": "response"},
    "algorithm": {"name": NAME},
}
LENGTHS = ("--lengths", "lognormal:mean=200,cv=0.8")


@pytest.fixture
def file(tmp_path: Path) -> str:
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(CONFIG))
    return str(tmp_path / "run.yaml")


def figures(file: str, *arguments: str) -> dict[str, Any]:
    out = Path(file).with_suffix(".json")
    command = ["simulate", file, "--cluster", A100, *LENGTHS, "--steps", "12", *arguments, "--json", str(out)]
    assert main(command) == 0
    return json.loads(out.read_text())


def test_the_configured_pools_are_simulated(file: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = figures(file)
    one = found["asynchronous"]
    assert (one["num_training"], one["num_generating"], one["num_engines"]) == (16, 8, 4)
    assert (one["generate"], one["max_running"]) == ("1-2", 64)
    assert one["parallel"] == {"actor": "1-8-2", "reference": "2-2-4"}
    assert (found["num_devices"], found["max_staleness"], found["bound"]) == (24, 2.0, "response")
    assert len(found["sweep"]) == 1
    # Half of the weights, with the norms whole, enter the nodes of the engines over the network.
    shape = resolve_model("llama2-7b")
    cluster = yaml.safe_load(Path(A100).read_text())
    assert one["update_s"] > shape.weight_bytes("bfloat16") / 2 / 1e12 and cluster
    text = capsys.readouterr().out
    for part in (
        "staleness bound 2 by response",
        "the configured division",
        "share of the tokens by staleness: 0:",
        "24 devices",
    ):
        assert part in text


def test_the_bound_of_the_configuration_holds_and_options_replace_it(file: str) -> None:
    response, token = figures(file), figures(file, "--bound", "token", "--staleness", "0")
    assert response["asynchronous"]["staleness_max"] <= 2
    assert response["asynchronous"]["masked_share"] == 0
    assert (token["bound"], token["max_staleness"]) == ("token", 0.0)
    assert token["asynchronous"]["staleness_max"] == 0
    assert token["asynchronous"]["tokens_per_s"] < response["asynchronous"]["tokens_per_s"]
    masked = figures(file, "staleness.max_versions=1", "staleness.bound=token", "data.batch_size=16")[
        "asynchronous"
    ]
    ages = masked["staleness_tokens"]
    older = sum(count for age, count in ages.items() if int(age) > 1)
    assert 0 < masked["masked_share"] == pytest.approx(older / sum(ages.values()))


def test_a_pool_of_another_role_works_beside_the_trainers(file: str) -> None:
    """The reference on 8 more ranks leaves the actor's ranks free for its other calls."""
    pools = CONFIG["cluster"]["pools"] | {"reference": {"roles": ["reference"], "ranks_per_node": [8]}}
    sections = CONFIG | {"cluster": CONFIG["cluster"] | {"pools": pools}, "reference": {"parallel": "2-2-2"}}
    before = figures(file)["asynchronous"]
    Path(file).write_text(yaml.safe_dump(sections))
    one = figures(file)["asynchronous"]
    assert (one["num_training"], one["num_generating"]) == (24, 8)
    assert one["parallel"] == {"actor": "1-8-2"}
    assert one["tokens_per_s"] > 0.9 * before["tokens_per_s"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--sweep"], "--sweep cannot change the pools and sizes"),
        (["--train-devices", "8"], "--train-devices cannot change the pools"),
        (["--fix", "actor=1-8-2"], "--fix cannot change the pools"),
        (["--devices", "16"], "--devices 16 must be the 24 ranks of the configuration's pools"),
        (["rollout.kv_cache_bytes=200GiB"], "GiB on a device, which has"),
        (["cluster.pools.engines.ranks_per_node=[7]"], "do not divide the 7"),
    ],
)
def test_what_contradicts_the_configured_pools(
    file: str, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["simulate", file, "--cluster", A100, *LENGTHS, *arguments]) == 2
    assert message in capsys.readouterr().err


def test_a_bound_that_the_longest_responses_exceed_is_said(
    file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    figures(file, "staleness.bound=token", "staleness.max_versions=1", "data.batch_size=4")
    assert "warning: the longest responses take" in capsys.readouterr().out


def test_the_planner_keeps_the_engines_and_plans_the_others(
    file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    out = Path(file).with_name("planned.yaml")
    assert (
        main(["plan", file, "--cluster", A100, *LENGTHS, "--placement", "colocate", "--out", str(out)]) == 0
    )
    text = capsys.readouterr().out
    assert "engines: 4 of 1-2 (p_g-t_g) on 8 of the devices, as configured" in text
    assert "actor+reference on 16" in text
    planned = load_config(out, dry_run=True)
    assert planned.cluster.pools["engines"].ranks_per_node == (8,)
    assert sum(planned.cluster.ranks_per_node) == 16 and planned.engines == ((2,),) * 4
