"""`hybridengine bench dispatch` without ranks: options, refusals before anything starts, and the report."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hybridengine.bench.dispatch import dispatch_figures
from hybridengine.bench.dispatch_spec import ROW_BYTES, DispatchSpec
from hybridengine.cli.main import main
from hybridengine.errors import ConfigError, TopologyError
from hybridengine.machine import PROCESS_BYTES
from hybridengine.topology.sizes import TrainSizes

MEBIBYTE = 2**20


def spec(**changes: object) -> DispatchSpec:
    values: dict[str, object] = {
        "producer": TrainSizes.parse("1-4-2"),
        "consumer": TrainSizes.parse("2-2-2"),
        "batch_bytes": 1_000_000_000,
        "repetitions": 5,
        "timeout_s": 300.0,
    }
    return DispatchSpec(**values | changes)  # pyright: ignore[reportArgumentType]


FIGURES = dispatch_figures(
    spec(batch_bytes=8 * MEBIBYTE),
    direct_s=[0.5, 0.7, 0.4],
    through_s=[4.0, 6.0, 5.0],
    empty_call_s=[0.010, 0.030, 0.020],
    payload_bytes={
        "controller_payload_bytes": 0,
        "through_controller_payload_bytes": 2_000,
        "received_bytes": 750,
    },
)


def test_rows_fill_the_batch_and_memory_is_what_every_process_holds() -> None:
    found = spec()
    assert found.num_rows == 1_000_000_000 // (1024 * 8) == 122_070
    # The batch on the producers, in the controller and in the object store, and twice on each of p·t consumers.
    assert found.needed_bytes == 3 * 10**9 + 2 * 4 * 10**9 + 8 * PROCESS_BYTES


def test_a_batch_without_a_row_for_each_replica() -> None:
    with pytest.raises(ConfigError, match=f"less than a row of {ROW_BYTES} bytes for each of 2 replicas"):
        spec(batch_bytes=2 * ROW_BYTES - 1)


def test_groups_of_other_ranks() -> None:
    with pytest.raises(TopologyError, match=r"1-4-2 has 8 ranks and 2-2-1 has 4; both groups share one pool"):
        spec(consumer=TrainSizes.parse("2-2-1"))


def test_figures_are_medians() -> None:
    assert FIGURES["seconds_direct"] == 0.5
    assert FIGURES["seconds_through_controller"] == 5.0
    assert FIGURES["advantage"] == 10.0
    assert FIGURES["empty_call_s"] == 0.020
    assert FIGURES["batch_bytes"] == 8 * MEBIBYTE
    assert (FIGURES["from"], FIGURES["to"]) == ("1-4-2", "2-2-2")


def test_the_command_prints_and_writes_what_was_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """tests/full/test_dispatch_bench.py covers the measurement itself."""
    monkeypatch.setattr("hybridengine.bench.dispatch.measure_dispatch", lambda spec, say: FIGURES)
    file = tmp_path / "out.json"
    assert main(["bench", "dispatch", "--bytes", "8MiB", "--json", str(file)]) == 0
    text = capsys.readouterr().out
    assert "8.0 MiB in 1024 rows from 1-4-2 to 2-2-2" in text
    assert "directly 10.0 times as fast; 750 B came from other processes" in text
    assert "an empty call to 8 ranks takes 20 ms" in text
    assert json.loads(file.read_text())["samples_direct_s"] == [0.5, 0.7, 0.4]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--from", "1-4"], "argument --from: '1-4' is not a parallel size"),
        (["--from", "1-4-2", "--to", "1-1-1"], "both groups share one pool"),
        (["--bytes", "many"], "--bytes"),
        (["--json", "/nowhere/out.json"], "/nowhere"),
        (["--bytes", "1000GiB"], "choose a smaller batch"),
        (["--repetitions", "0"], "--repetitions: '0' must be an integer from 1 to 1000"),
        (["--timeout", "nan"], "--timeout: 'nan' must be a number from 1 to 86400"),
    ],
)
def test_bad_options_end_with_one_message(
    options: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "dispatch", *options]) == 2
    message = capsys.readouterr().err
    assert words in message
    assert "Traceback" not in message
