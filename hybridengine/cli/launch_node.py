"""`hybridengine launch node`: what each node of a launch runs."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from hybridengine.checkpoints.run_lock import LOCK_FILE
from hybridengine.cli.launch_options import (
    MAX_COUNT,
    add_network_options,
    add_run_options,
    add_size_options,
    add_start_limit,
    note,
)
from hybridengine.cli.options import between
from hybridengine.errors import ConfigError
from hybridengine.launch.node import NodeTask, run_node
from hybridengine.launch.shape import Shape, launched_config, number_of_cpus, shape_of, train_arguments
from hybridengine.machine import num_gpus

DESCRIPTION = """Take part in a launch: find the address at which the other nodes reach this one, start Ray there with the
token of the launch, and wait until all nodes have joined. The first node then carries out the run; the others end with
it.

`hybridengine launch slurm` and `hybridengine launch ssh` start this command on every node; another launcher may do so as
well. All nodes need the same folder, which is on a file system that they share. Signals are passed on to the run, which
saves its step. The exit status of the first node is that of the run, or 75 if a node was lost and another attempt may
succeed."""

EPILOG = """examples:
  hybridengine launch node configs/arithmetic.yaml --hosts a,b --index 0 --launch-folder runs/arithmetic/1    on host a
  hybridengine launch node configs/arithmetic.yaml --hosts a,b --index 1 --launch-folder runs/arithmetic/1    on host b
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    add_run_options(parser)
    option = parser.add_argument
    option("--hosts", required=True, metavar="A,B,...", help="names of all nodes, the first of which leads")
    option(
        "--index", type=between(0, MAX_COUNT), metavar="K",
        help="position of this node in --hosts, from 0 (default: SLURM_NODEID)",
    )  # fmt: skip
    option(
        "--launch-folder", required=True, type=Path, metavar="FOLDER",
        help="folder of this launch, new and seen by all nodes",
    )  # fmt: skip
    add_size_options(parser)
    add_network_options(parser)
    option("--address", metavar="IP", help="address of this node, in place of the one that is found")
    option(
        "--attached",
        action="store_true",
        help="end when standard input does; its lines `stop`, `lost HOST` and `over` are those of launch ssh",
    )
    add_start_limit(parser)


def run(options: argparse.Namespace) -> int:
    config = launched_config(options.config, options.overrides)
    shape = shape_of(config, options.gpus_per_node, options.cpus_per_node)
    hosts, index = _place(options)
    if len(hosts) < shape.num_nodes:
        raise ConfigError(
            f"--hosts names {len(hosts)} hosts, and the run needs {shape}; name more, or choose smaller parallel sizes"
        )
    task = NodeTask(
        hosts=hosts,
        index=index,
        folder=options.launch_folder,
        num_cpus=offered_cpus(shape, options.cpus_per_node),
        num_gpus=offered_gpus(shape.num_gpus, config.cluster.device),
        run=lambda address: train_arguments(options.config, options.overrides, address),
        lock_file=config.run_folder / LOCK_FILE,
        start_limit_s=options.start_limit,
        interface=options.interface,
        address=options.address,
        attached=options.attached,
        metrics_port=options.metrics_port,
    )
    return run_node(task, note)


def offered_cpus(shape: Shape, given: int | None) -> int:
    """Return the CPUs that Ray offers here. Without GPUs they are the room for ranks, and no more than the launch has
    counted: pools would share nodes while others are left without ranks."""
    return (given or max(number_of_cpus(), shape.most_ranks)) if shape.num_gpus else shape.most_ranks


def offered_gpus(wanted: int, device: str) -> int | None:
    """Return the GPUs that Ray offers here: as many as are wanted, if they are there, since Ray believes any number."""
    if wanted:
        return min(wanted, num_gpus())
    return 0 if device == "cpu" else None


def _place(options: argparse.Namespace) -> tuple[tuple[str, ...], int]:
    """Return the names of all nodes and the position of this one."""
    hosts = tuple(name.strip() for name in options.hosts.split(","))
    if not all(hosts):
        raise ConfigError(
            f"--hosts {options.hosts!r} has an empty name; write names with commas: node1,node2"
        )
    twice = next((name for name in hosts if hosts.count(name) > 1), None)
    if twice is not None:
        raise ConfigError(
            f"--hosts names {twice} twice; a host is one node, whose ranks are in ranks_per_node"
        )
    index = options.index
    if index is None:
        given = os.environ.get("SLURM_NODEID", "")
        if not given.isdecimal():
            raise ConfigError(
                "--index is missing, and SLURM_NODEID is not set; give the node's position in --hosts"
            )
        index = int(given)
    if index >= len(hosts):
        raise ConfigError(
            f"--index {index} must be below {len(hosts)}, the number of --hosts; correct one of them"
        )
    return hosts, index
