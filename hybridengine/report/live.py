"""Live view of a run at the bottom of the terminal: the step, its phase and the current call of every role.

    step 12/100 ━━━━╸━━━━━━━━━━━━━━━━━━━━━━━━━ 0:03:05
    now generate, 812 tokens/s, about 21 min 10 s left
      actor     ━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━ 0:00:01 generate_sequences, 2/4 ranks done
      reward    ━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━ -:--:-- waits: compute_scores

Output of the run, its loggers and its ranks appears above the view.
"""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import TextIO

from rich.console import Console, RenderableType
from rich.progress import BarColumn, Progress, Task, TaskID, TextColumn, TimeElapsedColumn
from rich.progress_bar import ProgressBar
from rich.table import Column
from rich.text import Text

from hybridengine.formatting import format_seconds
from hybridengine.report import keys
from hybridengine.report.step_rows import Row

REFRESHES_PER_S = 4
ESTIMATE_S = 7 * 24 * 3600.0
"""Period over which the remaining time is estimated; longer than runs last without a stop."""


@dataclass
class _Call:
    """Call that has not ended on all ranks."""

    role: str
    method: str
    pool: str
    num_ranks: int
    inputs: set[int]
    """Pending calls whose rows this call reads."""
    ended: set[int] = field(default_factory=set)
    """Ranks that have finished the call."""


class _Bar(BarColumn):
    """Bar that stays empty before its task begins, unlike rich's, which pulses."""

    def render(self, task: Task) -> ProgressBar:
        bar = super().render(task)
        bar.pulse = False
        return bar


class LiveView(Progress):
    """Live view of one run; a context manager that restores the terminal on exit.

    Observes calls from any thread (`controller.calls.CallObserver`). The ranks of a pool carry out calls in the order
    in which they were made, and a call begins when its input rows exist. So the oldest call of a pool is running unless
    a call that produces its rows is pending; the others wait.

    Args:
        phase_of_call: function that returns the phase of a step to which a role's method belongs.
    """

    def __init__(self, console: Console, num_steps: int, phase_of_call: Callable[[str, str], str]) -> None:
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
        self._num_steps, self._phase_of_call = num_steps, phase_of_call
        self._calls_lock = threading.Lock()
        self._calls: dict[int, _Call] = {}
        self._shown: dict[str, int] = {}
        """Call whose time the row of each role shows."""
        self._roles: dict[str, TaskID] = {}
        self._stage, self._phases, self._speed = "now", "-", ""
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
        self.update(self._steps, completed=int(row[keys.STEP] or 0))

    def call_made(
        self, number: int, role: str, method: str, pool: str, num_ranks: int, inputs: Sequence[int]
    ) -> None:
        """Show a call that was sent to all ranks of a pool (see `CallObserver`)."""
        with self._calls_lock:
            missing = {earlier for earlier in inputs if earlier in self._calls}
            self._calls[number] = _Call(role, method, pool, num_ranks, missing)
            if role not in self._roles:
                self._roles[role] = self.add_task(f"  {role}", total=1, start=False, note="")
            self._show_calls()

    def rank_ended(self, number: int, pool: str, rank: int) -> None:
        """Show that a rank has finished a call; calls made before the view was attached are ignored."""
        with self._calls_lock:
            if (call := self._calls.get(number)) is None:
                return
            call.ended.add(rank)
            if len(call.ended) == call.num_ranks:
                del self._calls[number]
                for other in self._calls.values():
                    other.inputs.discard(number)
            self._show_calls()

    def _show_calls(self) -> None:
        oldest, first = dict[str, int](), dict[str, int]()
        for number, call in self._calls.items():
            oldest.setdefault(call.pool, number)
            first.setdefault(call.role, number)
        phases = dict[str, None]()
        for role, row in self._roles.items():
            number = first.get(role)
            if number is None:
                self._show_idle(role, "")
                continue
            call = self._calls[number]
            if oldest[call.pool] != number or call.inputs:
                self._show_idle(role, f"waits: {call.method}")
                continue
            phases[self._phase_of_call(role, call.method)] = None
            if self._shown.get(role) != number:
                self._shown[role] = number
                self.reset(row, total=call.num_ranks, note="")
            note = f"{call.method}, {len(call.ended)}/{call.num_ranks} ranks done"
            self.update(row, completed=len(call.ended), note=note)
        self._phases = " and ".join(phases) or "-"

    def _show_idle(self, role: str, note: str) -> None:
        self._shown.pop(role, None)
        self.reset(self._roles[role], start=False, total=1, note=note)

    def get_renderables(self) -> Iterable[RenderableType]:
        """Yield the parts of the view; called by rich."""
        if not self.tasks or self._has_ended:
            return
        steps, *roles = self.tasks
        left_s = steps.time_remaining
        left = "after the first step" if left_s is None else f"about {format_seconds(left_s)}"
        yield self.make_tasks_table([steps])
        yield Text(f"{self._stage} {self._phases}{self._speed}, time left: {left}".replace(".0 s", " s"))
        if roles:
            yield self.make_tasks_table(roles)

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
            self._has_ended = (
                True  # rich draws all lines at the end, and could not erase those that scroll away
            )
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
