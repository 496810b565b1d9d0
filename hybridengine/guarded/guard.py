"""Processes of user code on a rank: the code's own process, and a guard above it that ends it.

    rank  -- lifeline -->  guard  -- fork -->  user code, in a process group of its own

The guard ends the code and what it has started when the lifeline is cut, by the rank or by the rank's death, and when
the code's process ends by itself. It needs no cooperation of the code, which may be deep in C. Both work in a temporary
folder that the rank creates and the guard removes. Only the standard library is imported, so that a start takes little
more than the code's own imports.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import socket
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import NoReturn

from hybridengine.importing import import_object
from hybridengine.temporary import remove_tree

PR_SET_CHILD_SUBREAPER = 36
"""Option of prctl(2): orphans among the descendants become children of this process."""
ORPHANS_S = 2.0
"""Time limit for orphans to end."""
SIGNAL_EXIT_CODE = 128
"""The guard's exit code is that of the code; for a signal n it is this + n, as in a shell."""


def main(channel: int, server: str) -> None:
    """Run as a guard whose child calls `server`, "package.module:function", with its end of `channel`; never returns."""
    os.set_inheritable(channel, False)
    folder = os.getcwd()
    # If the parent ignores it, this process does too, and the exit code of the code would be lost.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
    pid = os.fork()  # before any thread starts
    if pid == 0:
        _run(channel, server)
    os.close(channel)
    exit_code = _guard(pid)
    remove_tree(folder)
    os._exit(exit_code)


def _guard(pid: int) -> int:
    """Return the exit code of the process `pid`, which is ended with its descendants when the lifeline is cut."""
    with contextlib.suppress(OSError):  # the process does it as well: the first one wins
        os.setpgid(pid, pid)

    def end() -> None:
        with contextlib.suppress(OSError):
            os.killpg(pid, signal.SIGKILL)

    def await_cut() -> None:
        os.read(0, 1)
        end()

    threading.Thread(target=await_cut, daemon=True).start()
    while (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT)) and ended.si_pid != pid:
        os.waitpid(ended.si_pid, 0)  # an orphan
    end()  # end what the code has started; the process is not reaped yet, so its pid is not reused
    _, status = os.waitpid(pid, 0)
    _end_orphans()
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else SIGNAL_EXIT_CODE - code


def _end_orphans() -> None:
    """End what has left the code's process group; children of what ends become this process's in turn."""
    deadline = time.monotonic() + ORPHANS_S
    while (children := _children()) and time.monotonic() < deadline:
        for child in children:
            with contextlib.suppress(PermissionError):  # a program of another user, such as sudo
                os.kill(child, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):  # there is none any more
            while os.waitpid(-1, os.WNOHANG) != (0, 0):
                pass
        time.sleep(0.005)


def _children() -> list[int]:
    """Return the children of this process's threads."""
    found = list[int]()
    for file in Path("/proc/self/task").glob("*/children"):
        with contextlib.suppress(OSError):  # a thread has ended
            found += map(int, file.read_text().split())
    return found


def _run(channel: int, server: str) -> NoReturn:
    """Run the code's process: outside the guard's group, without its lifeline, first to be killed on low memory."""
    try:
        os.setpgid(0, 0)
        nothing = os.open(os.devnull, os.O_RDWR)
        os.dup2(nothing, 0)
        os.close(nothing)
        with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
            file.write("1000")
        import_object(server)(socket.socket(fileno=channel))
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def limit_memory(num_bytes: int | None) -> None:
    """Limit the memory that this process may allocate, if there is a limit."""
    if num_bytes is not None:
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        resource.setrlimit(resource.RLIMIT_DATA, (num_bytes, hard))
