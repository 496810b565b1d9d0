"""`hybridengine rehearse`: run one iteration of a configuration without its devices, and count what it needs."""

from __future__ import annotations

import argparse

from hybridengine.cli.options import add_json_option, between, check_generates
from hybridengine.cli.outputs import check_outputs, emit, show_status
from hybridengine.config import RunConfig, load_config, model_shape
from hybridengine.config.sections import MAIN_POOL
from hybridengine.errors import ConfigError

DESCRIPTION = """Run one iteration of a configuration on one of its ranks, without devices and without the other ranks:
build, load, switch to generation, prefill and decode, log-probs, updates, save. The code is that of a run; tensors have
shapes and no values, and messages go nowhere. Prints the memory of each phase beside the planner's, and the messages of
each group. A laptop rehearses a rank of 128 in some minutes with 1 GiB of memory."""

EPILOG = """examples:
  hybridengine rehearse configs/llama3-70b-16nodes.yaml                    rank 0
  hybridengine rehearse configs/llama3-70b-16nodes.yaml --ranks stages     one rank of each pipeline stage
  hybridengine rehearse CONFIG actor.parallel=2-8-8 --rank 64 --json rank-64.json
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    option = parser.add_argument
    option("config", metavar="CONFIG", help="YAML file of the run")
    option(
        "overrides", nargs="*", default=[], metavar="KEY=VALUE", help="values that replace those of the file"
    )
    which = parser.add_mutually_exclusive_group()
    which.add_argument(
        "--rank", type=between(0, 2**20), metavar="N", help="rank of the actor's pool to rehearse (default 0)"
    )
    which.add_argument(
        "--ranks",
        choices=["stages"],
        help="rehearse the first rank of each pipeline stage, one after another",
    )
    add_json_option(parser)


def run(options: argparse.Namespace) -> int:
    from hybridengine.drivers.dataflow import check_functions
    from hybridengine.rehearsal.planned import planned_peaks
    from hybridengine.rehearsal.processes import rehearse_ranks
    from hybridengine.rehearsal.report import rehearsal_json, rehearsal_lines

    config = load_config(options.config, options.overrides, dry_run=True)
    check_generates(config, "rehearse")
    check_outputs({"--json": options.json}, {"CONFIG": options.config})
    check_functions(config.algorithm)
    if model_shape(config).vision is not None:
        raise ConfigError(
            f"rehearsals have no images, and {model_shape(config).family} reads them; rehearse its decoder, such as"
            " Qwen2.5 of the same size, and add the vision tower that --dry-run shows"
        )
    ranks, num_ranks = _ranks(config, options), config.pools[MAIN_POOL].num_ranks
    planned, found = planned_peaks(config), []
    show_status(f"rank {ranks[0]}")
    for place, one in enumerate(rehearse_ranks(config, ranks), start=1):
        found.append(one)
        show_status(f"rank {ranks[place]}" if place < len(ranks) else "")
    emit(options, rehearsal_json(found, planned), rehearsal_lines(found, planned, num_ranks))
    return 0


def _ranks(config: RunConfig, options: argparse.Namespace) -> list[int]:
    grid = config.grid("actor")
    if options.ranks == "stages":
        return list(grid.groups("pp")[0])
    rank = options.rank or 0
    if rank >= grid.num_ranks:
        raise ConfigError(
            f"--rank {rank} must be below the {grid.num_ranks} ranks of the actor's pool; name one from 0 to"
            f" {grid.num_ranks - 1}"
        )
    return [rank]
