"""Episodes of a rank in a process of their own: their functions share one event loop (`guarded/guard.py` starts it).

Two threads read and write the rank's lines, so that they work while a function keeps the loop from running; a third one
watches for that.
"""

from __future__ import annotations

import asyncio
import faulthandler
import inspect
import json
import os
import queue
import socket
import threading
import time
import traceback
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import Future
from typing import Any

from hybridengine import importing
from hybridengine.data.chat import Chat
from hybridengine.episodes import client as client_module
from hybridengine.episodes.client import Client, EpisodeError, LimitError, Row, TokenLimitError
from hybridengine.episodes.threads import Threads, calls_of_episode
from hybridengine.episodes.wire import VERSION, DrawnTurn, Ended, Limits, RunTokenizer, Wanted, line
from hybridengine.errors import DataError
from hybridengine.guarded.guard import limit_memory

MAX_TEXT = 4000
"""Characters of an error's text that are sent."""
LOOK_S = 0.2
"""Time between two looks of the watch at the loop."""
MOST_LOOK_S = 5 * LOOK_S
"""Most time that one look counts: a process that was stopped for longer has not been blocked by an episode."""

LEFT_S = 10.0
"""Time after the end of an episode in which its calls in threads should end."""

Function = Callable[[Client, Row], Awaitable[object]]


def serve(channel: socket.socket) -> None:
    """Load a function and run its episodes until the peer closes the channel."""
    asyncio.run(_Episodes(channel).run())


