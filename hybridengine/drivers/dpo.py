"""DPO on preferences of the data: a chosen and a rejected response to each prompt.

Source: arXiv 2305.18290, equation 7; IPO (`algorithm.loss=hybridengine.algorithms.losses.dpo:ipo_loss`): arXiv
2310.12036, equation 17.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from hybridengine.config.algorithm import Conflict
from hybridengine.config.loss_sections import PREFERENCE_LOSS
from hybridengine.config.values import ImportPath, Positive, Smoothing
from hybridengine.drivers.offline import LENGTHS, Offline
from hybridengine.drivers.online_dpo import pair_conflicts
from hybridengine.drivers.roles import Roles, Sampling, State

HELD_OUT_PREFERENCES = "hybridengine.drivers.offline_metrics:held_out_preferences"


class Dpo(Offline):
    """Increases the likelihood of the chosen response of each pair over the rejected one."""

    roles = ("actor", "reference")
    rows_kind = "preferences"
    rows_per_unit = 2

    loss: ImportPath = PREFERENCE_LOSS
    """Loss of pairs of rows, called as function(log_probs, columns, algorithm, actor, aggregation)."""
    beta: Positive = 0.1
    """Strength of the regularisation towards the reference."""
    label_smoothing: Smoothing = 0.0
    """Assumed fraction of wrong preferences (conservative DPO)."""

    def step(self, roles: Roles, sampling: Sampling, state: State) -> dict[str, float]:
        """Run one iteration; return its metrics."""
        batch = self.training_rows(roles, sampling)
        batch = batch.union(roles.reference.compute_log_probs(batch))
        update = roles.actor.update_preferences(batch, self)
        measured = self.measure_batch(roles, batch)
        return measured.get()[0] | update.get()[0]

    def measure_held_out(self, roles: Roles, batch: Any, num_counted: int) -> dict[str, float]:
        """Return `eval/loss`, `eval/accuracy`, `eval/margin` and the mean rewards, `eval/chosen_reward` and so on."""
        found = batch.union(
            roles.actor.compute_log_probs(batch), roles.reference.compute_log_probs(batch)
        ).select("log_probs", "ref_log_probs", *LENGTHS)
        return roles.compute.measure(found, HELD_OUT_PREFERENCES, self, num_counted).get()[0]

    def conflicts(self, config: Any) -> Iterator[Conflict]:
        """Yield a conflict if the pairs do not split evenly."""
        yield from super().conflicts(config)
        yield from pair_conflicts(self.name, config)
