"""The main job at a tiny size, once undisturbed and once with a fault about every 20 steps: both must end with the same
weights, bit for bit, and the same rows; and memory of the undisturbed run's processes must not grow.

    .venv/bin/python scripts/soak.py                          300 steps, about 20 minutes on two cores
    .venv/bin/python scripts/soak.py --steps 60 --seed 3      other faults, sooner done

Faults come from outside, as in life: signals to processes of the run, a limit on what they may write. Which ones, when
and to whom follows from the seed: the step, the moment within it, and the rank. What ends the whole run is answered as
an operator would: the same command again, with resume=auto.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import math
import os
import sys
import time
from bisect import bisect
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import mean

from rich.console import Console
from rich.table import Table
from soak_faults import KINDS, PATIENCE_S, Fault, RunProcess, faults_of

from hybridengine.cli.options import between
from hybridengine.report.step_rows import Row, latest_rows
from hybridengine.report.timeline import TIMELINE_FILE, read_timeline

TINY = [
    "data.batch_size=16",
    "data.task.train_rows=512",
    "data.task.eval_rows=32",
    "warmup.steps=60",
    "actor.ppo_epochs=1",
    "actor.mini_batches=2",
    "critic.ppo_epochs=1",
    "critic.mini_batches=2",
    "run.eval_every=50",
    "run.live=false",
    "checkpoint.every=5",
    "timeouts.call_s=30",
    "reward.timeout_s=10",
    "timeouts.save_s=60",
    "faults.max_restarts=1000",
]
"""Settings that make the main job tiny and let it detect a hang soon."""
MEASURED = ("time/", "throughput/", "memory/", "transfer/", "controller/", "reward/call_s")
"""Metrics of the machine, not of the computation."""
WARM_STEPS = 50
"""Number of steps after which the libraries have filled their caches."""
WINDOW = 25
"""Number of steps over which memory is averaged: it fluctuates from step to step."""
MOST_GROWTH = 0.01


def resident_bytes(pid: int) -> int:
    """Return the resident bytes of a process; 0 if it has ended."""
    with contextlib.suppress(OSError, IndexError):
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return 0


def watch(run: RunProcess, steps: int, say: Say) -> dict[int, float]:
    """Return the controller's memory at every step until the end of the run."""
    samples = dict[int, float]()
    for row in rows_of(run, steps):
        step = int(row["step"] or 0)
        samples[step] = resident_bytes(run.pid)
        if step % 50 == 0:
            say(f"undisturbed: step {step} of {steps}")
        if step == steps:
            break
    if run.status() != 0:
        raise SystemExit(f"the undisturbed run failed:\n{run.log_text()[-2000:]}")
    return samples


