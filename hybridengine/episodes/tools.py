"""Tools that run in processes of their own: limited in time, memory and output, and ended with all that they start."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import resource
import shutil
import signal
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass

PR_SET_PDEATHSIG = 1
"""Option of prctl(2): signal that the process gets when its parent ends."""


@dataclass(frozen=True)
class ToolResult:
    """What a process of a tool has written, and how it ended."""

    output: str
    """Text of its output and errors, up to the limit."""
    exit_code: int
    """Exit code; -N if signal N ended it."""
    limit: str = ""
    """Limit that ended it: `time` or `output`; empty if none did."""


async def run_process(
    arguments: Sequence[str],
    *,
    given: str = "",
    timeout_s: float = 10.0,
    memory_bytes: int = 512 * 2**20,
    output_bytes: int = 2**16,
) -> ToolResult:
    """Run a command in an empty folder of its own, with `given` as its input; return its result.

    The process and its children, unless they leave its session, are killed after `timeout_s`, or once they have written
    more than `output_bytes`; on Linux the process also ends with this one. It has no environment but PATH and its own
    HOME, and may allocate `memory_bytes` of memory, write files of as much, and use one core for `timeout_s`. It is not
    isolated from the network and from files that this user may read: run what nobody trusts in a container.

    Raises OSError if the command cannot be started.
    """

    def limit() -> None:
        for kind, most in (
            (resource.RLIMIT_AS, memory_bytes),
            (resource.RLIMIT_FSIZE, memory_bytes),
            (resource.RLIMIT_CORE, 0),
            (resource.RLIMIT_CPU, int(timeout_s) + 1),
        ):
            resource.setrlimit(kind, (most, most))
        if libc is not None:
            libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)

    # Loaded here: a process that has forked may not load libraries.
    libc = ctypes.CDLL(None) if sys.platform == "linux" else None

    folder = tempfile.mkdtemp(dir=os.getcwd())  # that of the episodes' process, which is removed with it
    try:
        process = await asyncio.create_subprocess_exec(
            *arguments,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            cwd=folder,
            env={"PATH": os.environ.get("PATH", os.defpath), "HOME": folder},
            start_new_session=True,
            preexec_fn=limit,
        )
        output, reached = bytearray(), ""
        feeding = asyncio.create_task(_feed(process, given.encode()))
        try:
            async with asyncio.timeout(timeout_s):
                if await _read(process, output, output_bytes):
                    reached = "output"
                else:
                    await process.wait()
        except TimeoutError:
            reached = "time"
        finally:
            feeding.cancel()
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            exit_code = await process.wait()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return ToolResult(output[:output_bytes].decode(errors="replace"), exit_code, reached)


async def _feed(process: asyncio.subprocess.Process, given: bytes) -> None:
    assert process.stdin is not None, "it is a pipe"
    with contextlib.suppress(ConnectionError):  # it has ended, or does not read
        process.stdin.write(given)
        await process.stdin.drain()
    process.stdin.close()


async def _read(process: asyncio.subprocess.Process, output: bytearray, most: int) -> bool:
    """Append what a process writes; return True as soon as that is more than `most` bytes."""
    assert process.stdout is not None, "it is a pipe"
    while part := await process.stdout.read(2**16):
        output += part
        if len(output) > most:
            return True
    return False


async def run_python(code: str, **limits: float) -> ToolResult:
    """Run Python code in a process (`run_process`, whose limits may be given); it sees installed packages."""
    return await run_process([sys.executable, "-I", "-c", code], **limits)  # type: ignore[arg-type]
