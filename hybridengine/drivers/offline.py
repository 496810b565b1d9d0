"""Parts shared by the algorithms that train on responses of the data: no generation, no reward.

Nothing here imports torch or Ray, because the planner traces the steps of algorithms.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from typing import Any

from hybridengine.config.algorithm import Algorithm, Conflict
from hybridengine.drivers.roles import Roles, Sampling

LENGTHS = ("prompt_lengths", "response_lengths", "response_mask")
"""Columns that `batch_metrics` reads, the last one if there is any."""
BATCH_METRICS = "hybridengine.drivers.offline_metrics:batch_metrics"


class Offline(Algorithm):
    """Base of SFT and DPO, whose iterations read the next rows of shuffled epochs over the data."""

    generates = False
    best_metric = "eval/loss"
    uncorrected = "which draws no responses"
    reads_overlong = False

    def training_rows(self, roles: Roles, sampling: Sampling) -> Any:
        """Return the sequences of an iteration: `rows_per_unit` for each row of the data."""
        return roles.prompts.training_prompts(sampling.prompts.repeat(self.rows_per_unit), sampling.step)

    def measure_batch(self, roles: Roles, batch: Any) -> Any:
        """Return the future of a batch's `batch_metrics`."""
        return roles.compute.measure(batch.select(*LENGTHS), BATCH_METRICS)

    def evaluate(self, roles: Roles, num_rows: int) -> dict[str, float]:
        """Return the metrics of held-out rows; where they are fewer than ranks, some are read twice but counted once."""
        from hybridengine.controller.rows import Rows

        padded = Rows.numbered(num_rows).pad_to_multiple(roles.compute.num_ranks)
        batch = roles.prompts.held_out_prompts(padded.repeat(self.rows_per_unit))
        return self.measure_held_out(roles, batch, num_rows * self.rows_per_unit)

    @abstractmethod
    def measure_held_out(self, roles: Roles, batch: Any, num_counted: int) -> dict[str, float]:
        """Return the metrics of the first `num_counted` held-out sequences."""

    def conflicts(self, config: Any) -> Iterator[Conflict]:
        """Yield sections that hold no responses, or that draw them, and options of metrics that are not measured."""
        yield from super().conflicts(config)
        if self.kl_estimator != type(self).model_fields["kl_estimator"].default:
            yield Conflict(
                f"algorithm.kl_estimator={self.kl_estimator} is not read by algorithm.name={self.name}, which measures no"
                " KL divergence; leave it out",
                ("algorithm.kl_estimator", "algorithm.name"),
            )
        if config.data.environment is not None:
            yield Conflict(
                f"data.environment={config.data.environment.name} has prompts without responses, which algorithm.name="
                f"{self.name} trains on; give data.train_file",
                ("data.environment", "algorithm.name"),
            )
