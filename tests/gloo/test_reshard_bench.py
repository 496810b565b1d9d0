"""`hybridengine reshard bench` on real ranks: every method delivers the right weights and moves the bytes it says."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from hybridengine.bench import methods
from hybridengine.bench.measurement import Measurement
from hybridengine.bench.methods.gather_all import Full
from hybridengine.bench.methods.method import Method
from hybridengine.bench.methods.micro_dp import MicroDp
from hybridengine.bench.results import PairResult
from hybridengine.bench.spec import BenchSpec, LayoutPair, MethodName
from hybridengine.model_shapes import ModelShape
from hybridengine.runtime.ledger import SwitchReport
from hybridengine.runtime.process_groups import ProcessGroups
from hybridengine.runtime.storage import WeightStorage
from tests.gloo.ranks import RankError, RankLauncher

EVEN = ModelShape(
    family="qwen3",
    num_layers=4,
    hidden_size=64,
    ffn_hidden_size=96,
    num_heads=8,
    num_kv_heads=4,
    head_dim=16,
    vocab_size=256,
    max_positions=64,
)
"""Every size divides, but for norms, which each tensor-parallel rank has whole."""

GENERAL = ("2-2-2:1-4", "4-1-2:2-2", "1-4-2:1-4")
NESTED = ("1-4-2:1-2", "2-4-1:1-2", "2-2-2:1-1")
FORMULAS = {
    # received, peak (of both copies, in methods that keep one), as fractions of M: table 2 of the paper by hand.
    "1-4-2:1-2": {"micro-dp": (1 / 4, 1 / 2), "model-parallel": (3 / 4, 3 / 4), "full": (7 / 8, 3 / 4)},
    "2-4-1:1-2": {"micro-dp": (3 / 8, 1 / 2), "model-parallel": (7 / 8, 5 / 8), "full": (7 / 8, 5 / 8)},
    "2-2-2:1-1": {"micro-dp": (3 / 4, 1.0), "model-parallel": (3 / 4, 5 / 4), "full": (7 / 8, 5 / 4)},
}


def measured(rank: int, spec: BenchSpec) -> list[PairResult]:
    registry = ProcessGroups(spec.timeout_s)
    return [Measurement(spec, pair, registry, lambda text: None).run() for pair in spec.pairs]


def spec_of(*pairs: str, bucket_bytes: int = 2**16, **settings: Any) -> BenchSpec:
    settings = {"repetitions": 2, "timeout_s": 30.0} | settings
    return BenchSpec(EVEN, tuple(map(LayoutPair.parse, pairs)), bucket_bytes=bucket_bytes, **settings)


def test_all_methods_move_what_their_formulas_say(run_ranks: RankLauncher) -> None:
    """Weights are checked by the benchmark itself, on each rank, against values of logical indices."""
    spec = spec_of(*NESTED, verify="always", repetitions=1)
    whole = spec.weight_bytes
    slack = 0.02 * whole  # norms, which no tensor parallelism shards
    for pair, result in zip(NESTED, run_ranks(8, measured, spec)[0], strict=True):
        by_name = {entry.method.value: entry for entry in result.results}
        assert set(by_name) == {method.value for method in MethodName}
        for name, (received, peak) in FORMULAS[pair].items():
            entry = by_name[name]
            assert entry.received_bytes_max == pytest.approx(received * whole, abs=slack), (pair, name)
            # Buckets, and in methods that gather beside their destination a buffer of one, come on top.
            assert peak * whole <= entry.peak_weight_bytes_max <= peak * whole + 4 * spec.bucket_bytes + slack
        assert by_name["micro-dp"].redundant_bytes_max == 0
        shard = whole / LayoutPair.parse(pair).train.model_parallel_size
        for name in ("model-parallel", "full", "per-tensor", "megatron-core"):
            assert by_name[name].redundant_bytes_max == pytest.approx(shard, abs=slack), (pair, name)
        for entry in result.results:
            assert 0 < entry.there.lowest <= entry.there.median <= entry.there.highest
            assert entry.received_back_bytes_max == 0
        assert result.raw is not None and result.raw.received_bytes == pytest.approx(
            FORMULAS[pair]["micro-dp"][0] * whole, abs=slack
        )
        assert result.verify_always_over_never is not None and result.verify_always_over_never > 0


def test_layouts_that_do_not_nest_and_those_that_need_nothing(run_ranks: RankLauncher) -> None:
    results = run_ranks(8, measured, spec_of(*GENERAL, dtype="bfloat16", repetitions=1))[0]
    there_is_none = results[-1]
    assert there_is_none.raw is None
    assert next(r for r in there_is_none.results if r.method is MethodName.MICRO_DP).received_bytes_max == 0


def first_element(weights: WeightStorage) -> torch.Tensor:
    return weights[weights.names[0]].view(-1)[0]


class Damages(Full):
    """A gather that delivers one wrong element to one rank."""

    def move(self) -> int:
        received = super().move()
        if self.actor.rank == 1:
            first_element(self.destination).add_(1)
        return received


class TouchesTraining(MicroDp):
    """A way back that changes an element of the training weights on every rank."""

    def back(self) -> SwitchReport:
        report = super().back()
        first_element(self.actor.weights).add_(1)
        return report


def damaged(rank: int, spec: BenchSpec, name: MethodName, damage: type[Method]) -> None:
    methods.METHODS[name] = damage
    measured(rank, spec)


@pytest.mark.parametrize(
    ("name", "damage", "message"),
    [
        (MethodName.FULL, Damages, "method full left wrong weights on rank 1"),
        (
            MethodName.MICRO_DP,
            TouchesTraining,
            "method micro-dp, on the way back, left wrong weights on rank 0",
        ),
    ],
)
def test_a_method_that_delivers_wrong_weights_ends_the_benchmark(
    run_ranks: RankLauncher, name: MethodName, damage: type[Method], message: str
) -> None:
    spec = spec_of("1-2-1:1-1", methods=(name,), timeout_s=5.0)
    with pytest.raises(RankError, match=message):
        run_ranks(2, damaged, spec, name, damage)


# ---- The command -----------------------------------------------------------------------------------------------------

COMMAND = str(Path(sys.executable).with_name("hybridengine"))
ENVIRONMENT = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}


@pytest.fixture
def command(tmp_path: Path) -> list[str]:
    """A benchmark of a tiny model on two ranks."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": EVEN.vocab_size,
        "hidden_size": EVEN.hidden_size,
        "intermediate_size": EVEN.ffn_hidden_size,
        "num_hidden_layers": EVEN.num_layers,
        "num_attention_heads": EVEN.num_heads,
        "num_key_value_heads": EVEN.num_kv_heads,
        "max_position_embeddings": EVEN.max_positions,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    options = f"--model {tmp_path}/config.json --train 1-2-1 --gen 1-1 --repetitions 1 --timeout 60".split()
    return ["reshard", "bench", *options]


