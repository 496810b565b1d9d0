"""Rows between groups of different sizes on a real Ray cluster: large ones never pass through the controller, and ranks
receive only the rows they need."""

from __future__ import annotations

import gc
import os
import signal
import time

import pytest
import ray
from ray._private.worker import global_worker

from hybridengine.config import load_config
from hybridengine.controller.call_log import call_log
from hybridengine.controller.failures import RankFailedError
from hybridengine.controller.pool import ResourcePool
from hybridengine.controller.row_requests import find_batches
from hybridengine.controller.rows import Produced, Rows
from hybridengine.controller.worker_group import WorkerGroup
from hybridengine.errors import ProtocolError, TransferError, WrongArgumentsError
from tests.full import ways_to_write
from tests.full.probe_workers import WIDE_BYTES, ProbeWorker, batch_of


def test_rows_go_from_group_to_group_without_the_controller(actor: WorkerGroup, critic: WorkerGroup) -> None:
    exchange = call_log()
    first = actor.wide(Rows.numbered(9))  # 2-2-1: all rows on rank 2
    actor.pool.wait()
    assert exchange.take_records()
    payload = exchange.payload_bytes
    seen = critic.narrowed(first)  # 1-2-2 over all ranks: 3, 2, 2 and 2 rows
    critic.pool.wait()
    (record,) = exchange.take_records()
    assert str(record) == "critic.narrowed"
    assert record.transferred == {
        "actor.wide": WIDE_BYTES * (3 + 2 + 2)
    }  # rank 2 has its own two rows already
    assert sorted(record.spans) == [0, 1, 2, 3]
    assert exchange.payload_bytes - payload == 9 * 16, "the narrow rows, inside the ranks' answers"
    payload = exchange.payload_bytes
    found = first.union(seen)[[8, 0]].get()
    assert found["narrow"].tolist() == [[8, 8], [0, 0]]
    assert found["wide"].unique(dim=1).tolist() == [[8], [0]]
    assert exchange.payload_bytes - payload == 2 * WIDE_BYTES


def test_small_rows_inside_messages_are_counted(actor: WorkerGroup, critic: WorkerGroup) -> None:
    actor.pool.wait()
    payload = call_log().payload_bytes
    doubled = critic.doubled(actor.numbers(Rows.numbered(9)))
    doubled.wait()
    # From rank 2 to the controller, from there to each rank that needs some of its rows, and the results.
    assert call_log().payload_bytes - payload == 8 * 9 * (1 + 4 + 1)
    assert doubled.get()["doubled"].tolist() == [2 * row for row in range(9)]
    assert call_log().payload_bytes - payload == 8 * 9 * (1 + 4 + 1)


def test_the_algebra_of_references_moves_nothing(actor: WorkerGroup, critic: WorkerGroup) -> None:
    rollout = actor.over_replicas(batch_of(5))
    ranks = critic.over_dp(rollout).select("ranks").wait()
    payload = call_log().payload_bytes
    rows = rollout.union(ranks).repeat(3)[1:].pad_to_multiple(4)[::-1]
    assert call_log().payload_bytes == payload
    numbers = [0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3, 4, 4, 4, 0, 0][::-1]
    assert len(rows) == 16
    assert rows.get("row_ids")["row_ids"].tolist() == numbers
    assert list(rows.get("answers")["answers"]) == [f"answer {row}!" for row in numbers]
    assert rows.get("ranks")["ranks"].tolist() == [0 if row < 3 else 2 for row in numbers]
    assert critic.doubled(rows).get()["doubled"].tolist() == [2 * row for row in numbers]


def test_a_later_column_replaces_an_earlier_one_and_the_controllers_rows_are_columns_too(
    actor: WorkerGroup, critic: WorkerGroup
) -> None:
    rollout = actor.over_dp(batch_of(4))
    shifted = critic.over_dp(rollout)
    assert rollout.union(shifted).get("row_ids")["row_ids"].tolist() == [100, 101, 102, 103]
    assert shifted.union(rollout).get("row_ids")["row_ids"].tolist() == [0, 1, 2, 3]
    mixed = shifted.union(batch_of(4).select("row_ids"))
    assert critic.doubled(mixed).get()["doubled"].tolist() == [0, 2, 4, 6]


def test_an_in_place_operation_of_a_worker_raises(actor: WorkerGroup, critic: WorkerGroup) -> None:
    """The rows may share memory with all readers on the node."""
    for group in (actor, critic):
        rows = actor.wide(Rows.numbered(6)).union(batch_of(6).select("answers"))
        assert group.narrowed(rows).get()["narrow"].tolist() == [[row, row] for row in range(6)]
        with pytest.raises(RankFailedError, match="Inplace update to inference tensor"):
            group.write(rows).wait()


@pytest.fixture(scope="module")
def compute(pool: ResourcePool) -> WorkerGroup:
    """The role that runs user-supplied functions, on one replica of four ranks."""
    run = load_config("configs/arithmetic.yaml")
    return WorkerGroup(pool, "workers.compute.ComputeWorker", parallel="1-4-1", config={"run": run})


