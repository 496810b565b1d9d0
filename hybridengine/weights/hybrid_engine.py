"""Weight synchronisation: the HybridEngine, with one copy of the weights on shared ranks, and pushes to other ranks.

    training     the trainer's storages own the weights; the engine's are empty
    generating   the engine's storages own the weights; the trainer's are empty, its gradient buffers released

A switch moves ownership bucket by bucket: the engine's part of a bucket is gathered within the micro-DP group, then the
trainer's part is released. Switching back cuts each rank's shard out of its generation weights, without the network.
Where the layouts do not nest, training parameters that a rank could not restore locally are retained, and the ledger
reports them as redundant. No rank can restore any from an engine that has converted them (`WeightStorage.settle`): they
are all kept, or gathered again from the optimizer's master weights (`Return`).

Source: HybridFlow, arXiv 2409.19256, section 5; here with one copy of the weights instead of two buffers.
"""

from __future__ import annotations

import contextlib
import gc
import traceback
from collections.abc import Iterator
from enum import Enum
from typing import Protocol

import torch.distributed as dist

from hybridengine.errors import PlanError, StorageError, TransferError
from hybridengine.formatting import format_bytes
from hybridengine.machine import package_versions
from hybridengine.reshard.compiler import inverse_local
from hybridengine.reshard.plan import Plan
from hybridengine.weights.executor import PlanExecutor, Verify
from hybridengine.weights.ledger import StorageLedger, SwitchReport
from hybridengine.weights.storage import WeightStorage, return_memory_to_system
from hybridengine.weights.transport import PointToPointTransport


class Mode(str, Enum):
    TRAINING = "training"
    GENERATING = "generating"
    LOST = "lost"
    """A switch failed and its changes could not be undone: the run must load a checkpoint."""


class Return(str, Enum):
    """Where the training weights come from after generation."""

    CUT = "cut"
    """Cut out of the engine's weights, without the network."""
    KEPT = "kept"
    """They stay in memory."""
    REGATHERED = "regathered"
    """Released; gathered from the optimizer's master weights, over the replicas."""


class TrainingSide(Protocol):
    """The part of a policy that the HybridEngine uses (`backends.policy.Policy`)."""

    @property
    def weights(self) -> WeightStorage: ...

    @property
    def version(self) -> int:
        """Number of optimizer steps that have been applied to the weights."""
        ...

    @property
    def gradient_bytes(self) -> int:
        """Bytes currently owned by gradients."""
        ...

    @property
    def retained(self) -> WeightStorage:
        """Weights besides `weights` that are kept from `lend` until `take_back`."""
        ...

    def lend(self, *, regathers: bool = False) -> None:
        """Make the weights those that the engine needs: with adapters merged in, if it has none of its own.

        Raises StorageError if `take_back` could not gather the weights from the optimizer, and is to.
        """

    def take_back(self, *, regathers: bool = False) -> int:
        """Undo `lend`, if it has been called; return the bytes received.

        With `regathers`, allocate the weights and fill them from the optimizer's master weights. Collective over the
        replicas.
        """
        ...

    def leave_training(self) -> None:
        """Release what only training needs: gradients without a pending step, and offloaded optimizer state."""


class GenerationSide(Protocol):
    """The part of a generation engine that the HybridEngine uses (`backends.engine.Engine`)."""

    @property
    def weights(self) -> WeightStorage: ...

    def leave_generation(self) -> None:
        """Release the KV cache."""

    def enter_generation(self, version: int) -> None:
        """Reallocate the KV cache, without contents computed by other weights; the weights of `version` are in place.

        The allocator still holds the memory that the trainer's weights have released, and reuses it for new tensors. If
        the KV cache cannot be allocated from there, return the memory to the system first.
        """


