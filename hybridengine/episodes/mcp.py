"""Tools of MCP servers (Model Context Protocol, modelcontextprotocol.io) that an episode starts as processes.

    async with mcp_tools(["python", "server.py"]) as tools:
        tools.schemas                                       # for a chat template
        result = await tools.call("add", {"x": 1, "y": 2})

The package `mcp` speaks the protocol; the process is this module's, so that it ends with the process of the episodes, and
a line of a gigabyte is never held in memory.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from hybridengine.episodes.client import EpisodeError
from hybridengine.episodes.cores import core_of_this_host
from hybridengine.episodes.tools import ToolResult
from hybridengine.errors import DataError, shown

if TYPE_CHECKING:
    from mcp import Client
    from mcp.client._transport import TransportStreams

END_S = 2.0
"""Time for a server to end by itself once its input is closed."""
LINE_BYTES = 2**24
"""Longest line of a server: a longer one ends it."""
STDERR_BYTES = 2**16
"""Most of a server's stderr that is passed on to this process's."""


class ToolServerError(EpisodeError):
    """A server of tools hangs, has ended, or does not speak the protocol."""


@contextlib.asynccontextmanager
async def mcp_tools(
    command: Sequence[str],
    *,
    environment: Mapping[str, str] | None = None,
    start_timeout_s: float = 30.0,
    call_timeout_s: float = 10.0,
    output_bytes: int = 2**16,
) -> AsyncIterator[McpTools]:
    """Start an MCP server and yield its tools; end the server afterwards.

    Args:
        command: the server's program and arguments; it speaks MCP on its input and output.
        environment: variables of the server in addition to PATH and HOME.
        start_timeout_s: time limit for the server to start and to list its tools, once it has one of the host's cores.
        call_timeout_s: time limit of a call.
        output_bytes: longest text of a call's result; the rest is cut off.

    Raises:
        ToolServerError: the server does not start, hangs, ends, or prints what is no MCP message.
        DataError: the package `mcp` is not installed.
    """
    try:
        import mcp
    except ModuleNotFoundError:
        raise DataError("tools of MCP servers need the package mcp; install hybridengine[tools]") from None
    server = _Server(command, environment or {})
    client = mcp.Client(server, cache=None)
    tools = McpTools(client, server, call_timeout_s, output_bytes)
    is_started = False
    try:
        async with contextlib.AsyncExitStack() as stack:
            # A server takes a second of a core to start.
            async with core_of_this_host(), asyncio.timeout(start_timeout_s):
                await stack.enter_async_context(client)
                await tools.list()
            is_started = True
            yield tools
    except (BaseExceptionGroup, mcp.MCPError, TimeoutError) as raised:
        error = _only(raised)  # task groups of anyio, in the package, wrap it
        if is_started or not isinstance(error, mcp.MCPError | TimeoutError):
            raise error from None
        late = isinstance(error, TimeoutError)
        reason = (
            f"did not list its tools within {start_timeout_s:g} s" if late else f"refused to start: {error}"
        )
        raise server.error(reason) from None


class McpTools:
    """The tools of a running server.

    Attributes:
        schemas: each tool as chat templates take them: `{"type": "function", "function": {"name": ..., ...}}`.
    """

    def __init__(self, client: Client, server: _Server, call_timeout_s: float, output_bytes: int) -> None:
        self._client, self._server = client, server
        self._call_timeout_s, self._output_bytes = call_timeout_s, output_bytes
        self.schemas: list[dict[str, Any]] = []

    async def list(self) -> None:
        """Read the schemas of all tools again, after a server has changed them."""
        found, cursor = list[dict[str, Any]](), None
        while True:
            page = await self._client.list_tools(cursor=cursor)
            for tool in page.tools:
                function = {
                    "name": tool.name,
                    "description": tool.description or "",
                    "parameters": tool.input_schema,
                }
                found.append({"type": "function", "function": function})
            if (cursor := page.next_cursor) is None:
                break
        self.schemas = found

    async def call(self, name: str, arguments: Mapping[str, Any] | None = None) -> ToolResult:
        """Call a tool; return its text, with exit_code 1 if the tool says that it failed or cannot take the arguments.

        Texts of a result are joined by line breaks; of other parts (images, sounds), their type is named. Raises
        ToolServerError if the server does not answer in time, has ended, or does not speak the protocol.
        """
        import mcp
        from pydantic_core import to_json

        if arguments is not None and not isinstance(arguments, Mapping):  # a model's JSON
            return self._cut(f"the arguments of {name!r} are {shown(arguments)}; give a JSON object", 1)
        try:
            to_json([name, arguments])
        except ValueError as error:  # such as half of a surrogate pair, which JSON may escape and UTF-8 lacks
            return self._cut(f"the call of {name!r} cannot be sent as JSON in UTF-8 ({error}); correct it", 1)
        try:
            async with asyncio.timeout(self._call_timeout_s):
                result = await self._client.call_tool(name, dict(arguments or {}))
        except TimeoutError:
            raise self._server.error(
                f"did not answer the call of {name!r} within {self._call_timeout_s:g} s"
            ) from None
        except mcp.MCPError as error:
            if not self._server.failure and self._server.is_running:
                return self._cut(
                    str(error), 1
                )  # an answer of the protocol, as for a tool that it does not have
            raise self._server.error(f"refused the call of {name!r}: {error}") from None
        texts = [getattr(part, "text", f"[{part.type}]") for part in result.content]
        if not texts and result.structured_content is not None:
            texts = [json.dumps(result.structured_content)]
        return self._cut("\n".join(texts), int(bool(result.is_error)))

    def _cut(self, text: str, exit_code: int) -> ToolResult:
        whole = text.encode()
        if len(whole) <= self._output_bytes:
            return ToolResult(text, exit_code)
        return ToolResult(whole[: self._output_bytes].decode(errors="ignore"), exit_code, "output")


class _Server:
    """The process of a server, as a transport of the package `mcp`: a context manager that yields two streams.

    The package's own transport reads lines of any length.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self._command, self._environment = [*command], environment
        self._stack = contextlib.AsyncExitStack()
        self._process: asyncio.subprocess.Process | None = None
        self.failure = ""
        """What the server did that ended the connection."""

    @property
    def is_running(self) -> bool:
        """True while the process has not ended."""
        return self._process is not None and self._process.returncode is None

    def error(self, reason: str) -> ToolServerError:
        """Return an error that names the server's failure, or else `reason`."""
        command = " ".join(self._command)
        return ToolServerError(
            f"the MCP server {shown(command)} {self.failure or reason}; correct the server, or catch this error"
        )

    async def __aenter__(self) -> TransportStreams:
        return await self._stack.enter_async_context(self._running())

    async def __aexit__(self, *error: Any) -> None:
        await self._stack.__aexit__(*error)

    @contextlib.asynccontextmanager
    async def _running(self) -> AsyncIterator[TransportStreams]:
        import anyio

        try:
            starting = asyncio.ensure_future(
                asyncio.create_subprocess_exec(
                    *self._command,
                    stdin=asyncio.subprocess.PIPE,
                    stdout=asyncio.subprocess.PIPE,
                    stderr=asyncio.subprocess.PIPE,
                    limit=LINE_BYTES,
                    env={
                        "PATH": os.environ.get("PATH", os.defpath),
                        "HOME": os.getcwd(),
                        **self._environment,
                    },
                    process_group=0,
                )
            )
            # A start that is cancelled itself would wait for the children of the process.
            self._process = process = await asyncio.shield(starting)
        except asyncio.CancelledError:
            starting.add_done_callback(_end_started)
            raise
        except OSError as error:
            raise self.error(f"cannot be started ({error.strerror})") from None
        to_client, from_server = anyio.create_memory_object_stream[Any](0)
        to_server, from_client = anyio.create_memory_object_stream[Any](0)
        reading = asyncio.create_task(self._read(process, to_client))
        writing = asyncio.create_task(self._write(process, from_client))
        noting = asyncio.create_task(self._pass_on_stderr(process))
        try:
            yield from_server, to_server
        finally:
            for stream in (to_client, from_server, to_server, from_client):
                stream.close()
            reading.cancel()
            writing.cancel()
            await self._end(process)
            await asyncio.wait(
                [noting], timeout=END_S
            )  # its last lines; a child of it may keep the pipe open
            noting.cancel()
            process._transport.close()  # type: ignore[attr-defined]  # pipes that such a child keeps open

    async def _read(self, process: asyncio.subprocess.Process, messages: Any) -> None:
        """Pass on what the server prints; close the stream when it says nothing more that can be understood."""
        import anyio
        from mcp.shared.message import SessionMessage
        from mcp_types import jsonrpc_message_adapter

        assert process.stdout is not None, "it is a pipe"
        with contextlib.suppress(anyio.ClosedResourceError, anyio.BrokenResourceError):
            async with messages:
                while not self.failure:
                    try:
                        line = await process.stdout.readline()
                    except ValueError:
                        self.failure = f"printed a line of more than {LINE_BYTES} bytes"
                        break
                    if not line:
                        self.failure = f"has ended, exit code {await process.wait()}"
                        break
                    try:
                        message = jsonrpc_message_adapter.validate_json(line, by_name=False)
                    except ValueError:
                        text = line.decode(errors="replace").strip()
                        self.failure = f"printed {shown(text)}, which is not an MCP message"
                        break
                    await messages.send(SessionMessage(message))
        _kill(process)

    async def _pass_on_stderr(self, process: asyncio.subprocess.Process) -> None:
        """Write the first part of the server's stderr to this process's; read the rest, so that it never waits."""
        assert process.stderr is not None, "it is a pipe"
        left = STDERR_BYTES
        while part := await process.stderr.read(2**16):
            if left:
                _write_stderr(part[:left])
                if len(part) > left:
                    command = shown(" ".join(self._command))
                    _write_stderr(
                        f"\n(the rest of stderr of the MCP server {command} is left out)\n".encode()
                    )
                    left = 0
                else:
                    left -= len(part)

    async def _write(self, process: asyncio.subprocess.Process, messages: Any) -> None:
        assert process.stdin is not None, "it is a pipe"
        with contextlib.suppress(ConnectionError):  # it has ended, which the reader says
            async for message in messages:
                text = message.message.model_dump_json(by_alias=True, exclude_unset=True)
                process.stdin.write(text.encode() + b"\n")
                await process.stdin.drain()

    async def _end(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdin is not None, "it is a pipe"
        process.stdin.close()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(process.wait(), END_S)
        if process.returncode is None:
            _kill(process)
            with contextlib.suppress(TimeoutError):  # a child that has left its group keeps its pipes open
                await asyncio.wait_for(process.wait(), END_S)


def _kill(process: asyncio.subprocess.Process) -> None:
    """End a server and its children; it may be one of them (`uv run`, `npx`)."""
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def _end_started(starting: asyncio.Future[asyncio.subprocess.Process]) -> None:
    """End a server whose start nobody waits for any more."""
    if not starting.cancelled() and starting.exception() is None:
        _kill(starting.result())
        starting.result()._transport.close()  # type: ignore[attr-defined]


def _write_stderr(content: bytes) -> None:
    with contextlib.suppress(OSError), open(2, "wb", closefd=False) as stderr:
        stderr.write(content)


def _only(error: BaseException) -> BaseException:
    """Return the only error of nested groups; the group itself if there are several."""
    while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    return error
