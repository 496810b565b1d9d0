"""`hybridengine plan`: its output, drawings and files, and its error messages."""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import math
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from hybridengine.cli.main import main, parse
from hybridengine.cli.run_request import request_of
from hybridengine.config import load_config, model_holders
from hybridengine.formatting import format_seconds
from hybridengine.planning.search.options import Options
from hybridengine.planning.search.plan import phases
from hybridengine.planning.search.plan_tables import comparison_lines, longest_path
from hybridengine.planning.search.search import Search
from tests.unit.plan_runs import A100, ROOT, Plan

CONFIG = str(ROOT / "configs" / "llama3-70b-16nodes.yaml")


@pytest.fixture
def planned(capsys: pytest.CaptureFixture[str]) -> Plan:
    def run(*arguments: str, command: str = "plan", config: str = CONFIG, cluster: str = A100):
        code = main([command, config, "--cluster", cluster, *arguments])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


SMALL = ("model.hf_config=llama2-7b", "rollout.kv_cache_bytes=4GiB", "--nodes", "2")
"""Options of a search that takes about a second."""


@dataclass(frozen=True)
class Files:
    """Output of one command with all kinds of outputs."""

    text: str
    figures: dict[str, Any]
    picture: Path
    config: Path


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Files:
    folder = tmp_path_factory.mktemp("small")
    figures, picture, config = folder / "plan.json", folder / "plan.svg", folder / "planned.yaml"
    outputs = ["--json", str(figures), "--plot", str(picture), "--out", str(config)]
    with contextlib.redirect_stdout(io.StringIO()) as out:
        assert main(["plan", CONFIG, "--cluster", A100, *SMALL, *outputs]) == 0
    return Files(out.getvalue(), json.loads(figures.read_text()), picture, config)


def test_figures_for_programs(small: Files) -> None:
    found = small.figures
    assert found["exact"] is True
    assert found["num_placements"] == 5
    assert 0 < found["search_s"] < 60
    steps = [plan["step_s"] for plan in found["plans"]]
    assert steps == sorted(steps)
    for plan in found["plans"]:
        assert plan["memory_headroom_bytes_min"] >= 0
        assert sum(pool["num_ranks"] for pool in plan["placement"]) <= 16
        names = sorted(name for pool in plan["placement"] for name in pool["models"])
        assert names == ["actor", "critic", "reference"]
        for role in plan["roles"].values():
            written, *named = role["parallel"].split()
            c = next((int(one[2:]) for one in named if one.startswith("c=")), 1)
            assert (
                math.prod(map(int, written.split("-"))) * c
                == role["num_ranks"]
                == plan["placement"][role["pool"]]["num_ranks"]
            )
        assert max(bar["end_s"] for bar in plan["timeline"]) == plan["step_s"]
        assert plan["phases_s"]["generate"] > 0
        if len(plan["placement"]) == 1:
            assert sum(plan["phases_s"].values()) == pytest.approx(plan["step_s"])


def test_text_shows_plans_sizes_the_timeline_and_why_the_next_one_lost(small: Files) -> None:
    for part in (
        "16 devices of A100-80GB",
        "5 placements",
        "nothing better exists in the search space",
        "sizes of plan 1",
        "timeline of plan 1",
        "plan 2 takes",
        "on its longest path",
        "plan 1 is written: hybridengine train",
    ):
        assert part in small.text
    assert "ggg" in small.text and "UUU" in small.text
    assert max(map(len, small.text.splitlines())) < 260


def test_differences_are_those_of_the_longest_paths() -> None:
    request = request_of(parse(["plan", CONFIG, "--cluster", A100, *SMALL]))
    best, *others = Search(Options(request.workload, request.cluster), 16).run().plans
    paths = {}
    for plan in (best, *others):
        path = longest_path(plan.bars)
        assert path[0].begin_s == 0 and path[-1].end_s == plan.step_s
        assert all(one.end_s == other.begin_s for one, other in itertools.pairwise(path))
        paths[plan.placement] = phases(path)
        assert sum(paths[plan.placement].values()) == pytest.approx(plan.step_s)
    for other in others:
        total, *found = comparison_lines(other, best)
        assert total.startswith(f"plan 2 takes {format_seconds(other.step_s - best.step_s)} longer")
        own, there = paths[other.placement], paths[best.placement]
        expected = set()
        for phase in own | there:
            seconds = own.get(phase, 0.0) - there.get(phase, 0.0)
            if abs(seconds) >= 0.005 * best.step_s:
                word = "more" if seconds > 0 else "less"
                expected.add(f"{format_seconds(abs(seconds))} {word} of {phase}")
        assert {line.partition(":")[0].strip() for line in found} == expected


