"""What the verifiers library runs in an episode: an agent that only talks, and the client that draws its turns."""

# pyright: reportMissingImports=false
# The library asks for versions of its own, so it is in an environment of its own.

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from functools import cache
from typing import Any

import verifiers.v1 as vf
from openai import AsyncOpenAI, DefaultAsyncHttpxClient
from verifiers.v1.clients.train import serialize_completion
from verifiers.v1.dialects.chat import ChatDialect, message_to_wire

from hybridengine.episodes.client import EpisodeError, Turn

__all__ = ["EpisodeClient", "TalkingAgent"]


class TalkingAgent(vf.Harness[vf.HarnessConfig]):
    """An agent in this process: one call of the model for each message. The library's own agents start a program for each
    episode, which `uv` installs."""

    APPENDS_SYSTEM_PROMPT = True
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
        """Send the conversation to the model once."""
        prompt = [vf.UserMessage(content=data.prompt)] if isinstance(data.prompt, str) else data.prompt or []
        if data.system_prompt is not None:
            prompt = [vf.SystemMessage(content=data.system_prompt), *prompt]
        messages: Any = [message_to_wire(message) for message in prompt]
        client = AsyncOpenAI(
            base_url=endpoint, api_key=secret, max_retries=0, timeout=None, http_client=_connections()
        )
        await client.chat.completions.create(model=ctx.model, messages=messages)
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")


@cache
def _connections() -> DefaultAsyncHttpxClient:
    """Return the connections of all episodes to the library's server in this process.

    They have no limits but the episodes' deadline: turns wait for one another, and a busy loop takes seconds to connect.
    """
    return DefaultAsyncHttpxClient(timeout=None, trust_env=False)


class EpisodeClient(vf.Client):
    """Draws the turns of the library's requests from the engine of the run.

    `draw` is called with the trace's number, the conversation and the longest turn, and returns the turn with the tokens
    before it.
    """

    def __init__(
        self, draw: Callable[[str, list[Any], int | None], Awaitable[tuple[Turn, list[int]]]]
    ) -> None:
        self._draw = draw

    async def get_response(
        self,
        dialect: Any,
        body: dict[str, Any],
        sampling: vf.SamplingConfig,
        session_id: str | None = None,
        turn: Any = None,
        headers: Mapping[str, str] | None = None,
    ) -> vf.Response:
        """Draw the turn after the messages of a request, in the episode of its trace."""
        if not isinstance(dialect, ChatDialect):
            raise EpisodeError(
                f"the environment's agent speaks {type(dialect).__name__}; choose one of chat completions"
            )
        request = dialect.parse_request(body)
        if request.tools:
            raise EpisodeError(
                "the environment gives the model tools, which its prompts do not describe; choose one without tools"
            )
        messages: list[Any] = [
            {"role": one["role"], "content": one["content"]} for one in map(message_to_wire, request.messages)
        ]
        assert session_id is not None, "it is the trace's number"
        drawn, before = await self._draw(session_id, messages, sampling.max_tokens)
        response = vf.Response(
            id=f"{session_id}-{drawn.number}",
            created=0,
            model=body["model"],
            message=vf.AssistantMessage(content=drawn.text),
            finish_reason="stop" if drawn.stopped else "length",
            usage=vf.Usage(prompt_tokens=len(before), completion_tokens=len(drawn.token_ids)),
            tokens=vf.TurnTokens(
                prompt_ids=before,
                completion_ids=[*drawn.token_ids],
                completion_logprobs=[*drawn.log_probs],
            ),
        )
        response.raw = serialize_completion(response, body["model"])
        return response
