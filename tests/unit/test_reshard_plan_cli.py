"""`hybridengine reshard plan`: its output, drawings and files, and its error messages."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hybridengine.cli import reshard_plan
from hybridengine.cli.main import main
from hybridengine.errors import ConfigError
from hybridengine.models.presets import PRESETS
from tests.unit.plan_runs import A100, GOOD, H100, ROOT, Plan


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Folder of a Llama 3 8B with 8 layers instead of 32, of which plans are made faster: 5.2 GiB in bfloat16."""
    folder = tmp_path_factory.mktemp("small")
    config = dict(PRESETS["llama3-8b"].config) | {"num_hidden_layers": 8}
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


@pytest.fixture(scope="module")
def small_devices(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Cluster file with devices of 4 GiB."""
    file, text = tmp_path_factory.mktemp("cluster") / "small.yaml", Path(H100).read_text()
    file.write_text(text.replace("device_memory_bytes: 80GiB", "device_memory_bytes: 4GiB"))
    assert file.read_text() != text
    return str(file)


@pytest.fixture
def both(plan: Plan, small: str, tmp_path: Path) -> Callable[..., tuple[str, dict[str, Any]]]:
    """Return a function that runs the command for the small model and returns the text and the figures."""

    def run(*arguments: str, **settings: str) -> tuple[str, dict[str, Any]]:
        file = tmp_path / "figures.json"
        code, out, err = plan(*arguments, "--json", str(file), **{"model": small, **settings})
        assert (code, err) == (0, "")
        return out, json.loads(file.read_text())

    return run


@pytest.fixture
def figures(both: Callable[..., tuple[str, dict[str, Any]]]) -> Callable[..., dict[str, Any]]:
    return lambda *arguments, **settings: both(*arguments, **settings)[1]


# ---- Output ----------------------------------------------------------------------------------------------------------


def test_text_shows_groups_bytes_memory_and_time(plan: Plan) -> None:
    code, out, _ = plan("--train", "2-4-2", "--gen", "1-2")
    text = " ".join(out.split())
    assert code == 0
    for part in (
        "llama3-8b, 32 layers, 8,030,261,248 parameters, 15.0 GiB in bfloat16",
        "16 ranks on 2 of 2048 nodes",
        "training 2-4-2 (p-t-d), paper order; generation 1-2 (p_g-t_g) in 8 engine(s)",
        "generation tensor [0,2] [1,3] [4,6] [5,7] ... 8 groups",
        "gather domains [0,1,4,5] [2,3,6,7] [8,9,12,13] [10,11,14,15]",
        "0 of 4 gather domains cross nodes",
        "moves there and back: every element of every shard is written once, none is lost",
        "between nodes (received) 0 B 0 B",
        "redundant beside it 0 B",
        "predicted from the cluster file's figures, not measured",
        "megatron order 4 of 4",
        "nothing enters a node twice",
    ):
        assert part in text
    assert "FIT" not in text


def test_long_groups_are_elided(both: Callable[..., tuple[str, dict[str, Any]]]) -> None:
    out, _ = both("--train", "8-8-16", "--gen", "1-8")
    assert "[0,64,...,960] [1,65,...,961]" in out
    assert "... 128 groups" in out
    assert max(map(len, out.splitlines())) < 170


def test_two_steps_are_compared_with_one(both: Callable[..., tuple[str, dict[str, Any]]]) -> None:
    """4-4-1 -> 1-1 on two nodes: what a node lacks enters it once instead of once for each of its 8 ranks."""
    out, _ = both("--train", "2-4-1", "--gen", "1-2")
    assert "order, one step" not in out
    out, two = both("--train", "4-4-1", "--gen", "1-1")
    text = " ".join(out.split())
    assert "paper order, one step" in text
    assert "the plan gathers in two steps" in text
    totals = [one["received_bytes_total_by_link"]["between_nodes"] for one in (two, two["one_step"])]
    assert totals[1] == pytest.approx(8 * totals[0], rel=1e-3)
    assert two["one_step"]["seconds_there"] > two["seconds_there"]


def test_json_has_the_figures_of_the_papers_example(figures: Callable[..., dict[str, Any]]) -> None:
    """1-8-16 -> 1-2 of a 7B model: (d_g - 1)/(tp)·M = 3/8 of M received, peak M/2 plus a bucket, nothing held twice."""
    found = figures("--train", "1-8-16", "--gen", "1-2", model="llama2-7b", cluster=A100)
    total = 2 * 6_738_415_616
    assert found["received_bytes_max"] == pytest.approx(3 / 8 * total, rel=2e-3)
    assert found["gen_shard_bytes_max"] == pytest.approx(total / 2, rel=2e-3)
    assert 0 <= found["peak_weight_bytes_max"] - found["gen_shard_bytes_max"] <= found["bucket_bytes_max"]
    assert found["inter_node_bytes_max"] == found["redundant_bytes_max"] == found["extra_bytes_max"] == 0
    # At least the time at NVLink's line rate in one direction, at most ten times as long.
    assert (
        found["received_bytes_max"] / 300e9
        < found["seconds_there"]
        < 10 * found["received_bytes_max"] / 300e9
    )
    assert 0 < found["seconds_back"] < found["seconds_there"]
    assert found["memory_bytes_there"][0] == found["train_shard_bytes_max"]
    assert found["memory_bytes_there"][-1] == found["gen_shard_bytes_max"] == found["memory_bytes_back"][0]
    assert found["memory_bytes_back"][-1] == found["train_shard_bytes_max"]
    assert set(found["orders"]) == {"paper", "megatron"}
    assert found["orders"]["paper"]["seconds_there"] == found["seconds_there"]


def test_options_change_what_is_planned(figures: Callable[..., dict[str, Any]]) -> None:
    base = ("--train", "2-4-2", "--gen", "1-2")
    paper = figures(*base)
    assert (paper["inter_node_bytes_max"], paper["nests"], paper["num_engines"]) == (0, True, 8)
    megatron = figures(*base, "--order", "megatron")
    assert megatron["inter_node_bytes_max"] > 0
    assert megatron["orders"] == paper["orders"] | {"megatron": megatron["orders"]["megatron"]}
    vanilla = figures(*base, "--grouping", "vanilla")
    assert vanilla["redundant_bytes_max"] > 0
    assert vanilla["nests"] is False
    wide = figures(*base, "--dtype", "float32")
    assert wide["received_bytes_max"] == 2 * paper["received_bytes_max"]
    small = figures(*base, "--bucket-bytes", "64MiB")
    assert small["num_buckets"] > paper["num_buckets"]
    assert small["peak_weight_bytes_max"] <= paper["peak_weight_bytes_max"]
    assert figures(*base, "--bucket-bytes", str(64 * 2**20)) == small


def test_a_config_file_plans_as_its_preset_does(
    figures: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(dict(PRESETS["qwen3-8b"].config)))
    base = ("--train", "1-4-2", "--gen", "1-2")
    one, other = figures(*base, model="qwen3-8b"), figures(*base, model=str(tmp_path))
    assert one | {"model": ""} == other | {"model": ""}


def test_diff_puts_two_layouts_side_by_side(both: Callable[..., tuple[str, dict[str, Any]]]) -> None:
    out, found = both("--diff", "2-4-2:1-2", "2-4-2:1-4")
    lines = out.splitlines()
    assert lines[0].split() == ["2-4-2:1-2", "2-4-2:1-4", "second", "/", "first"]
    assert next(line.split() for line in lines if line.startswith("number of engines")) == [
        "number", "of", "engines", "8", "4", "0.50",
    ]  # fmt: skip
    assert [one["layout"] for one in found["results"]] == ["2-4-2:1-2", "2-4-2:1-4"]
    assert both("--train", "2-4-2", "--diff", "1-2", "1-4")[1] == found
    assert both("--train", "2-4-2", "--gen", "1-2")[1] == found["results"][0]


def test_sweep_lists_every_layout_that_fits_best_first(
    both: Callable[..., tuple[str, dict[str, Any]]],
) -> None:
    out, found = both("--train", "2-4-2", "--sweep")
    seconds = [one["seconds_there"] + one["seconds_back"] for one in found["results"]]
    assert seconds == sorted(seconds)
    # Engines of up to a replica, or a node, of 8 ranks; all of them fit in 80 GiB.
    sizes = [f"{p}-{t}" for p in (1, 2, 4, 8) for t in (1, 2, 4, 8) if p * t <= 8]
    assert sorted(one["gen"] for one in found["results"]) == sizes
    assert found["num_too_large"] == 0
    rows = [line.split()[0] for line in out.splitlines()[1 : 1 + len(sizes)]]
    assert rows == [one["gen"] for one in found["results"]]
    assert (
        len({line.rstrip()[-3:] for line in out.splitlines()[1 : 1 + len(sizes)]}) == 1
    )  # aligned: all end in GiB


def test_sweep_all_lists_engines_of_any_size(figures: Callable[..., dict[str, Any]]) -> None:
    found = figures("--train", "2-4-2", "--sweep", "all")
    sizes = [f"{p}-{t}" for p in (1, 2, 4, 8) for t in (1, 2, 4, 8, 16) if p * t <= 16]
    assert sorted(one["gen"] for one in found["results"]) == sorted(sizes)


def test_sweep_leaves_out_what_exceeds_the_device(
    figures: Callable[..., dict[str, Any]], small_devices: str
) -> None:
    """The model takes more than 4 GiB: a device of 4 GiB needs an engine of at least two."""
    found = figures("--train", "1-8-1", "--sweep", cluster=small_devices)
    assert {one["gen"] for one in found["results"]} >= {"1-2", "1-4", "1-8"}
    assert "1-1" not in {one["gen"] for one in found["results"]}
    assert found["num_too_large"] + len(found["results"]) == 10
    assert all(one["peak_weight_bytes_max"] <= 4 * 2**30 for one in found["results"])


def test_a_layout_that_exceeds_the_device_is_planned_and_says_so(
    both: Callable[..., tuple[str, dict[str, Any]]], small_devices: str
) -> None:
    out, _ = both("--train", "1-8-1", "--gen", "1-1", cluster=small_devices)
    assert "of the device's 4.0 GiB; IT DOES NOT FIT" in out


@pytest.mark.parametrize("kind", ["plan", "diff", "sweep"])
def test_plot_and_json_files(plan: Plan, small: str, tmp_path: Path, kind: str) -> None:
    what = {
        "plan": ("--train", "2-4-1", "--gen", "1-2"),
        "diff": ("--diff", "2-4-1:1-2", "2-4-1:1-1"),
        "sweep": ("--train", "2-4-1", "--sweep"),
    }[kind]
    picture, file = tmp_path / "switch.svg", tmp_path / "switch.json"
    code, out, err = plan(*what, "--plot", str(picture), "--json", str(file), model=small)
    assert (code, err) == (0, "")
    assert "{" not in out
    drawn = picture.read_text()
    assert drawn.startswith("<?xml")
    assert len(drawn) > 10_000
    found = json.loads(file.read_text())
    assert len(found.get("results", [found])) == {"plan": 1, "diff": 2, "sweep": 10}[kind]


def test_help_teaches(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_info:
        main(["reshard", "plan", "--help"])
    assert exit_info.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    for part in (
        "examples:",
        "llama3-70b",
        "p-t-d",
        "p_g-t_g",
        "--sweep",
        "--diff",
        "--plot",
        "not measured",
    ):
        assert part in text


def test_examples_of_the_help_are_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    seen = []

    def refuse(cluster: str) -> None:
        seen.append(cluster)
        raise ConfigError("far enough")

    monkeypatch.setattr(reshard_plan, "load_cluster", refuse)

    lines = reshard_plan.EPILOG.replace("\\\n", " ").splitlines()
    examples = [line.partition(" | ")[0] for line in lines if "hybridengine reshard plan --" in line]
    for example in examples:
        assert main(shlex.split(example)[1:]) == 2
    assert len(seen) == len(examples) == 3
    assert all(Path(cluster).is_file() for cluster in seen)


# ---- Error messages --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "settings", "message"),
    [
        (("--train", "2-3-2", "--gen", "1-1"), {}, "t=3 does not divide num_heads=32"),
        (("--train", "2-4-2", "--gen", "1-3"), {}, "choose p_g·t_g from 1, 2, 4, 8, 16"),
        (("--train", "2-4-2", "--gen", "1-64"), {}, "do not divide the 16 ranks"),
        (("--train", "2-4", "--gen", "1-1"), {}, "'2-4' is not a parallel size"),
        (("--train", "2-4-2", "--gen", "x"), {}, "'x' is not a parallel size"),
        (("--gen", "1-2"), {}, "--train gives the training sizes of --gen, --sweep, and layouts"),
        (("--train", "2-4-2"), {}, "one of the arguments --gen --diff --sweep is required"),
        ((*GOOD, "--sweep"), {}, "argument --sweep: not allowed with argument --gen"),
        (("--train", "2-4-2", "--sweep", "al"), {}, "--sweep: invalid choice: 'al' (choose from 'practical', 'all')"),
        (("--diff", "1-2", "2-4-2:1-2"), {}, "--train gives the training sizes of --gen, --sweep, and layouts"),
        (("--train", "8-8-16", "--gen", "1-8"), {"cluster": A100}, "give --nodes 128"),
        ((*GOOD, "--nodes", "0"), {}, "nodes=0 must be"),
        ((*GOOD, "--order", "ring"), {}, "--order: invalid choice: 'ring' (choose from 'megatron', 'paper')"),
        ((*GOOD, "--bucket-bytes", "0"), {}, "'0' is not a size in bytes"),
        (GOOD, {"model": "lama3-8b"}, "did you mean llama3-8b"),
        (GOOD, {"model": "pyproject.toml"}, "cannot be read"),
        (GOOD, {"cluster": "nowhere.yaml"}, "nowhere.yaml does not exist"),
        ((*GOOD, "--json", "/nowhere/x.json"), {}, "--json /nowhere/x.json cannot be written (No such file"),
        ((*GOOD, "--plot", "/nowhere/x.png"), {}, "--plot /nowhere/x.png cannot be written"),
        ((*GOOD, "--plot", "x.txt"), {}, "must end in .png or .svg or .pdf; rename it"),
        ((*GOOD, "--json", "switch.txt"), {}, "--json switch.txt must end in .json; rename it"),
        ((*GOOD, "--json", "x" * 300 + ".json"), {}, "cannot be written (File name too long); name a file"),
        (("--train", "2-4-2", "--gen", ""), {}, "'' is not a parallel size; write p_g-t_g"),
        (("--train", "", "--gen", "1-2"), {}, "'' is not a parallel size; write p-t-d"),
        (("--train", "2-4-2", "--diff", "", "1-4"), {}, "'' is not a parallel size; write p_g-t_g"),
        (("--train", "2-4-2", "--diff", "", ""), {}, "'' is not a parallel size; write p_g-t_g"),
        (("--train", "2-4-2", "--diff", "2-4-2:", "1-4"), {}, "'' is not a parallel size; write p_g-t_g"),
        (("--train", "2-4-2", "--diff", "4-4-1:1-2", "4-4-1:1-4"), {}, "--train gives the training sizes of"),
        (("--train", "1-4-100000000000", "--gen", "1-3"), {}, "p·t·d = 400000000000 ranks must be at most 1048576"),
        (("--train", "1-1-" + "9" * 5000, "--gen", "1-3"), {}, "...' is beyond 1048576 ranks; choose smaller"),
        (("--train", "2-4-2", "--gen", "1-" + "9" * 5000), {}, "...' is beyond 1048576 ranks; choose smaller"),
        ((*GOOD, "--nodes", "99999999999999999999"), {}, "must be at most 1048576"),
        ((*GOOD, "--bucket-bytes", "9" * 5000), {}, "9' is not a size in bytes; write an integer"),
        ((*GOOD, "--bucket-bytes", "²"), {}, "'²' is not a size in bytes; write an integer"),
    ],
)  # fmt: skip
def test_bad_input_is_one_message_before_anything_is_planned(
    plan: Plan,
    arguments: tuple[str, ...],
    settings: dict[str, str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def planned(*_: Any, **__: Any) -> None:
        raise AssertionError("planned before everything was checked")

    monkeypatch.setattr(reshard_plan, "SwitchPricer", planned)
    code, out, err = plan(*arguments, **settings)
    assert (code, out) == (2, "")
    assert message in err
    assert err.startswith("hybridengine: ")
    assert err.count("hybridengine: ") == 1


def test_a_classifier_has_nothing_to_generate_with(plan: Plan, tmp_path: Path) -> None:
    config = dict(PRESETS["llama3-8b"].config) | {"architectures": ["LlamaForSequenceClassification"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    code, out, err = plan(*GOOD, model=str(tmp_path))
    assert (code, out) == (2, "")
    assert err.startswith(
        "hybridengine: the model has a score head instead of a vocabulary; a switch to generation"
    )


def test_nothing_fits(plan: Plan) -> None:
    code, out, err = plan("--train", "1-1-8", "--sweep", model="llama3-405b")
    assert (code, out) == (2, "")
    assert "no generation layout of training 1-1-8 fits" in err
