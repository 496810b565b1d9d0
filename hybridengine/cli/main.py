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
from hybridengine.cli.plan import add_planner_command
from hybridengine.cli.report import add_report_command
from hybridengine.cli.reshard_bench import add_bench_command
from hybridengine.cli.reshard_plan import add_plan_command
from hybridengine.cli.simulate import add_simulate_command
from hybridengine.cli.step_bench import add_step_command
from hybridengine.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    HybridEngineError,
    OutputError,
    TopologyError,
)
from hybridengine.redaction import without_secrets

EXAMPLES = """examples:
  hybridengine train configs/arithmetic.yaml                       the demo: four ranks on a CPU
  hybridengine train configs/arithmetic.yaml run.steps=5           any key of the file can be overridden
  hybridengine train configs/arithmetic.yaml actor.generate=1-2    another generation layout, p_g-t_g
  hybridengine train configs/llama3-70b-16nodes.yaml --dry-run     groups, plan and memory; starts nothing
  hybridengine train configs/arithmetic.yaml resume=auto           go on from the newest whole checkpoint
  hybridengine doctor configs/arithmetic.yaml                      what is wrong here, and how to mend it
  hybridengine convert --help                                      checkpoints of runs from and to safetensors
  hybridengine report runs/arithmetic                              curves, timeline and samples as one HTML page
  hybridengine plan --help                                         where models go, with which sizes; starts nothing
  hybridengine calibrate --help                                    measure this machine for plan and simulate
  hybridengine simulate --help                                     synchronous beside asynchronous; starts nothing
  hybridengine reshard plan --help                                 what a switch costs on a cluster; starts nothing
  hybridengine reshard bench --help                                what a switch costs here, measured on real ranks
  hybridengine bench dispatch --help                               what handing rows from group to group costs
  hybridengine bench step --help                                   what a step of GRPO costs, and one of TRL's
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit status: 0 done, 1 the run failed, 2 bad input, 130 interrupted.

    141 is what a shell says of a program whose reader went away, as in `| head -1`.
    """
    _prepare_streams()
    with contextlib.suppress(ValueError):  # signals are a main thread's business
        signal.signal(signal.SIGTERM, _terminate)
    with contextlib.suppress(FileNotFoundError):  # the folder in which the command is run is gone
        if (
            os.getcwd() not in sys.path
        ):  # as `python -m` has it: algorithms and rewards of one's own lie there
            sys.path.append(os.getcwd())
    try:
        options = parse(arguments)
        status = _run(options)
        sys.stdout.flush()
        return status
    except OSError:
        fault = _stdout_fault()
        if fault is None:
            return _unexpected()
        os.dup2(
            os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno()
        )  # Python writes what is left as it ends
        if isinstance(fault, BrokenPipeError):
            return 141
        print(
            f"hybridengine: stdout cannot be written ({fault.strerror}); direct it to where there is space",
            file=sys.stderr,
        )
        return 2
    except (ConfigError, TopologyError, CheckpointError, DataError) as error:
        print(without_secrets(f"hybridengine: {error}"), file=sys.stderr)
        return 2
    except HybridEngineError as error:
        if isinstance(error.__cause__, CheckpointError):  # a rank has read it: the fault is the file's
            print(without_secrets(f"hybridengine: {error.__cause__}"), file=sys.stderr)
            return 2
        if isinstance(error.__cause__, OutputError):  # a rank's disk is full: where it wrote says enough
            error = error.__cause__
        print(without_secrets(f"hybridengine: {type(error).__name__}: {error}"), file=sys.stderr)
        return 1
    except Exception:
        return _unexpected()
    except SystemExit as end:
        if isinstance(end.__context__, BrokenPipeError):  # how Rich says it
            return 141
        if end.code == 128 + signal.SIGTERM:
            print("hybridengine: SIGTERM; what has been written so far is kept", file=sys.stderr)
        raise
    except KeyboardInterrupt:
        print("hybridengine: interrupted; what has been written so far is kept", file=sys.stderr)
        return 130
    finally:
        # Libraries still tidy up: whoever cannot wait for that ends the process, without a traceback.
        atexit.register(_signals_end_at_once)


def _run(options: argparse.Namespace) -> int:
    """Carry out a command; returns the exit status.

    Raises:
        ConfigError: a module of somebody's own has called sys.exit, whose status would be taken for the command's.
    """
    try:
        return options.run(options)
    except SystemExit as end:
        if end.code == 128 + signal.SIGTERM or isinstance(end.__context__, BrokenPipeError):
            raise
        place = traceback.extract_tb(end.__traceback__)[-1]
        raise ConfigError(
            f"{place.filename}, line {place.lineno}: {place.name} has called sys.exit({end.code!r}), which would end the"
            " command; raise an exception instead"
        ) from None


def _signals_end_at_once() -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)


def _unexpected() -> int:
    """Show the traceback of the exception at hand, as Python does, without secrets; the exit status."""
    print(without_secrets(traceback.format_exc()), end="", file=sys.stderr)
    return 1


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The options of a command; `key=value` overrides may stand anywhere among them."""
    parser = _parser()
    options, rest = parser.parse_known_args(arguments)
    overrides = getattr(options, "overrides", None)
    if rest and (overrides is None or any(word.startswith("-") or "=" not in word for word in rest)):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if (
        rest and overrides is not None
    ):  # argparse gives a command its positional arguments only up to the first option
        options.overrides = [*overrides, *rest]
    return options


def _terminate(number: int, frame: object) -> None:
    """End as an exception does, so that temporary folders go and child processes end."""
    raise SystemExit(128 + number)


def _prepare_streams() -> None:
    """Where an output was closed (`>&-`), drop what it would get; where it lacks a character, show `?` instead."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:  # opened before any other file, it takes the number of the closed one
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_WRONLY), "w"))
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def _stdout_fault() -> OSError | None:
    """Why nothing can be printed; None where it can."""
    try:
        print(flush=True)  # an empty flush says nothing where a long text was refused
    except OSError as error:
        return error
    return None


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="hybridengine",
        description=__doc__,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"hybridengine {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    train = commands.add_parser(
        "train",
        help="train a model as a configuration file says",
        description="Train a model as a configuration file says. Writes runs/NAME/: metrics.jsonl (a row per step),"
        " tensorboard/, and the trained model as a Hugging Face checkpoint.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
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
