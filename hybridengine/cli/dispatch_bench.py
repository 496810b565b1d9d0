"""`hybridengine bench dispatch`: measure the transfer of rows between worker groups."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from hybridengine.bench.dispatch import DispatchSpec, measure_dispatch
from hybridengine.bench.machine import check_memory
from hybridengine.cli.options import add_json_option, between, byte_size, train_sizes
from hybridengine.cli.outputs import check_outputs, emit, progress_printer
from hybridengine.figure_tables import cell, table
from hybridengine.formatting import format_bytes

COLUMNS = {
    "way": "way",
    "seconds": "seconds",
    "seconds_min": "fastest",
    "seconds_max": "slowest",
    "payload_bytes": "payload",
}

DESCRIPTION = """Measure how rows get from one worker group to another, on real Ray workers of this machine: from
rank to rank through Ray's object store, and through the controller, which fetches them, splits them, and sends each rank
its part. Both ways take the same rows in turn. The first repetition checks every value and is not counted.

"payload" counts bytes of rows that the controller fetches or sends, or that pass it inside Ray's messages. An empty call
is the round trip of a method that does nothing, on all ranks."""

EPILOG = """examples:
  hybridengine bench dispatch                                      1 GB from 1-4-2 to 2-2-2, eight ranks
  hybridengine bench dispatch --from 1-2-2 --to 2-2-1 --bytes 256MiB --repetitions 9 --json dispatch.json"""


def add_dispatch_command(subparsers: Any) -> None:
    """Add `dispatch` to the sub-commands of `hybridengine bench`."""
    parser = subparsers.add_parser(
        "dispatch",
        help="hand a batch from one worker group to another, directly and through the controller",
        description=DESCRIPTION,
        epilog=EPILOG,
    )
    parser.set_defaults(run=run_dispatch)
    option = parser.add_argument
    option(
        "--from", dest="producer", type=train_sizes, default="1-4-2", metavar="P-T-D",
        help="sizes that produce (default 1-4-2)",
    )  # fmt: skip
    option(
        "--to", dest="consumer", type=train_sizes, default="2-2-2", metavar="P-T-D",
        help="sizes that consume (default 2-2-2)",
    )  # fmt: skip
    option(
        "--bytes", dest="batch_bytes", type=byte_size, default=10**9, metavar="BYTES",
        help="of the batch (default 1 GB)",
    )  # fmt: skip
    option("--repetitions", type=between(1, 1000), default=5, metavar="N", help="counted ones (default 5)")
    option("--empty-calls", type=between(1, 100_000), default=200, metavar="N", help="(default 200)")
    option(
        "--timeout", type=between(1, 86400, float), default=300.0, metavar="SECONDS",
        help="longest that a call may take (default 300)",
    )  # fmt: skip
    add_json_option(parser)


def run_dispatch(options: argparse.Namespace) -> int:
    """Carry out the command; return the exit status."""
    spec = DispatchSpec(
        producer=options.producer,
        consumer=options.consumer,
        batch_bytes=options.batch_bytes,
        repetitions=options.repetitions,
        num_empty_calls=options.empty_calls,
        timeout_s=options.timeout,
    )
    check_outputs({"--json": options.json}, {})
    check_memory(
        f"--bytes {spec.batch_bytes}: a batch of {format_bytes(spec.batch_bytes)} for {spec.consumer}",
        spec.needed_bytes,
        "choose a smaller batch or more data-parallel replicas",
    )
    figures = measure_dispatch(spec, progress_printer())
    emit(options, figures, result_lines(spec, figures))
    return 0


def result_lines(spec: DispatchSpec, figures: Mapping[str, Any]) -> list[str]:
    """Return the lines of a table of both ways, followed by notes."""
    rows = [
        {
            "way": way.replace("_", " "),
            "seconds": figures[f"seconds_{way}"],
            "seconds_min": min(figures[f"samples_{way}_s"]),
            "seconds_max": max(figures[f"samples_{way}_s"]),
            "payload_bytes": figures[payload],
        }
        for way, payload in (
            ("direct", "controller_payload_bytes"),
            ("through_controller", "through_controller_payload_bytes"),
        )
    ]
    received, call = (cell(name, figures[name]) for name in ("received_bytes", "empty_call_s"))
    return [
        f"{format_bytes(spec.batch_bytes)} in {spec.num_rows} rows from {spec.producer} to {spec.consumer}, medians of"
        f" {spec.repetitions} repetitions",
        *table(rows, COLUMNS),
        f"directly {figures['advantage']:.1f} times as fast; {received} came from other processes",
        f"an empty call to {spec.producer.num_ranks} ranks takes {call}",
    ]