class HybridEngine:
    """Switches one rank together with all ranks of the plan's domain; begins in training mode and empties the engine.

    Both sides have weights until the engine is emptied, so that nothing else may be held when it is built: the trainer
    leaves training before that.

    Args:
        verify: when receivers verify the bits of received weights.
        resume_from: checkpoint to name in an error when weights are lost; the caller keeps it up to date.
        back: where the training weights come from after generation; `CUT` needs an engine that does not convert weights.

    Raises:
        StorageError: the trainer has gradients, beside which the engine has been built.
        PlanError: the layouts do not describe the two models, or the ranks of the domain have different plans.
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
        back: Return = Return.CUT,
    ) -> None:
        self.mode, self._back = Mode.TRAINING, back
        self.resume_from = resume_from
        self._rank, self._verify = rank, verify
        self._training, self._generation = training, generation
        self._cut: PlanExecutor | None = None
        self._cut_buckets = 0
        if training.gradient_bytes:
            raise StorageError(
                f"rank {rank}: the trainer holds {format_bytes(training.gradient_bytes)} of gradients, which leave no"
                " room for an engine on a full device; call leave_training() before the engine is built"
            )
        storages = {Mode.TRAINING: training.weights, Mode.GENERATING: generation.weights}
        self._ledger = StorageLedger({**storages, "retained": training.retained})
        with _agreed(plan, rank, transport.group, verify):
            self._gather = PlanExecutor(
                plan,
                rank,
                training.weights,
                generation.weights,
                transport,
                self._ledger,
                release_source=back is not Return.KEPT,
            )
            if back is Return.CUT:
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
            StorageError: already generating, out of memory, or weights lost (the message then names the checkpoint).
            PlanError: the plan is stale.
            TransferError: a peer failed; this rank's training weights are restored.
        """
        self._expect(Mode.TRAINING)
        self._gather.check_fresh()
        try:
            self._training.leave_training()
            self._training.lend(regathers=self._back is Return.REGATHERED)
        except BaseException as error:  # no masters, no memory to offload to: no weight has moved yet
            self._training.take_back()
            self._gather.refuse("leaving training", error)
            raise
        self._ledger.begin()
        try:
            self._gather.run(verify=self._verify, after_bucket=self._generation.weights.settle)
        except BaseException as error:
            self._restore_training(error)
            raise
        report = self._ledger.finish("to_generate", Mode.GENERATING, self._training.gradient_bytes)
        self.mode = Mode.GENERATING
        self._generation.enter_generation(self._training.version)
        return report

    def to_train(self) -> SwitchReport:
        """Switch back to training, using local copies only; collective over the replicas where weights are `REGATHERED`.

        If it fails half-way (no memory for a bucket or for gradients), no weight is lost: call it again to resume with
        the part that failed.

        Raises:
            StorageError: already training, or out of memory.
            PlanError: the plan is stale.
            TransferError: a copy differs from its source.
        """
        self._expect(Mode.GENERATING)
        if self._cut is not None:
            self._cut.check_fresh(self._cut_buckets)
        self._generation.leave_generation()
        self._ledger.begin()
        if self._cut is not None:
            self._cut_out(self._cut)
        else:
            self._generation.weights.release()
            return_memory_to_system()  # for the training weights
        self._ledger.receive(self._training.take_back(regathers=self._back is Return.REGATHERED))
        report = self._ledger.finish("to_train", Mode.TRAINING, self._training.gradient_bytes)
        return_memory_to_system()  # what the engine had: gradients are larger than its parts, which would stay cached
        self.mode = Mode.TRAINING
        self._cut_buckets = 0
        return report

    def _cut_out(self, cut: PlanExecutor) -> None:
        """Cut the training weights out of the engine's, from the bucket at which an earlier call has failed."""
        try:
            cut.run(self._cut_buckets, self._verify)
        except BaseException:
            cut.drop_unfinished()
            raise
        finally:
            self._cut_buckets = cut.num_complete

    @contextlib.contextmanager
    def generating(self) -> Iterator[SwitchReport]:
        """Return a context manager for generation mode, which yields the report of the switch."""
        trained = self.mode is Mode.TRAINING
        try:
            yield self.to_generate()
        finally:
            if trained and self.mode is Mode.GENERATING:  # also if the KV cache could not be allocated
                self.to_train()

    def _restore_training(self, error: BaseException) -> None:
        """Undo a failed switch in reverse, which at no bucket needs more memory than the switch did."""
        try:
            self._gather.drop_unfinished()
            if self._cut is not None:
                self._cut.run(len(self.plan.buckets) - self._gather.num_complete)
            elif self._back is Return.REGATHERED and self._gather.num_complete:
                raise StorageError("replicas that have not failed would not gather them again")
        except BaseException as second:
            self.mode = Mode.LOST
            if not isinstance(second, Exception):  # an interrupt
                raise
            raise StorageError(
                f"rank {self._rank}: a switch failed ({error}), and the training weights could not be restored"
                f" ({second}); resume from {self.resume_from or 'the last checkpoint'}"
            ) from second
        self._generation.weights.release()
        self._training.take_back()

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
    """Executes a plan between ranks that train and ranks that generate. All ranks of the plan push together.

    Args:
        source: weights of this rank's policy; empty on a rank that only generates.
        destination: weights of this rank's engine; empty on a rank that only trains.

    Raises:
        PlanError: the layouts do not describe the two models, or the ranks have different plans.
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
        self._executor: PlanExecutor | None = None
        self._group, self._verify, self._destination = transport.group, verify, destination
        with _agreed(plan, rank, transport.group, verify):
            self._executor = PlanExecutor(
                plan, rank, source, destination, transport, self._ledger, release_source=False
            )

    def push(self) -> SwitchReport:
        """Write the policy's present weights into the engines; return this rank's costs.

        `redundant_bytes` are the policy's weights on this rank, which are kept: 0 if the rank only generates.

        Raises:
            PlanError: the plan is stale, or an earlier push has failed.
            TransferError: a message failed or was corrupted; the engines' weights are then undefined.
        """
        if self._executor is None:
            raise PlanError(
                "an earlier push has failed, and its process group is destroyed; join another link"
            )
        self._executor.check_fresh()
        self._ledger.begin()
        try:
            self._executor.run(verify=self._verify, after_bucket=self._destination.settle)
        except BaseException as error:
            for part in _chain(error):
                traceback.clear_frames(part.__traceback__)  # which hold messages, and so the group
            self.close()  # otherwise ranks that are not to blame would wait for messages until their time is up
            raise
        return self._ledger.finish("push", "engine")

    def close(self) -> None:
        """Destroy the process group; what other ranks still expect of this one fails at once."""
        if self._executor is None:
            return
        dist.destroy_process_group(self._group)
        self._executor = None
        del self._group
        gc.collect()  # connections close with the last reference to the group


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error and its causes."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


@contextlib.contextmanager
def _agreed(plan: Plan, rank: int, group: dist.ProcessGroup, verify: Verify) -> Iterator[None]:
    """Check, after the block has bound the plan, that all ranks can execute it. Collective, even if the block fails."""
    problem = None
    try:
        yield
    except PlanError as error:
        problem = error
    members = dist.get_process_group_ranks(group)
    if members != sorted(plan.ranks):
        raise PlanError(
            f"rank {rank}: the plan is for ranks {list(plan.ranks)}, its process group has ranks {members}; give the"
            " group of the plan's domain"
        )
    own = {**package_versions(), "verify": verify.value, "plan": plan.digest}, str(problem or "")
    found: list[tuple[dict[str, str], str] | None] = [None] * len(members)
    try:
        dist.all_gather_object(found, own, group=group)
    except RuntimeError as error:
        raise TransferError(
            f"rank {rank}: not all ranks of {members} have come to make the engine for {plan.source.kind} ->"
            f" {plan.destination.kind}: {error}; look for one that has failed before"
        ) from error
    if problem:
        raise problem
    for other, entry in zip(members, found, strict=True):
        assert entry is not None
        facts, reason = entry
        if reason:
            raise PlanError(f"rank {other} cannot carry out the plan: {reason}")
        for name, value in own[0].items():
            if facts.get(name) != value:
                raise PlanError(
                    f"ranks {rank} and {other} differ in {name}: {value} and {facts.get(name)}; give all ranks the same"
                    " packages, model, sizes, bucket size and verify"
                )
