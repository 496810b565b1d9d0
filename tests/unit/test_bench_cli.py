"""`hybridengine reshard bench`: what it accepts, and how it refuses before a rank starts."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from hybridengine.bench.joined import check_world, is_rank
from hybridengine.bench.machine import available_bytes, check_machine, needed_bytes, num_gpus
from hybridengine.bench.results import PairResult, RankSamples, RawAllGather, Timing, summarise
from hybridengine.bench.spec import DEFAULT_MODEL, BenchSpec, LayoutPair, MethodName
from hybridengine.cli import reshard_bench
from hybridengine.cli.main import main
from hybridengine.cli.reshard_bench import add_bench_command, spec_of
from hybridengine.errors import ConfigError, TopologyError

GIB = 2**30


class NoRanks:
    """Stands where ranks would be started."""

    def __init__(self, *arguments: object) -> None:
        raise AssertionError("ranks were started")


@pytest.fixture
def refusal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Runs the command with bad input; the one line that it says."""
    monkeypatch.setattr(reshard_bench, "RankStarter", NoRanks)

    def run(*arguments: str) -> str:
        code = main(["reshard", "bench", *arguments])
        out, err = capsys.readouterr()
        assert (code, out) == (2, "")
        assert "Traceback" not in err
        return err

    return run


def parsed(*arguments: str) -> BenchSpec:
    parser = argparse.ArgumentParser()
    add_bench_command(parser.add_subparsers())
    return spec_of(parser.parse_args(["bench", *arguments]))


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
        *("--methods", "megatron-core, micro-dp", "--dtype", "bfloat16", "--bucket-bytes", "1MiB"),
        *("--repetitions", "3", "--verify", "never", "--timeout", "9"),
    )
    assert [str(pair) for pair in spec.pairs] == ["2-2-1 -> 1-1", "2-4-1 -> 1-2"]
    assert spec.methods == (MethodName.MICRO_DP, MethodName.MEGATRON_CORE)
    assert (spec.dtype, spec.bucket_bytes, spec.repetitions) == ("bfloat16", 2**20, 3)
    assert (spec.verify, spec.timeout_s) == ("never", 9.0)


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["--train", "1-4"], ["--train: '1-4'", "p-t-d"]),
        (["--train", "1-3-1", "--gen", "1-1"], ["t=3 does not divide num_heads=8", "1-1-3, 3-1-1"]),
        (["--train", "1-4-2", "--gen", "1-3"], ["1-3", "choose"]),
        (["--pair", "1-4-2"], ["'1-4-2' is not a pair", "2-4-1:1-2"]),
        (["--methods", "micro-db"], ["'micro-db' does not name methods; choose from micro-dp, model-parallel"]),
        (["--methods", ""], ["'' does not name methods"]),
        (["--dtype", "int4"], ["--dtype: invalid choice: 'int4' (choose from 'float32', 'bfloat16')"]),
        (["--verify", "sometimes"], ["--verify: invalid choice: 'sometimes'", "'first', 'always', 'never'"]),
        (["--repetitions", "0"], ["--repetitions: '0' must be an integer from 1 to 10000"]),
        (["--bucket-bytes", "12"], ["--bucket-bytes 12", "65536"]),
        (["--bucket-bytes", "lots"], ["--bucket-bytes: 'lots' is no size in bytes", "64MiB"]),
        (["--timeout", "nan"], ["--timeout: 'nan' must be a number from 1 to 86400"]),
        (["--model", ""], ["''"]),
        (["--train", ""], ["''"]),
        (["--gen", ""], ["''"]),
        (["--model", "lama3-8b"], ["'lama3-8b'", "did you mean llama3-8b"]),
        (["--model", "/no/such/config.json"], ["/no/such/config.json"]),
        (["--json", "/no/such/folder/bench.json"], ["--json /no/such/folder/bench.json cannot be written"]),
        (["--plot", "/no/such/folder/bench.svg"], ["--plot /no/such/folder/bench.svg cannot be written"]),
        (["--plot", "bench.doc"], ["--plot bench.doc must end in .png or .svg or .pdf"]),
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
    # 4 KV heads: the engine replicates them at t_g = 8, a Megatron model of the same size cannot.
    pair = (LayoutPair.parse("1-4-2:1-8"),)
    with pytest.raises(TopologyError, match=r"megatron-core.*leave this method out"):
        BenchSpec(DEFAULT_MODEL, pair)
    assert BenchSpec(DEFAULT_MODEL, pair, (MethodName.MICRO_DP,)).pairs == pair


# ---- The machine -----------------------------------------------------------------------------------------------------


def test_what_the_ranks_need_is_compared_with_what_there_is() -> None:
    spec = BenchSpec(DEFAULT_MODEL, (LayoutPair.parse("1-4-2:1-2"),))
    needed = needed_bytes(spec, spec.pairs[0])
    assert needed > 8 * spec.weight_bytes * (1 / 4 + 1 / 2)  # training and generation shards of eight ranks
    check_machine(spec, gpus=0, available=needed)
    check_machine(spec, gpus=0, available=None)
    check_machine(spec, gpus=8, available=0)
    with pytest.raises(ConfigError, match=r"1-4-2 -> 1-2: 8 ranks with 128\.0 MiB of weights take about"):
        check_machine(spec, gpus=0, available=needed - 1)
    with pytest.raises(ConfigError, match="needs 8 GPUs, this machine has 4"):
        check_machine(spec, gpus=4, available=None)


