"""Output of a run while it is in progress, to a file and to a terminal."""

from __future__ import annotations

import io
import json
import os
import pty
import sys
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from rich.console import Console
from tensordict import NonTensorStack, TensorDict

from hybridengine.cli.main import main
from hybridengine.config import RunConfig
from hybridengine.config.sections import RunSection
from hybridengine.controller.call_log import CallRecord, call_log
from hybridengine.controller.calls import Future
from hybridengine.report import trackers as trackers_module
from hybridengine.report.console import step_line
from hybridengine.report.step_rows import Row, read_rows
from hybridengine.report.timeline import read_timeline
from hybridengine.training.output import RunConsole, RunOutput, run_trackers, where_to_look
from hybridengine.training.stopping import StopRequest

NODES = {"main": ["10.0.0.1", "10.0.0.1"]}


class Letters:
    """A tokenizer whose tokens are code points."""

    def batch_decode(self, sequences: Any, *, skip_special_tokens: bool) -> list[str]:
        return ["".join(map(chr, sequence)) for sequence in sequences]


def _rows(*texts: tuple[str, str, str, float]) -> TensorDict:
    """Return the rows of an evaluation: prompt, response, answer, score."""
    width = max(len(prompt + response) for prompt, response, _, _ in texts)
    tokens = [[*map(ord, prompt + response)] for prompt, response, _, _ in texts]
    return TensorDict(
        {
            "tokens": torch.tensor([row + [0] * (width - len(row)) for row in tokens]),
            "prompt_lengths": torch.tensor([len(text[0]) for text in texts]),
            "response_lengths": torch.tensor([len(text[1]) for text in texts]),
            "answers": NonTensorStack(*(text[2] for text in texts)),
            "scores": torch.tensor([text[3] for text in texts]),
        },  # type: ignore[arg-type]
        batch_size=[len(texts)],
    )


SAMPLES = _rows(
    ("1+1=", "2", "2", 1.0), ("2+5=", "9", "7", 0.25), ("4-4=", "", "0", float("nan")), ("3=", "3", "3", 1.0)
)


def _config(folder: Path, **run: Any) -> RunConfig:
    config = RunConfig(run=RunSection(name="demo", folder=str(folder), steps=3, **run))
    config.run_folder.mkdir(parents=True)
    return config


@contextmanager
def _terminal() -> Iterator[tuple[Console, list[str]]]:
    """Yield a console on a terminal of 80 columns, and a list that contains its output once the block has ended."""
    main_side, side = pty.openpty()
    parts: list[bytes] = []

    def read() -> None:
        while True:
            try:
                part = os.read(main_side, 65536)
            except OSError:
                return
            parts.append(part)

    reader, written = threading.Thread(target=read), list[str]()
    reader.start()
    try:
        with open(side, "w") as file:
            yield Console(file=file, width=80, height=24, _environ={"TERM": "xterm"}), written
    finally:
        reader.join(10)
        os.close(main_side)
        written.append(b"".join(parts).decode())


def _play(output: RunOutput) -> list[Row]:
    """Play step 0 with an evaluation, and one step."""
    rows = [
        {"eval/exact_match": 0.5},
        {"reward/mean": 0.25, "time/step_s": 2.0, "throughput/tokens_per_s": 50.0},
    ]
    output.begin(0, "evaluating:")
    output.show_samples(0, SAMPLES)
    output.record(0, rows[0])
    output.begin(1)
    output.record(1, rows[1])
    return [{"step": step, **row} for step, row in enumerate(rows)]


@pytest.mark.parametrize("force_color", ["", "1"])
def test_output_that_goes_to_a_file_is_a_line_per_step(tmp_path: Path, force_color: str) -> None:
    stream, config = io.StringIO(), _config(tmp_path)
    console = Console(file=stream, width=80, _environ={"FORCE_COLOR": force_color, "TERM": "xterm"})
    with RunOutput(config, NODES, Letters(), console) as output:
        rows = _play(output)
    assert stream.getvalue() == "".join(step_line(row, 3) + "\n" for row in rows)
    assert read_rows(config.run_folder) == rows


LONG_ROW = {"reward/mean": 0.4125, **{f"time/phase_{number}_s": 1.0 + number for number in range(20)}}


