"""Ray's workers, and other programs, as forks of a process that has imported everything: a rank with vLLM spends nine
tenths of its start on imports, and the tests start many. The processes among which pytest distributes tests are such
programs too.

Ray starts a worker with a program that sets up its environment. Here that is this file, which imports no packages: it
sends the worker's arguments, environment and open files to the warm process, which forks, and the fork runs Ray's own
program for workers, on the host (`tests.machines.hosts`) whose Ray has asked for it. Ray knows a worker by the
process id that the worker reports, so nothing else differs: signals, waits and logs refer to the rank. With `--wait`,
the file runs any Python program in the same way, and ends when it ends, with its exit status.
"""

from __future__ import annotations

import argparse
import array
import contextlib
import ctypes
import fcntl
import json
import os
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.util import spawnv_passfds
from pathlib import Path

REQUEST_LIMIT_S = 10.0
LARGEST_REQUEST = 2**20
MOST_FILES = 64
FREE_FILE = 512
STANDARD_FILES = (0, 1, 2)
NAMESPACES = ("net", "uts", "ipc", "pid", "mnt")


@contextmanager
def warm_workers(folder: Path, environment: dict[str, str]) -> Iterator[dict[str, str]]:
    """Start a warm process with `environment`; yield the variables with which `ray.init` starts its workers from it.

    It is a fork itself if this process knows another one. The folder's path must be short enough for a socket.
    """
    address = folder / "workers"
    known = [__file__] if "WARM_WORKERS" in os.environ else []
    command = [sys.executable, *known, "-m", "tests.warm_workers", str(address)]
    with subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=os.environ | environment,
        start_new_session=True,
    ) as server:
        assert server.stdin is not None and server.stdout is not None
        try:
            process = server.stdout.readline().decode().strip()
            assert process, "the warm process has ended before it was ready"
            hook = {"RAY_RUNTIME_ENV_HOOK": f"{__name__}.with_warm_workers"}
            yield hook | {"WARM_WORKERS": str(address), "WARM_WORKERS_PROCESS": process}
        finally:
            server.stdin.close()  # the server ends when its standard input closes


def warm_program(*command: object) -> list[str]:
    """Return the command that runs Python with these arguments as a fork of the process that `WARM_WORKERS` names."""
    return [sys.executable, __file__, "--wait", *map(str, command)]


def spawn_warm(path: bytes, arguments: list[str], files: Sequence[int]) -> int:
    """Start Python with open files, as `multiprocessing.util.spawnv_passfds` does, as a fork of the warm process."""
    return spawnv_passfds(path, warm_program("--files", *files, "-c", arguments[-1]), files)


def with_warm_workers(runtime_env: dict[str, object] | None) -> dict[str, object] | None:
    """Make this file the program that sets up workers, and start no services that tests do not use; Ray calls it as a
    hook before it starts a node."""
    from ray._private import ray_constants, utils
    from ray._private.node import Node

    # Joined to a folder, of which an absolute path leaves nothing.
    ray_constants.SETUP_WORKER_FILENAME = __file__
    for service in ("start_log_monitor", "start_monitor", "start_api_server"):
        setattr(Node, service, lambda node, *_, **__: None)
    if "RAY_metrics_report_interval_ms" not in os.environ:  # nobody reads metrics: start Ray's smaller agent
        utils.get_dashboard_dependency_error = lambda: ImportError("not in this test")
    return runtime_env


def start_one(arguments: list[str]) -> None:
    """Ask the warm process for a program with these arguments and this process's environment, folder and files."""
    setup = argparse.ArgumentParser()
    setup.add_argument("--serialized-runtime-env-context", default="{}")
    setup.add_argument("--language")
    setup.add_argument("--wait", action="store_true")
    setup.add_argument(
        "--files", type=int, nargs="*", default=[]
    )  # open files for the program, under the same numbers
    setup.add_argument("-u", action="store_true")  # a fork's output is written line by line
    own, arguments = setup.parse_known_args(arguments)
    variables = dict(os.environ) | json.loads(own.serialized_runtime_env_context).get("env_vars", {})
    given = [*STANDARD_FILES, *own.files]
    request = json.dumps([arguments, variables, os.getcwd(), own.wait, given]).encode()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as server:
        server.connect(os.environ["WARM_WORKERS"])
        files = array.array("i", given)
        server.sendmsg([request], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, files)])
        assert server.recv(1), "the warm process has ended"
        if own.wait:
            sys.exit(server.recv(1)[0])  # the program has been killed if there is none


