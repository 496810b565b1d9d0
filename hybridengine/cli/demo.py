"""`hybridengine demo`: the main job on this machine's CPU, with the configuration that the package carries."""

from __future__ import annotations

import argparse
from pathlib import Path

from hybridengine.cli import train

CONFIG = Path(__file__).with_name("demo.yaml")

DESCRIPTION = """Train a small model by PPO on four ranks of this machine's CPU, as configs/arithmetic.yaml says.
Megatron-core and vLLM run on the same ranks, with one copy of the weights. Takes some minutes, and writes runs/demo/."""

EPILOG = """examples:
  hybridengine demo                                 the job of `make train`
  hybridengine demo run.steps=3 warmup.steps=20     a minute of it
  hybridengine demo actor.generate=1-2 --dry-run    groups, plan and memory of other sizes; starts nothing
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    train.add_run_options(parser)
    parser.set_defaults(config=str(CONFIG))


def run(options: argparse.Namespace) -> int:
    options.overrides = ["cluster.device=cpu", *options.overrides]  # there may be fewer GPUs than ranks
    return train.run(options)
