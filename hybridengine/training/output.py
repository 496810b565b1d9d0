"""Output of a run: metrics, timeline, samples, live view and one console line per step."""

from __future__ import annotations

import logging
import math
import shlex
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType

from rich.console import Console
from rich.text import Text
from tensordict import TensorDictBase

from hybridengine.config import RunConfig
from hybridengine.controller.call_log import CallRecord, call_log
from hybridengine.controller.metrics import StepMetrics
from hybridengine.data.rewards import Decoder, reward_texts
from hybridengine.planning.costs.dataflows import phase_of_call
from hybridengine.report import keys
from hybridengine.report.console import step_line
from hybridengine.report.live import LiveView, can_show_live
from hybridengine.report.recorder import TENSORBOARD_FOLDER, MetricsRecorder
from hybridengine.report.samples import SAMPLES_FOLDER, Sample, terminal_table, write_samples
from hybridengine.report.step_rows import METRICS_FILE
from hybridengine.report.timeline import TIMELINE_FILE, Reading, Span, TimelineWriter
from hybridengine.report.trackers import TrackedRun, Trackers
from hybridengine.training.stopping import StopRequest

logger = logging.getLogger(__name__)

BARS = {
    "generate": "generate",
    "switch_to_generate": "switch",
    "switch_to_train": "switch",
    "log_probs": "log-probs",
    "ref_log_probs": "log-probs",
    "teacher_log_probs": "log-probs",
    "values": "values",
    "cost_values": "values",
    "scores": "scores",
    "costs": "scores",
    "update_weights": "weights",
    "receive_weights": "weights",
    "begin_responses": "prompts",
    "update_actor": "updates",
    "update_critic": "updates",
    "update_cost_critic": "updates",
    "prompts": "prompts",
    "advantages": "advantages",
}
"""Kind of the timeline's bars for each phase of an iteration."""

SHOWN_SAMPLES = 3
"""Number of an evaluation's responses that are shown in the terminal."""


def run_trackers(config: RunConfig) -> Trackers:
    """Return the trackers of a run; enter them (`with`) to open them."""
    run = TrackedRun(config.run.name, config.run_folder, config.described())
    return Trackers(config.run.trackers, run)


def where_to_look(folder: Path) -> str:
    """Return the files and commands that show the results of a finished run."""
    logdir, run = shlex.quote(str(folder / TENSORBOARD_FOLDER)), shlex.quote(str(folder))
    return f"metrics: {folder / METRICS_FILE}; tensorboard --logdir {logdir}; hybridengine report {run}"


class RunConsole(Console):
    """The console of a run: once it has been asked to stop, what nobody reads any more is lost.

    Ctrl-C in a pipeline ends the reader as well, and the run has its step to save.
    """

    def __init__(self, stop: StopRequest) -> None:
        super().__init__()
        self._stop = stop

    def on_broken_pipe(self) -> None:
        try:
            super().on_broken_pipe()
        except SystemExit:
            if not self._stop.heard:
                raise


class RunOutput:
    """Writer of a run's output to its folder, open `trackers` and terminal; a context manager.

    `nodes` are the addresses of every rank's node, by pool.
    """

    def __init__(
        self,
        config: RunConfig,
        nodes: Mapping[str, Sequence[str]],
        tokenizer: Decoder,
        console: Console,
        trackers: Trackers | None = None,
    ) -> None:
        folder, run = config.run_folder, config.run
        self._nodes, self._tokenizer, self._trackers = nodes, tokenizer, trackers
        self._samples = folder / SAMPLES_FOLDER
        self._console, self._num_steps = console, run.steps
        self._logs_json = run.log_format == "json"
        shows_view = run.live and not self._logs_json and can_show_live(console)
        calls = call_log()
        self._view = (
            LiveView(console, run.steps, phase_of_call, lambda: calls.unfinished) if shows_view else None
        )
        self._recorder = MetricsRecorder(folder)
        self._timeline = TimelineWriter(folder / TIMELINE_FILE)
        self._metrics = StepMetrics(run.name)

    def begin(self, step: int, *what: str) -> None:
        """Show in the live view that a step begins, or `what` after it."""
        if self._view is not None:
            self._view.begin(step, *what)

    def record(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write and print the row of a step, where step 0 is the state before training."""
        row = self._recorder.record(step, metrics)
        self._metrics.record(row)
        if self._trackers is not None:
            self._trackers.log(row)
        if self._view is not None:
            self._view.end(row)
        line = step_line(row, self._num_steps)
        if self._logs_json:
            logger.info(line, extra={"metrics": row})
        else:
            self._console.print(Text(line), soft_wrap=True)

    def draw(self, step: int, records: Sequence[CallRecord]) -> None:
        """Add the calls of a step, and the memory of the ranks after each call, to the timeline."""
        spans, readings = list[Span](), list[Reading]()
        for record in records:
            phase = BARS.get(phase_of_call(record.role, record.method), "other")
            nodes, pool = self._nodes[record.pool], record.pool if len(self._nodes) > 1 else ""
            for rank, (begin, end) in record.spans.items():
                place = rank, nodes[rank], record.role
                spans.append(Span(str(record), phase, *place, begin, end, pool, step))
                if fetched := record.fetch_seconds.get(rank, 0.0):
                    spans.append(Span("fetch rows", "transfers", *place, begin, begin + fetched, pool, step))
                readings += [
                    Reading(keys.memory_key(name), rank, nodes[rank], end, num_bytes, pool)
                    for name, num_bytes in record.held_bytes[rank].items()
                ]
        self._timeline.write(spans, readings)

    def show_samples(self, step: int, rows: TensorDictBase) -> None:
        """Write an evaluation's rows (tokens, lengths, `answers`, `scores`) as samples; print some in a live view."""
        columns = ["prompts", "responses", "answers"]
        texts, scores = reward_texts(rows, self._tokenizer, columns), rows["scores"].tolist()
        samples = [
            Sample(step, prompt, response, answer, score if math.isfinite(score) else None)
            for prompt, response, answer, score in zip(
                *(texts[name] for name in columns), scores, strict=True
            )
        ]
        write_samples(self._samples, step, samples)
        if self._view is not None:
            self._console.print(terminal_table(step, samples[:SHOWN_SAMPLES]))

    def __enter__(self) -> RunOutput:
        self._metrics.__enter__()
        if self._view is not None:
            self._view.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with ExitStack() as ends:
            ends.push(self._metrics)
            ends.callback(self._timeline.close)
            ends.callback(self._recorder.close)
            if self._view is not None:
                ends.push(self._view)
