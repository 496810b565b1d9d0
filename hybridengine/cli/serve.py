"""`hybridengine serve`: serve clients of the Tinker API."""

from __future__ import annotations

import argparse

from hybridengine.config import load_config
from hybridengine.importing import import_module

DESCRIPTION = """Serve clients of the Tinker API: their scripts train and sample the model of a configuration file on its
actor's ranks. Of the configuration, model, cluster, actor, generation.parallel, reference, rollout,
timeouts, faults and serve are used."""

EPILOG = """examples:
  hybridengine serve configs/serve.yaml model.path=runs/arithmetic/final       prints address and key
  hybridengine serve configs/serve.yaml serve.port=9000 serve.api_key=tml-mine
  TINKER_BASE_URL=http://127.0.0.1:8000 TINKER_API_KEY=tml-... python -m tinker_cookbook.recipes...   a client
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    option = parser.add_argument
    option("config", metavar="CONFIG", help="YAML file, e.g. configs/serve.yaml")
    option(
        "overrides", nargs="*", default=[], metavar="KEY=VALUE",
        help="values that replace those of the file, e.g. serve.port=9000",
    )  # fmt: skip


def run(options: argparse.Namespace) -> int:
    config = load_config(options.config, options.overrides, serves=True)
    import_module("hybridengine.serving.serve").serve(config)
    return 0
