"""`hybridengine reshard bench`: options that it accepts, and refusals before a rank starts."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from hybridengine import machine
from hybridengine.bench.reshard import measurement
from hybridengine.bench.reshard.results import PairResult, Sample, summarise
from hybridengine.bench.reshard.spec import DEFAULT_MODEL, BenchSpec, LayoutPair, MethodName
from hybridengine.cli import reshard_bench
from hybridengine.cli.main import main, parse
from hybridengine.cli.reshard_bench import spec_of
from hybridengine.controller.cluster import NodeOffer
from hybridengine.errors import ConfigError, TopologyError, WorkerError
from hybridengine.machine import check_memory, gpu_models, num_gpus


def replace_measurement(monkeypatch: pytest.MonkeyPatch, measure: Callable[..., object]) -> None:
    """Replace the function that would start ranks by `measure`; the real module would load torch and Megatron."""
    stand_in = SimpleNamespace(measure_switches=measure)
    monkeypatch.setitem(sys.modules, "hybridengine.bench.reshard.measurement", stand_in)  # type: ignore[arg-type]


def no_ranks(*arguments: object) -> None:
    raise AssertionError("ranks were started")


@pytest.fixture
def refusal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Return a function that runs the command with bad input and returns the error message."""
    replace_measurement(monkeypatch, no_ranks)

    def run(*arguments: str) -> str:
        code = main(["reshard", "bench", *arguments])
        out, err = capsys.readouterr()
        assert (code, out) == (2, "")
        assert "Traceback" not in err
        return err

    return run


def parsed(*arguments: str) -> BenchSpec:
    return spec_of(parse(["reshard", "bench", *arguments]))


def test_defaults_are_the_main_pair_and_every_method() -> None:
    spec = parsed()
    assert [str(pair) for pair in spec.pairs] == ["1-4-2 -> 1-2"]
    assert [method.value for method in spec.methods] == [
        "micro-dp",
        "model-parallel",
        "full",
        "per-tensor",
        "megatron-core",
    ]
    assert spec.weight_bytes >= 120e6


def test_options() -> None:
    spec = parsed(
        *("--train", "2-2-1", "--gen", "1-1", "--pair", "2-4-1:1-2", "--pair", "2-4-1:1-2"),
        *("--methods", "micro-dp", "megatron-core", "--dtype", "bfloat16", "--bucket-bytes", "1MiB"),
        *("--repetitions", "3", "--timeout", "9"),
    )
    assert [str(pair) for pair in spec.pairs] == ["2-2-1 -> 1-1", "2-4-1 -> 1-2"]
    assert spec.methods == (MethodName.MICRO_DP, MethodName.MEGATRON_CORE)
    assert (spec.dtype, spec.bucket_bytes, spec.repetitions) == ("bfloat16", 2**20, 3)
    assert spec.timeout_s == 9.0


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["--train", "1-4"], ["'1-4'", "p-t-d"]),
        (["--train", "1-3-1", "--gen", "1-1"], ["t=3 does not divide num_heads=8; choose 1, 2 or 4"]),
        (["--train", "1-4-2", "--gen", "1-3"], ["1-3", "choose"]),
        (["--pair", "1-4-2"], ["'1-4-2' is not a pair", "2-4-1:1-2"]),
        (["--pair", "1-4-2:1-2", "--nodes", "3"], ["--nodes 3 does not divide its 8 ranks", "a divisor"]),
        (["--methods", "micro-db"], ["--methods", "'micro-db'", "micro-dp", "model-parallel"]),
        (["--dtype", "int4"], ["--dtype", "'int4'", "float32", "bfloat16"]),
        (["--repetitions", "0"], ["--repetitions: '0' must be an integer from 1 to 10000"]),
        (["--bucket-bytes", "lots"], ["'lots' is not a size in bytes", "64MiB"]),
        (["--timeout", "0"], ["--timeout: '0' must be a number from 1 to 86400"]),
        (["--timeout", "nan"], ["--timeout: 'nan' must be a number from 1"]),
        (["--json", "one.svg"], ["--json one.svg must end in .json"]),
        (["--model", ""], ["''"]),
        (["--train", ""], ["''"]),
        (["--gen", ""], ["''"]),
        (["--model", "lama3-8b"], ["'lama3-8b'", "did you mean llama3-8b"]),
        (["--model", "/no/such/config.json"], ["/no/such/config.json"]),
        (["--json", "/no/such/folder/bench.json"], ["--json /no/such/folder/bench.json cannot be written"]),
        (["--plot", "/no/such/folder/bench.svg"], ["--plot /no/such/folder/bench.svg cannot be written"]),
        (["--plot", "bench.doc"], ["bench.doc must end in .png or .svg or .pdf"]),
        (["--model", "llama3-405b", "--train", "1-8-128"], ["1024 ranks", "available", "choose a smaller model"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) and value[0].startswith("--") else None,
)  # fmt: skip
def test_bad_input_is_one_clear_error(
    refusal: Callable[..., str], arguments: list[str], parts: list[str]
) -> None:
    message = refusal(*arguments)
    for part in parts:
        assert part in message
    assert message.count("\n") == 1


