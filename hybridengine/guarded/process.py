"""A process of user code, started under a guard (`guarded/guard.py`) and connected by a socket.

It inherits the environment, without the variables that make a process a rank of this world, a Ray worker or a GPU user,
and the module search path. Its working directory is a temporary folder. Its output goes to this process's stderr. Torch,
Ray and Megatron are not loaded unless the code imports them.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from hybridengine.errors import DataError
from hybridengine.guarded.guard import SIGNAL_EXIT_CODE
from hybridengine.temporary import make_folder, remove_tree

BOOTSTRAP = (
    "import json, sys; places, is_other = json.loads(sys.argv[3]); sys.path[:] = places + is_other * sys.path;"
    " from hybridengine.guarded.guard import main; main(int(sys.argv[1]), sys.argv[2])"
)

RANK_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
GPU_VARIABLES = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")

ENDING_S = 5.0
"""Time limit for a process to end after closing its connection."""
END_TIMEOUT_S = 10.0


class GuardedProcess:
    """A running process of user code. On Linux, all that it starts ends with it.

    Args:
        server: "package.module:function", called in the process with its end of `channel`.
        title: what it runs, for lists of processes.
        kind: word in the name of its temporary folder.
        python: interpreter of another environment, whose packages it sees instead of this one's; this project and the
            folders of the user's modules stay visible.

    Raises DataError if the interpreter cannot be started.
    """

    def __init__(self, server: str, title: str, kind: str, python: str | None = None) -> None:
        self.channel, theirs = socket.socketpair()
        self.folder = make_folder(kind)
        self._group: int | None = None
        with theirs:
            places = json.dumps([_module_places(python is not None), python is not None])
            try:
                self._process = subprocess.Popen(
                    [python or sys.executable, "-c", BOOTSTRAP, str(theirs.fileno()), server, places, title],
                    stdin=subprocess.PIPE,  # the lifeline: nothing is written to it before the end
                    stdout=2,
                    stderr=2,
                    pass_fds=(theirs.fileno(),),
                    env=child_environment(os.environ),
                    cwd=self.folder,
                    start_new_session=True,
                )
            except OSError as error:
                self.channel.close()
                remove_tree(self.folder)
                raise DataError(
                    f"the Python {python or sys.executable} of user code cannot be started ({error.strerror}); correct"
                    " its path"
                ) from None

    @property
    def pid(self) -> int:
        """Process number of the guard."""
        return self._process.pid

    def note_group(self) -> None:
        """Note the process group of the code, which exists once it has answered, in case that the guard is killed."""
        self._group = _only_child(self._process.pid)

    def end_text(self) -> str:
        """Return how the process has ended, after its connection was closed: "ended, exit code 1"."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return f"ended, {_exit_text(self._process.wait(ENDING_S))}"
        return "closed its connections"

    def close(self) -> None:
        """End the process and its descendants; idempotent."""
        process = self._process
        assert process.stdin is not None, "it is a pipe"
        if process.stdin.closed:
            return
        with contextlib.suppress(BrokenPipeError):
            # A byte, since closing has no effect while a fork of this process holds the other end.
            os.write(process.stdin.fileno(), b".")
        process.stdin.close()
        try:
            code = process.wait(END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            code = process.wait()
        if code < 0:  # the guard was killed, and can no longer end the code
            if self._group is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self._group, signal.SIGKILL)
            remove_tree(self.folder)
        self.channel.close()


def _module_places(only_users: bool) -> list[str]:
    """Return the folders in which this process looks for modules, or those among them that are not of its Python."""
    places = [os.path.abspath(place) for place in sys.path]
    own = [os.path.abspath(place) + os.sep for place in (sys.prefix, sys.base_prefix)]
    return [place for place in places if not (only_users and f"{place}{os.sep}".startswith(tuple(own)))]


def _only_child(pid: int) -> int | None:
    """Return the process that a guard has forked, which leads a group of its own; None if it has ended."""
    with contextlib.suppress(OSError):
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        return int(children[0]) if children else None
    return None


def child_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a process of user code, without GPUs, rank and Ray variables.

    Sets have the same order in all such processes: datasets draw from them.
    """
    others = ("RAY_", "TORCHELASTIC_")
    kept = [name for name in environment if name not in RANK_VARIABLES and not name.startswith(others)]
    fixed = {"PYTHONHASHSEED": "0", **dict.fromkeys(GPU_VARIABLES, "")}
    return {name: environment[name] for name in kept} | fixed


def _exit_text(code: int) -> str:
    number = -code if code < 0 else code - SIGNAL_EXIT_CODE
    if number not in set(signal.Signals):
        return f"exit code {code}"
    name = signal.Signals(number).name
    reason = ", for lack of memory or by a program, its own code included" if number == signal.SIGKILL else ""
    return f"killed by {name}{reason}"
