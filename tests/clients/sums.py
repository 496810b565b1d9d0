"""Sums as a `verifiers` taskset, with an agent that answers in one call of the model: `{"id": "sums", "file": ...}`."""

# pyright: reportMissingImports=false
# The clients' environment has the package, the project's does not.

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import verifiers.v1 as vf
from openai import AsyncOpenAI

__all__ = ["Sums", "SumsAgent"]


TOOL: Any = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Return the sum of two numbers.",
        "parameters": {"type": "object", "properties": {"x": {"type": "integer"}, "y": {"type": "integer"}}},
    },
}


class SumData(vf.TaskData):
    """A question with its answer."""

    answer: str


class SumTask(vf.Task[SumData]):
    """A question that is answered right or wrong."""

    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        """Return 1 if the last reply is the answer."""
        return float(trace.last_reply == self.data.answer)


class SumsConfig(vf.TasksetConfig):
    """Settings of the taskset."""

    file: Path = Path()
    """JSON lines with `prompt` and `answer`."""


class Sums(vf.Taskset[SumTask, SumsConfig]):
    """Questions of a file."""

    def load(self) -> Iterator[SumTask]:
        """Yield the questions in the order of the file."""
        for line in self.config.file.read_text().splitlines():
            yield SumTask(SumData(**json.loads(line)), self.config.task)


class SumsAgent(vf.Harness[vf.HarnessConfig]):
    """An agent in this process; the harnesses of verifiers start a program for each rollout, which `uv` installs."""

    SUPPORTS_RESUME = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self,
        ctx: vf.ModelContext,
        trace: vf.Trace,
        runtime: vf.Runtime,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: vf.TaskData,
    ) -> vf.ProgramResult:
        """Send the conversation to the model once, with a tool: the renderer is to see it, the server is not."""
        prompt = [vf.UserMessage(content=data.prompt)] if isinstance(data.prompt, str) else data.prompt or []
        messages: Any = [message.model_dump(include={"role", "content"}) for message in prompt]
        async with AsyncOpenAI(base_url=endpoint, api_key=secret, max_retries=0) as client:
            await client.chat.completions.create(model=ctx.model, messages=messages, tools=[TOOL])
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")
