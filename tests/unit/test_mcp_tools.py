"""Tools of MCP servers: servers of the SDK in processes, and programs that are none."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shlex
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from hybridengine.episodes.mcp import LINE_BYTES, STDERR_BYTES, McpTools, ToolServerError, _Server, mcp_tools
from hybridengine.episodes.tools import ToolResult
from tests.unit.test_episode_tools import awaited_end, is_running

SERVER = (sys.executable, str(Path(__file__).with_name("mcp_server.py")))


def used(use: Callable[[McpTools], Awaitable[Any]], command: Sequence[str] = SERVER, **limits: Any) -> Any:
    """Return what a use of a server's tools returns."""

    async def run() -> Any:
        async with mcp_tools(command, **limits) as tools:
            return await use(tools)

    return asyncio.run(run())


def test_tools_of_a_server_are_listed_as_schemas_and_called() -> None:
    async def use(tools: McpTools) -> Any:
        calls = [
            tools.call("add", {"x": 20, "y": 22}),
            tools.call("fail", {"reason": "no luck"}),
            tools.call("nothing"),
            tools.call("add", {"x": "many"}),
            tools.call("repeat", {"text": "é", "times": 100}),
        ]
        return tools.schemas, await asyncio.gather(*calls)

    schemas, (added, failed, unknown, wrong, cut) = used(use, output_bytes=101)
    (schema,) = [one["function"] for one in schemas if one["function"]["name"] == "add"]
    assert all(one["type"] == "function" for one in schemas)
    assert schema["description"] == "Return the sum of two numbers."
    assert schema["parameters"]["properties"]["x"]["type"] == "integer"
    assert set(schema["parameters"]["required"]) == {"x", "y"}
    assert added == ToolResult("42", 0)
    assert failed.exit_code == unknown.exit_code == wrong.exit_code == 1
    assert "fail" in failed.output
    assert cut == ToolResult("é" * 50, 0, "output")


def test_arguments_that_are_no_object_are_an_answer() -> None:
    texts = ["5", "[1, 2]", '"abc"', "[]", "0", "false"]

    async def use(tools: McpTools) -> Any:
        wrong = [await tools.call("add", json.loads(text)) for text in texts]
        return wrong, await tools.call("add", {"x": 1, "y": 2})

    wrong, right = used(use)
    assert wrong == [
        ToolResult(f"the arguments of 'add' are {text}; give a JSON object", 1) for text in texts
    ]
    assert right == ToolResult("3", 0)


def test_texts_that_utf8_lacks_are_an_answer_and_later_calls_are_sent() -> None:
    deep = "[" * 500 + "]" * 500

    async def use(tools: McpTools) -> Any:
        calls = [("add", r'{"x": "\ud800"}'), ("\ud800", "{}"), ("add", f'{{"x": {deep}}}')]
        wrong = [await tools.call(name, json.loads(text)) for name, text in calls]
        return wrong, await tools.call("add", {"x": 1, "y": 2})

    begin = time.monotonic()
    wrong, right = used(use, call_timeout_s=20.0)
    assert time.monotonic() - begin < 20.0
    for one, name in zip(wrong, ("'add'", r"'\ud800'", "'add'"), strict=True):
        assert one.exit_code == 1
        assert one.output.startswith(f"the call of {name} cannot be sent as JSON in UTF-8 (")
    assert right == ToolResult("3", 0)


def test_only_the_first_part_of_stderr_is_passed_on(capfd: pytest.CaptureFixture[str]) -> None:
    async def use(tools: McpTools) -> Any:
        await tools.call("complain", {"num_bytes": 1000})
        return await tools.call("complain", {"num_bytes": 50_000_000})

    assert used(use, call_timeout_s=60.0) == ToolResult("complained", 0)
    found = capfd.readouterr().err
    first, last = found[:STDERR_BYTES], found[STDERR_BYTES:]
    assert first.count("e" * 999) >= STDERR_BYTES // 1000 - 5
    assert re.fullmatch(r"\n\(the rest of stderr of the MCP server .* is left out\)\n", last)


