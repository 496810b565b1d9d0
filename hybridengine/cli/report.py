"""`hybridengine report`: write the report of a run as one HTML page."""

from __future__ import annotations

import argparse
import re
from importlib.util import find_spec
from pathlib import Path

from hybridengine.cli.outputs import check_outputs, write_outputs
from hybridengine.errors import ConfigError
from hybridengine.formatting import format_bytes

DESCRIPTION = """Write a report of a run, finished or still going, as one HTML page that needs no network: the figures
that show whether it is healthy (evaluation, reward, KL, losses, time of each phase, memory, transfers), the timeline of
the last step or of --steps, samples of prompts, responses and scores, and the configuration."""

EPILOG = """examples:
  hybridengine report runs/arithmetic
  hybridengine report runs/async-grpo --steps 10-12 --plot timeline.svg"""

REPORT_FILE = "report.html"


def add_options(parser: argparse.ArgumentParser) -> None:
    option = parser.add_argument
    option("folder", type=Path, metavar="RUN", help="folder of the run, e.g. runs/arithmetic")
    option(
        "--output", type=Path, metavar="FILE", help=f"the page (default: {REPORT_FILE} in the run's folder)"
    )

    option("--steps", type=_steps, metavar="FIRST-LAST", help="steps of the timeline (default: the last)")
    option("--plot", type=Path, metavar="FILE", help="draw the timeline alone as well (.png, .svg, .pdf)")


def _steps(text: str) -> range:
    found = re.fullmatch(r"([0-9]{1,9})(?:-([0-9]{1,9}))?", text)
    if found is None or int(found[2] or found[1]) < int(found[1]):
        raise argparse.ArgumentTypeError(f"{text!r} is no range of steps; write 12 or 10-12")
    return range(int(found[1]), int(found[2] or found[1]) + 1)


def run(options: argparse.Namespace) -> int:
    if find_spec("matplotlib") is None:
        raise ConfigError("hybridengine report needs matplotlib; install hybridengine[plots]")
    from hybridengine.report.figures import draw_timeline
    from hybridengine.report.page import read_run, render_page

    run = read_run(options.folder)
    file = options.output or options.folder / REPORT_FILE
    for source in run.sources:
        check_outputs({"--output": file, "--plot": options.plot}, {"the report": source})
    spans, steps = run.timeline.spans, options.steps
    known = {span.step for span in spans if span.step is not None}
    if known.isdisjoint(known if steps is None else steps) and (
        steps is not None or options.plot is not None
    ):
        found = f"steps {min(known)} to {max(known)}" if known else "no steps yet"
        raise ConfigError(f"the timeline of {options.folder} has {found}; choose --steps among them")
    write_outputs(
        {
            "--output": (file, render_page(run, steps)),
            "--plot": (options.plot, lambda place: draw_timeline(spans, steps, place)),
        }
    )
    print(f"written: {file} ({format_bytes(file.stat().st_size)}); open it in a browser")
    return 0