@pytest.mark.parametrize(
    ("config", "more"),
    [
        ("llama3-70b-16nodes.yaml", [*SMALL, "--placement", "actor | critic, reference"]),
        ("safe-rlhf.yaml", ["--devices", "4", "--placement", "standalone", "model.dtype=bfloat16"]),
    ],
)
def test_a_plan_is_a_configuration_that_can_be_trained(
    planned: Plan, tmp_path: Path, config: str, more: list[str]
) -> None:
    file, figures = tmp_path / "planned.yaml", tmp_path / "plan.json"
    arguments = ("--out", str(file), "--json", str(figures), *more)
    code, _, err = planned(*arguments, config=str(ROOT / "configs" / config))
    assert (code, err) == (0, "")
    best = json.loads(figures.read_text())["plans"][0]
    run = load_config(file, dry_run=True)
    holders = {holder.name: holder for holder in model_holders(run)}
    assert {name: str(holder.sizes) for name, holder in holders.items()} == {
        name: role["parallel"] for name, role in best["roles"].items()
    }
    assert str(run.actor.generate) == best["roles"]["actor"]["generate"]
    assert run.rollout.kv_cache_bytes == best["roles"]["actor"]["kv_cache_bytes"]
    assert run.num_ranks == sum(pool["num_ranks"] for pool in best["placement"])
    pools = list(run.pools.values())
    for name, role in best["roles"].items():
        assert pools[role["pool"]].num_ranks == role["num_ranks"]
        assert holders[name].role in pools[role["pool"]].roles
    assert main(["train", str(file), "--dry-run"]) == 0


def test_ranks_and_sizes_of_the_configuration_do_not_count(
    planned: Plan, small: Files, tmp_path: Path
) -> None:
    """A run refuses them; a plan replaces them and writes the same file."""
    clashing = [
        "actor.parallel=3-5-7",
        "actor.generate=1-3",
        "rollout.kv_cache_bytes=1",
        "cluster.ranks_per_node=[1]",
    ]
    for one in clashing:
        assert main(["train", CONFIG, one, "--dry-run"]) == 2
    file = tmp_path / "clashing.yaml"
    code, _, err = planned(*SMALL, "--out", str(file), *clashing)
    assert code == 0, err
    assert small.config.read_text() == file.read_text()


@pytest.mark.parametrize(
    ("config", "fixed", "few", "enough"),
    [
        ("arithmetic.yaml", "actor=1-1-2", "warmup.batch_size=3", "warmup.batch_size=4"),
        ("arithmetic.yaml", "actor=2-2-1", "data.batch_size=2", "data.batch_size=4"),
        ("remax.yaml", "actor=2-2-1", "data.batch_size=2", "data.batch_size=4"),
    ],
)
def test_a_plan_has_rows_for_every_rank_and_replica(
    planned: Plan, tmp_path: Path, config: str, fixed: str, few: str, enough: str
) -> None:
    """The rows are those of the warm-up's batch, which training splits over replicas, and of functions on every rank."""
    out = tmp_path / "planned.yaml"
    kept = ["actor.mini_batches=1", *(["critic.mini_batches=1"] if config == "arithmetic.yaml" else [])]
    settings: dict[str, str] = {
        "config": str(ROOT / "configs" / config),
        "cluster": str(ROOT / "configs" / "clusters" / "cpu-2cores-4ranks.yaml"),
    }
    assert f"actor cannot have --fix {fixed}" in refuse(planned, *kept, few, "--fix", fixed, **settings)
    code, _, err = planned(*kept, enough, "--fix", fixed, "--out", str(out), **settings)
    assert (code, err) == (0, "")
    assert f"actor={load_config(out, dry_run=True).actor.parallel}" == fixed


def test_models_of_one_role_share_a_pool(planned: Plan, tmp_path: Path) -> None:
    """A reward of two models is one role with one pool."""
    values = yaml.safe_load(Path(CONFIG).read_text())
    values["model"]["hf_config"] = "llama2-7b"
    model = {"kind": "model", "hf_config": "llama2-7b"}
    values["reward"] = {
        "terms": {
            "helpful": model | {"path": "models/helpful", "weight": 1.0},
            "short": model | {"path": "models/short", "weight": 0.5},
        }
    }
    file, out = tmp_path / "terms.yaml", tmp_path / "planned.yaml"
    file.write_text(yaml.safe_dump(values))
    code, text, err = planned("--nodes", "1", "--json", "--top", "20", "--out", str(out), config=str(file))
    assert (code, err) == (0, "")
    found = json.loads(text)
    assert found["num_placements"] == 15
    for plan in found["plans"]:
        assert plan["roles"]["reward_helpful"]["pool"] == plan["roles"]["reward_short"]["pool"]
    sizes = {name: role["parallel"] for name, role in found["plans"][0]["roles"].items()}
    terms = load_config(out, dry_run=True).reward.terms
    assert {f"reward_{name}": str(term.parallel) for name, term in terms.items()} == {
        name: value for name, value in sizes.items() if name.startswith("reward_")
    }


