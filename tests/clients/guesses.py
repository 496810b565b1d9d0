"""A `verifiers` environment of several turns for tests: the environment answers each guess of a number."""

# pyright: reportMissingImports=false
# The clients' environment has the package, the project's does not.

from __future__ import annotations

from collections.abc import Iterator

import verifiers.v1 as vf

__all__ = ["Guesses", "Guessing"]


class GuessData(vf.TaskData):
    """A number to guess."""

    number: int


class GuessTask(vf.Task[GuessData]):
    """A number that is found, or not."""

    @vf.reward(weight=2.0)
    async def found(self, trace: vf.Trace) -> float:
        """Return 1 if the last reply is the number."""
        return float(trace.last_reply == str(self.data.number))

    @vf.metric
    async def guesses(self, trace: vf.Trace) -> float:
        """Return the number of replies."""
        return float(trace.num_turns)


class GuessesConfig(vf.TasksetConfig):
    """Settings of the taskset."""

    most: int = 9
    """Largest number."""


class Guesses(vf.Taskset[GuessTask, GuessesConfig]):
    """The numbers from 1 on."""

    def load(self) -> Iterator[GuessTask]:
        """Yield a task for each number."""
        for number in range(1, self.config.most + 1):
            yield GuessTask(
                GuessData(prompt=f"from 1 to {self.config.most}?", system_prompt="guess", number=number),
                self.config.task,
            )


class Guessing(vf.Env[vf.SingleAgentEnvConfig]):
    """Two guesses in one conversation."""

    async def run(self, task: vf.Task, agents: vf.Agents) -> None:
        """Say which way to go after the first guess."""
        async with agents.agent.interaction(task) as talk:
            segment = await talk.turn()
            guess = int(segment.last_reply)
            if guess != task.data.number:
                await talk.turn("higher" if guess < task.data.number else "lower")
