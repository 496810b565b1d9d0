"""Asynchronous GRPO beside synchronous GRPO on as many ranks, and beside what `hybridengine simulate` predicts.

    .venv/bin/python scripts/measure_async.py                    all runs, about 20 minutes on two cores
    .venv/bin/python scripts/measure_async.py --steps 12         sooner done, less accurate
    .venv/bin/python scripts/measure_async.py --push             only the pause for new weights, by size of the model
    .venv/bin/python scripts/measure_async.py --pinned here.yaml  no emulated time: a core for each of two ranks

The runs are real: Ray, Megatron-core and vLLM with a tiny model, on 4 ranks; synchronous runs train and generate on all
of them, asynchronous ones train on two and generate with two engines. Only a GPU's time is emulated: ranks sleep until
an engine step, a forward pass or an update has taken the time that the planner predicts (scripts/emulated_time.py).
The simulator gets the same times, this machine's links, and the time between two calls of an engine in the first run.
With --pinned, all time is real: the synchronous run has two ranks, and asynchronous ones a trainer and an engine, on a
core each. The simulator then gets what `hybridengine calibrate --ranks 2 --out here.yaml` has written, and nothing else.
Responses have lognormal lengths of coefficient of variation 0.8, the same in all runs. Shares, ages and speeds are those
of the steady state: without the first steps, and without the last ones, for which no more prompts are begun.

A run that --folder has already is not repeated.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import fmean, median
from typing import Any

import emulated_time
import yaml
from omegaconf import OmegaConf

from hybridengine.bench.calibration.machine_rates import measured_cluster
from hybridengine.cli.main import main as hybridengine
from hybridengine.cli.options import between
from hybridengine.config import RunConfig, load_config
from hybridengine.errors import ConfigError
from hybridengine.formatting import aligned, format_bytes, format_seconds
from hybridengine.planning.costs.clusters import Cluster, load_cluster
from hybridengine.report import keys
from hybridengine.report.step_rows import Row, latest_rows, read_rows
from hybridengine.report.timeline import TIMELINE_FILE, read_timeline
from hybridengine.training import launch

SIMULATED_STEPS = 400
MACHINE = "machine.yaml"
SYNCHRONOUS: dict[str, Any] = {
    "run": {"eval_every": 0, "seed": 7, "live": False},
    "cluster": {"ranks_per_node": [4]},
    "model": {
        "build": {
            "family": "qwen2",
            "num_layers": 2,
            "hidden_size": 128,
            "ffn_hidden_size": 256,
            "num_heads": 4,
            "num_kv_heads": 2,
            "head_dim": 32,
            "max_positions": 288,
        }
    },
    "data": {"batch_size": 16, "task": {"name": "arithmetic", "train_rows": 512, "eval_rows": 4}},
    "actor": {"parallel": "1-1-4", "kl_loss_coef": 0.02, "micro_batch_tokens": 512},
    "reference": {"micro_batch_tokens": 512},
    "reward": {"function": "hybridengine.data.tasks:length_cost"},
    "rollout": {
        "max_prompt_tokens": 16,
        "max_response_tokens": 256,
        "samples_per_prompt": 4,
        "max_num_seqs": 16,
        "kv_cache_bytes": "32MiB",
    },
    "algorithm": {"name": "grpo"},
    "checkpoint": {"every": 0},
}
ASYNCHRONOUS: dict[str, Any] = {
    "cluster": {
        "ranks_per_node": [2],
        "pools": {"engines": {"roles": ["generation"], "ranks_per_node": [2]}},
    },
    "actor": {"parallel": "1-1-2"},
    "generation": {"steps_per_call": 8},
    "algorithm": {"name": "async_grpo", "correction": {"name": "token_tis"}},
}
PINNED: dict[str, Any] = {
    "cluster": {"ranks_per_node": [2]},
    "model": {
        "build": {
            "num_layers": 4,
            "hidden_size": 256,
            "ffn_hidden_size": 704,
            "num_heads": 8,
            "num_kv_heads": 4,
        }
    },
    "actor": {"parallel": "1-1-2"},
}
"""Sections of the synchronous run on two ranks with a core each."""
PINNED_ASYNCHRONOUS: dict[str, Any] = {
    "cluster": {"ranks_per_node": [1], "pools": {"engines": {"ranks_per_node": [1]}}},
    "actor": {"parallel": "1-1-1"},
}
BOUNDS = (("token", 2), ("response", 1), ("token", 0))
"""Bounds of the asynchronous runs: kind, and largest age in versions. The first lets engines work all the time."""

PUSHED = (256, 768, 1536)
"""Hidden sizes of the models whose pushes are measured."""
SHORT: dict[str, Any] = {
    "data": {"batch_size": 4},
    "rollout": {"max_response_tokens": 16, "samples_per_prompt": 2, "max_num_seqs": 4},
    "staleness": {"max_versions": 2},
}


@dataclass(frozen=True)
class Measured:
    """A run that has ended."""

    folder: Path
    config: RunConfig

    @cached_property
    def rows(self) -> list[Row]:
        """Rows of the steady state: the first steps warm up and fill the queue, and the last ones empty it."""
        eta, rows = self.max_age, latest_rows(read_rows(self.folder))[1:]
        return rows[1 + 2 * eta : len(rows) - eta]

    @property
    def max_age(self) -> int:
        return self.config.staleness.max_versions if self.config.engines else 0

    def values(self, key: str) -> list[float]:
        return [float(row.get(key) or 0.0) for row in self.rows]

    @cached_property
    def seconds(self) -> float:
        return sum(self.values(keys.STEP_S))

    @property
    def tokens(self) -> float:
        """Response tokens."""
        return sum(self.values(keys.RESPONSE_TOKENS_MEAN)) * self.config.rows_per_step

    @property
    def prompt_tokens(self) -> float:
        return (sum(self.values(keys.TOKENS)) - self.tokens) / (len(self.rows) * self.config.rows_per_step)

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds

    @property
    def pauses_s(self) -> list[float]:
        """Pause of the slowest engine for new weights, in each step."""
        return self.values(keys.time_key("receive_weights"))

    def idle_share(self, pools: str) -> float:
        """Return the idle share of the pools whose names begin with a text; pauses for new weights are idle."""
        names = [name for name in self.rows[0] if name.startswith(f"idle/{pools}")]
        shares = [fmean(float(row[name] or 0.0) for name in names) for row in self.rows]
        idle_s = sum(share * row for share, row in zip(shares, self.values(keys.STEP_S), strict=True))
        return (idle_s + (sum(self.pauses_s) if pools == "engines" else 0.0)) / self.seconds

    def age_shares(self) -> list[float]:
        """Return the share of the tokens of each age, and of older ones."""
        names = [f"staleness/age_{age}_share" for age in range(self.max_age + 1)]
        tokens = self.values(keys.RESPONSE_TOKENS_MEAN)
        return [
            sum(share * count for share, count in zip(self.values(name), tokens, strict=True)) / sum(tokens)
            for name in (*names, "staleness/older_share")
        ]


def train(folder: Path, name: str, steps: int, *sections: Mapping[str, Any]) -> Measured:
    """Carry out a run with sections in place of those of the synchronous one, or find it in the folder."""
    trees = SYNCHRONOUS, {"run": {"folder": str(folder), "steps": steps}}, *sections
    config = folder / f"{name}.yaml"
    OmegaConf.save(OmegaConf.merge(*trees), config)
    run = Measured(folder / name, load_config(config))
    if not (run.folder / "final").exists():
        print(f"{name}: {steps} steps ...", flush=True)
        out = io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
            status = hybridengine(["train", str(config)])
        if status:
            raise SystemExit(f"{name} failed:\n{out.getvalue()[-4000:]}")
    return run


def call_seconds(run: Measured) -> float:
    """Return the mean time between two calls of an engine, in a run whose engines have requests all the time."""
    steps = {row[keys.STEP] for row in run.rows}
    spans = read_timeline(run.folder / TIMELINE_FILE).spans
    num_calls = sum(span.step in steps and span.name.startswith("generation.") for span in spans)
    idle_s = run.idle_share("engines") * run.seconds - sum(run.pauses_s)
    return idle_s * len(run.config.engines) / num_calls


def simulated(run: Measured, cluster: Path, lengths: str) -> dict[str, Any]:
    """Return the figures of `hybridengine simulate` for the configuration of a run."""
    arguments = ["simulate", f"{run.folder}.yaml", "--cluster", str(cluster), "--lengths", lengths, "--json"]
    arguments += ["--prompt-tokens", f"{run.prompt_tokens:.3f}", "--steps", str(SIMULATED_STEPS)]
    print("hybridengine", *arguments, flush=True)
    with contextlib.redirect_stdout(io.StringIO()) as out:
        if hybridengine(arguments):
            raise SystemExit(1)
    return json.loads(out.getvalue())


def comparison(run: Measured, found: Mapping[str, Any]) -> list[list[str]]:
    """Return the lines of the table of an asynchronous run: figure, measured, simulated, difference."""
    one, ages = found["asynchronous"], list(range(run.max_age + 1))
    counts = {int(age): count for age, count in one["staleness_tokens"].items()}
    total = sum(counts.values())
    shares = [counts.get(age, 0) / total for age in ages]
    pairs = [
        ("trainers idle", run.idle_share("main"), one["train_idle_share"]),
        ("engines idle", run.idle_share("engines"), one["generate_idle_share"]),
    ]
    names = [f"tokens of age {age}" for age in ages] + ["older tokens"]
    pairs += zip(names, run.age_shares(), [*shares, 1 - sum(shares)], strict=True)
    lines = [[name, f"{a:.1%}", f"{b:.1%}", f"{100 * (a - b):+.1f} points"] for name, a, b in pairs]
    a, b = run.tokens_per_s, one["tokens_per_s"]
    lines.append(["tokens/s", f"{a:.0f}", f"{b:.0f}", f"{a / b - 1:+.1%}"])
    a, b = median(run.pauses_s), one["update_s"]
    return [*lines, ["pause for new weights", format_seconds(a), f"{1000 * b:.1f} ms", ""]]


def written(cluster: Cluster, file: Path) -> None:
    file.write_text(yaml.safe_dump(cluster.model_dump(mode="json", exclude_none=True)))


def machine(folder: Path) -> Cluster:
    """Return the measured links of this machine, which are in the folder from then on."""
    if not (folder / MACHINE).exists():
        written(measured_cluster(4, on_gpus=False), folder / MACHINE)
    return load_cluster(folder / MACHINE)


def compare(folder: Path, steps: int, pinned: Cluster | None) -> None:
    """Carry out all runs with emulated time, or on pinned cores, and print what was measured and simulated."""
    launch.WORKERS |= emulated_time.PINNED_WORKERS if pinned else emulated_time.WORKERS
    name = "pinned-" if pinned else ""
    both, other = ([PINNED], [PINNED_ASYNCHRONOUS]) if pinned else ([], [])
    cluster = folder / f"{name}cluster.yaml"
    fewer = max(8, steps // 2)  # of slow steps
    synchronous = train(folder, f"{name}synchronous", fewer, *both)
    ratios = [["over synchronous", "measured", "simulated", "measured, without older tokens"]]
    for bound, eta in BOUNDS:
        section = {"staleness": {"bound": bound, "max_versions": eta}}
        sections = *both, ASYNCHRONOUS, *other, section
        run = train(folder, f"{name}{bound}-{eta}", steps if eta else fewer, *sections)
        if len(ratios) == 1:
            written(pinned or emulated_time.emulated_cluster(machine(folder), call_seconds(run)), cluster)
        found = simulated(run, cluster, emulated_time.LENGTHS)
        heading = [f"{bound}, eta = {eta}", "measured", "simulated", "difference"]
        print("\n".join(aligned([heading, *comparison(run, found)])), flush=True)
        a = run.tokens_per_s / synchronous.tokens_per_s
        b = found["asynchronous"]["tokens_per_s"] / found["synchronous"]["tokens_per_s"]
        ratios.append([heading[0], f"{a:.2f}", f"{b:.2f}", f"{a * (1 - run.age_shares()[-1]):.2f}"])
    print("\n".join(aligned(ratios)))


def compare_pushes(folder: Path, steps: int) -> None:
    """Carry out short runs without emulated time, and print the pause for new weights of models of several sizes."""
    machine(folder)
    lines = [["hidden size", "to each engine", "pause: median", "longest", "simulated"]]
    for width in PUSHED:
        heads = {"num_heads": width // 64, "num_kv_heads": width // 64, "head_dim": 64}
        model = {"hidden_size": width, "ffn_hidden_size": 3 * width, **heads}
        run = train(folder, f"push-{width}", steps, ASYNCHRONOUS, SHORT, {"model": {"build": model}})
        num_bytes = median(run.values(keys.RECEIVED_BYTES))
        found = simulated(run, folder / MACHINE, "constant:16")["asynchronous"]["update_s"]
        pauses = [format_seconds(seconds) for seconds in (median(run.pauses_s), max(run.pauses_s), found)]
        lines.append([str(width), format_bytes(num_bytes), *pauses])
    print("\n".join(aligned(lines)))


def main(arguments: Sequence[str] | None = None) -> int:
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    option = parser.add_argument
    option(
        "--folder", type=Path, default=Path("runs/measure-async"), metavar="DIR", help="folder of the runs"
    )
    option(
        "--steps", type=between(8, 1000), default=24, metavar="N", help="iterations of an asynchronous run"
    )
    instead = parser.add_mutually_exclusive_group().add_argument
    instead("--push", action="store_true", help="only the pause for new weights, by size of the model")
    instead(
        "--pinned",
        type=Path,
        metavar="FILE",
        help="a core for each rank, and no emulated time; FILE is that of `hybridengine calibrate --ranks 2`",
    )
    options = parser.parse_args(arguments)
    try:
        pinned = load_cluster(options.pinned) if options.pinned else None
    except ConfigError as error:
        parser.error(str(error))
    options.folder.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("RAY_worker_niceness", "0")  # by default, all other work on the machine comes first
    if options.push:
        compare_pushes(options.folder, options.steps)
    else:
        compare(options.folder, options.steps, pinned)
    return 0


if __name__ == "__main__":
    sys.exit(main())
