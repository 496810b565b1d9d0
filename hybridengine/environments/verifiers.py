"""Environments of the verifiers library (github.com/PrimeIntellect-ai/verifiers, 0.4), drawn from this run's engine.

verifiers sends an agent's requests to a server of its own in this process, which hands them to a client (its
`v1/clients/client.py`). The client here draws the turns of the episode that a request belongs to: as tokens, which are
never tokenised again.
"""

# pyright: reportMissingImports=false
# The library asks for versions of its own, so it is in an environment of its own.

from __future__ import annotations

import asyncio
import contextlib
import itertools
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

from hybridengine.environments.environment import Prompt, constructed, settings_of
from hybridengine.episodes.client import (
    Client,
    EpisodeError,
    LimitError,
    Message,
    Result,
    Row,
    Turn,
    TurnLimitError,
)
from hybridengine.errors import DataError, shown

ADDRESS = "http://episode.invalid"
"""Address in the configuration of the client, by which the library's server recognises it; nothing is sent there."""
HARNESS = "hybridengine_chat"
"""Name under which the library finds the agent of `verifiers_chat.py`."""


@dataclass(frozen=True)
class Settings:
    """How an environment is played."""

    agent: str = "agent"
    """Name of the agent that the model plays."""
    environment: str = ""
    """Name of an environment of the library for the taskset's rows; by default the taskset's own, or one agent."""
    max_tokens: int = 0
    """Longest turn; no limit but the response's with 0."""


@dataclass
class _Episode:
    """An episode of this run, while the library plays it."""

    client: Client
    messages: list[Message]
    """What the model has read and written."""
    traces: dict[str, Any] = field(default_factory=dict)
    """The library's records of its agents, by number."""
    failure: BaseException | None = None
    drawing: asyncio.Lock = field(default_factory=asyncio.Lock)


