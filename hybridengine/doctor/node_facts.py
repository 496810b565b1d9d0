"""Facts about a node, collected by a process on that node that imports no heavy library.

A separate process imports libraries and queries devices: a broken build may end it, and Ray hides GPUs from this one.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata, util
from pathlib import Path
from typing import Any

from packaging.utils import canonicalize_name

from hybridengine.doctor.findings import THIS_MACHINE
from hybridengine.files import within

IMPORT_LIMIT_S = 240.0
"""Time limit for importing torch, Megatron-core and vLLM with a cold file cache."""
TRIAL_BYTES = 32 * 2**20
"""Bytes written to measure the speed of the run's folder."""
FOLDER_LIMIT_S = 30.0
"""Time limit for a file system to write the trial, or to show a file."""

OWN_PACKAGES = ("hybridengine", "workers")
"""This project's packages, which are the same on all nodes."""
DRIVER = Path("/proc/driver/nvidia/version")
"""Description of NVIDIA's kernel module."""
IMPORTED = ("torch", "megatron.core", "ray", "vllm", "transformers", "transformer_engine")
ASK = """
import importlib, json, sys, warnings
warnings.simplefilter("ignore")
found = {"import_errors": {}, "gpus": []}
for name in %(names)r:
    try:
        importlib.import_module(name)
    except BaseException as error:
        if isinstance(error, ModuleNotFoundError) and name.startswith(error.name or name):
            continue  # not installed: a matter of versions
        found["import_errors"][name] = f"{type(error).__name__}: {error}"
torch = sys.modules.get("torch")
if torch is not None and "torch" not in found["import_errors"]:
    found["cuda"] = torch.version.cuda
    try:
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version())) if count else None
        for one in range(count):
            free, total = torch.cuda.mem_get_info(one)
            capability = torch.cuda.get_device_capability(one)
            gpu = {"name": torch.cuda.get_device_name(one), "free_bytes": free, "total_bytes": total}
            found["gpus"].append(gpu | {"capability": capability})
    except Exception as error:
        found["gpu_error"] = f"{type(error).__name__}: {error}".splitlines()[0]
print("\\n" + json.dumps(found))
"""


@dataclass(frozen=True)
class Gpu:
    name: str
    free_bytes: int
    total_bytes: int
    capability: Sequence[int] = ()
    """Compute capability, (major, minor)."""


@dataclass(frozen=True)
class NodeFacts:
    """Facts about one node."""

    python: str
    packages: Mapping[str, str]
    """Versions of installed distributions, by normalised name."""
    import_errors: Mapping[str, str] = field(default_factory=dict)
    gpus: Sequence[Gpu] = ()
    has_gpu_device: bool = False
    """True if the system has an NVIDIA GPU, even if torch does not see it."""
    gpu_error: str = ""
    cuda: str | None = None
    """CUDA version that torch was built for; None for a CPU build."""
    nccl: str | None = None
    driver: str | None = None
    """Version of NVIDIA's kernel module; None without it, and in containers that hide it."""
    sources: str = ""
    """Digest of this project's sources that Python imports there; empty in earlier versions."""
    node: str = THIS_MACHINE
    num_cpus: int = 0
    available_bytes: int = 0
    total_bytes: int = 0
    shared_memory_bytes: int | None = None
    """Free space in /dev/shm; None without it."""


def node_facts() -> NodeFacts:
    """Return the facts about this node; takes as long as importing the libraries."""
    # Imported late, so that this module can be imported even if that one cannot.
    from hybridengine.machine import available_bytes, total_bytes

    return NodeFacts(
        python=platform.python_version(),
        packages=installed_packages(),
        sources=sources_digest(),
        driver=driver_version(),
        has_gpu_device=any(Path("/dev").glob("nvidia[0-9]*")),
        num_cpus=len(os.sched_getaffinity(0)),
        available_bytes=available_bytes(),
        total_bytes=total_bytes(),
        shared_memory_bytes=shared_memory_bytes(),
        **ask_libraries(IMPORTED),
    )


def shared_memory_bytes() -> int | None:
    """Return the free space in /dev/shm; None without it."""
    shared = Path("/dev/shm")
    return shutil.disk_usage(shared).free if shared.is_dir() else None


def installed_packages() -> dict[str, str]:
    """Return versions by normalised name; for a package installed twice, that which Python finds first."""
    found = reversed(list(metadata.distributions()))
    return {canonicalize_name(one.metadata["Name"]): one.version for one in found if one.metadata["Name"]}


def sources_digest(packages: Sequence[str] = OWN_PACKAGES) -> str:
    """Return the first 12 hexadecimal digits of a SHA-256 over the paths and contents of packages' Python files."""
    digest = hashlib.sha256()
    for name in packages:
        found = util.find_spec(name)
        for folder in map(Path, (found and found.submodule_search_locations) or ()):
            for file in sorted(folder.rglob("*.py")):
                content = file.read_bytes()
                digest.update(f"{name}/{file.relative_to(folder)} {len(content)}\n".encode() + content)
    return digest.hexdigest()[:12]


