"""TRL's side of `hybridengine bench step`: its own environment, and a child process that steps on request."""

from __future__ import annotations

import contextlib
import hashlib
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

from hybridengine.bench.step import trl_process
from hybridengine.bench.step.own import StepFiles
from hybridengine.bench.step.spec import StepSpec, StepTime, TrlWay
from hybridengine.errors import ConfigError, WorkerError, WorkerTimeoutError
from hybridengine.machine import num_gpus

TRL_PACKAGES = ("trl==1.16.0", "transformers==5.23.0", "accelerate==1.15.0", "datasets==5.2.0")
STAMP = "complete"
"""File that marks a complete environment; written last."""
INSTALL_TIMEOUT_S = 1800.0
END_TIMEOUT_S = 5.0
LOG_LINES = 12

Ask = Callable[[Any, float], dict[str, Any]]
"""Sends a message to a child process and returns the answer, for which it waits at most the given seconds."""


@contextlib.contextmanager
def trl_steps(
    spec: StepSpec, way: TrlWay, files: StepFiles, folder: Path, python: Path, say: Callable[[str], None]
) -> Iterator[Callable[[int], StepTime]]:
    """Start TRL and yield a function that does the step of a given number; end TRL on exit."""
    say(f"starting TRL: {way}")
    num_cores = len(os.sched_getaffinity(0))
    # TRL must not see this project's packages, nor variables that ranks set for their children.
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    quiet = {
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "OMP_NUM_THREADS": str(num_cores),
        **one_gpu(kept),
    }
    rows = [files.step_rows(spec.num_prompts, step + 1) for step in range(spec.num_steps)]
    settings = {
        "folder": str(folder / "trl"),
        "model": str(files.model),
        "tokenizer": str(files.tokenizer),
        "on_cpu": not num_gpus(),
        "num_threads": num_cores,
        "prompts": [[files.texts[row] for row in step] for step in rows],
        "prompt_tokens": [[list(files.prompts.tokens[row]) for row in step] for step in rows],
        **asdict(spec),
        **asdict(way),
    }
    with child_process([str(python), "-uP", trl_process.__file__], folder / "trl.log", kept | quiet) as ask:
        ask(settings, spec.timeout_s)
        yield lambda number: StepTime(**ask(number, spec.timeout_s))


def one_gpu(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variable that shows a process of TRL the first GPU of those that this process sees, if there is any."""
    visible = environment.get("CUDA_VISIBLE_DEVICES", "0")
    return {"CUDA_VISIBLE_DEVICES": visible.split(",")[0]} if num_gpus() else {}


@contextlib.contextmanager
def child_process(
    command: Sequence[str], log: Path, environment: Mapping[str, str] | None = None
) -> Iterator[Ask]:
    """Start TRL as a child process that works only on request; on exit, end it and all of its child processes.

    `Ask` raises WorkerTimeoutError if no answer arrives in time, and WorkerError if the child failed or has ended.
    """
    channel, theirs = multiprocessing.Pipe()
    with theirs, log.open("wb") as output:
        process = subprocess.Popen(
            [*command, str(theirs.fileno())],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=environment,
            pass_fds=[theirs.fileno()],
            start_new_session=True,
        )

    def last_lines() -> str:
        lines = log.read_text(errors="replace").strip().splitlines()[-LOG_LINES:]
        return "".join(f"\n  {line}" for line in lines)

    def ask(message: Any, timeout_s: float) -> dict[str, Any]:
        try:
            channel.send(message)
            answered = channel.poll(timeout_s)
            answer = channel.recv() if answered else {}
        except (EOFError, OSError):
            raise WorkerError(f"TRL has ended{last_lines()}") from None
        if not answered:
            raise WorkerTimeoutError(
                f"TRL has not answered within {timeout_s:g} s; allow more with --timeout{last_lines()}"
            )
        if "error" in answer:
            raise WorkerError(f"TRL: {answer['error']}{last_lines()}")
        return answer

    try:
        yield ask
    finally:
        channel.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(END_TIMEOUT_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def requirements() -> tuple[str, ...]:
    """Return TRL's packages and the torch version of this environment, so that both sides have the same kernels."""
    return (f"torch=={version('torch')}", *TRL_PACKAGES)


def make_environment(folder: Path, say: Callable[[str], None]) -> Path:
    """Return the Python of TRL's environment in `folder`, created if incomplete; a ConfigError if that is impossible."""
    contents = repr((sys.version_info[:2], requirements()))
    place = folder / f"trl-{hashlib.sha256(contents.encode()).hexdigest()[:12]}"
    python, stamp = place / "bin" / "python", place / STAMP
    if not stamp.exists():
        say(f"making an environment for TRL in {place} (a few minutes, once): {', '.join(requirements())}")
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"--environment {folder} cannot be written to ({error.strerror}); name a folder that can be, with 3 GB of"
                " space"
            ) from None
        shutil.rmtree(place, ignore_errors=True)
        install([sys.executable, "-m", "venv", str(place)])
        install([str(python), "-m", "pip", "install", "--quiet", "--no-input", *requirements()])
        stamp.touch()
    return python


def install(command: Sequence[str]) -> None:
    """Run a command that creates part of the environment; raise ConfigError if it fails."""
    try:
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=INSTALL_TIMEOUT_S)
    except subprocess.SubprocessError as error:
        said = getattr(error, "stderr", None) or getattr(error, "stdout", None) or str(error)
        last = "\n".join(str(said).strip().splitlines()[-5:])
        raise ConfigError(
            f"the environment for TRL cannot be made: {' '.join(command[1:5])} failed\n{last}\nwhere pip does not find"
            " torch, name PyTorch's index in PIP_EXTRA_INDEX_URL; --only hybridengine measures without TRL"
        ) from None