class Verifiers:
    """A taskset by its name, and its environment.

    The options are those of the taskset. The reward is the weighted sum of the trace's; metrics are its own, and its
    rewards by name.
    """

    def __init__(self, name: str, options: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
        vf = _library()
        self._settings = settings_of(Settings, settings)
        agent = {"harness": {"id": HARNESS}, "runtime": {"type": "subprocess"}}
        described = {
            "id": self._settings.environment,
            "taskset": {"id": name, **options},
            self._settings.agent: agent,
        }
        try:
            self._environment = vf.load_environment(vf.resolve_env_config(described))
        except ModuleNotFoundError as error:
            raise DataError(
                f"is not installed ({' '.join(str(error).split())}); install the package of the environment where"
                " verifiers is"
            ) from None
        except Exception as error:  # pydantic's, and whatever the constructor raises
            raise constructed(error) from None
        self._tasks, self._read = iter(self._environment.taskset), list[Any]()
        self._episodes = dict[str, _Episode]()
        self._stack: contextlib.AsyncExitStack | None = None
        self._starting = asyncio.Lock()

    def prompts(self, seed: int, count: int) -> Iterator[Prompt]:
        """Yield the taskset's rows in its order, from `seed` on: they have no seeds."""
        for index in itertools.count(seed):
            if index >= seed + count or (task := self._task(index)) is None:
                return
            _check_task(self._environment, task)
            yield Prompt(_messages(task.data), {"index": index, "key": task.key}, task.key)

    async def play(self, client: Client, row: Row, answer: Any) -> Result:
        vf = _library()
        await self._serve()
        task = self._task(answer["index"])
        if task is None or task.key != answer["key"]:
            raise EpisodeError(
                f"row {answer['index']} of the taskset is not what it was when the prompts were written; it must be the"
                " same in every process"
            )
        episode = _Episode(client, [*row.messages])

        def begun(trace: Any) -> None:
            episode.traces[trace.id] = trace
            self._episodes[trace.id] = episode

        context = vf.ModelContext(
            model="episode",
            client=vf.TrainClientConfig(base_url=ADDRESS, api_key_var="NONE"),
            sampling=vf.Sampling(max_tokens=self._settings.max_tokens or None),
        )
        try:
            slot = self._environment.slots(task)[0]
            played = await self._environment.run_slot(slot, context, on_trace=begun)
        finally:
            for name in episode.traces:
                del self._episodes[name]
        if episode.failure is not None:
            raise episode.failure
        return _result(played)

    async def draw(
        self, name: str, messages: list[Message], max_tokens: int | None
    ) -> tuple[Turn, list[int]]:
        """Return the turn that follows a conversation in the episode of a trace, and the tokens before it."""
        episode = self._episodes[name]
        async with episode.drawing:
            try:
                known = len(episode.messages)
                place = len(episode.client.turns)
                if messages[:known] != episode.messages:
                    raise EpisodeError(
                        f"the environment changed what the model has read or written before turn {place}; an episode is"
                        " one sequence of tokens, so only environments that add messages can be trained on"
                    )
                added = messages[known:]
                if strange := [one for one in added if one["role"] == "assistant"]:
                    raise EpisodeError(
                        f"the environment added the assistant's message {shown(strange[0]['content'])} before turn"
                        f" {place}, which the model did not write; choose an environment without such messages"
                    )
                if added:
                    episode.client.add(added)
                before = [*episode.client.tokens]
                turn = await episode.client.generate(max_tokens=max_tokens)
            except LimitError as error:
                # It is cut off and scored, as with the library's own limits of these names.
                has_room = isinstance(error, TurnLimitError)
                episode.traces[name].stop("max_turns" if has_room else "max_total_tokens")
                raise
            except Exception as error:
                episode.failure = error
                raise
            episode.messages += [*added, {"role": "assistant", "content": turn.text}]
            return turn, before

    def _task(self, index: int) -> Any:
        """Return a row of the taskset, which is read as far as needed; None if it has fewer."""
        self._read += itertools.islice(self._tasks, max(0, index + 1 - len(self._read)))
        return self._read[index] if index < len(self._read) else None

    async def _serve(self) -> None:
        """Start what the environment's episodes share, once in this process, which ends with it."""
        async with self._starting:
            if self._stack is None:
                _give_client(self)
                stack = contextlib.AsyncExitStack()
                await stack.enter_async_context(self._environment.serving())
                self._stack = stack  # now, since an episode may be cancelled while it waits here


def _library() -> ModuleType:
    import verifiers.v1 as vf

    from hybridengine.environments import verifiers_chat

    # The library imports agents by the name of a module at the top.
    sys.modules.setdefault(HARNESS, verifiers_chat)
    return vf


def _give_client(environment: Verifiers) -> None:
    """Let the library's server hand requests of episodes to `environment`."""
    from verifiers.v1.interception import server

    from hybridengine.environments.verifiers_chat import EpisodeClient

    made, client = server.resolve_client, EpisodeClient(environment.draw)
    server.resolve_client = lambda config: client if config.base_url == ADDRESS else made(config)


def _messages(data: Any) -> list[Message]:
    """Return a row's prompt as chat messages; raise DataError for one that is none, or has images."""
    if data.prompt is None:
        raise DataError(
            "has rows without a prompt, whose conversation somebody else begins; choose an environment whose rows have"
            " prompts"
        )
    prompt = data.prompt
    if isinstance(prompt, str):
        messages = [{"role": "user", "content": prompt}]
    else:
        messages = [{"role": one.role, "content": one.content} for one in prompt]
    if data.system_prompt is not None:
        messages.insert(0, {"role": "system", "content": data.system_prompt})
    if any(not isinstance(one["content"], str) for one in messages):
        raise DataError("has prompts with images; only texts can be played")
    return messages  # type: ignore[return-value]


def _check_task(environment: Any, task: Any) -> None:
    """Raise DataError for a task with tools, and for one without a reward, a judge or an environment that scores."""
    import verifiers.v1 as vf

    taskset = environment.taskset
    if taskset.toolsets(taskset.config) or task.toolsets(taskset.config.task):
        raise DataError(
            "gives the model tools, which its prompts do not describe; choose an environment without"
        )

    own = type(environment)
    codes = (own.run, own.finalize) != (vf.SingleAgentEnv.run, vf.Env.finalize)
    if not task.hooks("reward") and not task.plugged_judges() and not codes:
        raise DataError(
            f"has no reward: {type(task).__name__} has no method with @vf.reward; write one, or choose another"
        )


def _result(played: Any) -> Result:
    """Return the reward and the numbers of an episode that the library has played."""
    errors = [*(error for trace in played.traces for error in trace.errors), *played.errors]
    if errors:  # the later ones may follow from the first
        raise EpisodeError(f"the environment failed ({errors[0].type}: {errors[0].message}); correct it")
    if len(played.traces) != 1:
        raise EpisodeError(
            f"the environment ran {len(played.traces)} agents; an episode is one sequence of tokens, of one agent:"
            " choose such an environment"
        )
    (trace,) = played.traces
    if not trace.rewards:
        raise EpisodeError("the environment gave no reward; correct it, or choose another")
    rewards = {name: reward.value for name, reward in trace.rewards.items()}
    return Result(float(trace.reward), {**rewards, **trace.metrics})
