"""`hybridengine report`: write the report of a run as one HTML page."""

from __future__ import annotations

import argparse
from importlib.util import find_spec
from pathlib import Path

from hybridengine.cli.outputs import check_outputs, write_outputs
from hybridengine.errors import ConfigError
from hybridengine.formatting import format_bytes

DESCRIPTION = """Write a report of a run, finished or still going, as one HTML page that needs no network: the figures
that show whether it is healthy (evaluation, reward, KL, losses, time of each phase, memory, transfers), the timeline of
the last step, samples of prompts, responses and scores, and the configuration."""

EPILOG = ""

REPORT_FILE = "report.html"


def add_options(parser: argparse.ArgumentParser) -> None:
    option = parser.add_argument
    option("folder", type=Path, metavar="RUN", help="folder of the run, e.g. runs/arithmetic")
    option(
        "--output", type=Path, metavar="FILE", help=f"the page (default: {REPORT_FILE} in the run's folder)"
    )


def run(options: argparse.Namespace) -> int:
    if find_spec("matplotlib") is None:
        raise ConfigError("hybridengine report needs matplotlib; install hybridengine[plots]")
    from hybridengine.report.page import read_run, render_page

    run = read_run(options.folder)
    file = options.output or options.folder / REPORT_FILE
    for source in run.sources:
        check_outputs({"--output": file}, {"the report": source})
    write_outputs({"--output": (file, render_page(run))})
    print(f"written: {file} ({format_bytes(file.stat().st_size)}); open it in a browser")
    return 0
