"""Execution of a plan on one rank, bucket by bucket, between two sets of weights."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from enum import Enum

from hybridengine.errors import HybridEngineError, PlanError, StorageError, TransferError
from hybridengine.families.family import is_float32
from hybridengine.reshard.layout import LocalParameter
from hybridengine.reshard.plan import Plan
from hybridengine.weights.failure_notes import FailureNote, FailureNotes, explain
from hybridengine.weights.ledger import StorageLedger
from hybridengine.weights.programs import Program, ProgramBuilder, Step
from hybridengine.weights.storage import WeightStorage
from hybridengine.weights.transport import PeerError, Pending, PointToPointTransport

_num_runs: Counter[str] = Counter()
"""(process group, plan) -> number of runs that this process has begun or refused; equal on all ranks of the group.

Not per executor: a new executor on the same group must not read the notes of an earlier one."""


class Verify(str, Enum):
    """Switches in which receivers verify the received weights."""

    FIRST = "first"
    """First switch in each direction: errors of a plan recur in every switch."""
    ALWAYS = "always"
    NEVER = "never"


_InFlight = list[tuple[Program, list[Pending]]]
"""Programs of the buckets in flight, with the messages of their present steps."""


class PlanExecutor:
    """One rank's part in the execution of a plan.

    If the plan allows it, two buckets are in flight: messages of one are transferred from before the previous one has
    arrived until it is forwarded and unpacked.

    Args:
        source, destination: this rank's weights in both layouts, empty for a rank without a part in one.
        release_source: release a bucket's source weights once it has arrived (a switch), or keep them (an export).

    Raises:
        PlanError: a parameter is missing, or its shape or dtype differs from the layouts.
    """

    def __init__(
        self,
        plan: Plan,
        rank: int,
        source: WeightStorage,
        destination: WeightStorage,
        transport: PointToPointTransport,
        ledger: StorageLedger,
        release_source: bool = True,
    ) -> None:
        self.plan, self._rank = plan, rank
        self._source, self._destination = source, destination
        self._transport, self._ledger = transport, ledger
        self._release_source = release_source
        self.num_complete = 0
        """Number of buckets of the present or last run that have arrived."""
        self._operation = f"{transport.group.group_name}/{plan.digest[:16]}"
        for layout, storage in ((plan.source, source), (plan.destination, destination)):
            _check_storage(layout.kind, rank, layout.held(rank).parameters, storage)
        for always_float32 in (False, True):
            dtypes = {
                storage[name].dtype
                for storage in (source, destination)
                for name in storage.names
                if is_float32(name) == always_float32
            }
            if len(dtypes) <= 1:
                continue
            raise PlanError(
                f"{plan.source.kind} and {plan.destination.kind} hold weights of types"
                f" {', '.join(sorted(map(str, dtypes)))}; a switch needs one type on both sides"
            )
        self._builder = ProgramBuilder(rank, source, destination, transport)
        padded = {one.name for one in plan.destination.held(rank).parameters if one.has_padding}
        self._fills = [destination.part(one.destinations.get(rank, ()), padded) for one in plan.buckets]
        self._gives_up = [source.part(bucket.sources.get(rank, ())) for bucket in plan.buckets]
        self._programs: dict[tuple[int, bool], Program] = {}
        self._is_local = not any(bucket.packs for bucket in plan.buckets)
        self._has_verified = False

    def run(
        self,
        first: int = 0,
        verify: Verify = Verify.NEVER,
        after_bucket: Callable[[tuple[str, ...]], None] | None = None,
    ) -> None:
        """Execute the plan's buckets in order, starting with `first`; call `check_fresh` before.

        A rank that has all its data waits for the others, so that either all ranks have the destination or none has. If
        no messages pass between ranks, no rank waits.

        Args:
            verify: when to verify every move at its receiver; a run that fails does not count as the first.
            after_bucket: called with the destination parameters of each bucket after they are filled.

        Raises:
            TransferError: a message failed or was corrupted; the sources of buckets from `num_complete` on are unchanged.
        """
        self.num_complete = first
        has_verified, self._has_verified = self._has_verified, False  # verified again after a failure
        is_verified = verify is Verify.ALWAYS or (verify is Verify.FIRST and not has_verified)
        in_flight: _InFlight = []
        try:
            for index in range(first, len(self.plan.buckets)):
                if in_flight and not self.plan.buckets[index].overlaps:
                    self._finish_oldest(in_flight, after_bucket)
                self._open(index, is_verified, in_flight)
                if len(in_flight) > 1:
                    self._finish_oldest(in_flight, after_bucket)
            while in_flight:
                self._finish_oldest(in_flight, after_bucket)
            if not self._is_local:
                self._transport.meet()
            self._has_verified = has_verified or is_verified
        except (HybridEngineError, MemoryError, RuntimeError) as error:
            self._abandon(in_flight)
            raise self._failure(error) from error
        except BaseException as error:
            self._notes.leave(FailureNote(self._rank, self._place, (), _said(error)))
            self._abandon(in_flight)
            raise
        finally:
            _num_runs[self._operation] += 1

    def check_fresh(self, first: int = 0) -> None:
        """Raise PlanError unless both models use the bound storages, with the sources of buckets from `first` on."""
        try:
            if changes := self._changes(first):
                raise PlanError(
                    f"the plan is stale: rank {self._rank}, {', '.join(changes)}, since the plan was bound to the model;"
                    " make the engine anew, with a process group of its own"
                )
        except BaseException as error:
            self.refuse("the check before the switch", error)
            raise

    def _changes(self, first: int) -> list[str]:
        changes = []
        for layout, storage in ((self.plan.source, self._source), (self.plan.destination, self._destination)):
            if moved := storage.moved():
                changes.append(f"{layout.kind}: {_named(moved)} moved or changed shape, type or device")
        given_up = {
            name for bucket in self.plan.buckets[:first] for name in bucket.sources.get(self._rank, ())
        }
        empty = [
            name for name in self._source.names if name not in given_up and not self._source.is_live(name)
        ]
        if empty:
            changes.append(f"{self.plan.source.kind}: {_named(empty)} have given up their memory")
        if self._transport.is_closed and not self._is_local:
            changes.append("its process group has been destroyed")
        elif self._transport.has_given_up and not self._is_local:
            changes.append("a switch over its process group has failed")
        return changes

    def refuse(self, where: str, error: BaseException) -> None:
        """Decline a run that the other ranks begin: they receive the reason, immediately if the transport allows it."""
        self._notes.leave(FailureNote(self._rank, where, (), _said(error)))
        _num_runs[self._operation] += 1
        self._give_up()

    def drop_unfinished(self) -> None:
        """Release the destination weights of all buckets that have not arrived: after a failure they are undefined."""
        for fills in self._fills[self.num_complete :]:
            fills.release()

    def _open(self, index: int, verify: bool, in_flight: _InFlight) -> None:
        """Allocate memory, and start the messages of a bucket's first step."""
        self._fills[index].materialise()
        self._ledger.note()
        if (index, verify) not in self._programs:
            self._programs[index, verify] = self._builder.build(self.plan.buckets[index], verify)
        program = self._programs[index, verify]
        program.staging.materialise()
        self._ledger.stage(program.staging.total_bytes)
        in_flight.append((program, []))
        if program.steps:
            self._start(program.steps[0], in_flight[-1][1])
        program.local.run()

    def _start(self, step: Step, pending: list[Pending]) -> None:
        step.gather.run()
        pending[:] = [self._transport.post(step.messages)]
        if step.checks is not None:
            step.checks.sign()
            if step.checks.messages is not None:
                pending.append(self._transport.post(step.checks.messages))

    def _finish_oldest(
        self, in_flight: _InFlight, after_bucket: Callable[[tuple[str, ...]], None] | None
    ) -> None:
        """Wait for the oldest bucket, forward its boxes, unpack and verify it, and release its sources."""
        (program, pending), index = in_flight[0], self.num_complete
        for number, step in enumerate(program.steps):
            if number:
                self._start(step, pending)
            for messages in pending:
                self._ledger.receive(messages.wait())
            step.spread.run()
            if step.checks is not None:
                step.checks.verify(self._rank)
        if program.local_checks is not None:
            program.local_checks.sign()
            program.local_checks.verify(self._rank)
        in_flight.pop(0)
        program.staging.release()
        self._ledger.unstage(program.staging.total_bytes)
        if self._release_source:
            self._gives_up[index].release()
        self.num_complete = index + 1
        if after_bucket is not None:
            after_bucket(self.plan.buckets[index].destinations.get(self._rank, ()))

    def _abandon(self, in_flight: _InFlight) -> None:
        """Stop all writes into buffers of unfinished buckets after a failure, and free their staging."""
        self._give_up()  # first, so that other ranks do not take what they read from this rank for weights
        for _, pending in in_flight:
            for messages in pending:
                messages.abandon()
        for program in self._programs.values():
            program.staging.release()

    def _give_up(self) -> None:
        if not self._is_local:
            self._transport.give_up()

    @property
    def _notes(self) -> FailureNotes:
        """Failure notes of the current run only."""
        name = f"{self._operation}/{_num_runs[self._operation]}"
        return FailureNotes(self.plan.ranks, name, self._transport.store)

    @property
    def _place(self) -> str:
        index, buckets = self.num_complete, self.plan.buckets
        place = (
            f"bucket {index} of {len(buckets)} ({buckets[index].tensors[0]} ...)"
            if index < len(buckets)
            else f"the meeting after bucket {index - 1} of {len(buckets)}"
        )
        return f"{place} of {self.plan.source.kind} -> {self.plan.destination.kind}"

    def _failure(self, error: Exception) -> HybridEngineError:
        """Return `error` with the bucket and the reports of the other ranks."""
        where = self._place
        waited_for = error.peers if isinstance(error, PeerError) else ()
        note = FailureNote(self._rank, where, waited_for, str(error))
        notes = self._notes
        notes.leave(note)
        if isinstance(error, PeerError):
            told = explain(note, notes.read(waited_for))
            return TransferError(f"rank {self._rank}: {where}: {error}{'; ' if told else ''}{told}")
        if isinstance(error, TransferError):
            return TransferError(f"rank {self._rank}: {where}: {error}")
        return StorageError(
            f"rank {self._rank}: {where} failed: {type(error).__name__}: {error}; where it lacks memory, choose smaller"
            " buckets or a smaller KV cache"
        )


def _said(error: BaseException) -> str:
    """Return the text of an error for other ranks, with the class name of a foreign exception."""
    return str(error) if isinstance(error, HybridEngineError) else f"{type(error).__name__}: {error}"


def _named(names: Sequence[str]) -> str:
    """Return the first names, and the number of the others."""
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _check_storage(
    kind: str, rank: int, parameters: Sequence[LocalParameter], storage: WeightStorage
) -> None:
    expected = {parameter.name: tuple(parameter.shape) for parameter in parameters}
    found = {name: tuple(storage[name].shape) for name in storage.names}
    differing = [name for name in {**expected, **found} if expected.get(name) != found.get(name)]
    if differing:
        name = differing[0]
        raise PlanError(
            f"rank {rank} of {kind}: {_named(differing)} differ: the model has {name} with shape"
            f" {found.get(name, 'missing')}, its layout {expected.get(name, 'missing')}; use the layout of this model"
        )
