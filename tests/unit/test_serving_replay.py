"""Restarts of a model whose checkpoints have been deleted, replaced or have expired, on ranks in memory."""

from __future__ import annotations

import json
import time
from collections.abc import Callable

import pytest
from tinker import types

from hybridengine.errors import RanksLostError, RequestError
from hybridengine.serving.room import Room
from hybridengine.serving.store import Model
from tests.unit.serving_ranks import TableRanks
from tests.unit.serving_rooms import Rooms, answer, begin, passing, rooms, save, step

__all__ = ["rooms"]


def load(model: str, path: str) -> bytes:
    return json.dumps({"model_id": model, "path": path, "optimizer": True}).encode()


def train(room: Room, model: str, seq_id: int, target: int = 3) -> int:
    """Carry a pass and a step out, and return the next seq_id."""
    answer(room, room.submit(model, seq_id, "forward_backward", passing(target)))
    answer(room, room.submit(model, seq_id + 1, "optim_step", step(model)))
    return seq_id + 2


def from_state(room: Room, path: str) -> str:
    """Create a model from a checkpoint and return its id."""
    message = types.LoadWeightsRequest(
        session_id=room.create_session({}), model_seq_id=0, path=path, optimizer=True
    )
    return answer(room, room.load_model(message, message.model_dump_json().encode()))["model_id"]


def folders(rooms: Rooms) -> set[str]:
    return {each.name for each in rooms.folder.glob("*/weights/*")}


def prune(rooms: Rooms) -> None:
    """Stop the room, and remove from the database what a time long after would."""
    rooms.stop()
    assert rooms.store.prune(time.time() + 1) == []


def check_restored(rooms: Rooms, undisturbed: TableRanks, model: str, seq_id: int) -> Room:
    """Restart, and compare what new ranks hold with what those of the stopped room had."""
    ranks = TableRanks()
    room = rooms.start(ranks)
    assert answer(room, room.submit(model, seq_id, "forward", passing(forward_only=True)))
    assert room.store.get(Model, model).state == "live"
    assert ranks.table == pytest.approx(undisturbed.table)
    assert ranks.gradient == pytest.approx(undisturbed.gradient)
    return room


def until(condition: Callable[[], bool]) -> None:
    end_s = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < end_s, "timed out"
        time.sleep(0.01)


def expire(room: Room, path: str) -> None:
    checkpoint = room.store.checkpoint(path)
    assert checkpoint is not None
    room.store.update(type(checkpoint), checkpoint.folder, expires_s=1.0)


@pytest.mark.parametrize("remove", [Room.delete_checkpoint, expire])
def test_a_loaded_checkpoint_stays_until_a_later_one_covers_it(
    rooms: Rooms, remove: Callable[[Room, str], None]
) -> None:
    ranks = TableRanks()
    room = rooms.start(ranks)
    first = begin(room)
    after = train(room, first, 1)
    path = answer(room, room.submit(first, after, "save_weights", save(first, path="x")))["path"]
    room.finish(first.partition(":")[0])
    model = from_state(room, path)
    train(room, model, 1, 5)
    remove(room, path)
    prune(rooms)
    assert folders(rooms) == {"x-seq000003"}

    room = check_restored(rooms, ranks, model, 3)
    assert room.store.checkpoints(first) == []
    with pytest.raises(RequestError, match="x' does not exist or has expired"):
        room.delete_checkpoint(path)
    answer(room, room.submit(model, 4, "save_weights", save(model, path="y")))
    until(lambda: folders(rooms) == {"y-seq000004"})
    room.delete_checkpoint(f"tinker://{model}/weights/y")
    prune(rooms)
    room = check_restored(rooms, ranks, model, 5)
    assert folders(rooms) == {"y-seq000004"}
    room.finish(model.partition(":")[0])
    rooms.stop()
    (removed,) = rooms.store.prune(0)
    assert removed.path.endswith("/y")


def test_ranks_that_are_lost_load_a_deleted_checkpoint_again(rooms: Rooms) -> None:
    ranks = TableRanks()
    room = rooms.start(ranks, max_restarts=1)
    first = begin(room)
    after = train(room, first, 1)
    path = answer(room, room.submit(first, after, "save_weights", save(first)))["path"]
    room.finish(first.partition(":")[0])
    model = from_state(room, path)
    after = train(room, model, 1, 5)
    undisturbed = ranks.table.copy()
    room.delete_checkpoint(path)
    assert room.store.prune(time.time() + 1) == []
    ranks.errors["forward"] = [RanksLostError("actor.pass_rows died on rank 1", "0")]
    assert answer(room, room.submit(model, after, "forward", passing(forward_only=True)))
    assert "restart" in ranks.calls
    assert ranks.table == pytest.approx(undisturbed)


def test_a_restart_point_stays_when_one_with_gradients_takes_its_name(rooms: Rooms) -> None:
    ranks = TableRanks()
    room = rooms.start(ranks)
    model = begin(room)
    after = train(room, model, 1)
    answer(room, room.submit(model, after, "save_weights", save(model, path="x")))
    room.store.prune(time.time() + 1)  # bodies that the checkpoint covers
    answer(room, room.submit(model, 4, "forward_backward", passing(5)))
    again = save(model, path="x", overwrite=True)
    answer(room, room.submit(model, 5, "save_weights", again))
    prune(rooms)
    assert folders(rooms) == {"x-seq000003", "x-seq000005"}

    room = check_restored(rooms, ranks, model, 6)
    (seen,) = room.store.checkpoints(model)
    assert seen.seq_id == 5
    answer(room, room.submit(model, 7, "optim_step", step(model)))
    answer(room, room.submit(model, 8, "save_weights", again))
    until(lambda: folders(rooms) == {"x-seq000008"})


def test_a_load_is_repeated_from_what_it_read(rooms: Rooms) -> None:
    ranks = TableRanks()
    room = rooms.start(ranks)
    model = begin(room)
    again = save(model, path="x", overwrite=True)
    answer(room, room.submit(model, 1, "forward_backward", passing()))
    path = answer(room, room.submit(model, 2, "save_weights", again))["path"]
    answer(room, room.submit(model, 3, "load_weights", load(model, path)))
    after = train(room, model, train(room, model, 4), 5)
    answer(room, room.submit(model, after, "forward_backward", passing()))
    answer(room, room.submit(model, after + 1, "save_weights", again))
    prune(rooms)
    assert folders(rooms) == {"x-seq000002", f"x-seq{after + 1:06d}"}

    room = check_restored(rooms, ranks, model, after + 2)
    answer(room, room.submit(model, after + 3, "load_weights", load(model, path)))  # the new one
    prune(rooms)
    ranks.gradient[:] = 0
    room = check_restored(rooms, ranks, model, after + 4)
    answer(room, room.submit(model, after + 5, "save_weights", save(model, path="y")))
    until(lambda: folders(rooms) == {f"x-seq{after + 1:06d}", f"y-seq{after + 5:06d}"})
