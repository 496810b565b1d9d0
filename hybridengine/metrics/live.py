"""A live view of a run: a few lines at the bottom of the terminal, drawn again four times a second.

    step 12/100 ━━━━━━━━╸━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━  11%
    now generate  reward 0.412, first 0.120, best 0.455  eval 61.5%, first 31.5%
    812 tokens/s, mean 790  3 min 05 s passed, about 21 min 10 s left
    role       doing                     for      ranks  calls
    actor      generate_sequences        1.20 s   4/4    2/6
    reward     waits: compute_scores                     0/1

What is printed meanwhile, by the run, by loggers or by ranks, stands above it.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import TextIO

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from hybridengine.metrics.call_progress import CallProgress, RoleProgress
from hybridengine.metrics.formatting import format_seconds
from hybridengine.metrics.step_progress import Stage, StepProgress, StepReading

REFRESHES_PER_S = 4
GAP = "  "
HEADINGS = ("role", "doing", "for", "ranks", "calls")
NUM_NAMES = 2
"""The first ones, which are cut where there is too little room."""


def can_show_live(console: Console) -> bool:
    """Whether lines can be drawn again: a real terminal that is not a dumb one, whatever FORCE_COLOR says."""
    return console.is_interactive and not console.is_dumb_terminal and console.file.isatty()


class LiveView:
    """The view of one run; a context manager, which leaves the terminal as it would be without the view.

    Args:
        phase_of_call: role and method -> the phase of a step that the call is.
    """

    def __init__(
        self,
        console: Console,
        steps: StepProgress,
        calls: CallProgress,
        phase_of_call: Callable[[str, str], str],
    ) -> None:
        self._steps, self._calls, self._phase_of_call = steps, calls, phase_of_call
        self._streams: list[tuple[TextIO, TextIO]] = []
        self._live = Live(
            self,
            console=console,
            refresh_per_second=REFRESHES_PER_S,
            transient=True,
            redirect_stderr=sys.stderr.isatty(),  # an error stream that goes to a file stays there
        )

    def __enter__(self) -> LiveView:
        before = sys.stdout, sys.stderr
        self._live.start()
        self._streams = [
            (old, new) for old, new in zip(before, (sys.stdout, sys.stderr), strict=True) if old is not new
        ]
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
            self._live.stop()

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """At most as many lines as the terminal can take back: one that has scrolled away could not be erased."""
        reading, roles = self._steps.read(), self._calls.read()
        view = Group(
            _progress_line(reading, self._steps.num_steps),
            *_packed(self._facts(reading, roles), options.max_width),
            *([_role_table(roles, options.max_width)] if roles else []),
        )
        lines = console.render_lines(view, options.update(height=None), pad=False)
        for index, line in enumerate(lines[: max(1, console.height - 1)]):
            if index:
                yield Segment.line()
            yield from line

    def _facts(self, reading: StepReading, roles: Sequence[RoleProgress]) -> Iterator[str]:
        busy = [role for role in roles if role.is_busy and role.method is not None]
        phases = dict.fromkeys(self._phase_of_call(role.role, role.method or "") for role in busy)
        doing = " and ".join(phases) or "-"
        yield f"evaluating: {doing}" if reading.stage is Stage.EVALUATION else f"now {doing}"
        if reading.reward is not None:
            yield (
                f"reward {reading.reward:.3f}, first {reading.first_reward:.3f}, best {reading.best_reward:.3f}"
            )
        if reading.held_out:
            yield f"eval {reading.held_out}, first {reading.first_held_out}"
        if reading.tokens_per_s is not None and reading.mean_tokens_per_s is not None:
            yield f"{reading.tokens_per_s:.0f} tokens/s, mean {reading.mean_tokens_per_s:.0f}"
        left = (
            "time left: after the first step"
            if reading.left_s is None
            else f"about {_duration(reading.left_s)} left"
        )
        yield f"{_duration(reading.passed_s)} passed, {left}"


def _progress_line(reading: StepReading, num_steps: int) -> RenderableType:
    line = Table.grid(padding=(0, 1), expand=True)
    line.add_column(no_wrap=True)
    line.add_column(ratio=1)
    line.add_column(no_wrap=True)
    bar = ProgressBar(total=max(1, num_steps), completed=reading.num_done)
    share = f"{100 * reading.num_done // max(1, num_steps)}%"
    line.add_row(Text(f"step {reading.step}/{num_steps}", "bold"), bar, Text(share))
    return line


def _packed(facts: Iterator[str], width: int) -> Iterator[Text]:
    """Facts side by side, in as many lines as they need; none is broken in two unless it is wider than a line."""
    line = ""
    for fact in facts:
        if line and cell_len(line) + len(GAP) + cell_len(fact) > width:
            yield Text(line)
            line = ""
        line += GAP + fact if line else fact
    yield Text(line)


def _role_table(roles: Sequence[RoleProgress], width: int) -> Table:
    """A line per role, never wider than the terminal: of long names the end is cut, numbers stay."""
    table = Table(box=None, padding=(0, len(GAP), 0, 0), header_style="dim", pad_edge=False)
    for place, heading in enumerate(HEADINGS):
        is_name = place < NUM_NAMES
        table.add_column(heading, no_wrap=not is_name, max_width=max(6, width // 4) if place == 0 else None)
    for role in roles:
        cells = _role_cells(role)
        names = (Text(name, no_wrap=True, overflow="ellipsis") for name in cells[:NUM_NAMES])
        table.add_row(*names, *map(Text, cells[NUM_NAMES:]), style="" if role.is_busy else "dim")
    return table


def _role_cells(role: RoleProgress) -> tuple[str, ...]:
    doing, since, ranks = role.method or "-", "", ""
    if role.is_busy:
        since, ranks = _duration(role.since_s or 0.0), f"{role.num_busy}/{role.num_ranks}"
    elif role.method is not None:
        doing = f"waits: {role.method}"
    return role.role, doing, since, ranks, f"{role.num_done}/{role.num_made}"


def _duration(seconds: float) -> str:
    """Whole seconds above ten: what moves four times a second shall not flicker."""
    return format_seconds(seconds) if seconds < 10 else format_seconds(round(seconds)).replace(".0 s", " s")


def _move_handlers(old: TextIO, new: TextIO) -> None:
    """Let loggers that write to one stream write to another: a line beside the view would tear it."""
    loggers = [logging.getLogger(), *map(logging.getLogger, list(logging.root.manager.loggerDict))]
    for handler in {handler for logger in loggers for handler in logger.handlers}:
        if isinstance(handler, logging.StreamHandler) and vars(handler).get("stream") is old:
            handler.setStream(new)
