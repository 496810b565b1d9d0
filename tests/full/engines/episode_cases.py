"""A function of episodes for tests on ranks; imports are light."""

from __future__ import annotations

from hybridengine.episodes import Client, Result, Row


async def asks_back(client: Client, row: Row) -> Result:
    """Draw one to three turns; what is added depends on what was drawn."""
    for number in range(1 + int(row.answer) % 3):
        if number:
            client.add(f"{len(client.turns[-1].token_ids)}+{number}=")
        await client.generate(max_tokens=3 + number)
    if row.answer == "5":
        raise ValueError("row 5 fails after its turns")
    return Result(float(len(client.turns)), {"answer": int(row.answer)})
