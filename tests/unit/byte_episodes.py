"""Episodes without an engine: a token is a byte, and what the model draws is written beforehand."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

from hybridengine.environments.environment import Environment, Prompt
from hybridengine.episodes.client import Client, Result, Row
from hybridengine.episodes.wire import DrawnTurn, Limits, Wanted

LIMITS = Limits(4096, 64, 256, 60.0, 60.0, needs_reward=True)


class ByteChat:
    """A tokenizer of bytes, whose chat template is {role}content."""

    def text_tokens(self, text: str) -> list[int]:
        return [*text.encode()]

    def decoded(self, tokens: Sequence[int]) -> str:
        return bytes(tokens).decode()

    def message_tokens(self, messages: Sequence[Mapping[str, Any]], last: Sequence[int]) -> list[int]:
        return self.text_tokens("".join(f"{{{one['role']}}}{one['content']}" for one in messages))


def first_prompts(environment: Environment, count: int, seed: int = 0) -> list[Prompt]:
    return [*islice(environment.prompts(seed, 100), count)]


def play(environment: Environment, prompt: Prompt, *turns: str, **limits: int) -> tuple[Result, list[str]]:
    """Return the result of an episode with these turns, and what the environment said before each turn but the first.

    `limits` are those of an episode, such as `max_tokens`: the most bytes of the turns and of what is said together.
    """
    left, read = [*turns], list[str]()

    async def draw(wanted: Wanted) -> DrawnTurn:
        read.append(bytes(wanted.added).decode())
        tokens = [*left.pop(0).encode()][: wanted.max_tokens]
        return DrawnTurn(wanted.added, tokens, [-1.0] * len(tokens), True)

    row = Row(0, prompt.prompt, (1, 2), json.dumps(prompt.answer), 0)
    client = Client(0, row, replace(LIMITS, **limits), ByteChat(), draw)  # type: ignore[arg-type]
    result = asyncio.run(environment.play(client, row, json.loads(row.answer)))
    client.check_result(Result(result.reward))
    assert not left, "the episode ended before its turns"
    return result, read[1:]