def test_timelines_are_drawn_and_equal_plans_are_equal_pictures(
    planned: Plan, small: Files, tmp_path: Path
) -> None:
    again = tmp_path / "again.svg"
    assert planned(*SMALL, "--plot", str(again))[0] == 0
    assert small.picture.read_text() == again.read_text()
    assert "update_actor" in again.read_text() or "<path" in again.read_text()


def test_plans_and_switches_import_no_torch(tmp_path: Path) -> None:
    code = (
        "import sys; from hybridengine.cli.main import main;"
        "switch = ['--model', 'llama3-8b', '--train', '2-4-4', '--gen', '1-2'];"
        f"status = main(['reshard', 'plan', *switch, '--cluster', {A100!r}]);"
        f"status += main(['plan', {CONFIG!r}, '--cluster', {A100!r}, *{SMALL!r}, '--devices', '8']);"
        "heavy = ('torch', 'ray', 'megatron', 'vllm', 'transformers', 'tensordict', 'matplotlib');"
        "heavy = [name for name in heavy if name in sys.modules];"
        "assert not heavy, heavy; sys.exit(status)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


# ---- Bad input -------------------------------------------------------------------------------------------------------


def refuse(planned: Plan, *arguments: str, **settings: Any) -> str:
    code, out, err = planned(*arguments, **settings)
    assert (code, out) == (2, "")
    assert err.startswith("hybridengine: ") and "Traceback" not in err
    return " ".join(err.split())


def test_a_cluster_that_is_too_small(planned: Plan) -> None:
    """The message names the model that does not fit, the amount that is missing, and the remedies."""
    large = "model.hf_config=llama2-70b"
    text = refuse(planned, large, "--nodes", "1")
    for part in (
        "nothing fits on 8 devices of A100-80GB",
        "actor on 8 ranks needs",
        "critic on 8 ranks needs",
        "GiB a rank at best",
        "and misses by",
        " devices or devices with",
        " GiB would do",
    ):
        assert part in text
    enough = int(text.split(" devices or devices with")[0].rpartition(" ")[2])
    assert planned(large, "--nodes", str(enough // 8), "--top", "1", "--json")[0] == 0


def test_models_that_fit_only_by_themselves(planned: Plan) -> None:
    text = refuse(planned, *SMALL[:2], "--devices", "2", "--placement", "colocate", "actor.offload=none")
    assert "actor + critic + reference on 2 ranks needs" in text


def test_settings_that_would_do(planned: Plan) -> None:
    """With these settings, the same command finds a plan."""
    kept = ("--nodes", "1", "actor.recompute=none", "critic.recompute=none", "actor.micro_batch_tokens=24576")
    code, out, err = planned(*kept, config="configs/hybridflow-ppo.yaml")
    assert code == 2 and out == ""
    settings = re.findall(r"\w+\.(?:offload|recompute)=\w+", " ".join(err.split()))
    assert settings == ["actor.offload=optimizer", "critic.offload=optimizer"]
    code, out, _ = planned(*kept, *settings, "--json", config="configs/hybridflow-ppo.yaml")
    assert code == 0 and json.loads(out)["plans"]


def test_no_setting_is_named_that_would_not_do(planned: Plan) -> None:
    text = refuse(planned, "--devices", "1")
    assert "nothing fits on 1 device of" in text and text.endswith("GiB would do")
    assert "offload" not in text and "recompute" not in text


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["--fix", "actor=1-8-32"], ["--fix actor=1-8-32 takes p·t·d = 256 ranks", "128 devices"]),
        (["--fix", "actor=1-3-2"], ["--fix actor=1-3-2", "t=3 does not divide"]),
        (
            ["--fix", "actor=1-8-2", "--fix", "generate=1-3"],
            ["generation 1-3", "choose p_g·t_g from 1, 2, 4, 8, 16"],
        ),
        (["--fix", "generate=1-16"], ["cannot have --fix generate=1-16", "t_g divides t", "node of 8"]),
        (["--fix", "acter=1-8-2"], ["must be NAME=SIZES with one of actor, critic"]),
        (["--fix", "actor"], ["is not a parallel size; write p-t-d"]),
        (["--fix", "actor=1-8-2", "--fix", "actor=1-8-4"], ["each name once"]),
        (["--fix", "actor=8"], ["p-t-d"]),
        (
            ["--fix", "actor=1-8-2", "--fix", "critic=1-8-4", "--placement", "colocate"],
            [
                "no pools can have them together",
                "relax --fix actor=1-8-2 and --fix critic=1-8-4 and placement 'actor,critic,reference'",
            ],
        ),
        (
            ["--fix", "actor=1-8-8", "--fix", "critic=1-8-16"],
            ["actor=1-8-8", "critic=1-8-16"],
        ),
        (["--placement", "actor,critic"], ["must name each of actor, critic, reference once"]),
        (
            ["--placement", "actor,actor | critic | reference"],
            ["must name each of actor, critic, reference once"],
        ),
        (["--placement", "colocated"], ["or be one of colocate, standalone, split"]),
        (["--devices", "12"], ["--devices 12 must be a divisor of the 8 devices of a node or whole nodes"]),
        (["--devices", "0"], ["--devices 0"]),
        (["--nodes", "-1"], ["nodes=-1"]),
        (["--top", "0"], ["--top: '0' must be an integer from 1 to 1000"]),
        (["--lengths", "constant:0"], ["must have N and LOW from 1 on"]),
        (["--lengths", "lognormal:mean=-4,cv=1"], ["M from 1 to 1e9"]),
        (["--lengths", "nowhere.jsonl"], ["no such form, and no such file"]),
        (["--prompt-tokens", "-3"], ["--prompt-tokens -3 must be from 1 to"]),
        (["--prompt-tokens", "nan"], ["--prompt-tokens nan must be from 1 to"]),
        (["algorithm.name=my.dataflow"], ["algorithm: 'my.dataflow' is not an algorithm"]),
        (["model.dtype=float16"], ["model.dtype"]),
    ],
)
def test_what_cannot_be_is_said_in_one_message(planned: Plan, arguments: list[str], parts: list[str]) -> None:
    text = refuse(planned, *arguments)
    for part in parts:
        assert part in text


