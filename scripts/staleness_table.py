"""Exact match after asynchronous GRPO at several bounds on staleness, with and without a correction, over several seeds.

    .venv/bin/python scripts/staleness_table.py                      40 runs, less than an hour on two cores
    .venv/bin/python scripts/staleness_table.py --seeds 2 --steps 8  a first look

The task is that of configs/async-grpo.yaml on one trainer and one engine, with small steps, so that the policy still
changes while tokens are old; the synchronous run has the trainer alone. All runs begin with the same weights, those
after the supervised warm-up. Runs that have ended are not repeated: the same command continues after an interruption.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path
from statistics import mean, stdev

from hybridengine.cli.options import between
from hybridengine.formatting import aligned
from hybridengine.report import keys
from hybridengine.report.step_rows import Row, latest_rows, read_rows

ETAS = (0, 1, 4, 8)
NUM_EVALS = 4
"""Evaluations of each run after the first."""
SETTING = (
    "cluster.ranks_per_node=[1]",
    "actor.parallel=1-1-1",
    "reference.parallel=1-1-1",
    "actor.ppo_epochs=1",
    "actor.optimizer.lr=1e-5",
    "data.batch_size=16",
    "data.task.eval_rows=768",
)
SYNCHRONOUS = ("configs/grpo.yaml",)
ASYNCHRONOUS = "configs/async-grpo.yaml", "cluster.pools.engines.ranks_per_node=[1]"
"""Configuration and overrides of a run."""
CORRECTIONS = {"none": "algorithm.correction=null", "token_tis": "algorithm.correction.name=token_tis"}

Cell = tuple[str, str]
"""Bound and correction of a line of the table."""


def main() -> None:
    arguments = parse()
    folder, seeds = Path(arguments.folder), range(1, arguments.seeds + 1)
    warm = finished(folder, "warm", *ASYNCHRONOUS, "run.steps=1", "actor.optimizer.lr=1e-12")
    start = [
        f"model.path={warm / 'final'}",
        "model.build=null",
        "warmup=null",
        f"run.steps={arguments.steps}",
        f"run.eval_every={arguments.steps // NUM_EVALS}",
    ]
    found: dict[Cell, list[list[Row]]] = {}
    for seed in seeds:
        for cell, settings in cells().items():
            name = f"{cell[0]}-{cell[1]}-seed{seed}"
            rows = latest_rows(read_rows(finished(folder, name, *settings, *start, f"run.seed={seed}")))
            found.setdefault(cell, []).append(rows)
            print(f"{name}: {' '.join(f'{value:.1%}' for value in evals(rows).values())}", flush=True)
    print(f"exact match after so many iterations, mean ± standard deviation of {len(seeds)} seeds")
    print("\n".join(aligned(table(found))))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=between(2, 100), default=5, help="number of seeds (5)")
    parser.add_argument("--steps", type=between(NUM_EVALS, 10_000), default=24, help="iterations (24)")
    parser.add_argument("--folder", default="runs/staleness", help="folder of the runs (runs/staleness)")
    return parser.parse_args()


def cells() -> dict[Cell, tuple[str, ...]]:
    """Return configuration and overrides of each line; tokens that are not stale need no correction."""
    found: dict[Cell, tuple[str, ...]] = {("synchronous", "none"): SYNCHRONOUS}
    for eta in ETAS:
        for name, correction in CORRECTIONS.items():
            if eta or name == "none":
                found[f"eta{eta}", name] = (*ASYNCHRONOUS, f"staleness.max_versions={eta}", correction)
    return found


def finished(folder: Path, name: str, config: str, *overrides: str) -> Path:
    """Return the folder of a run that has ended, after carrying it out unless an earlier call did."""
    run = folder / name
    if not (run / "final").exists():
        command = [sys.executable, "-m", "hybridengine.cli.main", "train", config, f"run.folder={folder}"]
        options = [f"run.name={name}", "run.live=false", "checkpoint.every=0", "resume=never"]
        ended = subprocess.run(
            [*command, *options, *SETTING, *overrides], capture_output=True, text=True, check=False
        )
        if ended.returncode:
            raise SystemExit(f"{name} failed with status {ended.returncode}:\n{ended.stdout}{ended.stderr}")
    return run


def evals(rows: list[Row]) -> dict[int, float]:
    """Return the exact match after each iteration at which it was measured."""
    measured = ((row[keys.STEP], row.get(keys.EXACT_MATCH)) for row in rows)
    return {int(step or 0): float(value) for step, value in measured if value is not None}


def table(found: dict[Cell, list[list[Row]]]) -> list[list[str]]:
    """Return mean and standard deviation over the seeds, below a heading."""
    steps = [*evals(next(iter(found.values()))[0])]
    lines = [["run", "correction", *map(str, steps), "mean age", "largest", "outside bound"]]
    for cell, runs in found.items():
        values = [[evals(rows)[step] for rows in runs] for step in steps]
        trained = [row for rows in runs for row in rows[1:]]
        ages = [float(row.get("staleness/age_mean") or 0) for row in trained]
        largest = max(float(row.get("staleness/age_max") or 0) for row in trained)
        shares = [f"{mean(one):.1%} ± {stdev(one):.1%}" for one in values]
        older = mean(float(row.get("staleness/older_share") or 0) for row in trained)
        lines.append([*cell, *shares, f"{mean(ages):.1f}", f"{largest:.0f}", f"{older:.1%}"])
    return lines


if __name__ == "__main__":
    main()
