"""Positions of ranks in a call that does not end, which they report to Ray's key-value store before its limit."""

from __future__ import annotations

import contextlib
import faulthandler
import sys
import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import PurePath

import ray
from ray import ObjectRef
from ray.exceptions import RayError
from ray.experimental import internal_kv

WORD_SHARE = 0.9
"""Fraction of a call's limit after which a rank reports its position, so that the controller can read it at the limit."""
MOST_LINES = 16
"""Largest number of ranks listed individually in a report."""
SILENT = "says nothing: its process is stopped, or in native code that lets no other thread run"
_COLLECTIVES = "torch/distributed/"
_PATH_PARTS = 3


@contextlib.contextmanager
def telling(timeout_s: float) -> Iterator[None]:
    """Report this thread's position and log all stacks if the block takes almost `timeout_s`, unless the GIL is held."""
    key, thread = _key(ray.get_runtime_context().get_actor_id() or ""), threading.get_ident()
    said = False

    def say() -> None:
        nonlocal said
        # Not by faulthandler's own timer, which reads frames of running threads and has crashed ranks.
        faulthandler.dump_traceback(file=sys.__stderr__ or sys.stderr)
        frame = sys._current_frames().get(thread)
        if frame is not None:
            said, file = True, PurePath(*PurePath(frame.f_code.co_filename).parts[-_PATH_PARTS:])
            with contextlib.suppress(RayError, RuntimeError):  # the cluster is gone
                place = f"{frame.f_code.co_name} ({file}:{frame.f_lineno})"
                internal_kv._internal_kv_put(key, place.encode())

    timer = threading.Timer(WORD_SHARE * timeout_s, say)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()  # the report may be in progress
        if said:
            with contextlib.suppress(RayError, RuntimeError):
                internal_kv._internal_kv_del(key)


def words_of(pending: Mapping[int, ObjectRef]) -> dict[int, str]:
    """Return rank -> reported position, or a note that there is none; empty if no rank reported any."""
    words = dict[int, str]()
    try:
        for rank, reference in pending.items():
            found = internal_kv._internal_kv_get(_key(reference.task_id().actor_id().hex()))
            words[rank] = f"in {found.decode()}" if found else SILENT
    except (RayError, RuntimeError):  # the cluster cannot be reached
        return {}
    return words if any(word != SILENT for word in words.values()) else {}


def report_lines(places: Mapping[int, str], words: Mapping[int, str]) -> list[str]:
    """Return a line per rank: first ranks without a report, then those outside collectives, at rare positions first."""
    count = Counter(words.values())

    ordered = [(words.get(rank, ""), rank) for rank in places]
    ordered.sort(key=lambda one: (one[0] != SILENT, _COLLECTIVES in one[0], count[one[0]], one[1]))
    lines = [f"  rank {rank} ({places[rank]})" + (f": {word}" if word else "") for word, rank in ordered]
    left = len(lines) - MOST_LINES
    return lines[:MOST_LINES] + ([f"  and {left} more"] if left > 0 else [])


def _key(actor_id: str) -> bytes:
    return f"hybridengine/whereabouts/{actor_id}".encode()
