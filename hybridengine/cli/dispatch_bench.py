"""`hybridengine bench dispatch`: measure how rows get from one worker group to another."""

from __future__ import annotations

import argparse
import statistics
from typing import Any

from hybridengine.bench.dispatch import DispatchResult, DispatchSpec, measure_dispatch
from hybridengine.bench.machine import available_bytes
from hybridengine.cli.figure_tables import aligned, span
from hybridengine.cli.options import add_json_option, between, byte_size, train_sizes
from hybridengine.cli.outputs import check_outputs, emit, progress_printer
from hybridengine.metrics.formatting import format_bytes, format_seconds

DESCRIPTION = """Measure how rows get from one worker group to another, on real Ray workers of this machine. Direct: each
rank of the consumer fetches its own rows from Ray's object store. Through the controller: it fetches the rows, splits
them, and sends each rank its part. Both take the same rows in turn; the first repetition checks every value and is not
counted."""

EPILOG = """examples:
  hybridengine bench dispatch                                      1 GB from 1-4-2 to 2-2-2, eight ranks
  hybridengine bench dispatch --from 1-2-2 --to 2-2-1 --bytes 256MiB --repetitions 9 --json dispatch.json

"through the controller" counts bytes of rows that it fetches or sends, or that pass it inside Ray's messages."""


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
    spec.check_memory(available_bytes())
    result = measure_dispatch(spec, progress_printer())
    emit(options, result.as_dict(spec), result_lines(spec, result))
    return 0


def result_lines(spec: DispatchSpec, result: DispatchResult) -> list[str]:
    """Return the table of both ways, and the notes beneath it."""
    ways = (
        ("direct", result.direct_s, result.controller_payload_bytes),
        ("through controller", result.through_controller_s, result.through_payload_bytes),
    )
    rows = [
        [way, format_seconds(statistics.median(seconds)), span(seconds), format_bytes(num_bytes)]
        for way, seconds, num_bytes in ways
    ]
    empty = result.empty_call_s
    return [
        f"{format_bytes(spec.batch_bytes)} in {spec.num_rows} rows from {spec.producer} to {spec.consumer}, medians of"
        f" {spec.repetitions} repetitions",
        *aligned([["way", "seconds", "spread", "through the controller"], *rows]),
        f"directly {result.advantage:.1f} times as fast; {format_bytes(result.received_bytes)} came from other processes",
        f"an empty call to {spec.producer.num_ranks} ranks takes {format_seconds(statistics.median(empty))}"
        f" ({span(empty)})",
    ]