def test_memory_and_gpus_of_a_machine(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal:       32 kB\nMemAvailable:   16 kB\n")
    assert available_bytes(meminfo) == 16 * 1024
    assert available_bytes(tmp_path / "missing") is None
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm", "null"):
        (tmp_path / name).touch()
    assert num_gpus(tmp_path, {}) == 2
    assert num_gpus(tmp_path, {"CUDA_VISIBLE_DEVICES": ""}) == 0


WORLD = {"RANK": "0", "WORLD_SIZE": "8", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


def test_under_torchrun_the_world_must_fit() -> None:
    spec = BenchSpec(DEFAULT_MODEL, (LayoutPair.parse("1-4-2:1-2"),))
    world = WORLD
    assert is_rank(world) and not is_rank({"RANK": "0"})
    check_world(spec, world)
    with pytest.raises(TopologyError, match="needs 8 ranks, torchrun has started 6; choose p·t·d = 6"):
        check_world(spec, world | {"WORLD_SIZE": "6"})


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        (
            "RANK",
            "x",
            r"RANK='x' must be an integer, at least 0; start the command with torchrun, or unset RANK, WORLD",
        ),
        ("RANK", "-1", r"RANK='-1' must be an integer, at least 0"),
        ("RANK", "8", "RANK=8 must be less than WORLD_SIZE=8"),
        ("WORLD_SIZE", "", "WORLD_SIZE='' must be an integer, at least 1"),
        ("WORLD_SIZE", "²", "WORLD_SIZE='²' must be an integer"),
        ("WORLD_SIZE", "9" * 5000, "must be an integer"),
        ("LOCAL_RANK", "1.0", "LOCAL_RANK='1.0' must be an integer"),
        ("LOCAL_WORLD_SIZE", "9", "LOCAL_WORLD_SIZE=9 must be at most WORLD_SIZE=8"),
        ("MASTER_PORT", "70000", "MASTER_PORT must be a port from 1 to 65535, and is 70000; start"),
        ("MASTER_PORT", "http", "MASTER_PORT='http' must be an integer, at least 1"),
    ],
    ids=lambda text: text[:20],
)
def test_a_damaged_torchrun_environment(name: str, value: str, message: str) -> None:
    spec = BenchSpec(DEFAULT_MODEL, (LayoutPair.parse("1-4-2:1-2"),))
    world = WORLD
    with pytest.raises(ConfigError, match=message):
        check_world(spec, world | {name: value})


def test_a_torchrun_environment_that_lacks_something() -> None:
    spec = BenchSpec(DEFAULT_MODEL, (LayoutPair.parse("1-4-2:1-2"),))
    local = {"LOCAL_RANK": "2", "LOCAL_WORLD_SIZE": "2"}
    with pytest.raises(ConfigError, match="LOCAL_RANK=2 must be less than LOCAL_WORLD_SIZE=2; start"):
        check_world(spec, WORLD | local)
    without_port = {name: value for name, value in WORLD.items() if name != "MASTER_PORT"}
    with pytest.raises(
        ConfigError, match="MASTER_PORT must be a port from 1 to 65535, and is not set; start"
    ):
        check_world(spec, without_port)


def test_a_temporary_folder_in_which_no_socket_can_be(tmp_path: Path) -> None:
    folder = tmp_path / ("d" * 120)
    folder.mkdir()
    command = [sys.executable, "-m", "hybridengine.cli.main", "reshard", "bench"]
    done = subprocess.run(command, env=os.environ | {"TMPDIR": str(folder)}, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.endswith(
        f"hybridengine: no sockets can be made in the temporary folder {folder} (AF_UNIX path too long); set TMPDIR to a"
        " folder with a short name that can be written to\n"
    )


# ---- What it prints and draws ----------------------------------------------------------------------------------------


@pytest.fixture
def result() -> tuple[BenchSpec, PairResult]:
    spec = BenchSpec(DEFAULT_MODEL, (LayoutPair.parse("1-4-2:1-2"),), repetitions=3)
    whole = spec.weight_bytes
    measured = {
        method: [RankSamples((2.0 + n, 2.0 + n, 1.5 + n), (0.25,) * 3, whole // 4, 8 if n else 0, whole // 2, 0)]
        for n, method in enumerate(spec.methods)
    }  # fmt: skip
    return spec, summarise(spec, spec.pairs[0], measured, RawAllGather(whole // 4, Timing.of([[1.8]])), 1.31)


def test_the_table_shows_every_method_with_its_ratios(
    result: tuple[BenchSpec, PairResult],
) -> None:
    spec, pair = result
    lines = reshard_bench.pair_lines(spec, pair)
    out = "\n".join(lines)
    for method in spec.methods:
        assert sum(line.startswith(f"{method.value}  ") for line in lines) == 1
    for part in (
        "1-4-2 -> 1-2 on 8 ranks",
        "M = 128.0 MiB",
        "2.00 s",
        "1500-2000 ms",
        "32.0 MiB",
        "x1.50",  # model-parallel: 3 s against 2 s
        "90%",  # 1.8 s of 2 s
        "verify=always takes x1.31 of verify=never",
        "raw all-gather: 32.0 MiB per rank in 1.80 s",
        "full received 8 B on the way back",
    ):
        assert part in out


def test_the_picture_is_drawn(result: tuple[BenchSpec, PairResult], tmp_path: Path) -> None:
    from hybridengine.bench.plot import draw

    spec, pair = result
    file = tmp_path / "bench.svg"
    draw(spec, [pair, pair], file)
    text = file.read_text()
    assert text.count("<!-- megatron-core -->") == 2  # one label per row of panels
    assert text.count("<!-- 1-4-2 -&gt; 1-2 on 8 ranks -->") == 2
    for label in ("there", "back", "received", "peak weights", "redundant"):
        assert f"<!-- {label} -->" in text
