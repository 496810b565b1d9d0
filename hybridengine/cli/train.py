"""`hybridengine train`: train a model as a configuration file says."""

from __future__ import annotations

import argparse

from hybridengine.config import load_config

DESCRIPTION = """Train a model as a configuration file says. Writes runs/NAME/: metrics.jsonl (a row per step),
tensorboard/, and the trained model as a Hugging Face checkpoint."""

EPILOG = """examples:
  hybridengine train configs/arithmetic.yaml                       the demo: four ranks on a CPU
  hybridengine train configs/arithmetic.yaml actor.generate=1-2    any key of the file can be overridden
  hybridengine train configs/llama3-70b-16nodes.yaml --dry-run     groups, plan and memory; starts nothing
  hybridengine train configs/arithmetic.yaml resume=auto           resume from the newest complete checkpoint
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", metavar="CONFIG", help="YAML file, e.g. configs/arithmetic.yaml")
    add_run_options(parser)


def add_run_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of a run other than its file."""
    option = parser.add_argument
    option(
        "overrides", nargs="*", default=[], metavar="KEY=VALUE",
        help="values that replace those of the file, e.g. actor.parallel=2-2-1 (p-t-d), actor.generate=1-1 (p_g-t_g)",
    )  # fmt: skip
    option("--dry-run", action="store_true", help="print groups, plan and memory estimate, and start nothing")


def run(options: argparse.Namespace) -> int:
    config = load_config(options.config, options.overrides, dry_run=options.dry_run)
    if options.dry_run:
        from hybridengine.training.dry_run import print_dry_run

        print_dry_run(config)
    else:
        from hybridengine.training.run import train

        train(config)
    return 0
