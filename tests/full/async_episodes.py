"""Episodes of an asynchronous run that take time and play otherwise at each start, and what they have drawn."""

from __future__ import annotations

import asyncio
import random
from typing import ClassVar

from hybridengine.episodes import Client, Result, Row
from tests.full.async_faults import LosesEngine, WritesBatches


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


class WritesEpisodes(LosesEngine, WritesBatches):
    """Writes what episodes say and what is trained of them to a folder, and loses an engine."""

    written: ClassVar[tuple[str, ...]] = (
        "response_mask",
        "scores",
        "episode/turns",
        "episode/asked",
        "episode/drawn",
    )
