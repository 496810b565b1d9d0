"""`hybridengine`: train a model with RL on a Megatron HybridEngine, or see what a run would do."""

from __future__ import annotations

import argparse
import atexit
import contextlib
import io
import os
import signal
import sys
import traceback
import warnings
from collections.abc import Sequence

from hybridengine import __version__
from hybridengine.cli.calibrate import add_calibrate_command
from hybridengine.cli.convert import add_convert_command
from hybridengine.cli.dispatch_bench import add_dispatch_command
from hybridengine.cli.doctor import add_doctor_command
from hybridengine.cli.options import Parser
from hybridengine.cli.plan import add_planner_command
from hybridengine.cli.report import add_report_command
from hybridengine.cli.reshard_bench import add_bench_command
from hybridengine.cli.reshard_plan import add_plan_command
from hybridengine.cli.simulate import add_simulate_command
from hybridengine.cli.step_bench import add_step_command
from hybridengine.errors import CheckpointError, ConfigError, HybridEngineError, OutputError
from hybridengine.redaction import without_secrets

EXAMPLES = """examples:
  hybridengine train configs/arithmetic.yaml                       the demo: four ranks on a CPU
  hybridengine train configs/arithmetic.yaml actor.generate=1-2    any key of the file can be overridden
  hybridengine train configs/llama3-70b-16nodes.yaml --dry-run     groups, plan and memory; starts nothing
  hybridengine train configs/arithmetic.yaml resume=auto           resume from the newest complete checkpoint
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return the exit status.

    The status is 0 on success, 1 if the run failed, 2 for bad input, 130 if interrupted, and 141 if the reader of stdout
    has exited, as in `| head -1`.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # pytest replaces them
            stream.reconfigure(errors="replace")
    with contextlib.suppress(ValueError):  # only the main thread may handle signals
        signal.signal(signal.SIGTERM, _terminate)
    with contextlib.suppress(FileNotFoundError):  # the working directory has been removed
        if (
            here := os.getcwd()
        ) not in sys.path:  # for the user's algorithms and rewards, as with `python -m`
            sys.path.append(here)
    try:
        return _run(parse(arguments))
    except HybridEngineError as error:
        if error.exit_status == 1 and isinstance(error.__cause__, CheckpointError | OutputError):
            error = error.__cause__  # a rank's error about a file need not name the rank
        kind = f"{type(error).__name__}: " if error.exit_status == 1 else ""
        print(without_secrets(f"hybridengine: {kind}{error}"), file=sys.stderr)
        return error.exit_status
    except Exception:
        print(without_secrets(traceback.format_exc()), end="", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("hybridengine: interrupted; what has been written so far is kept", file=sys.stderr)
        return 130
    finally:
        # While libraries clean up, a signal ends the process without a traceback.
        atexit.register(_end_at_signals)


def _run(options: argparse.Namespace) -> int:
    """Carry out a command and return its exit status.

    Raises:
        ConfigError: the user's code called sys.exit, whose status would be mistaken for the command's.
    """
    try:
        status = options.run(options)
        print(end="", flush=True)
        return status
    except BrokenPipeError:
        if _is_stdout_closed():
            return 141
        raise
    except SystemExit as end:
        if isinstance(end.__context__, BrokenPipeError):  # Rich raises this
            return 141
        if end.code == 128 + signal.SIGTERM:
            print("hybridengine: SIGTERM; what has been written so far is kept", file=sys.stderr)
            raise
        place = traceback.extract_tb(end.__traceback__)[-1]
        raise ConfigError(
            f"{place.filename}, line {place.lineno}: {place.name} has called sys.exit({end.code!r}), which would end the"
            " command; raise an exception instead"
        ) from None


def _is_stdout_closed() -> bool:
    """Return True if the reader of stdout has exited; the remaining output is then discarded."""
    try:
        print(flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return True
    return False


def _end_at_signals() -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the options of a command; `key=value` overrides may appear anywhere among them."""
    parser = _parser()
    options, rest = parser.parse_known_args(arguments)
    overrides = getattr(options, "overrides", None)
    if rest and (overrides is None or any(word.startswith("-") or "=" not in word for word in rest)):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if rest and overrides is not None:  # argparse takes positional arguments only up to the first option
        options.overrides = [*overrides, *rest]
    return options


def _terminate(number: int, frame: object) -> None:
    """Raise SystemExit, so that temporary folders are removed and child processes end."""
    raise SystemExit(128 + number)


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog="hybridengine", description=__doc__, epilog=EXAMPLES)
    parser.add_argument("--version", action="version", version=f"hybridengine {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    train = commands.add_parser(
        "train",
        help="train a model as a configuration file says",
        description="Train a model as a configuration file says. Writes runs/NAME/: metrics.jsonl (a row per step),"
        " tensorboard/, and the trained model as a Hugging Face checkpoint.",
        epilog=EXAMPLES,
    )
    train.add_argument("config", metavar="CONFIG", help="YAML file, e.g. configs/arithmetic.yaml")
    train.add_argument(
        "overrides",
        nargs="*",
        default=[],
        metavar="KEY=VALUE",
        help="values that replace those of the file, e.g. actor.parallel=2-2-1 (p-t-d), actor.generate=1-1 (p_g-t_g)",
    )
    train.add_argument(
        "--dry-run", action="store_true", help="print groups, plan and memory estimate, and start nothing"
    )
    train.set_defaults(run=_train)
    add_calibrate_command(commands)
    add_convert_command(commands)
    add_doctor_command(commands)
    add_planner_command(commands)
    add_report_command(commands)
    add_simulate_command(commands)
    reshard = commands.add_parser(
        "reshard",
        help="plan or measure the switch between training and generation",
        description="Switching the actor's weights between its training and generation layouts: what it will cost on a"
        " cluster, and what it costs on real ranks.",
    ).add_subparsers(dest="reshard_command", required=True, metavar="COMMAND")
    add_plan_command(reshard)
    add_bench_command(reshard)
    bench = commands.add_parser(
        "bench",
        help="measure a whole step beside TRL, and what handing rows over costs",
        description="Measurements on this machine.",
    ).add_subparsers(dest="bench_command", required=True, metavar="COMMAND")
    add_dispatch_command(bench)
    add_step_command(bench)
    return parser


def _train(options: argparse.Namespace) -> int:
    from hybridengine.config import load_config

    config = load_config(options.config, options.overrides, dry_run=options.dry_run)
    if options.dry_run:
        from hybridengine.training.dry_run import print_dry_run

        print_dry_run(config)
        return 0
    # Megatron-core warns for every GPU package that is not installed; on a machine without a GPU that is expected.
    warnings.filterwarnings("ignore", category=UserWarning, module=r"megatron\.")
    from hybridengine.training.run import train

    train(config)
    return 0


if __name__ == "__main__":
    sys.exit(main())
