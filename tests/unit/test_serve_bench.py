"""`hybridengine bench serve` without a server: options, refusals before anything starts, and the report."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from hybridengine.bench.serve.server import SWITCH, ServerProcess
from hybridengine.bench.serve.spec import KINDS, STEP, TOGETHER, ServeSpec, Timing, serve_figures
from hybridengine.cli.main import main
from hybridengine.cli.serve_bench import result_lines
from hybridengine.controller.call_log import CallRecord
from hybridengine.errors import TopologyError
from hybridengine.serving.call_file import CallFile
from hybridengine.topology.sizes import GenSizes, TrainSizes

CONFIG = "configs/bench-small.yaml"
SPEC = ServeSpec(32, 16, TrainSizes.parse("1-2-1"), GenSizes.parse("1-1"), 3, 900.0)


def record(method: str, *spans: tuple[float, float]) -> CallRecord:
    return CallRecord("actor", method, dict(enumerate(spans)), {}, {}, {})  # pyright: ignore[reportArgumentType]


def rounds() -> list[dict[str, Timing]]:
    """Three rounds: the server's own time is 10, 30 and 20 ms, that of a step 100, 300 and 200 ms of 2 s."""
    return [
        {kind: Timing(0.5 + own_s, 0.5, int(kind == "asample"), 1) for kind in KINDS}
        | {TOGETHER: Timing(1.0 + own_s, 1.0, 1, 3), STEP: Timing(2.0, 2.0 - 10 * own_s, 1, 5)}
        for own_s in (0.010, 0.030, 0.020)
    ]


def test_the_servers_own_time_is_the_sdks_without_that_of_the_ranks() -> None:
    figures = serve_figures(SPEC, CONFIG, rounds())
    assert figures["kinds"]["optim_step"]["server_s"] == pytest.approx(0.020)
    assert figures["kinds"]["optim_step"]["server_over_step_share"] == pytest.approx(0.020 / 2.0)
    assert figures["kinds"][STEP]["server_s"] == pytest.approx(0.200)
    assert figures["server_share_of_step"] == pytest.approx(0.1)
    assert (figures["switches_of_samples_together"], figures["switches_of_step"]) == (1, 1)
    assert len(figures["kinds"][TOGETHER]["samples"]) == 3
    lines = result_lines(figures)
    assert lines[0] == "32 samples of 16 tokens, 1-2-1 / 1-1, medians of 3 rounds"
    assert lines[-1] == "32 samples together: switches 1; a step: switches 1, the server's own time 10.0%"
    (row,) = (line.split() for line in lines if line.startswith("optim_step"))
    assert row == ["optim_step", "0.52", "s", "0.50", "s", "20.00", "1%", "0", "1"]


def test_switches_are_the_most_of_all_rounds() -> None:
    found = rounds()
    found[1][TOGETHER] = Timing(1.0, 1.0, 2, 6)
    assert serve_figures(SPEC, CONFIG, found)["switches_of_samples_together"] == 2


def test_calls_are_written_by_the_server_and_read_since_the_last_look(tmp_path: Path) -> None:
    server = ServerProcess(tmp_path / "server", {}, 1.0)
    file = json.loads((server.folder / "serve.yaml").read_text())["serve"]["calls_file"]
    write = CallFile(file)
    write(record(SWITCH, (10.0, 10.5), (10.0, 10.75)))
    write(record("sample", (11.0, 12.0), (11.0, 11.5)))
    assert json.loads(Path(file).read_text().splitlines()[0]) == {
        "call": f"actor.{SWITCH}",
        "begin_s": 10.0,
        "end_s": 10.75,
        "seconds": 0.75,
    }
    calls = server.take_calls()
    assert (calls.seconds, calls.count) == (1.75, {SWITCH: 1, "sample": 1})
    write(record("step_with", (13.0, 13.25)))
    calls = server.take_calls()
    assert (calls.seconds, calls.count[SWITCH], calls.count.total()) == (0.25, 0, 1)


def test_without_a_file_calls_are_forgotten() -> None:
    CallFile(None)(record("sample", (0.0, 1.0)))


def test_engines_that_do_not_divide_the_ranks() -> None:
    with pytest.raises(
        TopologyError, match=r"--generate 1-3: .* do not divide the 2 ranks of training 1-2-1"
    ):
        ServeSpec(32, 16, TrainSizes.parse("1-2-1"), GenSizes.parse("1-3"), 3, 900.0)


@pytest.fixture
def refusal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Return a function that runs the command with bad input and returns the error message."""

    def nothing(*_: object) -> None:
        raise AssertionError("something was started")

    monkeypatch.setattr("hybridengine.bench.serve.measure.measure_serve", nothing)

    def run(*arguments: str) -> str:
        code = main(["bench", "serve", *arguments])
        out, err = capsys.readouterr()
        assert (code, out) == (2, "")
        assert "Traceback" not in err
        return err

    return run


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "CONFIG"),
        ([CONFIG, "--samples", "1"], "--samples: '1' must be an integer from 2 to 1024"),
        ([CONFIG, "--generate", "1-4"], "--generate 1-4"),
        ([CONFIG, "--json", CONFIG], "--json configs/bench-small.yaml must end in .json; rename it"),
        ([CONFIG, "--timeout", "5"], "--timeout: '5' must be a number from 10 to 86400"),
    ],
)
def test_bad_input_starts_nothing(refusal: Callable[..., str], arguments: list[str], message: str) -> None:
    assert message in refusal(*arguments)
