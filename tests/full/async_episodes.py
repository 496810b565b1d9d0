"""Episodes of an asynchronous run that take time and play otherwise at each start, and what they have drawn."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from unittest.mock import patch

import torch

from hybridengine.controller.rows import Rows
from hybridengine.drivers.roles import Roles, Sampling, Scorers, State
from hybridengine.episodes import Client, Result, Row
from tests.full.async_faults import LosesEngine

COLUMNS = ("response_mask", "scores", "episode/turns", "episode/asked", "episode/drawn")


async def asks_at_random(client: Client, row: Row) -> Result:
    """Draw one to three turns; their number and what is added between them are others when it begins again."""
    asked = random.randint(1, 3)
    for number in range(asked):
        if number:
            await asyncio.sleep(random.uniform(0, 0.3))
            client.add(f"{random.randint(0, 9)}=")
        await client.generate(max_tokens=4)
    drawn = sum(len(turn.token_ids) for turn in client.turns)
    return Result(float(drawn), {"asked": asked, "drawn": drawn})


class WritesEpisodes(LosesEngine):
    """Writes what episodes say and what is trained of them to a folder, and loses an engine."""

    folder: str

    def step(self, roles: Roles, sampling: Sampling, state: State) -> dict[str, float]:
        take = roles.generation.take

        def taken(version: int, scorers: Scorers) -> tuple[Rows, Rows]:
            batch, scores = take(version, scorers)
            torch.save(dict(batch.union(scores).get(*COLUMNS)), Path(self.folder) / f"{sampling.step}.pt")
            return batch, scores

        with patch.object(roles.generation, "take", taken):
            return super().step(roles, sampling, state)
