"""Runs recipes of configs/recipes and compares their rewards with the expected curves (docs/how-to/recipes.md).

    python -m scripts.check_recipes                           all recipes, one after another
    python -m scripts.check_recipes lake --seed 1 --update    make a run of one recipe part of its expected curve
    python -m scripts.check_recipes --draw                    draw docs/images/recipes.svg from the expected curves

The exit status is 0 if all runs are as expected, 1 if one is not or has failed, and 2 for wrong arguments.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import psutil

from hybridengine.config import load_config
from hybridengine.errors import HybridEngineError
from scripts.recipe_curves import (
    Part,
    SeedRun,
    check_spread,
    compare,
    draw,
    page_table,
    read_curve,
    read_run,
    with_run,
    write_curve,
)

ROOT = Path(__file__).parents[1]
RECIPES = ROOT / "configs" / "recipes"
CURVES = RECIPES / "curves"
PICTURE = ROOT / "docs" / "images" / "recipes.svg"
SHARED = "base"
"""File that recipes are based on, which is none itself."""
POLL_S = 1.0


def recipe_names() -> list[str]:
    """Return the names of all recipes."""
    return sorted(file.stem for file in RECIPES.glob("*.yaml") if file.stem != SHARED)


def train(name: str, seed: int, folder: Path) -> SeedRun:
    """Run a recipe; return its curve. Raises DataError if it failed."""
    os.chdir(ROOT)  # paths of configurations begin there
    folder.mkdir(parents=True, exist_ok=True)
    changes = [
        f"run.seed={seed}",
        f"run.folder={folder}",
        f"run.name={name}-seed{seed}",
        *_converted(name, folder),
    ]
    config = load_config(RECIPES / f"{name}.yaml", changes)
    shutil.rmtree(config.run_folder, ignore_errors=True)
    command = [sys.executable, "-m", "hybridengine.cli.main", "train", f"{RECIPES / name}.yaml", *changes]
    commit, start = _commit(), time.monotonic()
    with (folder / f"{config.run.name}.log").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        cpu_s = _cpu_seconds(process)
    rewards, held_out = read_run(config.run_folder, config.run.steps)
    return SeedRun(
        seed=seed,
        rewards=tuple(round(reward, 4) for reward in rewards),
        held_out=(round(held_out[0], 4), round(held_out[1], 4)),
        rows_per_step=config.rows_per_step,
        commit=commit,
        machine=_machine(),
        wall_s=round(time.monotonic() - start),
        cpu_s=round(cpu_s),
    )


def _converted(name: str, folder: Path) -> list[str]:
    """Convert a recipe's GGUF file, if it has one, once for all runs in a folder; return the changes that name the
    converted model."""
    file = RECIPES / f"{name}.yaml"
    model = load_config(file).model
    if model.gguf is None:
        return []
    described = Path(model.hf_config or "")
    config = load_config(file, [f"run.folder={folder}", f"run.name=converted-{described.stem}"])
    if not (config.model_folder / "model.safetensors").exists():
        from hybridengine.training.files import convert_gguf  # with torch, which takes seconds

        config.run_folder.mkdir(parents=True, exist_ok=True)
        convert_gguf(config)
    return ["model.gguf=null", "model.hf_config=null", f"model.path={config.model_folder}"]


def _cpu_seconds(process: subprocess.Popen[bytes]) -> float:
    """Wait for a process; return the processor time of it and of everything it started, to a second for each."""
    used: dict[tuple[int, float], float] = {}
    first = psutil.Process(process.pid)
    while process.poll() is None:
        for one in [first, *first.children(recursive=True)]:
            try:
                times = one.cpu_times()
                used[one.pid, one.create_time()] = times.user + times.system
            except psutil.NoSuchProcess:
                continue  # it ended between the two calls
        time.sleep(POLL_S)
    return sum(used.values())


def _commit() -> str:
    command = ["git", "-C", str(ROOT), "rev-parse", "--short=10", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip() or "unknown"


def _machine() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{len(os.sched_getaffinity(0))} cores, {models[0] if models else 'unknown processor'}"


def table(parts: Sequence[Part]) -> str:
    """Return a line for each part of a run."""
    lines = [f"  {'steps':>7}  {'reward':>6}  {'expected':>8}  {'tolerance':>9}"]
    for part in parts:
        verdict = "" if part.fits else "  below" if part.found < part.expected else "  above"
        lines.append(
            f"  {f'{part.first}-{part.last}':>7}  {part.found:6.3f}  {part.expected:8.3f}  {part.tolerance:9.3f}{verdict}"
        )
    return "\n".join(lines)


def check(name: str, seed: int, folder: Path, update: bool) -> bool:
    """Run a recipe and print how it compares with its curve, or add it to the curve; return True if it fits."""
    file = CURVES / f"{name}.json"
    try:
        known = read_curve(file)
        if not update:
            known = [run for run in known if run.seed != seed]  # the new run is one more, not one of these
            check_spread(known)  # before a run that nothing could be compared with
        run = train(name, seed, folder)
        print(
            f"{name}, seed {seed}: held-out score {run.held_out[0]:.3f} -> {run.held_out[1]:.3f};"
            f" {run.wall_s:.0f} s, {run.cpu_s:.0f} s of processor time",
            flush=True,
        )
        if update:
            write_curve(file, with_run(known, run))
            return True
        parts = compare(run.rewards, known)
    except HybridEngineError as error:
        print(f"{name}, seed {seed}: {error}", flush=True)
        return False
    print(table(parts), flush=True)
    return all(part.fits for part in parts)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return its exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("recipes", nargs="*", metavar="NAME", help="recipes to run; all by default")
    parser.add_argument(
        "--seed", type=int, default=1000, help="seed of the runs (default: 1000, of no curve)"
    )
    parser.add_argument("--folder", type=Path, default=ROOT / "runs" / "recipes", help="folder of the runs")
    parser.add_argument(
        "--update", action="store_true", help="add the runs to the expected curves, compare nothing"
    )
    parser.add_argument("--draw", action="store_true", help="only draw and print the expected curves")
    options = parser.parse_args(arguments)
    if options.seed < 0:
        parser.error(f"--seed {options.seed} must be at least 0")
    if options.folder.exists() and not options.folder.is_dir():
        parser.error(f"--folder {options.folder} is not a folder")
    names = options.recipes or recipe_names()
    if unknown := sorted({*names} - {*recipe_names()}):
        parser.error(f"{unknown[0]!r} is not a recipe; recipes are {', '.join(recipe_names())}")
    fits = [True]
    if not options.draw:
        fits = [check(name, options.seed, options.folder.resolve(), options.update) for name in names]
    if options.draw or options.update:
        curves = {file.stem: read_curve(file) for file in sorted(CURVES.glob("*.json"))}
        if curves:
            draw(curves, PICTURE)
        print(page_table(curves))
    return 0 if all(fits) else 1


if __name__ == "__main__":
    sys.exit(main())
