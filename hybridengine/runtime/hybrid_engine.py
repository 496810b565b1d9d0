"""The HybridEngine: one set of ranks, one copy of the weights, two modes.

    training     the trainer's storages own the weights; the engine's are empty
    generating   the engine's storages own the weights; the trainer's are empty, its gradient buffers released

Switching moves ownership bucket by bucket: the engine's part of a bucket is gathered inside the micro-DP group, then the
trainer's part is released. The way back cuts each rank's own shard out of what it holds, without the network.

Source: HybridFlow, arXiv 2409.19256, section 5; here with one copy of the weights instead of two buffers.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from enum import Enum
from typing import Protocol

from hybridengine.errors import StorageError
from hybridengine.reshard.plan import Plan
from hybridengine.reshard.planner import inverse_local
from hybridengine.runtime.executor import PlanExecutor
from hybridengine.runtime.ledger import StorageLedger, SwitchReport
from hybridengine.runtime.storage import WeightStorage, return_memory_to_system
from hybridengine.runtime.transport import PointToPointTransport


class Mode(str, Enum):
    TRAINING = "training"
    GENERATING = "generating"


class TrainingSide(Protocol):
    """What the HybridEngine needs of a trainer."""

    @property
    def weights(self) -> WeightStorage: ...

    def leave_training(self) -> None:
        """Release what only training needs: gradient buffers, and optimizer state where that is offloaded."""

    def enter_training(self) -> None:
        """Take it back."""


class GenerationSide(Protocol):
    """What the HybridEngine needs of a generation engine."""

    @property
    def weights(self) -> WeightStorage: ...

    def leave_generation(self) -> None:
        """Release the KV cache."""

    def enter_generation(self) -> None:
        """Take the KV cache back and forget everything that was computed with other weights."""


class HybridEngine:
    """Switches one rank between training and generating. All ranks of a micro-DP group switch together.

    Starts in training mode, with the generation weights released.

    Raises:
        PlanError: the layouts do not nest, or do not describe the two models.
    """

    def __init__(
        self,
        plan: Plan,
        rank: int,
        training: TrainingSide,
        generation: GenerationSide,
        transport: PointToPointTransport,
    ) -> None:
        self.mode = Mode.TRAINING
        self._training, self._generation = training, generation
        self._cut_buckets = 0
        self._ledger = StorageLedger({Mode.TRAINING: training.weights, Mode.GENERATING: generation.weights})
        self._gather = PlanExecutor(plan, rank, training.weights, generation.weights, transport, self._ledger)
        self._cut = PlanExecutor(
            inverse_local(plan), rank, generation.weights, training.weights, transport, self._ledger
        )
        generation.leave_generation()
        generation.weights.release()
        return_memory_to_system()

    @property
    def plan(self) -> Plan:
        return self._gather.plan

    def to_generate(self) -> SwitchReport:
        """Switch to generation. Collective over the micro-DP group.

        Raises:
            StorageError: already generating.
            TransferError: a peer failed; this rank's training weights are whole again.
        """
        self._expect(Mode.TRAINING)
        self._training.leave_training()
        self._ledger.begin()
        done = 0
        try:
            for index in range(len(self.plan.buckets)):
                self._gather.run_bucket(index)
                done = index + 1
        except BaseException:
            self._restore_training(done)
            raise
        return_memory_to_system()
        report = self._ledger.finish("to_generate", Mode.GENERATING)
        self.mode = Mode.GENERATING
        self._generation.enter_generation()
        return report

    def to_train(self) -> SwitchReport:
        """Switch back to training: local copies only.

        Where it fails half-way (no memory for a bucket), no weight is lost: call it again, and it goes on with the
        bucket that failed.

        Raises:
            StorageError: already training.
        """
        self._expect(Mode.GENERATING)
        self._generation.leave_generation()
        self._ledger.begin()
        for index in range(self._cut_buckets, len(self.plan.buckets)):
            self._cut.run_bucket(index)
            self._cut_buckets = index + 1
        self._cut_buckets = 0
        return_memory_to_system()
        report = self._ledger.finish("to_train", Mode.TRAINING)
        self.mode = Mode.TRAINING
        self._training.enter_training()
        return report

    @contextlib.contextmanager
    def generating(self) -> Iterator[SwitchReport]:
        """Generation mode while the context is open; yields the report of the switch."""
        report = self.to_generate()
        try:
            yield report
        finally:
            self.to_train()

    def _restore_training(self, done: int) -> None:
        """After a failed bucket: cut the training weights of all complete buckets back out, drop the failed one's."""
        self._cut.run(range(done))
        self._generation.weights.release()
        self._training.enter_training()

    def _expect(self, mode: Mode) -> None:
        if self.mode is not mode:
            raise StorageError(
                f"the engine is {self.mode.value}, this switch starts from {mode.value}; switch once"
            )
