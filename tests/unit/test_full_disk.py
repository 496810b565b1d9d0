"""A disk that fills up while a run writes its files: one error, and the earlier contents stay readable."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hybridengine.config import load_config
from hybridengine.errors import OutputError
from hybridengine.report.recorder import MetricsRecorder
from hybridengine.report.samples import Sample, write_samples
from hybridengine.report.step_rows import read_rows
from hybridengine.report.timeline import Span, TimelineWriter, read_timeline
from hybridengine.training.saving import Progress, RunSaver, _Writing
from tests.unit.checkpoints import written

# TensorBoard's thread may find the full disk during a later test.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")

FILE_BYTES = 4096
SAID = r"cannot be written \(File too large\); make room, .* what was written before is kept"


@contextmanager
def full_disk() -> Iterator[None]:
    """While open, no file may exceed a few kilobytes; this simulates a full disk, which only root can create."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (FILE_BYTES, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def record_steps(recorder: MetricsRecorder) -> None:
    for step in range(1000):
        recorder.record(step, {"score": 0.5})


def test_rows(tmp_path: Path) -> None:
    recorder = MetricsRecorder(tmp_path)
    with full_disk(), pytest.raises(OutputError, match=rf"(metrics\.jsonl|tensorboard) {SAID}"):
        record_steps(recorder)
    rows = read_rows(tmp_path)
    assert [row["step"] for row in rows] == list(range(len(rows))) and len(rows) > 20
    with closing(MetricsRecorder(tmp_path)) as again:
        again.record(len(rows), {"score": 1.0})
    assert len(read_rows(tmp_path)) == len(rows) + 1


def write_steps(timeline: TimelineWriter) -> None:
    for step in range(1000):
        timeline.write([Span("update", "updates", 0, "here", "actor", step, step + 0.5, "", step)])


def test_timeline(tmp_path: Path) -> None:
    file = tmp_path / "timeline.json"
    with (
        closing(TimelineWriter(file)) as timeline,
        full_disk(),
        pytest.raises(OutputError, match=rf"timeline\.json {SAID}"),
    ):
        write_steps(timeline)
    spans = read_timeline(file).spans
    assert [span.step for span in spans] == list(range(len(spans))) and len(spans) > 5
    with closing(TimelineWriter(file)) as again:
        again.write([Span("update", "updates", 0, "here", "actor", 5000.0, 5001.0, "", 5000)])
    assert len(read_timeline(file).spans) == len(spans) + 1


def test_samples(tmp_path: Path) -> None:
    samples = [Sample(1, "1 + 1 =", "2" * FILE_BYTES, "2", 1.0)]
    with full_disk(), pytest.raises(OutputError, match=rf"samples {SAID}"):
        write_samples(tmp_path / "samples", 1, samples)


class Group:
    """Ranks of a role that have written their part of a checkpoint."""

    def end_save(self, last: bool) -> Group:
        return self

    def get(self) -> list[bool]:
        return [True]


def test_a_checkpoint_that_cannot_be_renamed_is_named_once(tmp_path: Path) -> None:
    """The next save, which begins at once, tries again and fails in the same way."""
    config = load_config("configs/arithmetic.yaml", [f"run.folder={tmp_path}", "run.name=run"])
    said, roles = list[str](), dict.fromkeys(("actor", "critic", "generation"), Group())
    owner: Any = SimpleNamespace(**roles)
    saver = RunSaver(config, owner, Progress(step=4), said.append)
    partial = written(config.run_folder, 4)
    saver._writing = _Writing(partial, 4, ["actor"], None)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, before[1]))
    try:
        saver.after_step({}, last=True)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    why = "[Errno 27] File too large"
    assert [text for text in said if "renamed" in text] == [
        f"warning: checkpoint {partial} was written but could not be renamed: {why}; it will be renamed at the next save"
    ]
    assert "no checkpoint of step 4" in said[-1]
