"""Tools that wait for one of the host's cores: how many run at once, also of several processes, and their time."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from hybridengine.episodes import cores
from hybridengine.episodes.cores import Cores
from hybridengine.episodes.tools import ToolResult, run_process, run_python

USERS = """
import asyncio, json, sys, time
from pathlib import Path
from hybridengine.episodes.cores import Cores

async def use(shared, spans):
    async with shared.one():
        begun = time.monotonic()
        await asyncio.sleep(0.2)
        spans.append((begun, time.monotonic()))

async def main():
    shared, spans = Cores(Path(sys.argv[1]), [0, 1]), []
    await asyncio.gather(*(use(shared, spans) for _ in range(8)))
    print(json.dumps(spans))

asyncio.run(main())
"""


async def use(shared: Cores, spans: list[tuple[float, float]]) -> None:
    """Use a core for a moment, and note when."""
    async with shared.one():
        begun = time.monotonic()
        await asyncio.sleep(0.1)
        spans.append((begun, time.monotonic()))


def most_at_once(spans: Sequence[Sequence[float]]) -> int:
    """Return the largest number of spans of time that overlap."""
    changes = sorted((when, change) for span in spans for when, change in zip(span, (1, -1), strict=True))
    running = [0]
    for _, change in changes:
        running.append(running[-1] + change)
    return max(running)


@pytest.mark.parametrize("num_processes", [1, 3])
def test_no_more_run_at_once_than_there_are_cores(num_processes: int, tmp_path: Path) -> None:
    command = [sys.executable, "-c", USERS, str(tmp_path / "cores")]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE) for _ in range(num_processes)]
    spans = [span for one in processes for span in json.loads(one.communicate(timeout=120)[0])]
    assert len(spans) == 8 * num_processes
    assert most_at_once(spans) == 2


def test_a_process_that_uses_a_core_all_the_time_leaves_it_to_others(tmp_path: Path) -> None:
    uses = """
    print(time.monotonic(), flush=True)
    for _ in range(int(sys.argv[2])):
        await use(shared, spans)
"""
    text = USERS.replace("[0, 1]", "[0]").replace("sleep(0.2)", "sleep(0.05)")
    text = text.replace("    await asyncio.gather(*(use(shared, spans) for _ in range(8)))\n", uses)
    processes, begins = list[subprocess.Popen[bytes]](), list[float]()
    for count in (200, 10):
        command = [sys.executable, "-c", text, str(tmp_path), str(count)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE)
        assert process.stdout is not None
        processes.append(process)
        begins.append(float(process.stdout.readline()))
    many, few = (json.loads(one.communicate(timeout=120)[0]) for one in processes)
    assert (len(many), len(few)) == (200, 10)
    assert sum(begins[1] < begun < few[-1][1] for begun, _ in many) < 100, "about ten"
    assert most_at_once([*many, *few]) == 1


def test_an_event_loop_that_uses_a_core_all_the_time_leaves_it_to_those_of_other_threads(
    tmp_path: Path,
) -> None:
    shared, is_used = Cores(tmp_path, [0]), threading.Event()
    spans: list[list[tuple[float, float]]] = [[], []]

    async def uses(number: int, count: int) -> None:
        assert count == 200 or is_used.wait(60)
        for _ in range(count):
            async with shared.one():
                is_used.set()
                begun = time.monotonic()
                await asyncio.sleep(0.05)
                spans[number].append((begun, time.monotonic()))

    with ThreadPoolExecutor(2) as threads:
        list(threads.map(lambda one: asyncio.run(uses(*one)), enumerate((200, 10))))
    many, few = spans
    assert (len(many), len(few)) == (200, 10)
    assert sum(begun < few[-1][1] for begun, _ in many) < 100, "about ten"
    assert most_at_once([*many, *few]) == 1


def test_the_core_of_a_process_that_is_killed_is_free(tmp_path: Path) -> None:
    text = USERS.replace("sleep(0.2)", "sleep(3600)").replace("begun =", "print('in', flush=True); begun =")
    with subprocess.Popen([sys.executable, "-c", text, str(tmp_path)], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline() == b"in\n"
        process.kill()

    async def use() -> None:
        async with asyncio.timeout(30), Cores(tmp_path, [0, 1]).one():
            pass

    asyncio.run(use())


def test_without_locks_the_cores_are_those_of_the_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def flock(core: int, operation: int) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", flock)
    shared, spans = Cores(tmp_path / "cores", [0, 1]), list[tuple[float, float]]()

    async def all_of_them() -> None:
        await asyncio.gather(*(use(shared, spans) for _ in range(6)))

    asyncio.run(all_of_them())
    assert (len(spans), most_at_once(spans)) == (6, 2)


def test_no_core_stands_idle_while_another_process_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All that wait in a process are served at its next look; 40 looks would take 80 s."""
    monkeypatch.setattr(cores, "LOOK_S", 2.0)
    shared = Cores(tmp_path / "cores", range(64))

    async def use(all_have_one: asyncio.Barrier) -> None:
        async with shared.one():
            await all_have_one.wait()

    async def all_of_them() -> None:
        all_have_one = asyncio.Barrier(40)
        async with asyncio.timeout(40):
            await asyncio.gather(*(use(all_have_one) for _ in range(40)))

    with (tmp_path / "cores" / "waiting").open() as other:
        fcntl.flock(other, fcntl.LOCK_SH)
        asyncio.run(all_of_them())


