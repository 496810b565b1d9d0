"""Tools that run in processes of their own: limited in time, memory and output, and ended with all that they start."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import errno
import os
import resource
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass

from hybridengine.episodes.cores import core_of_this_host
from hybridengine.temporary import REMOVAL_S, start_removal

PR_SET_PDEATHSIG = 1
"""Option of prctl(2): signal that the process gets when its parent ends."""
ARGUMENT_BYTES = 2**16
"""Longest code that is passed as an argument; Linux takes arguments of up to 128 KiB."""
POLL_S = 0.005
"""Interval at which the end of a process that has closed its output is looked for, and that of a removal."""
END_S = 5.0
"""Time limit for a killed process to end."""
CANNOT_RUN = 126
"""Exit code of a command that cannot be run, as in a shell."""
RUN_FILE = "import sys; exec(compile(open(sys.argv.pop(), 'rb').read(), '<string>', 'exec'))"
"""Code that runs the file in its last argument; tracebacks name it as they do an argument, not by its random path."""


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
    takes_core: bool = True,
) -> ToolResult:
    """Run a command in an empty folder of its own, with a file of the text `given` as its input; return its result.

    It waits until one of the host's cores is free of other tools; `timeout_s` begins then. A command that waits for
    others (`docker exec`), or with which other tools talk, need not: `takes_core=False`. The process and its children,
    unless they leave its process group (`setsid`, `timeout`), are killed after `timeout_s`, or once they have written
    more than `output_bytes`; on Linux the process also ends with this one. It has no environment but PATH, its own HOME
    and OMP_NUM_THREADS, and may allocate `memory_bytes` of memory, write files of as much, and use one core for
    `timeout_s`. It is not isolated from the network and from files that this user may read: run what nobody trusts in a
    container.

    Arguments that no process can be given, such as a NUL, are a result with exit code 126. Raises OSError if the command
    cannot be started for another reason.
    """

    def limit() -> None:
        if libc is not None:
            libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        for kind, most in limits:
            resource.setrlimit(kind, (most, most))

    # Memory comes last: this process may have more, and can then allocate nothing.
    most = {
        resource.RLIMIT_FSIZE: memory_bytes,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_CPU: int(timeout_s) + 1,
        resource.RLIMIT_DATA: memory_bytes,
        resource.RLIMIT_AS: memory_bytes,
    }
    limits = [(kind, _at_most(resource.getrlimit(kind)[1], value)) for kind, value in most.items()]
    # Loaded here: a process that has forked may not load libraries.
    libc = ctypes.CDLL(None) if sys.platform == "linux" else None

    async with core_of_this_host() if takes_core else contextlib.nullcontext():
        folder = tempfile.mkdtemp(dir=os.getcwd())  # that of the episodes' process, which is removed with it
        try:
            try:
                # Not a pipe, which a child that does not read it would keep open.
                with tempfile.TemporaryFile(dir=os.getcwd()) as file:
                    file.write(given.encode(errors="replace"))
                    file.seek(0)
                    # Not by asyncio: a start that is cancelled there waits for the children of the process.
                    process = subprocess.Popen(
                        arguments,
                        stdin=file,
                        stdout=subprocess.PIPE,
                        stderr=subprocess.STDOUT,
                        cwd=folder,
                        env={
                            "PATH": os.environ.get("PATH", os.defpath),
                            "HOME": folder,
                            "OMP_NUM_THREADS": "1",
                        },
                        start_new_session=True,
                        preexec_fn=limit,
                    )
            except (OSError, ValueError) as error:  # ValueError: a NUL, or half of a surrogate pair
                if isinstance(error, OSError) and error.errno != errno.E2BIG:
                    raise
                return ToolResult(f"the command cannot be run: {error}", CANNOT_RUN)
            output, reached = bytearray(), ""
            try:
                async with asyncio.timeout(timeout_s):
                    reached = await _followed(process, output, output_bytes)
            except TimeoutError:
                reached = "time"
            finally:
                with contextlib.suppress(PermissionError):  # a program of another user, such as sudo
                    # It is not reaped yet, so that its number is not another's.
                    os.killpg(process.pid, signal.SIGKILL)
                await _ended(process, END_S)
        finally:
            await _removed(folder)
        exit_code = -signal.SIGKILL if process.returncode is None else process.returncode
        return ToolResult(output[:output_bytes].decode(errors="replace"), exit_code, reached)


def _at_most(hard: int, value: int) -> int:
    """Return a value of a limit that a process may set, of which `hard` is the largest."""
    return value if hard == resource.RLIM_INFINITY else min(value, hard)


async def _followed(process: subprocess.Popen[bytes], output: bytearray, most: int) -> str:
    """Append what a process writes until it has ended; return "output" as soon as that is more than `most` bytes."""
    loop, stream = asyncio.get_running_loop(), asyncio.StreamReader()
    transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(stream), process.stdout)
    try:
        while part := await stream.read(2**16):
            output += part
            if len(output) > most:
                return "output"
        while os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            await asyncio.sleep(POLL_S)
        return ""
    finally:
        transport.close()


async def _removed(folder: str) -> None:
    """Wait for REMOVAL_S at most until a folder is removed."""
    with contextlib.suppress(OSError):
        os.rmdir(folder)
        return
    with contextlib.suppress(OSError):
        await _ended(start_removal(folder), REMOVAL_S)


async def _ended(process: subprocess.Popen[bytes], limit_s: float) -> None:
    """Wait for `limit_s` at most until a process has ended."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(limit_s):
            while process.poll() is None:
                await asyncio.sleep(POLL_S)


async def run_python(code: str, **limits: float) -> ToolResult:
    """Run Python code of any length in a process (`run_process`, whose limits may be given).

    It sees installed packages.
    """
    python, encoded = [sys.executable, "-I", "-c"], code.encode(errors="surrogatepass")
    if len(encoded) <= ARGUMENT_BYTES and b"\0" not in encoded:
        return await run_process([*python, code], **limits)  # type: ignore[arg-type]
    with tempfile.NamedTemporaryFile(dir=os.getcwd()) as file:
        file.write(encoded)
        file.flush()
        return await run_process([*python, RUN_FILE, file.name], **limits)  # type: ignore[arg-type]
