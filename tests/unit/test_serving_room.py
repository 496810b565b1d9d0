"""Order, retries, ends and restarts of the server's requests, on ranks in memory."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path

import pytest
from sqlalchemy import select
from tinker import types

from hybridengine.errors import HybridEngineError, RequestError
from hybridengine.serving.store import Checkpoint, ClientSession, Model, Request
from tests.unit.serving_ranks import TableRanks
from tests.unit.serving_rooms import (
    Rooms,
    answer,
    begin,
    creation,
    passing,
    prompt,
    rooms,
    sampler,
    save,
    step,
)

__all__ = ["rooms"]


def test_requests_are_carried_out_by_seq_id(rooms: Rooms) -> None:
    ranks = TableRanks()
    room = rooms.start(ranks)
    model = begin(room)
    last = room.submit(model, 4, "save_weights", save(model))
    room.submit(model, 3, "optim_step", step(model))
    room.submit(model, 2, "forward", passing(forward_only=True))
    time.sleep(0.05)
    assert ranks.calls == ["begin_model"]
    room.submit(model, 1, "forward_backward", passing())
    assert answer(room, last)["path"] == f"tinker://{model}/weights/000004"
    assert ranks.calls == ["begin_model", "forward_backward", "forward", "optim_step", "save"]
    found = room.store.get(Model, model)
    assert (found.seq_id, found.step, found.gradients) == (4, 1, False)


def test_a_gap_ends_the_model_by_name(rooms: Rooms) -> None:
    room = rooms.start(TableRanks(), gap_s=0.05)
    model = begin(room)
    waiting = room.submit(model, 3, "optim_step", step(model))
    with pytest.raises(RequestError, match="seq_id=3 waited 0 s for seq_id=1, which did not arrive"):
        answer(room, waiting)
    with pytest.raises(RequestError, match="was stopped: seq_id=3 waited"):
        room.submit(model, 1, "optim_step", step(model))


def test_a_retry_gets_the_first_result(rooms: Rooms) -> None:
    ranks = TableRanks()
    room = rooms.start(ranks)
    model = begin(room)
    first = room.submit(model, 1, "forward_backward", passing())
    assert room.submit(model, 1, "forward_backward", passing()) == first
    before = answer(room, first)
    assert room.submit(model, 1, "forward_backward", passing()) == first
    assert answer(room, first) == before
    assert ranks.calls == ["begin_model", "forward_backward"]
    with pytest.raises(
        RequestError, match="is a request of the kind forward_backward, and now of optim_step"
    ):
        room.submit(model, 1, "optim_step", step(model))
    taken = f"seq_id=1 of {model} is a request of the kind forward_backward with other contents; give each"
    with pytest.raises(RequestError, match=taken):
        room.submit(model, 1, "forward_backward", passing(target=4))
    second = room.submit(model, 2, "optim_step", step(model))
    assert room.submit(model, 2, "optim_step", step(model).replace(b", ", b",")) == second  # encoded anew
    with pytest.raises(RequestError, match=r"seq_id=2 of .* with other contents"):
        room.submit(model, 2, "optim_step", step(model, rate=0.5))
    session = model.partition(":")[0]
    assert begin(room, session=session) == model  # create_model again
    saved = answer(room, room.submit(model, 3, "save_weights", save(model)))["path"]
    message = types.LoadWeightsRequest(model_seq_id=0, path=saved, optimizer=False, session_id=session)
    with pytest.raises(
        RequestError, match=r"seq_id=0 of .* is a request of the kind create_model, and now of load"
    ):
        room.load_model(message, message.model_dump_json().encode())
    with pytest.raises(RequestError, match=f"seq_id=None of {model} must be 0 to 9223372036854775807"):
        room.submit(model, None, "optim_step", step(model))
    with pytest.raises(RequestError, match=f"seq_id={2**63} of {model} must be 0 to"):
        room.submit(model, 2**63, "optim_step", step(model))
    with pytest.raises(RequestError, match=f"model_seq_id={2**63} of .* must be 0 to"):
        room.create_model(*creation(room, 2**63))
    with pytest.raises(RequestError, match="model 'nobody' does not exist"):
        room.submit("nobody", 1, "optim_step", step(model))


def test_a_step_without_gradients_is_refused_without_the_ranks(rooms: Rooms) -> None:
    ranks = TableRanks()
    room = rooms.start(ranks)
    model = begin(room)
    answer(room, room.submit(model, 1, "forward_backward", passing()))
    answer(room, room.submit(model, 2, "optim_step", step(model)))
    with pytest.raises(
        RequestError, match="no gradients wait for an optim_step; send forward_backward before it"
    ):
        answer(room, room.submit(model, 3, "optim_step", step(model)))
    assert ranks.calls == ["begin_model", "forward_backward", "optim_step"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"learning_rate": 1e38}, r"learning_rate=1e\+38 must be 0 to 1: a step of Adam"),
        ({"learning_rate": -1e-3}, "learning_rate=-0.001 must be 0 to 1"),
        ({"beta2": 1.0}, "beta2=1.0 must be at least 0 and below 1"),
        ({"beta2": 0.0, "eps": 0.0}, r"eps=0.0 must be 1.175494e-38 to 3.402823e\+38, float32's range"),
        ({"eps": 1e-50}, "eps=1e-50 must be 1.175494e-38 to"),
        ({"grad_clip_norm": 1e39}, r"grad_clip_norm=1e\+39 must be 0 to 3.402823e\+38, the largest float32"),
        (
            {"learning_rate": 0.1, "weight_decay": 11.0},
            "learning_rate=0.1 times weight_decay=11.0 must be at most 1",
        ),
    ],
)
def test_steps_that_make_weights_useless_are_refused(
    rooms: Rooms, settings: dict[str, float], message: str
) -> None:
    ranks = TableRanks()
    room = rooms.start(ranks)
    model = begin(room)
    answer(room, room.submit(model, 1, "forward_backward", passing()))
    body = json.dumps({"model_id": model, "adam_params": settings}).encode()
    stepped = room.submit(model, 2, "optim_step", body)
    with pytest.raises(RequestError, match=message):
        answer(room, stepped)
    assert rooms.store.get(Request, stepped).category == "user"
    assert ranks.calls == ["begin_model", "forward_backward"]


def test_a_client_without_heartbeats_loses_the_ranks(rooms: Rooms) -> None:
    ranks = TableRanks()
    room = rooms.start(ranks)
    model = begin(room)
    sampling = sampler(room, model, 1)
    waiting = room.create_model(*creation(room))
    assert room.store.get(Request, waiting).state == "queued"
    rooms.store.update(ClientSession, model.partition(":")[0], heartbeat_s=time.time() - 61)
    second = answer(room, waiting)["model_id"]
    assert ranks.calls == ["begin_model", "begin_model"]
    with pytest.raises(
        RequestError, match=f"model {model} no longer holds the ranks: its client sent no heartbeat"
    ):
        room.submit(model, 2, "optim_step", step(model))
    with pytest.raises(
        RequestError,
        match=f"of the model {model}, which no longer holds the ranks, and they are not kept; sample from",
    ):
        answer(room, room.submit(sampling, 0, "sample", prompt()))
    room.finish(second.partition(":")[0])
    with pytest.raises(RequestError, match="has ended; create another ServiceClient"):
        room.heartbeat(second.partition(":")[0])


def test_a_restart_carries_out_what_was_accepted(rooms: Rooms) -> None:
    ranks = TableRanks()
    room = rooms.start(ranks)
    model = begin(room)
    room.submit(model, 1, "forward_backward", passing())
    room.submit(model, 2, "optim_step", step(model))
    room.submit(model, 3, "save_weights", save(model, path="whole"))
    room.submit(model, 4, "forward_backward", passing(5))
    answer(
        room, room.submit(model, 5, "save_weights", save(model))
    )  # gradients wait: no place to resume from
    ranks.free.clear()
    stuck = room.submit(model, 6, "forward_backward", passing(4))
    queued = room.submit(model, 7, "optim_step", step(model))
    room._closing = True
    ranks.free.set()
    rooms.stop()
    assert [request.id for request in rooms.store.queued()][-1] == queued

    fresh = TableRanks()
    room = rooms.start(fresh)
    answer(room, stuck)
    assert answer(room, queued)["metrics"]
    assert fresh.calls == ["load optimizer=True", "forward_backward", "forward_backward", "optim_step"]
    expected = TableRanks()
    again = rooms.store.replay(model)
    assert again.checkpoint is not None
    assert again.checkpoint.path.endswith("/whole")
    assert [request.seq_id for request in again.again] == [4, 6, 7]
    rooms.stop()
    with rooms.store.transaction() as transaction:
        for checkpoint in transaction.scalars(select(Checkpoint)):
            transaction.delete(checkpoint)
    room = rooms.start(expected)  # from the beginning
    answer(room, room.submit(model, 8, "forward", passing(forward_only=True)))
    passes = "forward_backward"
    assert expected.calls == ["begin_model", passes, "optim_step", passes, passes, "optim_step", "forward"]
    assert expected.table == pytest.approx(fresh.table)


def test_a_model_that_cannot_be_resumed_is_stopped(rooms: Rooms) -> None:
    room = rooms.start(TableRanks())
    model = begin(room)
    rooms.stop()
    broken = TableRanks()
    broken.error = RuntimeError("no memory")
    broken.free.clear()
    room = rooms.start(broken)
    waiting = room.submit(model, 1, "optim_step", step(model))
    broken.free.set()
    with pytest.raises(RequestError, match="it could not be resumed after a restart: no memory"):
        answer(room, waiting)
    assert begin(room)


def test_a_checkpoint_is_replaced_only_on_demand(rooms: Rooms) -> None:
    room = rooms.start(TableRanks())
    model = begin(room)
    answer(room, room.submit(model, 1, "save_weights", save(model, path="a")))
    with pytest.raises(RequestError, match="a exists; choose another name"):
        answer(room, room.submit(model, 2, "save_weights", save(model, path="a")))
    answer(room, room.submit(model, 3, "save_weights", save(model, path="a", overwrite=True)))
    rooms.stop()  # after the room has tidied up
    (checkpoint,) = room.store.checkpoints(model)
    assert checkpoint.seq_id == 3
    assert [folder.name for folder in Path(checkpoint.folder).parent.iterdir()] == ["a-seq000003"]


def test_a_checkpoint_that_expires_is_gone_at_once(rooms: Rooms) -> None:
    room = rooms.start(TableRanks())
    model = begin(room)
    body = save(model, path="short", ttl_seconds=60)
    path = answer(room, room.submit(model, 1, "save_weights", body))["path"]
    assert [each.path for each in rooms.store.checkpoints(model)] == [path]
    rooms.store.update(Checkpoint, room.checkpoint(path).folder, expires_s=time.time())
    assert rooms.store.checkpoints(model) == []
    with pytest.raises(RequestError, match="does not exist or has expired"):
        room.checkpoint(path)
    assert answer(room, room.submit(model, 2, "save_weights", body))["path"] == path


def test_old_results_go_and_what_a_restart_needs_stays(rooms: Rooms) -> None:
    room = rooms.start(TableRanks())
    model = begin(room)
    sampling = sampler(room, model, 1)
    drawn = room.submit(sampling, 0, "sample", prompt())
    answer(room, drawn)
    room.submit(model, 2, "save_weights", save(model, path="old", ttl_seconds=60))
    room.submit(model, 3, "save_weights", save(model, path="base", ttl_seconds=60))
    last = room.submit(model, 4, "forward_backward", passing())
    answer(room, last)
    for checkpoint in rooms.store.checkpoints(model):
        rooms.store.update(Checkpoint, checkpoint.folder, expires_s=1.0)
    (gone,) = rooms.store.prune(time.time() + 1)
    assert gone.path.endswith("/old")
    base = rooms.store.replay(model).checkpoint
    assert base is not None
    assert base.path.endswith("/base")
    assert rooms.store.checkpoints(model) == []
    assert (rooms.store.get(Request, drawn).body, rooms.store.get(Request, drawn).result) == (b"", None)
    assert (rooms.store.get(Request, last).body, rooms.store.get(Request, last).result) == (passing(), None)
    removed = "is done and its result has been removed, and it is not carried out again"
    with pytest.raises(RequestError, match=f"request {last} {removed}"):
        room.submit(model, 4, "forward_backward", passing())
    with pytest.raises(RequestError, match=f"request {model}:0 {removed}"):
        begin(room, session=model.partition(":")[0])


@pytest.mark.parametrize("kind", ["forward_backward", "sample"])
def test_a_room_that_has_failed_stores_nothing(rooms: Rooms, kind: str) -> None:
    """A server that has lost its lease must not write beside the new owner of the database."""
    ranks = TableRanks()
    room = rooms.start(ranks)
    told = list[str]()
    room.at_failure = lambda: told.append("failure")
    model = begin(room)
    sampling = sampler(room, model, 1)
    ranks.free.clear()
    owner, body = (sampling, prompt()) if kind == "sample" else (model, passing())
    running = room.submit(owner, 2, kind, body)
    while not ranks.asked[-1].startswith(kind):
        time.sleep(0.01)
    queued = [room.submit(model, 3, "optim_step", step(model)), room.submit(sampling, 4, "sample", prompt())]
    room.fail(HybridEngineError("lost"))
    room.fail(HybridEngineError("lost again"))
    ranks.free.set()
    for request_id in (running, *queued):
        room.results.done(request_id).result(10)
    rooms.stop()
    assert {request.id for request in rooms.store.queued()} == {running, *queued}
    assert rooms.store.get(Model, model).seq_id == 1
    assert (told, room.trouble) == (["failure"], "the server ends, and can be started again: lost")
    assert len(ranks.calls) == 2


def test_a_room_that_has_broken_says_so(rooms: Rooms, monkeypatch: pytest.MonkeyPatch) -> None:
    room = rooms.start(TableRanks())
    ended = threading.Event()
    room.at_failure = ended.set
    model = begin(room)
    monkeypatch.setattr(room._requests, "carry_out", lambda _: (_ for _ in ()).throw(OSError("disk full")))
    accepted = room.submit(model, 1, "optim_step", step(model))
    room.results.done(accepted).result(10)
    assert ended.wait(10)
    assert room.trouble == "the server ends, and can be started again: disk full"
    assert [request.id for request in rooms.store.queued()] == [accepted]
    late = room.submit(model, 2, "optim_step", step(model))
    assert rooms.store.find(Request, late) is None