def driver_version(description: Path = DRIVER) -> str | None:
    """Return the version of NVIDIA's kernel module, such as 570.86.15; None if there is none."""
    with contextlib.suppress(OSError):
        if found := re.search(r"NVRM version:.*?\s(\d+\.[\d.]+)\s", description.read_text()):
            return found[1]
    return None


def ask_libraries(modules: Sequence[str]) -> dict[str, Any]:
    """Return fields of `NodeFacts` from a process that imports libraries; its death or hang is the error of all."""
    environment = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
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
        return {"import_errors": {", ".join(modules): f"importing took more than {IMPORT_LIMIT_S:g} s"}}
    with contextlib.suppress(ValueError, LookupError):
        found = json.loads(done.stdout.strip().splitlines()[-1])
        return found | {"gpus": [Gpu(**gpu) for gpu in found["gpus"]]}
    last = (done.stderr.strip().splitlines() or ["nothing on stderr"])[-1]
    reason = f"the process that imported them ended with status {done.returncode} ({last})"
    return {"import_errors": {", ".join(modules): reason}}


@dataclass(frozen=True)
class FolderFacts:
    """Facts about a folder, as a node sees it."""

    error: str = ""
    """Error of writing to the folder."""
    free_bytes: int = 0
    write_s: float = 0.0
    """Seconds to write `TRIAL_BYTES` to disk."""
    small_s: float = 0.0
    """Seconds to create, write, sync and remove a file of one byte."""


def try_folder(folder: str) -> FolderFacts:
    """Write files to a folder, sync them to disk and remove them."""
    try:
        return within(FOLDER_LIMIT_S, _write_to, folder)
    except OSError as error:
        return FolderFacts(error=_reason(error))


def _write_to(folder: str) -> FolderFacts:
    begin = time.perf_counter()
    with tempfile.NamedTemporaryFile(dir=folder, prefix=".doctor-") as file:
        file.write(b"1")
        file.flush()
        os.fsync(file.fileno())
    small_s, begin = time.perf_counter() - begin, time.perf_counter()
    with tempfile.NamedTemporaryFile(dir=folder, prefix=".doctor-") as file:
        file.write(os.urandom(2**20) * (TRIAL_BYTES // 2**20))
        file.flush()
        os.fsync(file.fileno())
        took = time.perf_counter() - begin
    return FolderFacts(free_bytes=shutil.disk_usage(folder).free, write_s=took, small_s=small_s)


def _reason(error: OSError) -> str:
    return f"{type(error).__name__}: {error.strerror or error}"


def unreadable(paths: list[str]) -> dict[str, str]:
    """Return the reason for each file or folder that this node cannot read."""
    reasons = dict[str, str]()
    for path in paths:
        try:
            within(FOLDER_LIMIT_S, _read_from, path)
        except OSError as error:
            reasons[path] = error.strerror or str(error)
    return reasons


def _read_from(path: str) -> None:
    if os.path.isdir(path):
        os.listdir(path)
    else:
        with open(path, "rb") as file:
            file.read(1)


@contextlib.contextmanager
def made(folder: str) -> Iterator[str]:
    """Create a folder, and remove it on exit if it did not exist; yield the error, or "" on success."""
    try:
        missing = within(FOLDER_LIMIT_S, _make, folder)
    except OSError as error:
        yield _reason(error)
        return
    try:
        yield ""
    finally:
        for one in missing:
            with contextlib.suppress(OSError):  # another process has added a file
                within(FOLDER_LIMIT_S, one.rmdir)


def _make(folder: str) -> list[Path]:
    """Create a folder; return it and its parents as far as they did not exist."""
    missing = [one for one in (Path(folder), *Path(folder).parents) if not one.exists()]
    Path(folder).mkdir(parents=True, exist_ok=True)
    return missing


@contextlib.contextmanager
def locked_mark(folder: str) -> Iterator[str]:
    """Create a file in a folder, locked while the context is open, and yield its path."""
    with tempfile.NamedTemporaryFile(dir=folder, prefix=".doctor-") as file:
        with contextlib.suppress(OSError):  # nodes then see no lock, which is reported
            fcntl.flock(file, fcntl.LOCK_EX)
        yield file.name


def is_seen(mark: str, limit_s: float = 10.0) -> bool:
    """True if this node sees the file; waits, since network file systems may show it with a delay."""
    end = time.monotonic() + limit_s
    while not (seen := os.path.exists(mark)) and time.monotonic() < end:
        with contextlib.suppress(OSError):
            os.listdir(os.path.dirname(mark))  # makes NFS refresh its cache
        time.sleep(0.2)
    return seen


def lock_is_seen(mark: str) -> bool:
    """True if this node sees another node's lock of a file; runs lock their folders in the same way."""
    try:
        with open(mark, "r+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # only the owner may write it, or the file system has no locks
        return False
    return False
