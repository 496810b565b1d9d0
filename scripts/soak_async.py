"""An asynchronous run that is killed as a whole ten times, at random moments, and resumed: it loses and repeats nothing.

    .venv/bin/python scripts/soak_async.py                      ten kills, about 15 minutes on two cores
    .venv/bin/python scripts/soak_async.py --kills 3 --seed 3   other moments, sooner done

kill -9 of every process may hit any call, push or save. At the end, an undisturbed run repeats the order of calls that
the killed one recorded: both must end with the same weights, bit for bit, so that every prompt was trained once, with
the same tokens. No trained token may be older than `staleness.max_versions`.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from itertools import islice
from pathlib import Path

from soak import Say, digest, rows_of
from soak_faults import RunProcess, kill_everything

from hybridengine.cli.options import between
from hybridengine.config.run_config import CALLS_FILE
from hybridengine.report.step_rows import Row, latest_rows

ETA = 2
TINY = [
    "data.batch_size=16",
    "data.task.train_rows=512",
    "warmup.steps=30",
    "actor.ppo_epochs=1",
    "actor.mini_batches=2",
    "rollout.samples_per_prompt=4",
    "generation.steps_per_call=2",
    f"staleness.max_versions={ETA}",
    "run.eval_every=0",
    "run.live=false",
    "checkpoint.every=2",
]
MOST_ROWS, LONGEST_S = 5, 2.0
"""Rows that a run writes before its kill, and seconds after the last one, at most."""


def main() -> int:
    """Run the test; return the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=between(1, 1000), default=10, help="of the first run (default 10)")
    parser.add_argument("--seed", type=int, default=0, help="of the moments (default 0)")
    parser.add_argument("--config", default="configs/async-grpo.yaml", help="of both runs")
    parser.add_argument(
        "--folder", type=Path, default=Path("runs/soak-async"), help="of both runs (default runs/soak-async)"
    )
    options = parser.parse_args()
    if options.folder.exists():
        parser.error(f"--folder {options.folder} exists; remove it, or name another one")
    options.folder.mkdir(parents=True)
    say, chance = Say(), random.Random(options.seed)
    steps = 8 * (options.kills + 1)
    command = [str(Path(sys.executable).with_name("hybridengine")), "train", options.config, *TINY]
    command += [f"run.steps={steps}", f"run.folder={options.folder}", "resume=auto"]

    def run_of(name: str, *overrides: str) -> RunProcess:
        log = options.folder / f"{name}.log"
        return RunProcess([*command, f"run.name={name}", *overrides], log, options.folder / name)

    killed = run_of("killed")
    try:
        for number in range(options.kills):
            await_rows(killed, steps, chance.randint(1, MOST_ROWS))
            time.sleep(chance.uniform(0.0, LONGEST_S))
            kill_everything(killed, 0)
            killed.status()
            say(f"kill {number + 1} of {options.kills}, with {len(latest_rows(killed.rows()))} rows")
            killed.start()
        finish(killed, steps)
    finally:
        killed.end()
    say("the killed run has ended; repeating its order of calls")
    repeated = run_of("repeated", f"generation.replay={killed.folder / CALLS_FILE}")
    try:
        finish(repeated, steps)
    finally:
        repeated.end()

    rows = latest_rows(killed.rows())[1:]
    problems = []
    if [row["step"] for row in rows] != [*range(1, steps + 1)]:
        problems.append("not every step has one row")
    if (oldest := max(map(age, rows))) > ETA:
        problems.append(f"a token of age {oldest:g} was trained, and the bound is {ETA}")
    if digest(killed.folder) != digest(repeated.folder):
        problems.append("the weights differ")
    for problem in problems:
        say(f"FAILED: {problem}")
    if not problems:
        say(
            f"{options.kills} kills: the same weights as without any, oldest token {oldest:g} of at most {ETA}"
        )
    return 1 if problems else 0


def await_rows(run: RunProcess, steps: int, number: int) -> None:
    """Wait until a run has written a number of rows more."""
    if len([*islice(rows_of(run, steps), number)]) < number:
        raise SystemExit(f"{run.folder.name} has ended:\n{run.log_text()[-3000:]}")


def finish(run: RunProcess, steps: int) -> None:
    """Wait for the end of a run."""
    for _ in rows_of(run, steps):
        pass
    if run.status() != 0:
        raise SystemExit(f"{run.folder.name} failed:\n{run.log_text()[-3000:]}")


def age(row: Row) -> float:
    """Return the age of the oldest token that was trained; the update itself refuses one beyond the bound."""
    oldest = float(row["staleness/age_max"] or 0)
    return min(oldest, ETA) if row["staleness/older_share"] else oldest


if __name__ == "__main__":
    sys.exit(main())
