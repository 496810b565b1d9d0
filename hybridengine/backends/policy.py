"""The protocol of policies: any number of forward and backward passes, then an optimizer step.

Megatron-core implements it (`backends/megatron/trainer.py`). Gradients that wait for their optimizer step are kept
while a weight sync (`weights/hybrid_engine.py`) moves the weights to the engine.

Shapes: B rows, T positions, R requested positions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor

from hybridengine.config.role_sections import OptimizerSection
from hybridengine.reshard.layout import Layout
from hybridengine.weights.hybrid_engine import TrainingSide

MicroBatch = dict[str, Tensor]
"""Columns of some rows; `tokens` [B, T] is the model's input, the rest is passed to the output function.

`lengths` [B], if present, are the numbers of valid tokens, which come first: the model sees the rows packed, without
padding. `positions` [B, R], if present, are the tokens whose outputs are wanted; -1 for none. `routes` [B, T, L, K], if
present, are the K experts that compute each token in each of the L layers with experts; -1 where the router chooses.
`weight`, if present, is what the micro-batch adds to the divisor of gradients, for the router's losses; by default the
number of tokens in `mask`.
"""

OutputFunction = Callable[[Any, MicroBatch], dict[str, Tensor]]
"""(model output, micro-batch) -> tensors by name. The output is `Predictions` of [B, T], or of [B, R] with `positions`;
that of a model with a score head is a tensor of scores [B, T, labels] or [B, R, labels], zero where there are none."""

LossFunction = Callable[[Any, MicroBatch], tuple[Tensor, Tensor, Any]]
"""(model output, micro-batch) -> (loss summed over tokens, number of tokens, additional result to collect)."""


@dataclass(frozen=True)
class StepResult:
    """Result of one optimizer step."""

    grad_norm: float
    """Norm over all ranks, before clipping."""
    lr: float
    skipped: bool = False
    """True if the gradient was not finite on some rank: nothing has changed, and `grad_norm` is NaN."""
    collected: list[Any] = field(default_factory=list)
    """Third result of the loss function for each micro-batch; empty on all stages but the last."""


class Policy(TrainingSide, Protocol):
    """One rank's part of a trained model. All ranks of its grid call the same methods in the same order."""

    layout: Layout

    def forward(self, batches: Sequence[MicroBatch], output: OutputFunction) -> list[dict[str, Tensor]]:
        """Return each micro-batch's `output`, on the last stage only; StorageError if the engine has the weights."""
        ...

    def forward_backward(self, batches: Sequence[MicroBatch], loss: LossFunction) -> list[Any]:
        """Add the gradients of some micro-batches to the pending ones, for the next optimizer step.

        If a pass raises, its gradients and the pending ones are discarded.

        Returns:
            The third result of `loss` for each micro-batch; empty on all stages but the last.

        Raises:
            DataError: there are no micro-batches.
            StorageError: the weights are in the generation engine, or there is no memory for gradients.
        """
        ...

    def drop_gradients(self) -> None:
        """Forget the pending gradients: the next pass starts from zero."""
        ...

    def optimizer_step(self, settings: OptimizerSection | None = None, *, summed: bool = False) -> StepResult:
        """Take one step along the mean gradient per token, over all tokens of all replicas since the last step.

        If it is not finite, the step is skipped on all ranks: weights, moments and schedule are unchanged.

        Args:
            settings: learning rate, betas, eps, weight decay and clipping of this step alone, in place of the optimizer's
                own; the schedule, whose settings are ignored here, does not advance.
            summed: take the sum of the gradients instead of the mean.

        Raises:
            StorageError: the weights are in the generation engine, or there are no pending gradients.
        """
        ...
