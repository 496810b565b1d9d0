"""The protocol of policies: forward and backward passes any number of times, then an optimizer step.

Megatron-core is one (`backends/megatron/trainer.py`). Its weights, gradients and optimizer state come and go: a weight
sync (`runtime/hybrid_engine.py`) takes the weights for generation, and gradients that wait for their optimizer step stay.

Shapes: B rows, T positions, R wanted positions, W = padded vocabulary / t.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor

from hybridengine.reshard.layout import Layout
from hybridengine.weights.hybrid_engine import TrainingSide

MicroBatch = dict[str, Tensor]
"""Columns of some rows; `tokens` [B, T] goes into the model, the rest to the output function.

`positions` [B, R], where it is there, says at which positions the model's logits are wanted.
"""

OutputFunction = Callable[[Tensor, MicroBatch], dict[str, Tensor]]
"""(model output [B, T, W], with `positions` logits [B, R, W], micro-batch) -> tensors by name."""

LossFunction = Callable[[Tensor, MicroBatch], tuple[Tensor, Tensor, Any]]
"""(model output as above, micro-batch) -> (loss summed over tokens, number of tokens, whatever the caller collects)."""


@dataclass(frozen=True)
class StepResult:
    """Result of one optimizer step."""

    grad_norm: float
    """Norm over all ranks, before clipping."""
    lr: float
    skipped: bool = False
    """The gradient was not finite on some rank: nothing has changed, and `grad_norm` is NaN."""
    collected: list[Any] = field(default_factory=list)
    """The loss function's third result for each micro-batch; empty on all stages but the last."""


class Policy(TrainingSide, Protocol):
    """One rank's part of a model that is trained. All ranks of its grid call the same methods in the same order."""

    @property
    def layout(self) -> Layout: ...

    def forward(self, batches: Sequence[MicroBatch], output: OutputFunction) -> list[dict[str, Tensor]]:
        """Return the results of `output` for each micro-batch, in order; nothing on all stages but the last.

        Raises:
            StorageError: the generation engine has the weights.
        """
        ...

    def forward_backward(self, batches: Sequence[MicroBatch], loss: LossFunction) -> list[Any]:
        """Add the gradients of some micro-batches to those that wait for the next optimizer step.

        Where a pass raises, its gradients and those that waited are given up.

        Returns:
            What `loss` gives to collect for each micro-batch; nothing on all stages but the last.

        Raises:
            DataError: no micro-batch.
            StorageError: the generation engine has the weights, or gradients have no memory.
        """
        ...

    def optimizer_step(self) -> StepResult:
        """Take one step along the mean gradient per token, over all tokens of all replicas since the last step.

        Where it is not finite, the step is skipped on all ranks: weights, moments and schedule stay as they are.

        Raises:
            StorageError: the generation engine has the weights, or no pass has left gradients.
        """
        ...
