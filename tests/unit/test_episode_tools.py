"""Processes of tools: output, limits, and that nothing is left of them."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hybridengine.episodes.tools import ToolResult, run_process, run_python


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def is_running(number: int) -> bool:
    try:
        return Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def awaited_end(number: int) -> bool:
    """Return True once a process has ended; False if it has not within ten seconds."""
    deadline = time.monotonic() + 10
    while is_running(number) and time.monotonic() < deadline:
        time.sleep(0.01)
    return not is_running(number)


def test_output_errors_input_and_exit_code() -> None:
    code = "import sys; print(input() * 2); print('no', file=sys.stderr); sys.exit(3)"
    found = asyncio.run(run_process([sys.executable, "-c", code], given="ab\n", timeout_s=60))
    assert (sorted(found.output.split()), found.exit_code, found.limit) == (["abab", "no"], 3, "")


def test_it_has_a_folder_of_its_own_and_no_secrets(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_KEY", "tml-1")
    code = "import os; open('file', 'w').close(); print(os.getcwd(), sorted(os.environ), os.environ['HOME'])"
    found = asyncio.run(run_python(code, timeout_s=60))
    place = found.output.split()[0]
    assert Path(place).parent == folder and "SECRET_KEY" not in found.output
    assert found.output.split()[-1] == place
    assert [*folder.iterdir()] == [], "nothing is left of it"


def test_a_tool_that_hangs_is_killed_with_its_children_and_keeps_its_output() -> None:
    code = (
        "import subprocess, time; print(subprocess.Popen(['sleep', '600']).pid, flush=True); time.sleep(600)"
    )
    found = asyncio.run(run_python(code, timeout_s=3))
    assert (found.limit, found.exit_code) == ("time", -signal.SIGKILL)
    assert awaited_end(int(found.output))


@pytest.mark.parametrize("closes", ["", "import os; os.close(1); os.close(2); "])
def test_a_tool_that_closes_its_output_and_hangs(closes: str) -> None:
    found = asyncio.run(run_python(f"{closes}import time; time.sleep(600)", timeout_s=2))
    assert found == ToolResult("", -signal.SIGKILL, "time")


def test_a_tool_that_is_cancelled_is_killed_with_its_children(folder: Path) -> None:
    file = folder / "number"

    async def cancelled() -> None:
        task = asyncio.create_task(run_process(["sh", "-c", f"sleep 600 & echo $! > {file}; wait"]))
        async with asyncio.timeout(60):
            while not file.exists() or not file.read_text():
                await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cancelled())
    assert awaited_end(int(file.read_text()))
    assert [*folder.iterdir()] == [file]


def test_libraries_of_a_tool_use_the_one_core_that_it_has() -> None:
    """Their threads for all cores of a large host would need more memory than it may have."""
    code = "import os; print(os.environ['OMP_NUM_THREADS'])"
    assert asyncio.run(run_python(code, timeout_s=60)).output == "1\n"


def test_a_tool_may_have_more_memory_than_the_process_of_its_episode() -> None:
    code = """
import asyncio
from hybridengine.episodes.tools import run_python
from hybridengine.guarded.guard import limit_memory
limit_memory(2**27)
print(asyncio.run(run_python("print(len(bytearray(2**28)))", memory_bytes=2**30, timeout_s=60)).output)
"""
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, check=True)
    assert int(done.stdout) == 2**28


def test_a_tool_that_prints_a_gigabyte() -> None:
    found = asyncio.run(run_process(["yes"], output_bytes=1000, timeout_s=60))
    assert (found.output, found.limit) == ("y\n" * 500, "output")


def test_memory_is_bounded() -> None:
    found = asyncio.run(run_python("x = bytearray(2**31)", memory_bytes=2**28, timeout_s=60))
    assert "MemoryError" in found.output and found.exit_code == 1


def test_a_tool_that_reads_nothing_of_a_long_input() -> None:
    found = asyncio.run(run_process(["true"], given="x" * 10**6, timeout_s=60))
    assert (found.exit_code, found.limit) == (0, "")


@pytest.mark.parametrize("filler", ["x" * 300_000, "é" * 40_000], ids=["300 kB", "80 kB"])
def test_code_of_any_length_runs(filler: str, folder: Path) -> None:
    code = f"import sys\nassert not sys.argv[1:]\nprint(len('{filler}'))\nprint(1 / 0)"
    found = asyncio.run(run_python(code, timeout_s=60))
    assert found.output.startswith(f"{len(filler)}\n") or f"\n{len(filler)}\n" in found.output
    assert 'File "<string>", line 4, in <module>' in found.output and "ZeroDivisionError" in found.output
    assert (found.exit_code, found.limit) == (1, "")
    assert [*folder.iterdir()] == []


@pytest.mark.parametrize("code", ["print(1)\0", "print('\ud800')"], ids=["NUL", "surrogate"])
def test_code_that_no_process_can_be_given_is_a_result(code: str, folder: Path) -> None:
    found = asyncio.run(run_python(code, timeout_s=60))
    assert found.exit_code > 0 and ("null bytes" in found.output or "surrogates" in found.output)
    assert [*folder.iterdir()] == []


@pytest.mark.parametrize(
    ("argument", "reason"),
    [
        ("x" * 300_000, "Argument list too long"),
        ("\0", "embedded null byte"),
        ("\ud800", "surrogates not allowed"),
    ],
    ids=["long", "NUL", "surrogate"],
)
def test_arguments_that_no_process_can_be_given_are_a_result(
    argument: str, reason: str, folder: Path
) -> None:
    found = asyncio.run(run_process(["echo", argument]))
    assert found.exit_code == 126 and reason in found.output
    assert [*folder.iterdir()] == []


def test_input_that_is_no_text_is_replaced() -> None:
    assert asyncio.run(run_process(["cat"], given="a\ud800b", timeout_s=60)).output == "a?b"


def test_a_command_that_is_not_there(folder: Path) -> None:
    with pytest.raises(FileNotFoundError):
        asyncio.run(run_process(["/no/such/command"]))
    assert [*folder.iterdir()] == []


@pytest.mark.skipif(sys.platform != "linux", reason="the signal at a parent's end is Linux's")
def test_a_tool_ends_with_the_process_of_its_episode(folder: Path) -> None:
    file = folder / "number"
    tool = f"import os, time; open({str(file)!r}, 'w').write(str(os.getpid())); time.sleep(600)"
    code = "import asyncio; from hybridengine.episodes.tools import run_python;"
    code += f" asyncio.run(run_python({tool!r}, timeout_s=600))"
    root = Path(__file__).parents[2]
    parent = subprocess.Popen([sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": str(root)})
    deadline = time.monotonic() + 60
    while not (file.exists() and file.read_text()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait()
    assert awaited_end(int(file.read_text()))