@pytest.mark.parametrize("way", ways_to_write.WAYS_TO_WRITE)
def test_functions_of_users_write_into_copies(way: str, actor: WorkerGroup, compute: WorkerGroup) -> None:
    rows = actor.wide(Rows.numbered(8)).wait()
    written = compute.map(rows, f"{ways_to_write.__name__}.{way}")
    assert written.get()["wide"].unique().tolist() == [-1]
    assert rows.get()["wide"].unique(dim=1).tolist() == [[row] for row in range(8)]
    here = getattr(ways_to_write, way)(rows.get())
    assert here["wide"].unique().tolist() == [-1]
    assert rows.get()["wide"].unique(dim=1).tolist() == [[row] for row in range(8)]


def test_objects_of_rows_that_nobody_refers_to_are_given_up(actor: WorkerGroup) -> None:
    rows = actor.wide(Rows.numbered(2)).wait()
    part = rows[:1]
    name = object_of(rows)
    del rows
    gc.collect()
    assert part.get()["wide"].shape == (1, WIDE_BYTES // 8), "a part is a reference as well"
    assert is_kept(name)
    del part
    gc.collect()
    actor.describe().get()  # a pool keeps the last call until the next one
    wait_until_gone(name)


def object_of(rows: Rows) -> bytes:
    """Return Ray's name of the object that holds the column `wide` of rank 0."""
    (source,) = rows._sources
    assert isinstance(source.origin, Produced)
    reference, path = source.origin.batches[0]
    (stored,) = find_batches([(ray.get(reference), path)], timeout_s=60)
    return stored.columns["wide"].content.binary()


def wait_until_gone(name: bytes) -> None:
    deadline = time.monotonic() + 60
    while is_kept(name):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def is_kept(name: bytes) -> bool:
    """Return True if Ray's store on this node contains an object."""
    return global_worker.core_worker.object_exists(ray.ObjectRef(name))  # pyright: ignore[reportAttributeAccessIssue]


def test_rows_of_a_rank_that_has_died_are_lost_by_name(ray_cluster: int) -> None:
    with ResourcePool([1], timeout_s=60) as one, ResourcePool([1], timeout_s=60) as other:
        first = WorkerGroup(one, ProbeWorker, role="first", parallel="1-1-1")
        second = WorkerGroup(other, ProbeWorker, role="second", parallel="1-1-1")
        rows = first.wide(Rows.numbered(2)).wait()
        (seen,) = first.describe().get()
        gone = object_of(rows)
        os.kill(seen["pid"], signal.SIGKILL)
        wait_until_gone(gone)
        name = rf"'wide' of first\.wide cannot be fetched from rank 0 \(process {seen['pid']} of node .*\): OwnerDied"
        with pytest.raises(
            RankFailedError, match=rf"second\.narrowed failed on rank 0 .*TransferError: .*{name}"
        ):
            second.narrowed(rows).get()
        with pytest.raises(TransferError, match=name):
            rows.get()


def test_what_is_missing_is_named(actor: WorkerGroup, critic: WorkerGroup) -> None:
    rows = actor.numbers(Rows.numbered(8))
    with pytest.raises(RankFailedError, match=r"critic\.over_dp.*KeyError") as caught:
        critic.over_dp(rows.select()).get()
    assert caught.value.failure.role == "critic"
    with pytest.raises(
        RankFailedError, match=r"critic\.doubled.*\['row_ids'\] are needed.*there are \['doubled'\]"
    ):
        critic.doubled(critic.doubled(rows)).get()
    with pytest.raises(ProtocolError, match=r"columns \['values'\] are needed, and nobody has produced them"):
        rows.get("values")
    with pytest.raises(ProtocolError, match="8 rows and 4 rows cannot stand side by side"):
        rows.union(rows[:4])
    with pytest.raises(ProtocolError, match=r"critic\.over_dp .* 4 and 8 rows|got arguments"):
        critic.two_batches(rows, rows[:4])
    with pytest.raises(ProtocolError, match=r"actor\.numbers returns a row for each that it is given"):
        actor.numbers(None)
    with pytest.raises(WrongArgumentsError, match=r"^Rows.* cannot be sent to a rank inside another value"):
        critic.tp_sum({"nested": rows})


def test_the_call_that_failed_is_blamed_and_not_the_one_that_lacks_its_rows(ray_cluster: int) -> None:
    with ResourcePool([2], timeout_s=60) as pool:
        group = WorkerGroup(pool, ProbeWorker, role="one", parallel="1-1-2")
        failed = group.fail_on_rows(batch_of(4))
        with pytest.raises(RankFailedError, match=r"one\.fail_on_rows failed on rank [01] .*bad rows"):
            group.doubled(failed).get()
        assert group.describe().get()


def test_pools_of_their_own_exchange_rows(ray_cluster: int) -> None:
    """Two worlds of two ranks: the second waits for the first's rows, but not for its other calls."""
    with ResourcePool([2], timeout_s=60) as one, ResourcePool([2], timeout_s=60) as other:
        first = WorkerGroup(one, ProbeWorker, role="first", parallel="1-2-1")
        second = WorkerGroup(other, ProbeWorker, role="second", parallel="1-1-2")
        rows = first.numbers(Rows.numbered(5))
        sleeping = first.sleep(0, 1.5)
        assert second.doubled(rows).get()["doubled"].tolist() == [0, 2, 4, 6, 8]
        assert not sleeping.done()
