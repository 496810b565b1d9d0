"""Options that the commands of `hybridengine launch` share."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from hybridengine.cli.options import between
from hybridengine.cli.outputs import write_outputs
from hybridengine.launch.output import written

MAX_COUNT = 65_536
START_LIMIT_S = 900.0
RETRIES = 5


def add_run_options(parser: argparse.ArgumentParser) -> None:
    """Add the configuration of the run and its overrides."""
    option = parser.add_argument
    option("config", metavar="CONFIG", help="YAML file of the run; the same path on every node")
    option(
        "overrides", nargs="*", default=[], metavar="KEY=VALUE", help="values that replace those of the file"
    )


def add_size_options(parser: argparse.ArgumentParser) -> None:
    """Add the sizes of nodes."""
    option, count = parser.add_argument, between(1, MAX_COUNT)
    option(
        "--gpus-per-node", type=count, metavar="N",
        help="GPUs of a node, on which pools may share it (default: the most ranks that a pool has on one node; none with"
        " cluster.device=cpu or auto)",
    )  # fmt: skip
    option("--cpus-per-node", type=count, metavar="N", help="CPUs of a node that the launch asks for")


def add_start_limit(parser: argparse.ArgumentParser) -> None:
    """Add `--start-limit SECONDS`."""
    parser.add_argument(
        "--start-limit", type=between(1, 86_400, float), default=START_LIMIT_S, metavar="SECONDS",
        help="time for all nodes to join, after which the launch ends and names those that are missing",
    )  # fmt: skip


def add_network_options(parser: argparse.ArgumentParser) -> None:
    """Add `--interface NAME` and `--metrics-port N`."""
    parser.add_argument(
        "--interface", metavar="NAME",
        help="network interface of the nodes, such as eth0 (default: the first one over which all reach the first node)",
    )  # fmt: skip
    parser.add_argument(
        "--metrics-port", type=between(1, 65_535), metavar="N",
        help="port of each node at which Prometheus reads metrics, without a token (default: none; on one node, a port on"
        " loopback)",
    )  # fmt: skip


def node_options(options: argparse.Namespace) -> list[str]:
    """Return the options of `launch node` that another command's options imply."""
    given = ["--start-limit", f"{options.start_limit:g}"]
    for key in ("gpus_per_node", "cpus_per_node", "interface", "metrics_port"):
        if (value := getattr(options, key)) is not None:
            given += [f"--{key.replace('_', '-')}", str(value)]
    return given


def add_output_options(parser: argparse.ArgumentParser, submit: str) -> None:
    """Add `--output FILE` and `--submit`, which runs the program `submit`."""
    parser.add_argument("--output", type=Path, metavar="FILE", help="write it to FILE instead of printing it")
    parser.add_argument("--submit", action="store_true", help=f"hand it to {submit} instead of printing it")


def deliver(options: argparse.Namespace, text: str, submit: Callable[[str], None]) -> None:
    """Write a script or manifest to the file that the options name, or submit it, or print it."""
    if options.output is not None:
        write_outputs({"--output": (options.output, text)})
    if options.submit:
        submit(text)
    elif options.output is None:
        sys.stdout.write(text)


def note(text: str) -> None:
    """Print a line of progress to stderr; if it cannot be written, it is lost, and the command continues."""
    with suppress(OSError):
        written(f"launch: {text}\n".encode(errors="replace"), sys.stderr, lambda: True)