@pytest.mark.parametrize("environment", [{}, {"TERM": "xterm-256color", "COLUMNS": "40"}])
def test_a_long_line_to_a_file_is_plain_and_not_broken(tmp_path: Path, environment: dict[str, str]) -> None:
    stream = io.StringIO()
    console = Console(file=stream, _environ=environment)
    with RunOutput(_config(tmp_path), NODES, Letters(), console) as output:
        output.record(1, LONG_ROW)
    text = stream.getvalue()
    assert text == step_line({"step": 1, **LONG_ROW}, 3) + "\n"
    assert text.isascii() and text.replace("\n", "").isprintable()


def test_lines_reach_the_stream_at_once(tmp_path: Path) -> None:
    """Behind a pipe, output is block-buffered: without a flush no step is visible before the run ends."""
    raw = io.BytesIO()
    stream = io.TextIOWrapper(io.BufferedWriter(raw), encoding="utf-8")  # pyright: ignore[reportArgumentType]
    with RunOutput(_config(tmp_path), NODES, Letters(), Console(file=stream)) as output:
        output.record(1, LONG_ROW)
        assert raw.getvalue().decode() == step_line({"step": 1, **LONG_ROW}, 3) + "\n"


def test_samples_are_kept_whole_and_as_a_table(tmp_path: Path) -> None:
    config = _config(tmp_path)
    with RunOutput(config, NODES, Letters(), Console(file=io.StringIO())) as output:
        _play(output)
    folder = config.run_folder / "samples"
    lines = [json.loads(line) for line in (folder / "evaluation.jsonl").read_text().splitlines()]
    assert lines[1] == {"step": 0, "prompt": "2+5=", "response": "9", "answer": "7", "score": 0.25}
    assert lines[2]["score"] is None, "a row that was dropped has no score, and NaN is no JSON"
    table = (folder / "evaluation-0.md").read_text()
    assert "4 responses, mean score 0.750." in table
    assert table.count("\n| ") == 5  # headings and responses


