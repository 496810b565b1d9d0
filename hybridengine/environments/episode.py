"""The function of `rollout.episode` that plays a run's environment."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from typing import Any

from hybridengine.environments.environment import Environment, load_environment
from hybridengine.episodes.client import Client, Result, Row

_loading: dict[str, asyncio.Task[Environment]] = {}
"""JSON of an environment's name, options and settings -> the environment, or the task that loads it."""


async def rollout(client: Client, row: Row) -> Result:
    """Play the environment `row.options["environment"]`; return its reward, and the metrics that the run wants."""
    environment = await _loaded(row.options["environment"])
    result = await environment.play(client, row, json.loads(row.answer))
    metrics = {name: value for name, value in result.metrics.items() if name in client.metric_names}
    return replace(result, metrics=metrics)


async def _loaded(described: Any) -> Environment:
    key = json.dumps(described, sort_keys=True)
    if key not in _loading:
        load = asyncio.to_thread(load_environment, **described)
        _loading[key] = asyncio.create_task(load)  # type: ignore[arg-type]
    return await asyncio.shield(_loading[key])  # a dropped episode does not end it for the others