def test_a_model_config_that_is_none(refusal: Callable[..., str], tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"model_type": "llama"}))
    assert str(file) in refusal("--model", str(file))


def test_nothing_is_left_where_output_was_checked(refusal: Callable[..., str], tmp_path: Path) -> None:
    refusal("--json", str(tmp_path / "bench.json"), "--train", "1-4-2", "--gen", "1-3")
    refusal("--json", str(tmp_path / "bench.json"), "--plot", str(tmp_path / "missing" / "bench.svg"))
    assert list(tmp_path.iterdir()) == []


def test_an_existing_output_keeps_its_contents_until_there_is_a_result(
    refusal: Callable[..., str], tmp_path: Path
) -> None:
    file = tmp_path / "bench.json"
    file.write_text("earlier")
    refusal("--json", str(file), "--plot", "/no/such/folder/bench.svg")
    assert file.read_text() == "earlier"


def test_megatron_core_needs_a_model_that_shards_at_the_generation_sizes() -> None:
    # 4 KV heads: the engine replicates them at t_g = 8, which a Megatron model of the same size cannot do.
    pair = (LayoutPair.parse("1-4-2:1-8"),)
    with pytest.raises(TopologyError, match=r"megatron-core.*leave this method out"):
        BenchSpec(DEFAULT_MODEL, pair)
    assert BenchSpec(DEFAULT_MODEL, pair, (MethodName.MICRO_DP,)).pairs == pair


# ---- The machine -----------------------------------------------------------------------------------------------------


def test_what_the_ranks_need_is_compared_with_what_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = BenchSpec(DEFAULT_MODEL, (LayoutPair.parse("1-4-2:1-2"),))
    needed = spec.needed_bytes(spec.pairs[0])
    assert needed > 8 * spec.weight_bytes * (1 / 4 + 1 / 2)  # training and generation shards of eight ranks
    monkeypatch.setattr(machine, "available_bytes", lambda: needed)
    check_memory("a pair", needed, "choose another")
    with pytest.raises(ConfigError, match=r"a pair takes about .* available; choose another"):
        check_memory("a pair", needed + 1, "choose another")


def test_ranks_are_spread_over_nodes() -> None:
    spec = BenchSpec(DEFAULT_MODEL, (LayoutPair.parse("1-4-2:1-2"),), num_nodes=2)
    assert spec.nodes(spec.pairs[0]).ranks_per_node == (4, 4)


def test_gpus_of_a_machine(tmp_path: Path) -> None:
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm", "null"):
        (tmp_path / name).touch()
    assert num_gpus(tmp_path, {}) == 2
    assert num_gpus(tmp_path, {"CUDA_VISIBLE_DEVICES": ""}) == 0
    assert num_gpus(tmp_path, {"CUDA_VISIBLE_DEVICES": "1"}) == 1
    assert num_gpus(tmp_path, {"CUDA_VISIBLE_DEVICES": "GPU-8932f937,GPU-1c5a80f3"}) == 2
    assert num_gpus(tmp_path / "none", {"CUDA_VISIBLE_DEVICES": "0"}) == 0
    for bus in ("0000:8d:00.0", "0000:0a:00.0"):
        (tmp_path / bus).mkdir()
        described = f"Model: \t\t NVIDIA {bus[5:7]} 80GB HBM3\nIRQ:   \t\t 18\n"
        (tmp_path / bus / "information").write_text(described)
    assert gpu_models(tmp_path) == ["NVIDIA 0a 80GB HBM3", "NVIDIA 8d 80GB HBM3"]