def test_a_core_whose_lock_fails_is_not_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shared = Cores(tmp_path / "cores", [0])

    async def use() -> None:
        async with asyncio.timeout(30), shared.one():
            pass

    def flock(file: int, operation: int, real: Any = fcntl.flock) -> None:
        if file != shared._waiting:
            raise OSError(errno.EIO, "Input/output error")
        real(file, operation)

    monkeypatch.setattr(fcntl, "flock", flock)
    with pytest.raises(OSError, match="Input/output error"):
        asyncio.run(use())
    monkeypatch.undo()
    asyncio.run(use())


@pytest.mark.parametrize(
    ("text", "quota"),
    [("max 100000", None), ("250000 100000\n", 2), ("50000 100000", 1), ("", None), (None, None)],
)
def test_a_container_has_no_more_cores_than_it_may_use(
    text: str | None, quota: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cores, "QUOTA_FILE", tmp_path / "cpu.max")
    if text is not None:
        (tmp_path / "cpu.max").write_text(text)
    assert cores._quota() == quota


def test_tools_of_several_loops_share_the_cores_and_their_files(tmp_path: Path) -> None:
    """As those of functions in threads that call asyncio.run."""
    shared, spans = Cores(tmp_path / "cores", [0, 1]), list[tuple[float, float]]()
    before = len(os.listdir("/proc/self/fd"))

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(lambda _: asyncio.run(use(shared, spans)), range(24)))
    assert (len(spans), most_at_once(spans)) == (24, 2)
    assert len(os.listdir("/proc/self/fd")) <= before


def test_the_time_of_a_tool_begins_when_it_has_a_core(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    shared = Cores(tmp_path / "cores", [0])
    monkeypatch.setattr(cores, "_cores", lambda: shared)

    async def tools() -> list[str]:
        sleeps = (run_process(["sleep", "2"], timeout_s=6) for _ in range(4))
        return [result.limit for result in await asyncio.gather(*sleeps)]

    begun = time.monotonic()
    assert asyncio.run(tools()) == [""] * 4
    assert time.monotonic() - begun >= 8, "one after the other"


def test_a_tool_may_make_folders_deeper_than_recursion(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    code = "import os\nfor _ in range(3000): os.mkdir('a'); os.chdir('a')\nprint('made')"
    try:
        result = asyncio.run(run_python(code, timeout_s=60))
        assert (result.output, result.exit_code) == ("made\n", 0)
        assert not any(tmp_path.iterdir())
    finally:  # pytest could not remove them either
        subprocess.run(["rm", "-rf", *tmp_path.iterdir()], check=True)


@pytest.mark.parametrize("end", ["raises", "is cancelled"])
def test_a_tool_that_fails_gives_its_core_back(end: str, tmp_path: Path) -> None:
    shared = Cores(tmp_path / "cores", [0])

    async def fails() -> None:
        async with shared.one():
            if end == "raises":
                raise ValueError
            await asyncio.sleep(3600)

    async def use_after() -> None:
        task = asyncio.create_task(fails())
        await asyncio.sleep(0.1)
        task.cancel()
        with pytest.raises((ValueError, asyncio.CancelledError)):
            await task
        async with asyncio.timeout(30), shared.one():
            pass

    asyncio.run(use_after())


OUTLIVED = (
    "import subprocess; print(subprocess.Popen(['sleep', '1000'], start_new_session=True).pid, flush=True); "
)


@pytest.mark.parametrize(
    ("code", "limit"),
    [("", "time"), ("import time; print('more' * 100, flush=True); time.sleep(300)", "output")],
)
def test_a_child_that_outlives_its_tool_keeps_neither_it_nor_its_pipes(
    code: str, limit: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    timeout_s = 8.0 if limit == "time" else 120.0

    def pipes() -> set[str]:
        names = (os.path.join("/proc/self/fd", name) for name in os.listdir("/proc/self/fd"))
        return {link for name in names if os.path.lexists(name) and "pipe:" in (link := os.readlink(name))}

    async def used() -> tuple[ToolResult, set[str]]:
        before = pipes()
        given = "more than a pipe holds" * 10_000  # which nobody reads
        result = await run_process(
            [sys.executable, "-c", OUTLIVED + code], given=given, timeout_s=timeout_s, output_bytes=100
        )
        await asyncio.sleep(0.1)  # the loop closes pipes between its tasks
        return result, pipes() - before

    result, opened = asyncio.run(used())
    os.kill(int(result.output.split()[0]), signal.SIGKILL)  # it lives on
    assert (result.limit, opened) == (limit, set())


def test_a_command_that_waits_for_others_takes_no_core(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    shared = Cores(tmp_path / "cores", [0])
    monkeypatch.setattr(cores, "_cores", lambda: shared)

    async def beside_a_tool() -> str:
        async with shared.one(), asyncio.timeout(60):
            return (await run_process(["echo", "hello"], takes_core=False, timeout_s=50)).output

    assert asyncio.run(beside_a_tool()) == "hello\n"


@pytest.mark.parametrize("what", ["a file", "another user's"])
def test_what_has_the_name_of_the_folder_keeps_no_tool_from_running(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = tmp_path / "own"
    own.mkdir()
    monkeypatch.chdir(own)
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(tmp_path))
    if what == "another user's":
        monkeypatch.setattr(os, "getuid", lambda: 12345)
    name = tmp_path / f"hybridengine-cores-{os.getuid()}"
    if what == "a file":
        name.touch()
    else:
        name.mkdir()
    cores._cores.cache_clear()
    try:
        assert asyncio.run(run_process(["echo", "hello"], timeout_s=50)).output == "hello\n"
    finally:
        cores._cores.cache_clear()
    assert any(own.iterdir()), "cores of its own"
    if what == "another user's":
        assert not any(name.iterdir())
