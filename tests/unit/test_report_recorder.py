"""Rows that are written, read back from both files, and kept when a folder is opened again."""

from __future__ import annotations

import json
import logging
import math
import os
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from hybridengine.errors import DataError
from hybridengine.report.recorder import TENSORBOARD_FOLDER, MetricsRecorder
from hybridengine.report.step_rows import METRICS_FILE, Row, latest_rows, read_rows


def _tensorboard_scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Return tag -> (step, value) as TensorBoard itself reads them."""
    events = EventAccumulator(str(folder / TENSORBOARD_FOLDER))
    events.Reload()
    return {
        tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]
    }


def _lines(folder: Path) -> list[str]:
    return (folder / METRICS_FILE).read_text().splitlines()


def test_rows_arrive_in_both_files(tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "demo"
    with closing(MetricsRecorder(folder)) as recorder:
        recorder.record(0, {"eval/exact_match": 0.25})
        written = recorder.record(
            1, {"reward/mean": 0.5, "switch/received_bytes": 2**40 + 1, "kl/mean": -1e-7}
        )
    assert written == {"step": 1, "reward/mean": 0.5, "switch/received_bytes": 2**40 + 1, "kl/mean": -1e-7}
    assert [json.loads(line) for line in _lines(folder)] == [{"step": 0, "eval/exact_match": 0.25}, written]
    assert read_rows(folder) == [{"step": 0, "eval/exact_match": 0.25}, written]
    assert _tensorboard_scalars(folder) == {
        "eval/exact_match": [(0, 0.25)],
        "reward/mean": [(1, 0.5)],
        "switch/received_bytes": [(1, float(2**40))],
        "kl/mean": [(1, pytest.approx(-1e-7))],
    }


def test_rows_are_on_disk_before_the_recorder_is_closed(tmp_path: Path) -> None:
    """A process that dies without cleanup loses no row."""
    child = os.fork()
    if child == 0:
        try:
            recorder = MetricsRecorder(tmp_path)
            recorder.record(1, {"reward/mean": 0.5})
            recorder.record(2, {"reward/mean": 0.75})
        finally:
            os._exit(9)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    assert read_rows(tmp_path) == [{"step": 1, "reward/mean": 0.5}, {"step": 2, "reward/mean": 0.75}]
    assert _tensorboard_scalars(tmp_path) == {"reward/mean": [(1, 0.5), (2, 0.75)]}


def test_scalars_of_every_kind_become_numbers(tmp_path: Path) -> None:
    with closing(MetricsRecorder(tmp_path)) as recorder:
        recorder.record(
            np.int64(3),
            {
                "int": 7,
                "numpy_int": np.int64(2**53 + 1),
                "numpy_float": np.float32(0.5),
                "tensor": torch.tensor(1.25, requires_grad=True),
                "tensor_of_one": torch.tensor([2.5]),
                "int_tensor": torch.tensor(9),
            },
        )
    (row,) = read_rows(tmp_path)
    assert row == {
        "step": 3,
        "int": 7,
        "numpy_int": 2**53 + 1,
        "numpy_float": 0.5,
        "tensor": 1.25,
        "tensor_of_one": 2.5,
        "int_tensor": 9.0,
    }
    assert '"int": 7,' in _lines(tmp_path)[0]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, torch.tensor(math.nan)])
def test_a_value_that_is_not_finite_is_null_and_warned_about(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, value: float
) -> None:
    with caplog.at_level(logging.WARNING), closing(MetricsRecorder(tmp_path)) as recorder:
        recorder.record(4, {"actor/policy_loss": value, "reward/mean": 0.5})
    assert _lines(tmp_path) == ['{"step": 4, "actor/policy_loss": null, "reward/mean": 0.5}']
    assert _tensorboard_scalars(tmp_path) == {"reward/mean": [(4, 0.5)]}
    (warning,) = caplog.records
    assert warning.getMessage() == f"step 4: metric actor/policy_loss is {float(value)}; written as null"


@pytest.mark.parametrize("value", ["0.5", None, torch.zeros(2), [1.0], {"a": 1}])
def test_a_value_that_is_not_a_number_is_refused_and_writes_nothing(tmp_path: Path, value: object) -> None:
    with closing(MetricsRecorder(tmp_path)) as recorder:
        recorder.record(1, {"reward/mean": 0.5})
        with pytest.raises(DataError, match=r"metric 'kl/mean'=.* must be one number"):
            recorder.record(2, {"reward/mean": 0.5, "kl/mean": value})  # pyright: ignore[reportArgumentType]
        with pytest.raises(DataError, match="pass it as `step`"):
            recorder.record(2, {"step": 3})
    assert len(read_rows(tmp_path)) == 1


def test_opening_again_appends(tmp_path: Path) -> None:
    with closing(MetricsRecorder(tmp_path)) as recorder:
        recorder.record(1, {"reward/mean": 0.25})
        recorder.record(2, {"reward/mean": 0.5})
    first = (tmp_path / METRICS_FILE).read_bytes()
    with closing(MetricsRecorder(tmp_path)) as recorder:
        recorder.record(2, {"reward/mean": 0.625})
        recorder.record(3, {"reward/mean": 0.75})
    assert (tmp_path / METRICS_FILE).read_bytes().startswith(first)
    rows = read_rows(tmp_path)
    assert [(row["step"], row["reward/mean"]) for row in rows] == [(1, 0.25), (2, 0.5), (2, 0.625), (3, 0.75)]
    assert [row["reward/mean"] for row in latest_rows(rows)] == [0.25, 0.625, 0.75]
    scalars = _tensorboard_scalars(tmp_path)["reward/mean"]
    assert {(1, 0.25), (2, 0.625), (3, 0.75)} <= set(scalars)


def test_a_run_that_goes_back_leaves_later_rows_behind() -> None:
    rows: list[Row] = [
        {"step": step, "reward/mean": number} for number, step in enumerate([0, 1, 2, 3, 1, 2, 2])
    ]
    assert [(row["step"], row["reward/mean"]) for row in latest_rows(rows)] == [(0, 0), (1, 4), (2, 6)]
    assert latest_rows(rows[:5]) == [rows[0], rows[4]]


def test_an_unfinished_last_line_is_cut_off(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    whole, torn = '{"step": 1, "reward/mean": 0.5}\n', '{"step": 2, "reward/me'
    (tmp_path / METRICS_FILE).write_text(whole + torn)
    assert read_rows(tmp_path) == [{"step": 1, "reward/mean": 0.5}]
    with closing(MetricsRecorder(tmp_path)) as recorder:
        recorder.record(2, {"reward/mean": 0.75})
    assert _lines(tmp_path) == [whole.strip(), '{"step": 2, "reward/mean": 0.75}']
    assert f"ended in an unfinished line of {len(torn)} bytes; cut it off" in caplog.text


@pytest.mark.parametrize("bad", ["not json", "[1]", '{"reward/mean": 1.0}', '{"step": "1"}', ""])
def test_reading_names_the_line_that_is_not_a_row(tmp_path: Path, bad: str) -> None:
    (tmp_path / METRICS_FILE).write_text(f'{{"step": 1}}\n{bad}\n{{"step": 3}}\n')
    with pytest.raises(DataError, match=r"metrics\.jsonl:2: .* is not a row"):
        read_rows(tmp_path)


def test_a_folder_without_metrics_has_no_rows(tmp_path: Path) -> None:
    assert read_rows(tmp_path) == []
