"""`hybridengine episodes serve`: run the functions of `rollout.episode` for the ranks of another host."""

from __future__ import annotations

import argparse
import contextlib

from hybridengine.cli.options import between
from hybridengine.config import load_config
from hybridengine.errors import ConfigError
from hybridengine.importing import import_module

DESCRIPTION = """Run the processes of a configuration's episodes on this host, for ranks of a run whose
rollout.episode.addresses names it: a process for each that connects. A rank shows that it has the key before anything is
started, and can only ask for the function of this configuration. Lines are not encrypted: use a private network."""

EPILOG = """examples:
  head -c 32 /dev/urandom | base64 > episodes.key       the key, for this host and for rollout.episode.key_file
  hybridengine episodes serve agents.yaml --host 10.0.0.7 --key-file episodes.key
  hybridengine train agents.yaml rollout.episode.addresses=[10.0.0.7:8400] rollout.episode.key_file=episodes.key
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    option = parser.add_argument
    option("config", metavar="CONFIG", help="YAML file of the run")
    option(
        "overrides", nargs="*", default=[], metavar="KEY=VALUE",
        help="values that replace those of the file, e.g. rollout.episode.memory_bytes=4GiB",
    )  # fmt: skip
    option("--key-file", required=True, metavar="FILE", help="file with the key that ranks must have")
    option("--host", default="127.0.0.1", help="address to listen at (default: 127.0.0.1)")
    option(
        "--port",
        type=between(0, 65535),
        default=8400,
        help="port to listen at, 0 for a free one (default: 8400)",
    )
    option(
        "--tokenizer", metavar="FOLDER",
        help="folder of the run's tokenizer on this host (default: the path that the rank names)",
    )  # fmt: skip


def run(options: argparse.Namespace) -> int:
    config = load_config(options.config, options.overrides, dry_run=True)
    if (section := config.rollout.episode) is None:
        raise ConfigError(f"{options.config} has no rollout.episode; there is nothing to serve")
    process = import_module("hybridengine.episodes.process")
    processes = import_module("hybridengine.episodes.processes")
    remote = import_module("hybridengine.episodes.remote")
    key = remote.read_key(options.key_file)
    here = section.model_copy(update={"addresses": ()})
    processes.check_episode(here, config.timeouts.start_s)
    host = remote.EpisodeHost(here, key, options.tokenizer, process.SERVER, options.host, options.port)
    print(f"episodes of {section.function} at {options.host}:{host.port}; Ctrl-C ends it", flush=True)
    with contextlib.closing(host):
        host.serve(lambda text: print(text, flush=True))
    return 0
