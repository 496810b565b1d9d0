"""The weight sync: the HybridEngine, with one copy of the weights on one set of ranks, and pushes to other ranks.

    training     the trainer's storages own the weights; the engine's are empty
    generating   the engine's storages own the weights; the trainer's are empty, its gradient buffers released

Switching moves ownership bucket by bucket: the engine's part of a bucket is gathered inside the micro-DP group, then the
trainer's part is released. The way back cuts each rank's own shard out of what it holds, without the network.
Where the layouts do not nest, training parameters that a rank could not cut back out stay, and the ledger reports them
as redundant.

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
from hybridengine.weights.executor import PlanExecutor, Verify
from hybridengine.weights.fingerprint import agreed
from hybridengine.weights.ledger import StorageLedger, SwitchReport
from hybridengine.weights.storage import WeightStorage, return_memory_to_system
from hybridengine.weights.transport import PointToPointTransport


class Mode(str, Enum):
    TRAINING = "training"
    GENERATING = "generating"
    LOST = "lost"
    """A switch failed, and so did restoring what it had moved: a checkpoint is needed."""


class TrainingSide(Protocol):
    """Side of a policy that the HybridEngine uses (`backends.policy.Policy`)."""

    @property
    def weights(self) -> WeightStorage: ...

    @property
    def version(self) -> int:
        """Number of optimizer steps that the weights have taken."""
        ...

    @property
    def gradient_bytes(self) -> int:
        """Bytes that gradients own now."""
        ...

    def leave_training(self) -> None:
        """Release what only training needs: gradients without a pending step, and optimizer state that is offloaded."""

    def enter_training(self) -> None:
        """Take it back."""


class GenerationSide(Protocol):
    """Side of a generation engine that the HybridEngine uses (`backends.engine.Engine`)."""

    @property
    def weights(self) -> WeightStorage: ...

    def leave_generation(self) -> None:
        """Release the KV cache."""

    def enter_generation(self, version: int) -> None:
        """Take the KV cache back; nothing that other weights have computed is left, and those of `version` are there.

        What the trainer's weights have given up is still in the allocator's hands, which gives it to the next tensors;
        where the KV cache cannot come from there, hand it back to the system first.
        """


class HybridEngine:
    """Switches one rank between training and generating. All ranks of the plan's domain switch together.

    Starts in training mode, with the generation weights released.

    Args:
        verify: when receivers check the bits of what they have received.
        resume_from: checkpoint that an error names where weights are lost; to be kept up to date.

    Raises:
        PlanError: the layouts do not describe the two models, or the ranks of the domain bring different plans.
    """

    def __init__(
        self,
        plan: Plan,
        rank: int,
        training: TrainingSide,
        generation: GenerationSide,
        transport: PointToPointTransport,
        verify: Verify = Verify.FIRST,
        resume_from: str = "",
    ) -> None:
        self.mode = Mode.TRAINING
        self.resume_from = resume_from
        self._rank, self._verify = rank, verify
        self._training, self._generation = training, generation
        self._verified: set[str] = set()
        self._cut_buckets = 0
        self._ledger = StorageLedger({Mode.TRAINING: training.weights, Mode.GENERATING: generation.weights})
        with agreed(plan, rank, transport.group, verify.value):
            self._gather = PlanExecutor(
                plan, rank, training.weights, generation.weights, transport, self._ledger
            )
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
        """Switch to generation. Collective over the domain.

        Raises:
            StorageError: already generating; or no memory, or weights lost (then the message names the checkpoint).
            PlanError: the plan is stale.
            TransferError: a peer failed; this rank's training weights are whole again.
        """
        self._expect(Mode.TRAINING)
        self._gather.check_fresh()
        self._leave_training()
        self._ledger.begin()
        try:
            self._gather.run(verify=self._verifies("to_generate"))
        except BaseException as error:
            self._restore_training(error)
            raise
        report = self._ledger.finish("to_generate", Mode.GENERATING, self._training.gradient_bytes)
        self.mode = Mode.GENERATING
        self._generation.enter_generation(self._training.version)
        return report

    def to_train(self) -> SwitchReport:
        """Switch back to training: local copies only.

        Where it fails half-way (no memory for a bucket or for gradients), no weight is lost: call it again, and it goes
        on with what failed.

        Raises:
            StorageError: already training, or no memory.
            PlanError: the plan is stale.
            TransferError: a copy has other bits than its source.
        """
        self._expect(Mode.GENERATING)
        self._cut.check_fresh(self._cut_buckets)
        self._generation.leave_generation()
        self._ledger.begin()
        try:
            self._cut.run(self._cut_buckets, verify=self._verifies("to_train"))
        except BaseException:
            self._cut.drop_unfinished()
            self._verified.discard("to_train")
            raise
        finally:
            self._cut_buckets = self._cut.num_complete
        report = self._ledger.finish("to_train", Mode.TRAINING, self._training.gradient_bytes)
        self._training.enter_training()
        self.mode = Mode.TRAINING
        self._cut_buckets = 0
        return report

    @contextlib.contextmanager
    def generating(self) -> Iterator[SwitchReport]:
        """Generation mode while the context is open; yields the report of the switch."""
        trained = self.mode is Mode.TRAINING
        try:
            yield self.to_generate()
        finally:
            if trained and self.mode is Mode.GENERATING:  # also where the KV cache found no memory
                self.to_train()

    def _leave_training(self) -> None:
        try:
            self._training.leave_training()
        except BaseException as error:  # no memory to offload to: no weight has moved yet
            self._gather.refuse("leaving training", error)
            self._training.enter_training()
            raise

    def _verifies(self, direction: str) -> bool:
        """Return whether this switch is checked; counts attempts, so that all ranks say the same."""
        first = direction not in self._verified
        self._verified.add(direction)
        return self._verify is Verify.ALWAYS or (self._verify is Verify.FIRST and first)

    def _restore_training(self, error: BaseException) -> None:
        """After a failed bucket: drop what has not arrived, cut the training weights of all complete buckets back out.

        In reverse: so no step needs more memory than the switch has had at the same bucket.

        Raises:
            StorageError: that failed as well.
        """
        try:
            self._gather.drop_unfinished()
            self._cut.run(len(self.plan.buckets) - self._gather.num_complete)
        except BaseException as second:
            self.mode = Mode.LOST
            if not isinstance(second, Exception):  # an interrupt
                raise
            raise StorageError(
                f"rank {self._rank}: a switch failed ({error}), and the training weights could not be restored"
                f" ({second}); resume from {self.resume_from or 'the last checkpoint'}"
            ) from second
        self._generation.weights.release()
        self._training.enter_training()

    def _expect(self, mode: Mode) -> None:
        if self.mode is Mode.LOST:
            raise StorageError(
                f"the weights of rank {self._rank} were lost in a failed switch; resume from"
                f" {self.resume_from or 'the last checkpoint'}"
            )
        if self.mode is not mode:
            raise StorageError(
                f"the engine is {self.mode.value}, this switch starts from {mode.value}; switch once"
            )


class WeightPush:
    """Carries out a plan between ranks that train and ranks that generate. All ranks of the plan push together.

    Args:
        source: weights of this rank's policy; empty on a rank that only generates.
        destination: weights of this rank's engine; empty on a rank that only trains.
        verify: when receivers check the bits of what they have received.

    Raises:
        PlanError: the layouts do not describe the two models, or the ranks bring different plans.
    """

    def __init__(
        self,
        plan: Plan,
        rank: int,
        source: WeightStorage,
        destination: WeightStorage,
        transport: PointToPointTransport,
        verify: Verify = Verify.FIRST,
    ) -> None:
        self._ledger = StorageLedger({"policy": source, "engine": destination})
        with agreed(plan, rank, transport.group, verify.value):
            self._executor = PlanExecutor(
                plan, rank, source, destination, transport, self._ledger, release_source=False
            )
        self._verify, self._has_pushed = verify, False

    def push(self) -> SwitchReport:
        """Write the policy's present weights into the engines; return what it cost this rank.

        `redundant_bytes` are the policy's weights on this rank, which stay: 0 where a rank only generates.

        Raises:
            PlanError: the plan is stale.
            TransferError: a message failed, or arrived changed; the engines' weights are then undefined.
        """
        self._executor.check_fresh()
        self._ledger.begin()
        checked = self._verify is Verify.ALWAYS or (self._verify is Verify.FIRST and not self._has_pushed)
        self._executor.run(verify=checked)
        self._has_pushed = True
        return self._ledger.finish("push", "engine")