class _Episodes:
    """Episodes of one process.

    Lines from the rank: `load`, once; `begin`, `drawn` and `drop` of an episode; `ping`. Lines to it: `loaded`, `wrong`,
    or `version` where this is not the rank's; then `wanted` and `ended` of an episode, `blocked`, `worn` if
    threads of ended episodes go on, and `alive` for `ping`.
    """

    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel
        self._out = queue.SimpleQueue[bytes]()
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._answers: dict[int, tuple[Wanted, asyncio.Future[DrawnTurn]]] = {}
        """The turn that each episode wants, and its future."""
        self._has_iterated = threading.Event()
        """Set by an iteration of the loop, cleared at each look of the watch."""

    async def run(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._closed = asyncio.Event()
        for work in (self._read, self._write):
            threading.Thread(target=work, daemon=True).start()
        await self._closed.wait()
        os._exit(0)  # whatever functions and their threads still do

    # ---- threads ----

    def _read(self) -> None:
        lines = self._channel.makefile("rb")
        kinds = {"load": self._load, "begin": self._begin, "drawn": self._drawn, "drop": self._drop}
        while (text := lines.readline()).endswith(b"\n"):
            kind, content = json.loads(text)
            if kind == "ping":  # answered by this thread: what blocks the loop alone is not silent
                self._send("alive", None)
            else:
                self._loop.call_soon_threadsafe(kinds[kind], content)
        self._loop.call_soon_threadsafe(self._closed.set)

    def _write(self) -> None:
        while True:
            self._channel.sendall(self._out.get())

    def _watch(self) -> None:
        """Tell the rank of code that awaits nothing for too long; the rank then ends this process.

        Only the code of one task counts, without a pause: it is the same if the task is still running at the next look,
        and no iteration of the loop has begun since.
        """
        last, blocked_s, looked_s = None, 0.0, time.monotonic()
        while True:
            self._has_iterated.clear()
            self._loop.call_soon_threadsafe(self._has_iterated.set)
            time.sleep(LOOK_S)
            task, now_s = asyncio.current_task(self._loop), time.monotonic()
            is_same = task is last and not self._has_iterated.is_set()
            blocked_s = blocked_s + min(now_s - looked_s, MOST_LOOK_S) if is_same else 0.0
            last, looked_s = task, now_s
            if blocked_s < self._limits.blocked_s:
                continue
            number = next((number for number, one in self._tasks.items() if one is task), None)
            faulthandler.dump_traceback(file=2)
            text = (
                f"it did not let others run for {self._limits.blocked_s:g} s (its stacks are in the log); await what"
                " takes long, or call it by asyncio.to_thread"
            )
            self._send("blocked", {"number": number, "text": text})
            return

    def _send(self, kind: str, content: Any) -> None:
        self._out.put(line(kind, content))

    # ---- lines of the rank ----

    def _load(self, content: Mapping[str, Any]) -> None:
        if content.get("version") != VERSION:
            self._send("version", VERSION)
            return
        try:
            limit_memory(content["memory_bytes"])
            self._threads = Threads(content["memory_bytes"])
            self._loop.set_default_executor(self._threads)
            self._limits = Limits(**content["limits"])
            self._options = content["options"]
            self._function = load_function(content["path"])
            tokenizer = None
            if content["tokenizer"]:
                from hybridengine.data.tokenizer import load_tokenizer  # takes seconds

                tokenizer = load_tokenizer(content["tokenizer"], pad_with_eos=True)
            self._chat = Chat(tokenizer)
            if content["run_tokenizer"]:
                check_tokenizer(self._chat, content["tokenizer"], RunTokenizer(**content["run_tokenizer"]))
        except DataError as error:
            self._send("wrong", str(error))
            return
        except BaseException as error:  # a module may raise anything when imported
            limit = content["memory_bytes"]
            also = (
                f", or raise memory_bytes={limit}" if limit else ""
            )  # libraries fail in many ways without memory
            self._send("wrong", f"raised {_described(error)} when it was imported; correct the module{also}")
            return
        threading.Thread(target=self._watch, daemon=True).start()
        self._send("loaded", VERSION)

    def _begin(self, content: Mapping[str, Any]) -> None:
        number = content["number"]
        row = Row(
            **{**content["row"], "prompt_tokens": tuple(content["row"]["prompt_tokens"])},
            options=self._options,
        )
        recorded = [DrawnTurn(**one) for one in content["recorded"]]
        one = Client(number, row, self._limits, self._chat, self._ask, recorded)
        self._tasks[number] = asyncio.create_task(self._episode(number, one, row))

    def _drawn(self, content: Mapping[str, Any]) -> None:
        """Give an episode the turn that it wants, and not one that it has given up before it wanted this one."""
        number, drawn = content["number"], DrawnTurn(**content["drawn"])
        if number not in self._answers:
            return
        wanted, answer = self._answers[number]
        if not answer.done() and (wanted.turn, wanted.added) == (content["turn"], drawn.added):
            answer.set_result(drawn)

    def _drop(self, number: int) -> None:
        self._answers.pop(number, None)
        if (task := self._tasks.pop(number, None)) is not None:
            task.cancel()

    # ---- an episode ----

    async def _ask(self, wanted: Wanted) -> DrawnTurn:
        answer = self._loop.create_future()
        self._answers[wanted.number] = wanted, answer
        self._send("wanted", wanted)
        return await answer

    async def _episode(self, number: int, client: Client, row: Row) -> None:
        kind = text = ""
        reward, metrics, trained = None, {}, list[bool]()
        calls_of_episode.set(calls := set())
        try:
            async with asyncio.timeout(self._limits.deadline_s) as deadline:
                returned = await self._function(client, row)
            kind = "result"
            reward, metrics, trained = client.check_result(returned)
            kind = ""
        except BaseException as error:  # also a panic of Rust, or the cancellation of a task that it awaited
            if isinstance(error, TimeoutError) and deadline.expired():
                kind, text = "deadline", f"it did not end within deadline_s={self._limits.deadline_s:g} s"
            else:
                kind, text = _failure(error, kind)
        if calls:
            # Not calls to come: of tasks that it has started, and that work for other episodes.
            self._loop.call_later(LEFT_S, self._count_left, {*calls})
        if (
            self._tasks.get(number) is asyncio.current_task()
        ):  # otherwise it was dropped, and may have begun again
            del self._tasks[number]
            self._answers.pop(number, None)
            turn = max(0, len(client.turns) - (kind in ("", "result")))
            self._send("ended", Ended(number, reward, metrics, trained, kind, text, turn))

    def _count_left(self, calls: set[Future[Any]]) -> None:
        """Count calls in threads that go on after their episode; tell the rank if there are too many."""
        if self._threads.num_left(calls) >= self._threads.most_left:
            self._send("worn", None)


def load_function(path: str) -> Function:
    """Return the async function at "package.module:function"; raise DataError if there is none with two parameters."""
    function = importing.import_object(path)
    if not inspect.iscoroutinefunction(function) and not inspect.iscoroutinefunction(
        getattr(function, "__call__", None)  # noqa: B004
    ):
        raise DataError(f"is a {type(function).__name__}; write it as `async def rollout(client, row)`")
    try:
        inspect.signature(function).bind(None, None)
    except TypeError as error:
        raise DataError(
            f"cannot be called with (client, row): {error}; give it these two parameters"
        ) from None
    return function


def check_tokenizer(chat: Chat, folder: str, run: RunTokenizer) -> None:
    """Raise DataError if this host's tokenizer, of `folder`, gives other tokens or texts than the run's."""
    own = chat.digests()
    if differing := [name for name, digest in run.digests.items() if own.get(name) != digest]:
        raise DataError(
            f"has another tokenizer in {folder} than the run has in {run.folder} (other {', '.join(differing)}); give"
            " `hybridengine episodes serve --tokenizer` a copy of the run's folder, and use the same version of"
            " transformers"
        )


def _failure(error: BaseException, kind: str) -> tuple[str, str]:
    """Return the kind and the description of an error that has ended an episode; of a group's, the first one's."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    if isinstance(error, LimitError):
        return "tokens" if isinstance(error, TokenLimitError) else "turns", str(error)
    if kind == "result":
        return kind, str(error) if isinstance(
            error, EpisodeError
        ) else f"its result raised {_described(error)}"
    return "raised", f"it raised {_described(error)}"


def _described(error: BaseException) -> str:
    """Return an error on one line with its place in user code, shortened."""
    inside = (__file__, client_module.__file__)
    frames = [one for one in traceback.extract_tb(error.__traceback__) if one.filename not in inside]
    reason = " ".join(" ".join(traceback.format_exception_only(error)).split())
    place = f" ({frames[-1].filename}, line {frames[-1].lineno})" if frames else ""
    text = f"{reason}{place}"
    return text if len(text) <= MAX_TEXT else f"{text[: MAX_TEXT // 2]} ... {text[-MAX_TEXT // 2 :]}"