def test_the_command_writes_figures_and_a_picture(command: list[str], tmp_path: Path) -> None:
    outputs = ["--json", str(tmp_path / "bench.json"), "--plot", str(tmp_path / "bench.png")]
    done = subprocess.run(
        [COMMAND, *command, *outputs],
        env=ENVIRONMENT, capture_output=True, text=True, timeout=280, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Traceback" not in done.stderr and "hybridengine:" not in done.stderr
    assert "weights of every method are right" in done.stderr
    assert "raw all-gather" in done.stdout
    report = json.loads((tmp_path / "bench.json").read_text())
    assert [entry["method"] for entry in report["results"]] == [method.value for method in MethodName]
    assert (tmp_path / "bench.png").read_bytes().startswith(b"\x89PNG")


def test_under_torchrun_the_command_joins(command: list[str], tmp_path: Path) -> None:
    torchrun = [
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        "-m",
        "hybridengine.cli.main",
    ]
    done = subprocess.run(
        [sys.executable, *torchrun, *command, "--json", str(tmp_path / "bench.json")],
        env=ENVIRONMENT, capture_output=True, text=True, timeout=280, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("raw all-gather:") == 1  # rank 0 speaks for all
    assert len(json.loads((tmp_path / "bench.json").read_text())["results"]) == len(MethodName)


def children(pid: int) -> list[int]:
    """Processes that a process has started."""
    return [
        int(child)
        for file in Path(f"/proc/{pid}/task").glob("*/children")
        for child in file.read_text().split()
    ]


@contextlib.contextmanager
def ended(process: subprocess.Popen[str]) -> Iterator[None]:
    """Whatever happens, the process and all that it has started are gone afterwards."""
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


@pytest.mark.parametrize(
    ("victim", "sent", "status", "said"),
    [
        ("rank", signal.SIGKILL, 1, "died with exit code -9; it was killed, most likely for lack of memory"),
        ("command", signal.SIGINT, 130, "interrupted"),
    ],
)
def test_no_process_outlives_a_killed_rank_or_an_interrupt(
    command: list[str], victim: str, sent: signal.Signals, status: int, said: str, tmp_path: Path
) -> None:
    """In the second of two pairs; what the first has given is written."""
    command[command.index("--repetitions") + 1] = "20"
    outputs = ["--json", str(tmp_path / "bench.json"), "--plot", str(tmp_path / "bench.svg")]
    process = subprocess.Popen(
        [COMMAND, *command, "--pair", "1-2-1:1-2", *outputs],
        env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # ignored where tests run in the background
    )  # fmt: skip
    with ended(process):
        assert process.stderr is not None
        begun = (line for line in process.stderr if "repetition 3/" in line)
        for _ in range(2):
            next(begun)
        ranks = [rank for child in children(process.pid) for rank in children(child)]
        assert len(ranks) == 2
        os.kill(ranks[0] if victim == "rank" else process.pid, sent)
        _, errors = process.communicate(timeout=60)
        assert process.returncode == status
        assert said in errors and "Traceback" not in errors
        deadline = time.monotonic() + 10
        while left := [pid for pid in ranks if Path(f"/proc/{pid}").exists()]:
            assert time.monotonic() < deadline, f"processes {left} are still there"
            time.sleep(0.1)
    report = json.loads((tmp_path / "bench.json").read_text())
    assert {(entry["train"], entry["gen"]) for entry in report["results"]} == {("1-2-1", "1-1")}
    assert "<svg" in (tmp_path / "bench.svg").read_text()
