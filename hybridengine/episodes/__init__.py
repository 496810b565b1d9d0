"""Rollouts of several turns: an async function that talks to the engine, and what it is given.

    async def rollout(client: Client, row: Row) -> Result | float | None

Every row of a batch has a call of its own, an *episode*. Its tokens are one sequence: the row's prompt, then the turns
that the model draws and, between them, what the function adds. Only tokens that the model drew are trained.
"""

from hybridengine.episodes.client import (
    Client,
    LimitError,
    Result,
    Row,
    TokenLimitError,
    Turn,
    TurnLimitError,
)
from hybridengine.episodes.tools import ToolResult, run_process, run_python

__all__ = [
    "Client",
    "LimitError",
    "Result",
    "Row",
    "TokenLimitError",
    "ToolResult",
    "Turn",
    "TurnLimitError",
    "run_process",
    "run_python",
]
