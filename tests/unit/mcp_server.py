"""An MCP server of the SDK, for tests: `python mcp_server.py`."""

from __future__ import annotations

import asyncio
import contextlib
import os
import stat
import subprocess
import sys
import time

from mcp.server.mcpserver import MCPServer

server = MCPServer("sums")


@server.tool()
def add(x: int, y: int) -> str:
    """Return the sum of two numbers."""
    return str(x + y)


@server.tool()
def fail(reason: str) -> str:
    """Raise an error."""
    raise ValueError(reason)


@server.tool()
async def sleep(seconds: float) -> str:
    """Answer late."""
    await asyncio.sleep(seconds)
    return "awake"


@server.tool()
def hang() -> str:
    """Hear nothing any more."""
    time.sleep(600)
    return "awake"


@server.tool()
def repeat(text: str, times: int) -> str:
    """Return a text many times."""
    return text * times


@server.tool()
def end(code: int) -> str:
    """End the server."""
    os._exit(code)


@server.tool()
def garbage(length: int) -> str:
    """Print what is no message."""
    for number in map(int, os.listdir("/proc/self/fd")):
        with contextlib.suppress(OSError):  # the SDK has moved the output away from 1, to protect it
            if number > 2 and stat.S_ISFIFO(os.fstat(number).st_mode):
                with open(number, "wb", closefd=False) as output:
                    output.write(b"x" * length + b"\n")
    return "printed"


@server.tool()
def complain(num_bytes: int) -> str:
    """Write to stderr."""
    for _ in range(num_bytes // 1000):
        os.write(2, b"e" * 999 + b"\n")
    return "complained"


@server.tool()
def leave_child(seconds: int) -> str:
    """Start a process that keeps stderr open, and return its number."""
    script = f"import time; time.sleep({seconds})"
    return str(subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.DEVNULL).pid)


@server.tool()
def process() -> str:
    """Return the server's process number and its session."""
    return f"{os.getpid()} {os.getsid(0)} {os.getpgid(0)}"


if __name__ == "__main__":
    server.run()