def test_empty_length_samples(planned: Plan, tmp_path: Path) -> None:
    file = tmp_path / "lengths.txt"
    file.write_text("\n\n")
    assert "has no lengths" in refuse(planned, "--lengths", str(file))
    file.write_text("3\n-5\n")
    assert 'line 2: "-5" is not a number of tokens' in refuse(planned, "--lengths", str(file))


def test_unknown_and_impossible_hardware(planned: Plan, tmp_path: Path) -> None:
    assert "does not exist; name a cluster file" in refuse(planned, cluster="configs/clusters/b200.yaml")
    values = yaml.safe_load(Path(A100).read_text())
    for key, value, part in (
        ("efficiency", -0.5, "compute.efficiency=-0.5"),
        ("decode_row_s", -1e-6, "compute.decode_row_s"),
        ("effciency", 0.5, "did you mean compute.efficiency?"),
    ):
        file = tmp_path / "cluster.yaml"
        file.write_text(yaml.safe_dump({**values, "compute": {**values["compute"], key: value}}))
        assert part in refuse(planned, cluster=str(file))
    file.write_text(
        yaml.safe_dump(
            {**values, "links": {**values["links"], "same_node": {"bytes_per_s": -3, "latency_s": 0}}}
        )
    )
    assert "links.same_node.bytes_per_s=-3" in refuse(planned, cluster=str(file))
    del values["compute"]
    file.write_text(yaml.safe_dump(values))
    assert "has no section compute" in refuse(planned, cluster=str(file))
    values["compute"] = {"flops_per_s": {"float32": 1e12}}
    file.write_text(yaml.safe_dump(values))
    assert "compute.flops_per_s.bfloat16 is missing" in refuse(planned, cluster=str(file))


def test_without_a_cluster_file(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["plan", CONFIG]) == 2
    assert "--cluster is missing, and there is no calibrated.yaml here" in capsys.readouterr().err
    (tmp_path / "calibrated.yaml").write_text(Path(A100).read_text())
    assert main(["plan", CONFIG, *SMALL, "--json"]) == 0
    assert main(["plan"]) == 2
    assert "CONFIG is missing" in capsys.readouterr().err


def test_files_that_cannot_be_written_are_refused_first(planned: Plan, tmp_path: Path) -> None:
    assert "--out" in refuse(planned, *SMALL, "--out", str(tmp_path / "none" / "a.yaml"))
    link = tmp_path / "a.json"
    link.symlink_to(tmp_path / "a.yaml")
    assert "same file" in refuse(planned, *SMALL, "--out", str(tmp_path / "a.yaml"), "--json", str(link))
    assert "must end in .yaml or .yml; rename it" in refuse(planned, *SMALL, "--out", str(ROOT / "README.md"))
    assert "what CONFIG reads" in refuse(planned, *SMALL, "--out", CONFIG)
    assert ".png" in refuse(planned, *SMALL, "--plot", str(tmp_path / "a.txt"))
