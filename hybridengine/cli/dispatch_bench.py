"""`hybridengine bench dispatch`: measure how rows get from one worker group to another."""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from hybridengine.bench.dispatch import DispatchResult, DispatchSpec, measure_dispatch
from hybridengine.bench.machine import available_bytes
from hybridengine.cli.options import once
from hybridengine.cli.output_files import check_output_files, write_output
from hybridengine.config.values import parse_bytes
from hybridengine.errors import TopologyError
from hybridengine.metrics.formatting import format_bytes, format_seconds
from hybridengine.topology.sizes import TrainSizes

DESCRIPTION = """Measure how rows get from one worker group to another, on real Ray workers of this machine:

  direct               the consumer is handed a reference, and each of its ranks fetches its own rows from Ray's object
                       store, where the ranks that have made them have put them
  through controller   the controller fetches the rows, splits them, and sends each rank its part

Both take the same rows in turn, in the same processes. A repetition ends when every rank of the consumer has read its
rows. The first one checks every value and is not counted."""

EPILOG = """examples:
  hybridengine bench dispatch                                      1 GB from 1-4-2 to 2-2-2, eight ranks
  hybridengine bench dispatch --from 1-2-2 --to 2-2-1 --bytes 256MiB --repetitions 9 --json dispatch.json

reading it: "spread" is the fastest and the slowest repetition. "through the controller" counts bytes of rows that it
fetches or sends, or that pass it inside Ray's messages. An empty call is the round trip of a method that does nothing,
on all ranks."""


def add_dispatch_command(subparsers: Any) -> None:
    """Add `dispatch` to the sub-commands of `hybridengine bench`."""
    parser = subparsers.add_parser(
        "dispatch",
        help="hand a batch from one worker group to another, directly and through the controller",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )

    option = once(parser)

    option(
        "--from", dest="producer", default="1-4-2", metavar="P-T-D", help="sizes that produce (default 1-4-2)"
    )
    option(
        "--to", dest="consumer", default="2-2-2", metavar="P-T-D", help="sizes that consume (default 2-2-2)"
    )
    option(
        "--bytes",
        dest="batch_bytes",
        default="1000000000",
        metavar="BYTES",
        help="of the batch (default 1 GB)",
    )
    option("--repetitions", type=int, default=5, metavar="N", help="counted repetitions (default 5)")
    option("--empty-calls", type=int, default=200, metavar="N", help="empty calls (default 200)")
    option(
        "--timeout",
        type=float,
        default=300.0,
        metavar="SECONDS",
        help="longest that a call may take (default 300)",
    )
    option("--json", type=Path, metavar="FILE", help="write everything that was measured to FILE")
    parser.set_defaults(run=run_dispatch)


def run_dispatch(options: argparse.Namespace) -> int:
    """Carry out the command; returns the exit status."""
    spec = DispatchSpec(
        producer=_sizes("--from", options.producer),
        consumer=_sizes("--to", options.consumer),
        batch_bytes=parse_bytes("--bytes", options.batch_bytes),
        repetitions=options.repetitions,
        num_empty_calls=options.empty_calls,
        timeout_s=options.timeout,
    )
    check_output_files({"--json": options.json}, {})
    spec.check_memory(available_bytes())
    console, started = Console(), time.perf_counter()

    def say(text: str) -> None:
        seconds = time.perf_counter() - started
        console.print(f"[{seconds:6.1f}s] {text}", markup=False, highlight=False, soft_wrap=True)

    result = measure_dispatch(spec, say)
    print_result(console, spec, result)
    if options.json:
        write_output("--json", options.json, json.dumps(result.as_dict(spec), indent=2) + "\n")
        say(f"written: {options.json}")
    return 0


def _sizes(option: str, text: str) -> TrainSizes:
    try:
        return TrainSizes.parse(text)
    except TopologyError as error:
        raise TopologyError(f"{option} {text}: {error}") from None


def print_result(console: Console, spec: DispatchSpec, result: DispatchResult) -> None:
    """Print the table and what belongs to it."""
    table = Table(
        title=f"{format_bytes(spec.batch_bytes)} in {spec.num_rows} rows from {spec.producer} to {spec.consumer}, medians"
        f" of {spec.repetitions} repetitions",
        title_justify="left",
    )
    table.add_column("way")
    for heading in ("seconds", "spread", "through the controller"):
        table.add_column(heading, justify="right", no_wrap=True)
    for way, seconds, num_bytes in (
        ("direct", result.direct_s, result.controller_payload_bytes),
        ("through controller", result.through_controller_s, result.through_payload_bytes),
    ):
        table.add_row(
            way, format_seconds(statistics.median(seconds)), _spread(seconds), format_bytes(num_bytes)
        )
    console.print(table)
    empty = result.empty_call_s
    for line in (
        f"directly {result.advantage:.1f} times as fast; {format_bytes(result.received_bytes)} came from other processes",
        f"an empty call to {spec.producer.num_ranks} ranks takes {format_seconds(statistics.median(empty))}"
        f" ({_spread(empty)})",
    ):
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def _spread(seconds: Sequence[float]) -> str:
    return f"{format_seconds(min(seconds))} to {format_seconds(max(seconds))}"
