"""Models that wait for the ranks, on ranks in memory."""

from __future__ import annotations

import time

import pytest

from hybridengine.errors import RequestError
from hybridengine.serving.store import ClientSession, Model, Request
from tests.unit.serving_ranks import TableRanks
from tests.unit.serving_rooms import Rooms, answer, begin, creation, rooms, save

__all__ = ["rooms"]


def test_models_get_the_ranks_in_the_order_in_which_they_asked(rooms: Rooms) -> None:
    ranks = TableRanks()
    room = rooms.start(ranks)
    first = begin(room)
    second, third = (room.create_model(*creation(room)) for _ in range(2))
    reason = room.wait_reason(rooms.store.get(Request, second))
    assert reason is not None
    assert reason.startswith(
        f"model {first} holds the ranks, which train one model at a time, and its client sent a"
    )
    assert room.wait_reason(rooms.store.get(Request, f"{first}:0")) is None
    with pytest.raises(RequestError, match="waits for the ranks; wait for the result of its first request"):
        room.submit(second.removesuffix(":0"), 1, "save_weights", save(second))
    assert room.create_model(*creation(room, session=second.partition(":")[0])) == second  # a retry
    with pytest.raises(RequestError, match="of the same session waits for the ranks"):
        room.create_model(*creation(room, 1, second.partition(":")[0]))
    room.finish(first.partition(":")[0])
    assert answer(room, second)["model_id"] == second.removesuffix(":0")
    assert rooms.store.get(Request, third).state == "queued"
    room.finish(second.partition(":")[0])
    assert answer(room, third)["model_id"] == third.removesuffix(":0")
    assert ranks.calls == ["begin_model"] * 3


def test_a_wait_ends_with_the_name_of_the_model_that_holds_the_ranks(rooms: Rooms) -> None:
    room = rooms.start(TableRanks(), turn_s=0.1)
    model = begin(room)
    waiting = room.create_model(*creation(room))
    with pytest.raises(
        RequestError,
        match=rf"did not get the ranks: it waited 0 s \(serve.wait_s\), and model {model} holds the ranks",
    ):
        answer(room, waiting)
    assert rooms.store.get(Model, model).state == "live"


def test_a_client_that_leaves_while_it_waits_does_not_get_the_ranks(rooms: Rooms) -> None:
    ranks = TableRanks()
    room = rooms.start(ranks)
    model = begin(room)
    silent, closed, last = (room.create_model(*creation(room)) for _ in range(3))
    rooms.store.update(ClientSession, silent.partition(":")[0], heartbeat_s=time.time() - 61)
    room.finish(closed.partition(":")[0])
    with pytest.raises(RequestError, match=r"did not get the ranks: session .* has ended"):
        answer(room, closed)
    with pytest.raises(RequestError, match=r"did not get the ranks: its client sent no heartbeat for 61 s"):
        answer(room, silent)
    room.finish(model.partition(":")[0])
    assert answer(room, last)
    assert ranks.calls == ["begin_model", "begin_model"]


def test_models_wait_on_after_a_restart_of_the_server(rooms: Rooms) -> None:
    room = rooms.start(TableRanks())
    model = begin(room)
    waiting = room.create_model(*creation(room))
    rooms.stop()
    for key in (model, waiting):  # the server was away for longer than a client may be silent
        rooms.store.update(ClientSession, key.partition(":")[0], heartbeat_s=time.time() - 61)
    ranks = TableRanks()
    room = rooms.start(ranks)
    time.sleep(0.05)
    assert rooms.store.get(Request, waiting).state == "queued"
    room.finish(model.partition(":")[0])
    assert answer(room, waiting)
    assert ranks.calls == ["begin_model", "begin_model"]
