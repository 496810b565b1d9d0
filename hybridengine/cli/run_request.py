"""Options that `plan` and `simulate` share: run, cluster, response lengths and sizes."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hybridengine.cli.options import check_generates
from hybridengine.config import RunConfig, load_config
from hybridengine.errors import ConfigError
from hybridengine.planning.costs.clusters import Cluster, load_planned_cluster
from hybridengine.planning.costs.lengths import FORMS, Lengths
from hybridengine.planning.costs.workload import Workload, workload_of
from hybridengine.planning.search.placements import Constraints

CALIBRATED = "calibrated.yaml"
"""Default cluster file, which `calibrate` writes."""
MOST_DEVICES = 4096
MOST_ROWS = 2**17
"""Largest number of rows per step, because rows are packed and generated one by one, as in a run."""


@dataclass(frozen=True)
class RunRequest:
    """Run to plan or simulate, and the devices for it."""

    config: RunConfig
    cluster: Cluster
    num_devices: int
    workload: Workload
    constraints: Constraints

    @property
    def figures(self) -> dict[str, Any]:
        """Figures of the request as JSON values."""
        return {
            "algorithm": self.workload.algorithm,
            "cluster": self.cluster.name,
            "num_devices": self.num_devices,
            "lengths": self.workload.lengths.name,
        }

    @property
    def num_generating(self) -> int:
        """Number of devices of engines on a pool of their own."""
        return sum(map(sum, self.config.engines))

    @property
    def title(self) -> str:
        return f"{self.workload.algorithm} on {self.num_devices} devices of {self.cluster.name}"

    @property
    def rows(self) -> str:
        """Rows of a step as text."""
        workload = self.workload
        return (
            f"{workload.num_prompts} prompts x {workload.samples_per_prompt}, {workload.prompt_tokens:g} tokens each,"
            f" responses {workload.lengths}"
        )


def add_run_options(parser: Any) -> None:
    """Add the options that name the run and the cluster."""
    option = parser.add_argument
    option("config", metavar="CONFIG", nargs="?", help="YAML file of the run")
    option("overrides", nargs="*", metavar="KEY=VALUE", help="values that replace those of the file")
    option("--cluster", metavar="FILE", help=f"YAML file of nodes, devices and links (default: {CALIBRATED})")
    option("--nodes", type=int, metavar="N", help="number of nodes, instead of the cluster file's")
    option("--devices", type=int, metavar="N", help="devices to use: part of a node, or whole nodes")
    option(
        "--lengths", metavar="LENGTHS",
        help=f"lengths of responses: {FORMS}, or the folder of a run (default: all of rollout.max_response_tokens)",
    )  # fmt: skip
    option(
        "--prompt-tokens", type=float, metavar="MEAN",
        help="mean number of tokens of a prompt (default: rollout.max_prompt_tokens)",
    )  # fmt: skip
    option(
        "--fix", action="append", default=[], metavar="NAME=SIZES",
        help="sizes of a model, e.g. actor=1-8-16 (p-t-d), 'actor=4-2-2 c=2 v=5' (context ranks and virtual stages),"
        " 'actor=4-4-2 e=8 etp=1' (parts and shards of experts), generate=1-2 (p_g-t_g), or 'generate=1-8 e=8'; can be"
        " repeated",
    )  # fmt: skip


def request_of(options: argparse.Namespace) -> RunRequest:
    """Return the run and the devices that the options name."""
    if options.config is None:
        raise ConfigError(
            "CONFIG is missing; name the YAML file of a run, e.g. configs/llama3-70b-16nodes.yaml"
        )
    config = load_config(options.config, options.overrides, dry_run=True, placed=False)
    check_generates(config, "plan or simulate")
    if "generation" in config.algorithm.roles:  # its pools are part of what is planned
        config = load_config(options.config, options.overrides, dry_run=True)
    if config.rollout.quantization != "none":
        raise ConfigError(
            f"rollout.quantization={config.rollout.quantization} has no prices yet; leave it out here, and see what it"
            " does to memory by `hybridengine train --dry-run`"
        )
    cluster = cluster_of(options, config.model.dtype)
    wanted = config.num_ranks if config.engines and options.devices is None else options.devices
    num_devices = devices_of(cluster, wanted)
    limit = config.rollout.max_response_tokens
    lengths_text = f"constant:{limit}" if options.lengths is None else options.lengths
    if lengths_text and Path(lengths_text).is_dir():
        from hybridengine.bench.calibration.measured_run import run_lengths

        lengths = run_lengths(lengths_text, limit)
    else:
        lengths = Lengths.of(lengths_text, limit)
    prompt_tokens = options.prompt_tokens
    if prompt_tokens is not None and not 1 <= prompt_tokens <= config.rollout.max_prompt_tokens:
        raise ConfigError(
            f"--prompt-tokens {prompt_tokens:g} must be from 1 to rollout.max_prompt_tokens="
            f"{config.rollout.max_prompt_tokens}; correct the one or the other"
        )
    if config.rows_per_step > MOST_ROWS:
        raise ConfigError(
            f"data.batch_size={config.data.batch_size} · rollout.samples_per_prompt={config.rollout.samples_per_prompt}"
            f" = {config.rows_per_step:,} rows in a step, and plans are made for up to {MOST_ROWS:,}; lower one of them"
        )
    workload = workload_of(config, lengths, prompt_tokens)
    constraints = Constraints.of(options.fix, options.placement, workload, num_devices)
    return RunRequest(config, cluster, num_devices, workload, constraints)


def cluster_of(options: argparse.Namespace, dtype: str) -> Cluster:
    """Return the cluster that the options name, or the calibrated one."""
    file = options.cluster or CALIBRATED
    if options.cluster is None and not Path(CALIBRATED).exists():
        raise ConfigError(
            f"--cluster is missing, and there is no {CALIBRATED} here; name a file of configs/clusters/, or measure this"
            " machine with hybridengine calibrate"
        )
    cluster = load_planned_cluster(file, dtype)
    return cluster if options.nodes is None else cluster.resized(options.nodes)


def devices_of(cluster: Cluster, wanted: int | None) -> int:
    """Return the number of devices to use: `wanted`, a part of a node or whole nodes, or all devices if None."""
    node, most = cluster.devices_per_node, min(cluster.num_devices, MOST_DEVICES)
    number = cluster.num_devices if wanted is None else wanted
    if not 1 <= number <= most or (number % node if number > node else node % number):
        raise ConfigError(
            f"--devices {number}{' (all of them)' if wanted is None else ''} must be a divisor of the {node} devices of a"
            f" node or whole nodes, at most {most} (cluster {cluster.name}); give another number, or --nodes"
        )
    return number
