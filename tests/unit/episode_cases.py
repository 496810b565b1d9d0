"""Good and bad functions of episodes; the processes under test load them, so the imports are light."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import socket
import threading
import time
from pathlib import Path

from hybridengine.episodes import Client, Result, Row, Turn, child

TOGETHER = threading.Barrier(64)
LEFT_BEHIND: list[asyncio.Task[None]] = []


class Panic(BaseException):
    """An error that is no `Exception`, as panics of libraries in Rust are."""


def serve_as_an_earlier_version(channel: socket.socket) -> None:
    """Load nothing, and say so without a version."""
    channel.makefile("rb").readline()
    channel.sendall(b'["loaded", null]\n')
    channel.recv(1)


async def work() -> None:
    while True:
        await asyncio.to_thread(time.sleep, 0.2)


async def block_later() -> None:
    await asyncio.sleep(0.5)
    time.sleep(3600)


async def does_what_the_answer_says(client: Client, row: Row) -> object:
    """Draw one turn, and then fail or succeed in the way of the row's answer."""
    turn = await client.generate(max_tokens=2)
    match row.answer.split(" ", 1):
        case ["talk", count]:  # draw other turns, each after a text with its number
            for number in range(1, int(count)):
                client.add(f"{number}?")
                await client.generate(max_tokens=2 + number)
            return Result(float(len(client.tokens)), {"turns": len(client.turns)})
        case ["starts", file]:  # add the number of processes that have run the episode
            starts = 1 + (int(Path(file).read_text()) if Path(file).exists() else 0)
            Path(file).write_text(str(starts))
            client.add([starts])
            await client.generate(max_tokens=2)
            await asyncio.sleep(3600 if starts == 1 else 0)
        case ["raise"]:
            raise ValueError("that is wrong")
        case ["exit"]:
            raise SystemExit(3)
        case ["panic"]:
            raise Panic("first line\nsecond line")
        case ["cancel"]:
            task = asyncio.create_task(asyncio.sleep(3600))
            task.cancel()
            await task
        case ["group"]:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(client.generate(stop=""))
        case ["sleep"]:
            await asyncio.sleep(3600)
        case ["swallow"]:
            while True:
                try:
                    await asyncio.sleep(3600)
                except asyncio.CancelledError:
                    continue
        case ["block-late"]:
            await asyncio.sleep(0.5)
            time.sleep(3600)
        case ["block"]:
            time.sleep(3600)
        case ["pauses", times]:  # wait without awaiting, and draw a turn; so often
            seconds, count = times.split()
            for _ in range(int(count)):
                time.sleep(float(seconds))
                await client.generate(max_tokens=1)
        case ["holds"]:  # all of Python, for longer than anyone waits
            re.match(r"(a+)+$", "a" * 40 + "b")
        case ["thread", seconds]:
            child.LEFT_S = 0.2  # of this process
            await asyncio.to_thread(time.sleep, float(seconds))
            return float(os.getpid())
        case ["workers", count]:
            child.LEFT_S = 1.0
            LEFT_BEHIND.extend(asyncio.create_task(work()) for _ in range(int(count)))
            await asyncio.sleep(0.1)
        case ["together"]:
            await asyncio.to_thread(TOGETHER.wait, 60)
        case ["orphan"]:
            LEFT_BEHIND.append(asyncio.create_task(block_later()))
        case ["nap"]:
            await asyncio.sleep(1)
        case ["abandon"]:
            client.add([7])
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(client.generate(max_tokens=8), 0.5)
            return Result(-1.0, turns=client.turns[1:])
        case ["again"]:  # give a turn up, and draw it again after another token
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(client.generate(max_tokens=8), 0.3)
            client.add([7])
            turn = await client.generate(max_tokens=3)
            return Result(float(len(turn.token_ids)))
        case ["die"]:
            os._exit(7)
        case ["kill"]:
            os.kill(os.getpid(), signal.SIGKILL)
        case ["die-once", file]:
            if not Path(file).exists():
                Path(file).touch()
                os._exit(7)
        case ["long"]:
            client.add("1" * 1000)
        case ["turns"]:
            while True:
                await client.generate(max_tokens=1)
        case ["nan"]:
            return float("nan")
        case ["text"]:
            return "a text"
        case ["none"]:
            return None
        case ["metric"]:
            return Result(1.0, {"strange": 1.0})
        case ["forge"]:
            tokens = (*turn.token_ids[:-1], turn.token_ids[-1] + 1)
            return Result(1.0, turns=[Turn(0, tokens, turn.log_probs, True)])
        case ["exclude"]:
            await client.generate(max_tokens=1)
            return Result(1.0, turns=client.turns[1:])
        case ["stop"]:
            await client.generate(stop="")
        case ["unknown"]:
            client.add([10**9])
        case ["other"]:
            await client.generate([*client.tokens[:-1], 5, 5])
        case ["twice"]:
            await asyncio.gather(client.generate(), client.generate())
        case ["allocate"]:
            bytearray(2**33)
    return 1.0


async def fails(client: Client, row: Row) -> float:
    raise ValueError("nothing was drawn")


def not_async(client: Client, row: Row) -> float:
    return 0.0


async def takes_one(client: Client) -> float:
    return 0.0


CONSTANT = 1
