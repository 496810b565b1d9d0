"""GRPO, and Dr.GRPO: each response is compared with the others to the same prompt.

Source: DeepSeekMath, arXiv 2402.03300, section 4.1; Dr.GRPO, arXiv 2503.20783, section 3
(`algorithm.normalize_std=false`, `actor.loss_aggregation=sequence_sum`, as in `configs/dr-grpo.yaml`); other baselines:
algorithms/group_advantages.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal, Self

from hybridengine.config.algorithm import Conflict
from hybridengine.config.values import Count, ImportPath
from hybridengine.drivers.dataflow import CriticFree, DrawnBatch
from hybridengine.drivers.dynamic_sampling import draw_informative
from hybridengine.drivers.roles import Roles, Sampling, State


class Grpo(CriticFree):
    """Advantages are scores minus a baseline of their group."""

    min_samples = 2

    advantages: ImportPath = "hybridengine.drivers.advantages:grpo"
    """Function that computes the advantages of a batch, called as function(rows, across, algorithm, samples)."""
    normalize_std: bool = True
    """Divide advantages by their group's standard deviation; False for Dr.GRPO."""
    baseline: Literal["mean", "length_weighted", "best_other", "token"] = "mean"
    """Baseline of a response: the mean of its group; the mean weighted by lengths (OPO); the best of the others, which
    only the best response exceeds (pass@k, k responses per prompt); or one for each token, the mean weighted by the
    gradients up to it (optimal token baseline)."""
    rescale_equal: bool = False
    """Multiply advantages by B/(B - M), where M of the B responses are in groups of equal scores and have none (GPG)."""

    max_rounds: Count = 1
    """Batches of prompts that may be drawn for one iteration. Above 1, prompts whose responses all have the same score
    are dropped for others, until a batch is full or the rounds are used up (dynamic sampling, DAPO, arXiv 2503.14476,
    section 3.2)."""

    @property
    def num_rounds(self) -> int:
        """Largest number of rounds."""
        return self.max_rounds

    def traced(self) -> Self:
        """Return the algorithm with one round."""
        return self.model_copy(update={"max_rounds": 1})

    def draw(self, roles: Roles, sampling: Sampling, state: State) -> DrawnBatch:
        """Return the responses of an iteration, with dynamic sampling if it has more than one round."""
        if self.max_rounds == 1:
            return super().draw(roles, sampling, state)
        return draw_informative(roles, sampling, state, self.max_rounds)

    @property
    def needs_squares(self) -> bool:
        """True for the token baseline."""
        return self.baseline == "token"

    def conflicts(self, config: Any) -> Iterator[Conflict]:
        """Yield baselines that are not divided by the standard deviation, or whose columns nothing computes."""
        yield from super().conflicts(config)
        if self.normalize_std and self.baseline in ("length_weighted", "token"):
            yield Conflict(
                f"algorithm.baseline={self.baseline} gives advantages that are not divided by a standard deviation; set"
                " algorithm.normalize_std=false",
                ("algorithm.baseline", "algorithm.normalize_std"),
            )
        if self.needs_squares and self.from_engine:
            yield Conflict(
                f"algorithm.baseline=token needs the trainer's distributions, and algorithm.name={self.name} takes the"
                " engine's log-probs; choose grpo",
                ("algorithm.baseline", "algorithm.name"),
            )


class GrpoFromEngine(Grpo):
    """GRPO with the engine's log-probs as those of the old policy, which saves one forward pass of four to five.

    For one optimizer step per iteration, where the old policy is the current one and the ratio only measures the
    numerical difference between engine and trainer (`actor/ratio_max`).
    """

    from_engine = True
    uncorrected = "which takes the engine's log-probs for the trainer's"
