"""Memory of other processes of this host, read or mapped where the system allows it (Linux, the same user)."""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

MAX_SPANS = 1024
"""Most spans of one call to the system (IOV_MAX of Linux)."""

_PR_SET_PTRACER = 0x59616D61


class _Span(ctypes.Structure):
    """struct iovec."""

    _fields_ = [("base", ctypes.c_void_p), ("size", ctypes.c_size_t)]


_LIBC = ctypes.CDLL(None, use_errno=True)
_READS_MEMORY = sys.platform == "linux" and hasattr(_LIBC, "process_vm_readv")
if _READS_MEMORY:
    _LIBC.process_vm_readv.restype = ctypes.c_ssize_t
    _SPANS = ctypes.POINTER(_Span), ctypes.c_ulong
    _LIBC.process_vm_readv.argtypes = [ctypes.c_int, *_SPANS, *_SPANS, ctypes.c_ulong]


def read(pid: int, spans: Sequence[tuple[int, int, int]]) -> None:
    """Copy memory of a process: (address there, address here, bytes) each.

    Raises:
        OSError: the process has ended, has no such memory, or may not be read.
    """
    for first in range(0, len(spans), MAX_SPANS):
        _read(pid, spans[first : first + MAX_SPANS])


def shared_copy(tensor: Tensor) -> tuple[Tensor, int]:
    """(`tensor` in memory that other processes can map, descriptor of its file); the file goes when that is closed."""
    descriptor = os.memfd_create("hybridengine-rows")
    try:
        os.ftruncate(descriptor, tensor.nbytes)
        memory = mmap.mmap(descriptor, tensor.nbytes)
    except OSError:
        os.close(descriptor)
        raise
    copy = torch.frombuffer(memory, dtype=torch.uint8).view(tensor.dtype).view(tensor.shape)
    return copy.copy_(tensor), descriptor


def mapped(pid: int, descriptor: int, num_bytes: int) -> Tensor:
    """The bytes of another process's `shared_copy`, uint8: not copied, but by whoever writes to them, and for itself.

    Raises:
        OSError: the process has ended, has closed the file, or may not be looked at.
    """
    own = os.open(f"/proc/{pid}/fd/{descriptor}", os.O_RDONLY | os.O_CLOEXEC)
    try:
        return torch.frombuffer(mmap.mmap(own, num_bytes, access=mmap.ACCESS_COPY), dtype=torch.uint8)
    finally:
        os.close(own)


def host() -> str:
    """The same for processes that call each other by the same numbers, on the same running system; "" for no host."""
    if not _READS_MEMORY:
        return ""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def admit_siblings() -> None:
    """Where only relatives may read memory, let whatever this process's parent has started read this one's."""
    if _READS_MEMORY:
        _LIBC.prctl(_PR_SET_PTRACER, ctypes.c_ulong(os.getppid()), 0, 0, 0)


def _read(pid: int, spans: Sequence[tuple[int, int, int]]) -> None:
    left = [span for span in spans if span[2]]
    while left:
        here = (_Span * len(left))(*((target, size) for _, target, size in left))
        there = (_Span * len(left))(*((source, size) for source, _, size in left))
        count = _LIBC.process_vm_readv(pid, here, len(left), there, len(left), 0)
        if count <= 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))
        left = _rest(left, count)


def _rest(spans: list[tuple[int, int, int]], done: int) -> list[tuple[int, int, int]]:
    """What is left of `spans` once their first `done` bytes have been read."""
    for index, (source, target, size) in enumerate(spans):
        if done < size:
            return [(source + done, target + done, size - done), *spans[index + 1 :]]
        done -= size
    return []