def test_a_terminal_gets_the_view_the_lines_and_some_samples(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = _config(tmp_path)
    monkeypatch.setattr(Future, "num_ended", lambda call: 0)  # a call without Ray
    call = Future(
        cast(Any, None),
        "actor",
        "generate_sequences",
        cast(Any, {"reference": [0]}),
        places=[""],
        timeout_s=1,
    )
    with _terminal() as (console, written), RunOutput(config, NODES, Letters(), console) as output:
        monkeypatch.setattr(call_log(), "unfinished", [call])
        rows = _play(output)
        output.begin(2)
        assert output._view is not None
        output._view.refresh()
    text = written[0]
    assert "step 2/3" in text
    assert "now generate" in text, "phases have the names that they have in metrics"
    assert "50 tokens/s" in text
    assert "after step 0" in text
    assert text.count("2+5=") == 1
    assert "3=" not in text.replace("1+1=", ""), "only the first samples"
    for row in rows:
        assert step_line(row, 3) in text.replace("\r\n", "\n")
    assert text.removesuffix("\x1b[?25h\r").endswith("\x1b[2K"), "the view is erased"


def test_a_failure_takes_the_view_away_and_keeps_what_was_written(tmp_path: Path) -> None:
    config = _config(tmp_path)

    def fail(console: Console) -> None:
        with RunOutput(config, NODES, Letters(), console) as output:
            rows.extend(_play(output))
            raise ZeroDivisionError

    rows = list[Row]()
    with _terminal() as (console, written), pytest.raises(ZeroDivisionError):
        fail(console)
    assert written[0].count("\x1b[?25l") == written[0].count("\x1b[?25h") == 1
    assert read_rows(config.run_folder) == rows


def test_the_view_can_be_switched_off(tmp_path: Path) -> None:
    config = _config(tmp_path, live=False)
    with _terminal() as (console, written), RunOutput(config, NODES, Letters(), console) as output:
        rows = _play(output)
    assert written[0].replace("\r\n", "\n") == "".join(step_line(row, 3) + "\n" for row in rows)


def test_every_bar_and_reading_is_drawn_in_its_pool(tmp_path: Path) -> None:
    config = _config(tmp_path)
    records = [
        CallRecord(
            "actor",
            "update",
            {0: (1.0, 2.0), 1: (1.0, 3.0)},
            {0: 0.5, 1: 0.0},
            Counter(),
            {0: {"bytes": 7}, 1: {}},
        ),
        CallRecord(
            "reward", "compute_scores", {0: (3.0, 4.0)}, {0: 0.0}, Counter(), {0: {"bytes": 9}}, "judges"
        ),
    ]
    records[0] = replace(records[0], pool="main")
    nodes = NODES | {"judges": ["10.0.0.2"]}
    with RunOutput(config, nodes, Letters(), Console(file=io.StringIO())) as output:
        output.draw(4, records)
    drawn = read_timeline(config.run_folder / "timeline.json")
    assert {
        (span.name, span.phase, span.pool, span.rank, span.start_s, span.end_s, span.step)
        for span in drawn.spans
    } == {
        ("actor.update", "updates", "main", 0, 1.0, 2.0, 4),
        ("actor.update", "updates", "main", 1, 1.0, 3.0, 4),
        ("fetch rows", "transfers", "main", 0, 1.0, 1.5, 4),
        ("reward.compute_scores", "scores", "judges", 0, 3.0, 4.0, 4),
    }
    assert [(one.name, one.pool, one.rank, one.value) for one in drawn.readings] == [
        ("memory/bytes", "main", 0, 7),
        ("memory/bytes", "judges", 0, 9),
    ]


def test_trackers_get_the_rows_as_they_were_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, dict[str, float]]] = []
    told: list[Any] = []

    class Tracker:
        def __init__(self, run: Any) -> None:
            told.append(run)

        def log(self, step: int, values: dict[str, float]) -> None:
            seen.append((step, values))

        def close(self, failed: bool) -> None:
            seen.append((-1, {"failed": failed}))

    monkeypatch.setattr(trackers_module, "OPENERS", {"wandb": Tracker})
    config = _config(tmp_path, trackers=("wandb",))
    console = Console(file=io.StringIO())
    with run_trackers(config) as trackers, RunOutput(config, NODES, Letters(), console, trackers) as output:
        output.record(1, {"reward/mean": 0.5, "kl/mean": float("inf")})
        output.record(2, {"reward/failures": 1.0})
    assert seen == [(1, {"reward/mean": 0.5}), (2, {"reward/failures": 1.0}), (-1, {"failed": False})]
    assert [row["step"] for row in read_rows(config.run_folder)] == [1, 2]
    assert (told[0].name, told[0].folder) == ("demo", config.run_folder)
    assert told[0].config["run"]["steps"] == 3


def test_what_is_typed_next_works(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = _config(tmp_path)
    with RunOutput(config, NODES, Letters(), Console(file=io.StringIO())) as output:
        _play(output)
    hint = where_to_look(config.run_folder)
    assert f"{config.run_folder}/metrics.jsonl" in hint
    command = hint.rpartition("; ")[2].split()
    assert command[:2] == ["hybridengine", "report"]
    assert main(_without(command, "hybridengine")) == 0
    assert (config.run_folder / "report.html").exists()
    capsys.readouterr()


def _without(command: Sequence[str], program: str) -> list[str]:
    assert command[0] == program
    return list(command[1:])


@pytest.mark.parametrize("name", ["comet", "tensorboard"])
def test_an_unknown_tracker_is_an_error_of_the_configuration(
    built: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", str(built), f"run.trackers=[{name}]", "--dry-run"]) == 2
    message = capsys.readouterr().err
    assert name in message
    assert "run.trackers" in message
    assert "'wandb' or 'mlflow'" in message


@pytest.mark.parametrize("is_asked", [False, True])
def test_a_run_that_is_asked_to_stop_needs_no_reader_any_more(
    is_asked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C in a pipeline ends both, and the run has its step to save."""
    end, output = os.pipe()
    os.close(end)
    stop = StopRequest()
    stop.heard = is_asked
    with open(output, "w") as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        console = RunConsole(stop)
        with nullcontext() if is_asked else pytest.raises(SystemExit):
            console.print("step 1")
            console.print("step 2")
