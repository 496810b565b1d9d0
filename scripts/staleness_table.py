"""Exact match after asynchronous GRPO at several bounds on staleness, with and without a correction, over several seeds.

    .venv/bin/python scripts/staleness_table.py                      35 runs, about two hours on two cores
    .venv/bin/python scripts/staleness_table.py --seeds 2 --steps 8  a first look

All runs begin with the same weights, those after the supervised warm-up of configs/async-grpo.yaml. Runs that have ended
are not repeated: the same command continues after an interruption.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path
from statistics import mean, stdev

from rich.console import Console
from rich.table import Table

from hybridengine.cli.options import between
from hybridengine.report import keys
from hybridengine.report.step_rows import Row, latest_rows, read_rows

CONFIG = Path("configs/async-grpo.yaml")
ETAS = (0, 1, 4, 8)
CORRECTIONS = {"none": "algorithm.correction=null", "token_tis": "algorithm.correction.name=token_tis"}


def main() -> None:
    arguments = parse()
    console, folder = Console(), Path(arguments.folder)
    seeds = range(1, arguments.seeds + 1)
    warm = finished(folder, "warm", "run.steps=1", "actor.optimizer.lr=1e-12", "data.batch_size=8")
    start = [
        f"model.path={warm / 'final'}",
        "model.build=null",
        "warmup=null",
        f"run.steps={arguments.steps}",
    ]
    start.append(f"run.eval_every={arguments.steps}")
    found: dict[tuple[int, str], list[list[Row]]] = {}
    for seed in seeds:
        for eta, correction in cells():
            name = f"eta{eta}-{correction}-seed{seed}"
            overrides = [f"run.seed={seed}", f"staleness.max_versions={eta}", CORRECTIONS[correction]]
            rows = latest_rows(read_rows(finished(folder, name, *start, *overrides)))
            found.setdefault((eta, correction), []).append(rows)
            console.print(
                f"{name}: {number(rows[0], keys.EXACT_MATCH):.1%} -> {number(rows[-1], keys.EXACT_MATCH):.1%}"
            )
    console.print(table(found, arguments.steps))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=between(2, 100), default=5, help="number of seeds (5)")
    parser.add_argument("--steps", type=between(1, 10_000), default=20, help="iterations of each run (20)")
    parser.add_argument("--folder", default="runs/staleness", help="folder of the runs (runs/staleness)")
    return parser.parse_args()


def cells() -> list[tuple[int, str]]:
    """Return the bounds and corrections; tokens that are not stale need none."""
    return [(eta, correction) for eta in ETAS for correction in CORRECTIONS if eta or correction == "none"]


def finished(folder: Path, name: str, *overrides: str) -> Path:
    """Return the folder of a run that has ended, after carrying it out unless an earlier call did."""
    run = folder / name
    if not (run / "final").exists():
        command = [
            sys.executable,
            "-m",
            "hybridengine.cli.main",
            "train",
            str(CONFIG),
            f"run.folder={folder}",
        ]
        options = [f"run.name={name}", "run.live=false", "checkpoint.every=0", "resume=never", *overrides]
        ended = subprocess.run([*command, *options], capture_output=True, text=True, check=False)
        if ended.returncode:
            raise SystemExit(f"{name} failed with status {ended.returncode}:\n{ended.stdout}{ended.stderr}")
    return run


def number(row: Row, key: str) -> float:
    return float(row[key] or 0)


def table(found: dict[tuple[int, str], list[list[Row]]], steps: int) -> Table:
    """Return mean and standard deviation over the seeds."""
    result = Table(title=f"{steps} iterations, mean and standard deviation over seeds")
    for title in ("eta", "correction", "exact match before", "after", "mean age", "older than eta"):
        result.add_column(title)
    for (eta, correction), runs in found.items():
        after = [number(rows[-1], keys.EXACT_MATCH) for rows in runs]
        trained = [row for rows in runs for row in rows[1:]]
        result.add_row(
            str(eta),
            correction,
            f"{mean(number(rows[0], keys.EXACT_MATCH) for rows in runs):.1%}",
            f"{mean(after):.1%} ± {stdev(after):.1%}",
            f"{mean(number(row, 'staleness/age_mean') for row in trained):.2f}",
            f"{mean(number(row, 'staleness/older_share') for row in trained):.1%}",
        )
    return result


if __name__ == "__main__":
    main()