def test_the_cluster_says_if_there_are_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """A benchmark may be started where there is no GPU, on the cluster's head. There is no cluster: Ray is replaced."""
    made = list[bool]()

    def refuse(ranks: object, *, use_gpus: bool, **_: object) -> None:
        made.append(use_gpus)
        raise ConfigError("enough")

    monkeypatch.setattr(measurement, "start_ray", lambda num_cpus: None)
    monkeypatch.setattr(measurement, "ResourcePool", refuse)
    spec = BenchSpec(DEFAULT_MODEL, (LayoutPair.parse("1-2-1:1-1"),))
    for counts in ([0, 2], [0, 0]):
        offers = [NodeOffer(f"10.0.0.{node}", 8, count) for node, count in enumerate(counts)]
        monkeypatch.setattr(measurement, "node_offers", lambda offers=offers: offers)
        with pytest.raises(ConfigError, match="enough"):
            list(measurement.measure_switches(spec, lambda text: None))
    assert made == [True, False]


# ---- Output and drawings ---------------------------------------------------------------------------------------------


@pytest.fixture
def result() -> tuple[BenchSpec, PairResult]:
    spec = BenchSpec(DEFAULT_MODEL, (LayoutPair.parse("1-4-2:1-2"),), repetitions=3)
    whole = spec.weight_bytes
    samples = {
        label: [
            [Sample(there + n, 0.25, 1.8, whole // 4, 8 if n == 2 else 0, whole // 2, 0, whole // 4)]
            for there in (2.0, 2.0, 1.5)
        ]
        for n, label in enumerate(spec.contestants)
    }
    return spec, summarise(spec, spec.pairs[0], samples)


def test_the_table_shows_every_method_with_its_ratios(result: tuple[BenchSpec, PairResult]) -> None:
    spec, pair = result
    out = "\n".join(reshard_bench.pair_lines(spec, pair))
    for method in spec.methods:
        assert f"\n{method.value} " in out
    for part in (
        "1-4-2 -> 1-2 on 8 ranks",
        "M = 128.0 MiB",
        "2.00 s",
        "1.50 s",
        "32.0 MiB",
        "1.50",  # model-parallel: 3 s against 2 s
        "0.90",  # 1.8 s of 2 s
        "verify always over never: 0.88",  # 7 s of 8 s
        "raw all gather seconds: 1.80 s",
        "8 B",  # received on the way back
    ):
        assert part in out


def test_a_pair_that_fails_takes_nothing_away_from_those_before(
    result: tuple[BenchSpec, PairResult], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def measure(*arguments: object) -> Iterator[PairResult]:
        yield result[1]
        raise WorkerError("rank 1 was killed")

    replace_measurement(monkeypatch, measure)
    file, picture = tmp_path / "bench.json", tmp_path / "bench.svg"
    assert main(["reshard", "bench", "--json", str(file), "--plot", str(picture)]) == 1
    assert len(json.loads(file.read_text())["results"]) == len(MethodName)
    assert "<svg" in picture.read_text()


def test_the_picture_is_drawn(result: tuple[BenchSpec, PairResult], tmp_path: Path) -> None:
    from hybridengine.bench.reshard.plot import draw

    spec, pair = result
    file = tmp_path / "bench.svg"
    draw(spec, [pair, pair], file)
    text = file.read_text()
    assert text.count("<!-- megatron-core -->") == 2  # one label per row of panels
    assert text.count("<!-- 1-4-2 -&gt; 1-2 on 8 ranks -->") == 2
    for label in ("there", "back", "received", "peak weights", "redundant"):
        assert f"<!-- {label} -->" in text
