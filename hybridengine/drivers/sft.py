"""Supervised fine-tuning: maximises the likelihood of the responses of demonstrations."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from hybridengine.config.algorithm import Conflict
from hybridengine.config.loss_sections import SUPERVISED_LOSS
from hybridengine.config.values import ImportPath
from hybridengine.drivers.offline import LENGTHS, Offline
from hybridengine.drivers.roles import Roles, Sampling, State

HELD_OUT_LOSS = "hybridengine.drivers.offline_metrics:held_out_loss"


class Sft(Offline):
    """Trains the actor on the tokens that the assistant has written in each row of the data."""

    roles = ("actor",)
    rows_kind = "demonstrations"

    loss: ImportPath = SUPERVISED_LOSS
    """Loss of the responses, called as function(log_probs, columns, algorithm, actor, aggregation)."""

    def conflicts(self, config: Any) -> Iterator[Conflict]:
        """Yield a warm-up, which would be the same training."""
        yield from super().conflicts(config)
        if config.warmup is not None:
            yield Conflict(
                f"warmup trains on demonstrations before algorithm.name={self.name}, which does that itself; leave warmup"
                " out, and raise run.steps",
                ("warmup", "algorithm.name"),
            )

    def step(self, roles: Roles, sampling: Sampling, state: State) -> dict[str, float]:
        """Run one iteration; return its metrics."""
        batch = self.training_rows(roles, sampling)
        update = roles.actor.update_supervised(batch, self)
        measured = self.measure_batch(roles, batch)
        return measured.get()[0] | update.get()[0]

    def measure_held_out(self, roles: Roles, batch: Any, num_counted: int) -> dict[str, float]:
        """Return `eval/loss`, the mean over tokens, and `eval/perplexity`."""
        found = batch.union(roles.actor.compute_log_probs(batch)).select("log_probs", *LENGTHS)
        return roles.compute.measure(found, HELD_OUT_LOSS, num_counted).get()[0]