def serve(address: str) -> None:
    """Fork a worker for every request until the standard input is closed."""
    import select

    sys.modules["ray"] = None  # type: ignore[assignment]  # it reads the environment while it is imported: not here
    import tests.preload  # noqa: F401

    del sys.modules["ray"]
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for workers
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(address)
        listener.listen(64)
        os.write(sys.stdout.fileno(), b"%d\n" % os.getpid())
        while listener in select.select([listener, sys.stdin], [], [])[0]:
            asking, _ = listener.accept()
            with asking, contextlib.suppress(OSError):  # the asking process may be killed at any point
                asking.settimeout(REQUEST_LIMIT_S)
                request, files, _, _ = socket.recv_fds(asking, LARGEST_REQUEST, MOST_FILES)
                if len(files) < len(STANDARD_FILES):
                    continue
                arguments, environment, folder, wait, numbers = json.loads(request)
                namespaces = other_namespaces(asking)
                asking.send(b"1")
                if os.fork() == 0:
                    listener.close()
                    report = socket.socket(fileno=moved(asking.detach()))
                    its_files = dict(zip(numbers, files, strict=True))
                    become(arguments, environment, folder, its_files, namespaces, report if wait else None)
                for file in (*files, *namespaces):
                    os.close(file)


def moved(file: int) -> int:
    """Return an open file under a number that no program expects, in place of its own."""
    number = fcntl.fcntl(file, fcntl.F_DUPFD, FREE_FILE)
    os.close(file)
    return number


def other_namespaces(asking: socket.socket) -> list[int]:
    """Return open files of the namespaces in which the asking process differs from this one."""
    size = struct.calcsize("3i")
    pid, _, _ = struct.unpack("3i", asking.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))
    places = [(f"/proc/{pid}/ns/{kind}", f"/proc/self/ns/{kind}") for kind in NAMESPACES]
    return [os.open(its, os.O_RDONLY) for its, own in places if not os.path.samefile(its, own)]


def enter(namespaces: list[int]) -> None:
    """Move this process into namespaces; into one of processes, only its children move."""
    libc = ctypes.CDLL(None, use_errno=True)
    for namespace in namespaces:
        if libc.setns(namespace, 0):
            raise OSError(ctypes.get_errno(), "setns")
        os.close(namespace)
    if namespaces and os.fork():
        os._exit(0)


def become(
    arguments: list[str],
    environment: dict[str, str],
    folder: str,
    files: dict[int, int],
    namespaces: list[int],
    report: socket.socket | None,
) -> None:
    """Run a program as if this process had been started for it, with open files under the numbers that it expects, and
    report its exit status; does not return."""
    import atexit
    import runpy
    import traceback

    status = 1
    atexit._clear()  # what the imports have registered is for the end of the warm process
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        enter(namespaces)
        os.setsid()
        higher = {number: moved(file) for number, file in files.items()}
        for number, file in higher.items():
            os.dup2(file, number)
            os.close(file)
        # The inherited objects remember whether the warm process's own files can be searched.
        sys.stdout, sys.stderr = (os.fdopen(file, "w", 1, closefd=False) for file in STANDARD_FILES[1:])
        os.environ.clear()
        os.environ.update(environment)
        os.chdir(folder)
        match arguments:
            case ["-c", program, *rest]:
                sys.argv = ["-c", *rest]
                exec(program, {"__name__": "__main__"})
            case ["-m", module, *_]:
                sys.argv = arguments[1:]
                runpy.run_module(module, run_name="__main__")
            case _:
                sys.argv = arguments
                sys.path.insert(0, str(Path(arguments[0]).parent))
                runpy.run_path(arguments[0], run_name="__main__")
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:  # written to the worker's log; the fork must never continue as the server
        traceback.print_exc()
    finally:
        if report:
            atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        if report:
            report.send(bytes([status]))
        os._exit(status)


if __name__ == "__main__":
    if __package__:
        serve(sys.argv[1])
        os._exit(0)  # some modules report what they leak
    else:
        start_one(sys.argv[1:])
