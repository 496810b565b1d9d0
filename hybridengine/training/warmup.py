"""Supervised steps before RL, in the actor's own workers."""

from __future__ import annotations

from collections.abc import Callable

from hybridengine.config.sections import WarmupSection
from hybridengine.controller.worker_group import WorkerGroup
from hybridengine.data.datasets import DemonstrationDataset


def warm_up(
    actor: WorkerGroup,
    demonstrations: DemonstrationDataset,
    settings: WarmupSection,
    progress: Callable[[int, float], None],
) -> None:
    """Train the actor on demonstrations; `progress(step, loss)` is called now and then."""
    actor.start_supervised(settings.lr, settings.steps)
    every = max(1, settings.steps // 10)
    for step in range(1, settings.steps + 1):
        update = actor.update_supervised(demonstrations.batch(step - 1, settings.batch_size))
        metrics = update.get()[0]
        if step % every == 0 or step == settings.steps:
            progress(step, metrics["warmup/loss"])
