"""Live view of a run at the bottom of the terminal: the step, its phase and the current call of every role.

    step 12/100 ━━━━╸━━━━━━━━━━━━━━━━━━━━━━━━━ 0:03:05
    now generate, 812 tokens/s, about 21 min 10 s left
      actor     ━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━ 0:00:01 generate_sequences, 2/4 ranks done
      reward    ━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━ -:--:-- waits: compute_scores

An asynchronous run has another line, of the last step, and a row for all of its engines:

    queue 96 complete, 40 unfinished; age 0.81, at most 2, 1.2% masked; idle engines 3%, main 12%
      generation ━━━━━━━━━━━━━━━━━━━━━━━━━━━━━ 0:00:00 advance, 2/2 engines at work

Output of the run, its loggers and its ranks appears above the view.
"""

from __future__ import annotations

import logging
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from types import TracebackType
from typing import Any, TextIO

from rich.console import Console, RenderableType
from rich.progress import BarColumn, Progress, Task, TaskID, TextColumn, TimeElapsedColumn
from rich.progress_bar import ProgressBar
from rich.table import Column
from rich.text import Text

from hybridengine.formatting import format_seconds
from hybridengine.report import keys
from hybridengine.report.console import asynchronous_results
from hybridengine.report.step_rows import Row

REFRESHES_PER_S = 4
ESTIMATE_S = 7 * 24 * 3600.0
"""Period over which the remaining time is estimated; longer than runs last without a stop."""


class _Bar(BarColumn):
    """Bar that stays empty before its task begins, unlike rich's, which pulses."""

    def render(self, task: Task) -> ProgressBar:
        bar = super().render(task)
        bar.pulse = False
        return bar


class LiveView(Progress):
    """Live view of one run; a context manager that restores the terminal on exit.

    A pool's ranks carry out calls in order, so its oldest call of `unfinished_calls` (oldest first) is running, unless a
    call that produces its rows is unfinished; the others wait.
    """

    def __init__(
        self,
        console: Console,
        num_steps: int,
        phase_of_call: Callable[[str, str], str],
        unfinished_calls: Callable[[], Sequence[Any]],
    ) -> None:
        super().__init__(
            TextColumn("{task.description}", markup=False, table_column=_cut(console.width // 4)),
            _Bar(bar_width=max(4, min(30, console.width // 4))),
            TimeElapsedColumn(),
            TextColumn("{task.fields[note]}", markup=False, table_column=_cut()),
            console=console,
            transient=True,
            refresh_per_second=REFRESHES_PER_S,
            redirect_stderr=sys.stderr.isatty(),  # stderr that is redirected to a file stays redirected
            speed_estimate_period=ESTIMATE_S,
        )
        self._num_steps, self._phase_of_call, self._unfinished = num_steps, phase_of_call, unfinished_calls
        self._roles: dict[str, Task] = {}
        self._pools = defaultdict[str, set[Any]](set)
        """Pools on which calls of each role were seen: one, or one for each engine."""
        self._stage, self._speed, self._asynchronous = "now", "", ""
        self._has_begun = self._has_ended = False
        self._streams: list[tuple[TextIO, TextIO]] = []
        self._steps = self.add_task(f"step 0/{num_steps}", total=num_steps, note="")

    def begin(self, step: int, stage: str = "now") -> None:
        """Show the start of an iteration, or of the evaluation after it (stage "evaluating:")."""
        self._stage = stage
        self.update(self._steps, description=f"step {step}/{self._num_steps}")
        if step and not self._has_begun:
            self._has_begun = True
            self.advance(self._steps, step - 1)  # steps before a resume do not count for the estimate

    def end(self, row: Row) -> None:
        """Show an iteration as complete."""
        if (rate := row.get(keys.TOKENS_PER_S)) is not None:
            self._speed = f", {rate:.0f} tokens/s"
        self._asynchronous = "; ".join(asynchronous_results(row))
        self.update(self._steps, completed=int(row[keys.STEP] or 0))

    def _show_calls(self) -> str:
        """Update the row of each role; return the phases of the calls that are running."""
        ended = {call: call.num_ended() for call in list(self._unfinished())}
        pending = [call for call in ended if ended[call] < call.num_ranks]
        oldest, first = dict[Any, Any](), dict[str, Any]()
        for call in pending:
            oldest.setdefault(call.pool, call)
            self._pools[call.role].add(call.pool)
            if first.setdefault(call.role, call) is call and call.role not in self._roles:
                row = TaskID(1 + len(self._roles))
                self._roles[call.role] = Task(row, f"  {call.role}", 1, 0, self.get_time)
        at_work = Counter(call.role for call in oldest.values())
        phases = dict[str, None]()
        for role, task in self._roles.items():
            call = first.get(role)
            if call is None or oldest[call.pool] is not call or any(one in pending for one in call.inputs):
                task.fields = {"note": f"waits: {call.method}" if call else ""}
                task.total, task.completed, task.start_time = 1, 0, None
                continue
            phases[self._phase_of_call(role, call.method)] = None
            if task.fields.get("call") is not call:
                task.start_time = self.get_time()
            task.total, task.completed = call.num_ranks, ended[call]
            note = f"{call.method}, {ended[call]}/{call.num_ranks} ranks done"
            if (num_pools := len(self._pools[role])) > 1:
                note = f"{call.method}, {at_work[role]}/{num_pools} engines at work"
            task.fields = {"note": note, "call": call}
        return " and ".join(phases) or "-"

    def get_renderables(self) -> Iterable[RenderableType]:
        """Yield the parts of the view; called by rich."""
        if not self.tasks or self._has_ended:
            return
        phases, (steps,) = self._show_calls(), self.tasks
        left_s = steps.time_remaining
        left = "after the first step" if left_s is None else f"about {format_seconds(left_s)}"
        yield self.make_tasks_table([steps])
        yield Text(f"{self._stage} {phases}{self._speed}, time left: {left}".replace(".0 s", " s"))
        if self._asynchronous:
            yield Text(self._asynchronous)
        if self._roles:
            yield self.make_tasks_table(self._roles.values())

    def __enter__(self) -> LiveView:
        before = sys.stdout, sys.stderr
        self.start()
        self._streams = list(zip(before, (sys.stdout, sys.stderr), strict=True))
        for old, new in self._streams:
            _move_handlers(old, new)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            for old, new in self._streams:
                _move_handlers(new, old)
        finally:
            # Rich draws all lines at the end, and could not erase those that scroll away.
            self._has_ended = True
            self.stop()


def can_show_live(console: Console) -> bool:
    """Return True if the console can redraw lines: a terminal that is not dumb, regardless of FORCE_COLOR."""
    return console.is_interactive and not console.is_dumb_terminal and console.file.isatty()


def _cut(max_width: int | None = None) -> Column:
    """Return a column that cuts texts which do not fit."""
    return Column(
        no_wrap=True, overflow="ellipsis", max_width=None if max_width is None else max(6, max_width)
    )


def _move_handlers(old: TextIO, new: TextIO) -> None:
    """Redirect loggers from one stream to another, because a line that bypasses the view would garble it."""
    loggers = [logging.getLogger(), *map(logging.getLogger, list(logging.root.manager.loggerDict))]
    for handler in {handler for logger in loggers for handler in logger.handlers}:
        if isinstance(handler, logging.StreamHandler) and vars(handler).get("stream") is old:
            handler.setStream(new)
