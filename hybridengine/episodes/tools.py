"""Tools that run in processes of their own: limited in time, memory and output, and ended with all that they start."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import errno
import os
import resource
import signal
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass

from hybridengine.episodes.cores import core_of_this_host
from hybridengine.temporary import remove_tree

PR_SET_PDEATHSIG = 1
"""Option of prctl(2): signal that the process gets when its parent ends."""
ARGUMENT_BYTES = 2**16
"""Longest code that is passed as an argument; Linux takes arguments of up to 128 KiB."""
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
    unless they leave its session, are killed after `timeout_s`, or once they have written more than `output_bytes`; on
    Linux the process also ends with this one. It has no environment but PATH and its own HOME, and may allocate
    `memory_bytes` of memory, write files of as much, and use one core for `timeout_s`. It is not isolated from the
    network and from files that this user may read: run what nobody trusts in a container.

    Arguments that no process can be given, such as a NUL, are a result with exit code 126. Raises OSError if the command
    cannot be started for another reason.
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

    async with core_of_this_host() if takes_core else contextlib.nullcontext():
        folder = tempfile.mkdtemp(dir=os.getcwd())  # that of the episodes' process, which is removed with it
        try:
            try:
                # Not a pipe, which a child that does not read it would keep open.
                with tempfile.TemporaryFile(dir=os.getcwd()) as file:
                    file.write(given.encode(errors="replace"))
                    file.seek(0)
                    process = await asyncio.create_subprocess_exec(
                        *arguments,
                        stdin=file,
                        stdout=asyncio.subprocess.PIPE,
                        stderr=asyncio.subprocess.STDOUT,
                        cwd=folder,
                        env={"PATH": os.environ.get("PATH", os.defpath), "HOME": folder},
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
                    if await _read(process, output, output_bytes):
                        reached = "output"
                    else:
                        await process.wait()
            except TimeoutError:
                reached = "time"
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                # `wait` would wait for a child outside its session, which has this pipe as well.
                process._transport.get_pipe_transport(1).close()  # type: ignore[attr-defined]
                exit_code = await process.wait()
        finally:
            remove_tree(folder)
        return ToolResult(output[:output_bytes].decode(errors="replace"), exit_code, reached)


async def _read(process: asyncio.subprocess.Process, output: bytearray, most: int) -> bool:
    """Append what a process writes; return True as soon as that is more than `most` bytes."""
    assert process.stdout is not None, "it is a pipe"
    while part := await process.stdout.read(2**16):
        output += part
        if len(output) > most:
            return True
    return False


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
