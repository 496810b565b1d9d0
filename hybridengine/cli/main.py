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
from collections.abc import Iterator, Sequence

from hybridengine import __version__
from hybridengine.cli import (
    calibrate,
    convert,
    demo,
    dispatch_bench,
    doctor,
    episodes_serve,
    launch_kuberay,
    launch_node,
    launch_slurm,
    launch_ssh,
    plan,
    rehearse,
    report,
    reshard_bench,
    reshard_plan,
    serve,
    serve_bench,
    simulate,
    step_bench,
    train,
)
from hybridengine.cli.options import Parser
from hybridengine.errors import CheckpointError, ConfigError, HybridEngineError, OutputError
from hybridengine.redaction import without_secrets

TERMINATED = 128 + signal.SIGTERM
"""Exit status of a command that SIGTERM has ended."""
GROUPS = {
    "launch": "start a run on several machines: through SLURM, KubeRay or ssh",
    "reshard": "plan or measure the switch between training and generation",
    "episodes": "run the functions of multi-turn rollouts on other hosts",
    "bench": "measure a whole step beside TRL, what handing rows over costs, and what the Tinker server adds",
}
COMMANDS = {
    "train": (train, "train a model as a configuration file says"),
    "demo": (demo, "train a small model on this machine's CPU, in some minutes"),
    "calibrate": (calibrate, "measure this machine and fit the planner's cost model to it"),
    "convert": (convert, "turn a run's checkpoint into Hugging Face safetensors, or the other way round"),
    "doctor": (doctor, "examine an installation and a cluster, and print what to fix"),
    "plan": (plan, "choose placement and parallel sizes for a run on a cluster; starts nothing"),
    "rehearse": (
        rehearse,
        "run one iteration on a rank without devices or peers, and count memory and messages",
    ),
    "report": (report, "write a run's report as an HTML page"),
    "serve": (serve, "serve clients of the Tinker API, which train and sample with scripts of their own"),
    "simulate": (simulate, "simulate synchronous and asynchronous training on a cluster; starts nothing"),
    "episodes serve": (episodes_serve, "run a configuration's episodes for the ranks of another host"),
    "launch slurm": (launch_slurm, "write a batch script for SLURM, or submit it"),
    "launch kuberay": (launch_kuberay, "write a RayJob manifest for KubeRay, or create the job"),
    "launch ssh": (launch_ssh, "run on hosts of a list, with spare ones in place of those that fail"),
    "launch node": (launch_node, "what each node of a launch runs"),
    "reshard plan": (reshard_plan, "plan the switch for a cluster: bytes, memory, seconds; starts nothing"),
    "reshard bench": (reshard_bench, "measure the switch on real ranks, beside the methods that others use"),
    "bench dispatch": (dispatch_bench, "hand a batch to another worker group, also through the controller"),
    "bench serve": (serve_bench, "the Tinker server's own time per request, and its switches"),
    "bench step": (step_bench, "a step of GRPO, and one of TRL's in turn"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; return 0, 1 if the run failed, 2 for bad input, 130 if interrupted, 141 if stdout was closed."""
    # Megatron-core warns for every GPU package that is not installed; without a GPU that is expected.
    warnings.filterwarnings("ignore", category=UserWarning, module=r"megatron\.")
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # pytest replaces them
            stream.reconfigure(errors="replace")
    with contextlib.suppress(ValueError):  # only the main thread may handle signals
        # SystemExit, so that temporary folders are removed and child processes end.
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(TERMINATED))
    with contextlib.suppress(FileNotFoundError):  # the working directory has been removed
        if (here := os.getcwd()) not in sys.path:  # for the user's algorithms and rewards
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
        for number in (signal.SIGINT, signal.SIGTERM):  # no traceback while libraries clean up
            atexit.register(signal.signal, number, signal.SIG_DFL)


def _run(options: argparse.Namespace) -> int:
    """Carry out a command and return its exit status; calls of sys.exit in the user's code are errors."""
    try:
        status = options.run(options)
        if sys.stdout is not None:
            sys.stdout.flush()
        return status
    except BrokenPipeError:
        if _is_stdout_closed():
            return 141
        raise
    except SystemExit as end:
        if isinstance(end.__context__, BrokenPipeError):  # Rich raises this
            return 141
        if any(isinstance(one, SystemExit) and one.code == TERMINATED for one in _chain(end)):
            print("hybridengine: SIGTERM; what has been written so far is kept", file=sys.stderr)
            sys.exit(TERMINATED)
        place = traceback.extract_tb(end.__traceback__)[-1]
        raise ConfigError(
            f"{place.filename}, line {place.lineno}: {place.name} has called sys.exit({end.code!r}), which would end the"
            " command; raise an exception instead"
        ) from None


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error and those during whose handling it was raised: cleaning up after SIGTERM may raise others."""
    while error is not None:
        yield error
        error = error.__context__


def _is_stdout_closed() -> bool:
    """Return True if nobody can read stdout any more; the remaining output is then discarded."""
    try:
        print(flush=True)
    except OSError:  # also of a terminal that is gone
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return True
    return False


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the options of a command; `key=value` overrides may appear anywhere among them."""
    parser = _parser()
    options, rest = parser.parse_known_args(arguments)
    overrides = getattr(options, "overrides", None)
    if rest and (overrides is None or any(word.startswith("-") or "=" not in word for word in rest)):
        options.command.error(f"unrecognized arguments: {' '.join(rest)}")
    if rest and overrides is not None:  # argparse takes positional arguments only up to the first option
        options.overrides = [*overrides, *rest]
    return options


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog="hybridengine", description=__doc__, epilog=train.EPILOG)
    parser.add_argument("--version", action="version", version=f"hybridengine {__version__}")
    groups = {"": parser.add_subparsers(required=True, metavar="COMMAND")}
    for words, (module, text) in COMMANDS.items():
        group, _, name = words.rpartition(" ")
        if group not in groups:
            added = groups[""].add_parser(group, help=GROUPS[group], description=GROUPS[group])
            groups[group] = added.add_subparsers(required=True, metavar="COMMAND")
        command = groups[group].add_parser(
            name, help=text, description=module.DESCRIPTION, epilog=module.EPILOG
        )
        module.add_options(command)
        command.set_defaults(run=module.run, command=command)
    return parser


if __name__ == "__main__":
    sys.exit(main())