def memory_of_ranks(folder: Path) -> dict[str, dict[int, float]]:
    """Return rank -> step -> mean of the memory that the rank reported after each of its calls. A measurement from
    outside would include the KV cache at times and miss it at other times."""
    timeline = read_timeline(folder / TIMELINE_FILE)
    begins = dict[int, float]()
    for span in timeline.spans:
        if span.step is None:
            continue
        begins[span.step] = min(span.start_s, begins.get(span.step, math.inf))
    steps = sorted(begins, key=lambda step: begins[step])
    edges = [begins[step] for step in steps]
    held: dict[str, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for reading in timeline.readings:
        if reading.name == "memory/resident_bytes" and reading.time_s >= edges[0]:
            held[reading.row][steps[bisect(edges, reading.time_s) - 1]].append(reading.value)
    return {
        row: {step: mean(values) for step, values in by_step.items()} for row, by_step in sorted(held.items())
    }


def rows_of(run: RunProcess, steps: int) -> Iterator[Row]:
    """Yield each row as it is written, while the run's process is alive."""
    seen, deadline = len(run.rows()), time.monotonic() + PATIENCE_S
    while True:
        alive, rows = run.is_alive(), run.rows()
        for row in rows[seen:]:
            deadline = time.monotonic() + PATIENCE_S
            yield row
        seen = len(rows)
        if not alive:
            return
        if time.monotonic() > deadline:
            raise SystemExit(
                f"no row within {PATIENCE_S:g} s after step {rows[-1]['step'] if rows else 'none'}"
            )
        time.sleep(0.01)


def disturb(run: RunProcess, steps: int, faults: Sequence[Fault], say: Say) -> int:
    """Inject the faults and restart the run when it ends; return the number of restarts."""
    left, begun = list(faults), 0
    while True:
        before = time.monotonic()
        for row in rows_of(run, steps):
            step_s, before = time.monotonic() - before, time.monotonic()
            if left and int(row["step"] or 0) == left[0].after_step:
                fault = left[0]
                time.sleep(fault.share * min(step_s, 2.0))
                if not run.is_alive():
                    break
                say(
                    f"after step {fault.after_step} and {fault.share:.2f} of one: {fault.kind}, rank {fault.rank}"
                )
                KINDS[fault.kind](run, fault.rank)
                left.pop(0)
        status = run.status()
        if status == 0 and (run.folder / "final").is_dir():
            if left:
                raise SystemExit(f"the run ended before {left}")
            return begun
        begun += 1
        if begun > len(faults):
            raise SystemExit(
                f"ended with status {status} more often than there are faults:\n{run.log_text()[-3000:]}"
            )
        say(f"ended with status {status}; the same command again")
        run.start()


def computed(rows: list[Row]) -> list[Row]:
    """Return the rows without the values that depend on the machine."""
    return [{key: row[key] for key in row if not key.startswith(MEASURED)} for row in latest_rows(rows)]


def digest(folder: Path) -> str:
    """Return the SHA-256 of the trained weights."""
    return hashlib.sha256((folder / "final" / "model.safetensors").read_bytes()).hexdigest()


def growth_table(memory: Mapping[str, Mapping[int, float]], steps: int) -> tuple[Table, float]:
    """Return a table of early and late memory, and the largest growth as a share."""
    early, late = range(WARM_STEPS + 1, WARM_STEPS + WINDOW + 1), range(steps - WINDOW + 1, steps + 1)
    table, worst = (
        Table("process", f"steps {early[0]}-{early[-1]}", f"steps {late[0]}-{late[-1]}", "growth"),
        0.0,
    )
    for name, by_step in memory.items():
        before, after = (mean(by_step[step] for step in window) for window in (early, late))
        growth = after / before - 1
        worst = max(worst, growth)
        table.add_row(name, f"{before / 2**20:.1f} MiB", f"{after / 2**20:.1f} MiB", f"{growth:+.2%}")
    return table, worst


class Say:
    """Prints text with the time since the beginning."""

    def __init__(self) -> None:
        self._begin = time.monotonic()

    def __call__(self, text: str) -> None:
        print(f"[{time.monotonic() - self._begin:6.1f}s] {text}", flush=True)


def main() -> int:
    """Run the test; return the exit status."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=between(1, 10**6), default=300, help="of both runs (default 300)")
    parser.add_argument(
        "--every", type=between(1, 10**6), default=20, help="steps between faults, about (default 20)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the faults (default 0)")
    parser.add_argument("--config", default="configs/arithmetic.yaml", help="of the main job")
    parser.add_argument(
        "--folder", type=Path, default=Path("runs/soak"), help="of both runs (default runs/soak)"
    )
    options = parser.parse_args()
    if options.folder.exists():
        parser.error(f"--folder {options.folder} exists; remove it, or name another one")
    options.folder.mkdir(parents=True)
    say = Say()
    command = [str(Path(sys.executable).with_name("hybridengine")), "train", options.config, *TINY]
    command += [f"run.steps={options.steps}", f"run.folder={options.folder}", "resume=auto"]

    def run_of(name: str) -> RunProcess:
        return RunProcess(
            [*command, f"run.name={name}"], options.folder / f"{name}.log", options.folder / name
        )

    undisturbed = run_of("undisturbed")
    try:
        samples = watch(undisturbed, options.steps, say)
    finally:
        undisturbed.end()
    faults = faults_of(options.steps, options.every, options.seed)
    say(f"undisturbed run done; {len(faults)} faults to come")
    disturbed = run_of("disturbed")
    try:
        begun = disturb(disturbed, options.steps, faults, say)
    finally:
        disturbed.end()
    restarts = disturbed.log_text().count("starting the ranks again")
    say(f"{len(faults)} faults: ranks were started again {restarts} times, the command {begun} times")
    problems = []
    if computed(disturbed.rows()) != computed(undisturbed.rows()):
        problems.append("rows differ")
    one, other = (digest(options.folder / name) for name in ("undisturbed", "disturbed"))
    say(f"final weights: undisturbed {one[:16]}, disturbed {other[:16]}")
    if one != other:
        problems.append("final weights differ")
    if options.steps >= WARM_STEPS + 2 * WINDOW:
        memory = {"controller": samples, **memory_of_ranks(options.folder / "undisturbed")}
        table, worst = growth_table(memory, options.steps)
        Console().print(table)
        if worst >= MOST_GROWTH:
            problems.append(f"memory grows by {worst:.2%}")
    say("; ".join(problems) or "the same weights and rows, and memory does not grow")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
