"""`hybridengine launch ssh`: run on the hosts of a list."""

from __future__ import annotations

import argparse
import os
import secrets
import sys
import time
from pathlib import Path

from hybridengine.cli.launch_options import (
    RETRIES,
    add_network_options,
    add_run_options,
    add_size_options,
    add_start_limit,
    node_options,
    note,
)
from hybridengine.cli.options import between
from hybridengine.launch.shape import launched_config, shape_of
from hybridengine.launch.ssh import SshLaunch, launch, parse_hosts

DESCRIPTION = """Carry out a run on hosts that ssh reaches without a password, from this terminal. Each host runs
`hybridengine launch node` in the same folder, which is on a file system that all hosts share. Lines of output begin
with the host. Ctrl-C and SIGTERM let the run save its step; a lost connection does as well.

Hosts beyond those that the run needs are spare: they take the place of hosts that do not answer, and of hosts that fail,
after which the run resumes from its last checkpoint."""

EPILOG = """examples:
  hybridengine launch ssh configs/llama3-70b-16nodes.yaml --hostfile hosts.txt     one host a line; 16 of them
  hybridengine launch ssh configs/arithmetic.yaml --hosts a,b,c cluster.ranks_per_node=[2,2]     c is spare
  hybridengine launch ssh configs/arithmetic.yaml --hosts a,b --interface ib0 --setup 'source /etc/profile.d/cuda.sh'
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    add_run_options(parser)
    option = parser.add_argument
    listing = parser.add_mutually_exclusive_group(required=True)
    listing.add_argument("--hosts", metavar="A,B,...", help="hosts as ssh takes them")
    listing.add_argument("--hostfile", type=Path, metavar="FILE", help="file with one host a line")
    option(
        "--retries", type=between(0, 1000), default=RETRIES, metavar="N", help="new attempts after hosts fail"
    )
    option("--folder", default=os.getcwd(), metavar="FOLDER", help="folder in which hosts start")
    option(
        "--python", default=sys.executable, metavar="FILE", help="Python of the installation on every host"
    )
    option("--setup", default="", metavar="COMMANDS", help="shell commands that each host carries out first")
    option(
        "--ssh-option", action="append", default=[], metavar="NAME=VALUE",
        help="option of ssh, such as Port=2222 or IdentityFile=KEY; may be repeated",
    )  # fmt: skip
    add_size_options(parser)
    add_network_options(parser)
    add_start_limit(parser)


def run(options: argparse.Namespace) -> int:
    config = launched_config(options.config, options.overrides)
    shape = shape_of(config, options.gpus_per_node, options.cpus_per_node)
    hosts = parse_hosts(options.hosts, options.hostfile)
    name = f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(3)}"

    def arguments(chosen: list[str], index: int, attempt: int) -> list[str]:
        folder = config.run_folder / "launch" / f"{name}.{attempt}"
        names = ",".join(host.rpartition("@")[2] for host in chosen)
        place = ["--hosts", names, "--index", str(index), "--launch-folder", str(folder)]
        return [
            "launch",
            "node",
            options.config,
            *options.overrides,
            *place,
            *node_options(options),
            "--attached",
        ]

    plan = SshLaunch(
        hosts=hosts,
        num_nodes=shape.num_nodes,
        folder=options.folder,
        setup=options.setup,
        python=options.python,
        options=tuple(word for one in options.ssh_option for word in ("-o", one)),
        arguments=arguments,  # pyright: ignore[reportArgumentType]
        retries=options.retries,
    )
    note(f"{config.run.name}: {shape}; {len(hosts)} hosts are named")
    return launch(plan, note)
