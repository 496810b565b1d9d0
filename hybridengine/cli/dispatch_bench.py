"""`hybridengine bench dispatch`: measure the transfer of rows between worker groups."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from hybridengine.bench.dispatch_spec import DispatchSpec
from hybridengine.cli.options import add_json_option, between, byte_size
from hybridengine.cli.outputs import check_outputs, emit, progress_printer
from hybridengine.formatting import cell, format_bytes, table
from hybridengine.machine import check_memory
from hybridengine.topology.sizes import TrainSizes

COLUMNS = {
    "way": "way",
    "seconds": "seconds",
    "seconds_min": "fastest",
    "seconds_max": "slowest",
    "payload_bytes": "payload",
}

DESCRIPTION = """Measure how rows get from one worker group to another, on real Ray workers of this machine: from
rank to rank through Ray's object store, and through the controller, which fetches them, splits them, and sends each rank
its part. The first repetition checks every value and is not counted. An empty call does nothing, on all ranks."""

EPILOG = """examples:
  hybridengine bench dispatch                                      1 GB from 1-4-2 to 2-2-2, eight ranks
  hybridengine bench dispatch --from 1-2-2 --to 2-2-1 --bytes 256MiB --repetitions 9 --json dispatch.json"""


def add_options(parser: argparse.ArgumentParser) -> None:
    option, seconds = parser.add_argument, between(1, 86400, float)
    option("--from", dest="source", type=TrainSizes.parse, default="1-4-2", metavar="P-T-D", help="producers")
    option("--to", type=TrainSizes.parse, default="2-2-2", metavar="P-T-D", help="consumers")
    option("--bytes", type=byte_size, default=10**9, metavar="BYTES", help="of the batch")
    option("--repetitions", type=between(1, 1000), default=5, metavar="N", help="counted ones")
    option("--timeout", type=seconds, default=300.0, metavar="SECONDS", help="longest that a call may take")
    add_json_option(parser)


def run(options: argparse.Namespace) -> int:
    sizes = options.source, options.to
    spec = DispatchSpec(*sizes, options.bytes, options.repetitions, options.timeout)
    check_outputs({"--json": options.json}, {})
    check_memory(
        f"--bytes {spec.batch_bytes}: a batch of {format_bytes(spec.batch_bytes)} for {spec.consumer}",
        spec.needed_bytes,
        "choose a smaller batch or more data-parallel replicas",
    )
    from hybridengine.bench.dispatch import measure_dispatch

    figures = measure_dispatch(spec, progress_printer())
    emit(options, figures, result_lines(spec, figures))
    return 0


def result_lines(spec: DispatchSpec, figures: Mapping[str, Any]) -> list[str]:
    """Return the lines of a table of both ways, followed by notes."""
    payloads = {"direct": "controller", "through_controller": "through_controller"}
    rows = [
        {
            "way": way.replace("_", " "),
            "seconds": figures[f"seconds_{way}"],
            "seconds_min": min(figures[f"samples_{way}_s"]),
            "seconds_max": max(figures[f"samples_{way}_s"]),
            "payload_bytes": figures[f"{payload}_payload_bytes"],
        }
        for way, payload in payloads.items()
    ]
    received, call = (cell(name, figures[name]) for name in ("received_bytes", "empty_call_s"))
    return [
        f"{format_bytes(spec.batch_bytes)} in {spec.num_rows} rows from {spec.producer} to {spec.consumer}, medians of"
        f" {spec.repetitions} repetitions",
        *table(rows, COLUMNS),
        f"directly {figures['advantage']:.1f} times as fast; {received} came from other processes",
        f"an empty call to {spec.producer.num_ranks} ranks takes {call}",
    ]