def test_the_last_lines_of_a_server_are_passed_on(capfd: pytest.CaptureFixture[str]) -> None:
    async def use(tools: McpTools) -> None:
        raise AssertionError("it did not start")

    with pytest.raises(ToolServerError, match="has ended, exit code 1"):
        used(use, [sys.executable, "-c", "raise SystemExit('no server')"])
    assert "no server\n" in capfd.readouterr().err


def test_a_child_that_keeps_stderr_open_does_not_keep_the_block_from_ending() -> None:
    async def use(tools: McpTools) -> int:
        return int((await tools.call("leave_child", {"seconds": 600})).output)

    begin = time.monotonic()
    pid = used(use)
    try:
        assert time.monotonic() - begin < 120
    finally:
        os.kill(pid, signal.SIGKILL)


def test_a_server_behind_another_program_that_hangs_is_ended_with_the_block() -> None:
    """As `uv run` and `npx` start servers."""

    async def use(tools: McpTools) -> int:
        pid = int((await tools.call("process")).output.split()[0])
        with pytest.raises(ToolServerError, match="did not answer"):
            await tools.call("hang")
        return pid

    begin = time.monotonic()
    pid = used(use, ["sh", "-c", f"{shlex.join(SERVER)}; true"], call_timeout_s=5)
    assert time.monotonic() - begin < 120
    assert awaited_end(pid)


def test_a_start_that_is_cancelled_leaves_no_process(tmp_path: Path) -> None:
    """Children keep its pipes open; asyncio alone would wait for them."""
    file = tmp_path / "number"
    command = ["sh", "-c", f"sleep 600 & echo $! > {file}; wait"]

    async def cancelled() -> int:
        task = asyncio.create_task(_Server(command, {}).__aenter__())
        for _ in range(2):  # it has been started, and its pipes are being opened
            await asyncio.sleep(0)
        deadline = time.monotonic() + 60
        while (not file.exists() or not file.read_text()) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert not task.done()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        async with asyncio.timeout(60):
            while is_running(int(file.read_text())):
                await asyncio.sleep(0.01)
        return int(file.read_text())

    assert asyncio.run(cancelled()) > 0


def test_a_server_is_in_the_session_of_its_episodes_and_ends_with_the_block() -> None:
    async def use(tools: McpTools) -> str:
        return (await tools.call("process")).output

    pid, session, group = map(int, used(use).split())
    assert (session, group) == (os.getsid(0), pid)
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (("sleep", {"seconds": 60}), "did not answer the call of 'sleep' within 0.5 s"),
        (("end", {"code": 7}), "has ended, exit code 7"),
        (("garbage", {"length": 5}), 'printed "xxxxx", which is not an MCP message'),
    ],
    ids=["hangs", "ends", "no JSON"],
)
def test_a_call_that_a_server_does_not_answer_is_one_error(call: tuple[str, Any], text: str) -> None:
    async def use(tools: McpTools) -> None:
        await tools.call(*call)

    with pytest.raises(ToolServerError, match=text):
        used(use, call_timeout_s=0.5 if call[0] == "sleep" else 30.0)


@pytest.mark.parametrize(
    ("command", "text"),
    [
        (["/nothing/there"], "cannot be started \\(No such file"),
        (["sleep", "60"], "did not list its tools within 0.5 s"),
        (["echo", "hello"], 'printed "hello", which is not an MCP message'),
        (["head", "-c", str(LINE_BYTES + 1), "/dev/zero"], f"printed a line of more than {LINE_BYTES} bytes"),
        (["false"], "has ended, exit code 1"),
    ],
    ids=["none", "hangs", "no JSON", "long", "ends"],
)
def test_a_program_that_is_no_server_is_one_error(command: list[str], text: str) -> None:
    async def use(tools: McpTools) -> None:
        raise AssertionError("it did not start")

    with pytest.raises(ToolServerError, match=text):
        used(use, command, start_timeout_s=0.5 if command[0] == "sleep" else 30.0)


def test_an_error_of_the_function_is_its_own() -> None:
    async def use(tools: McpTools) -> None:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        used(use)
