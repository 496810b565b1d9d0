"""Ranks in memory that are lost: the room starts them again, or ends with an error that names them."""

from __future__ import annotations

import threading

import pytest

from hybridengine.errors import ConfigError, RanksLostError, RequestError
from hybridengine.serving.ranks import Prompt
from hybridengine.serving.room import Room
from hybridengine.serving.store import Request
from tests.unit.serving_ranks import TableRanks
from tests.unit.serving_rooms import (
    Rooms,
    answer,
    begin,
    passing,
    prompt,
    rooms,
    sampler,
    save,
    step,
)

__all__ = ["rooms"]


def lost(number: int = 0) -> RanksLostError:
    """Return the error of a rank that has died; equal numbers mean the same failure."""
    return RanksLostError(
        f"actor.pass_rows died on rank 1 (tp=1): pid {id(object())}\ntraceback", f"{number}"
    )


def unforeseen(number: int = 0) -> RanksLostError:
    """Return the error of a rank that is alive and has raised an error that nobody expects."""
    return RanksLostError(
        "actor.pass_rows failed on rank 1 (tp=1): OverflowError", f"{number}", unforeseen=True
    )


def ended(room: Room) -> threading.Event:
    event = threading.Event()
    room.at_failure = event.set
    return event


def test_a_request_in_which_the_ranks_are_lost_is_carried_out_on_new_ones(rooms: Rooms) -> None:
    ranks = TableRanks()
    room = rooms.start(ranks, max_restarts=1)
    model = begin(room)
    room.submit(model, 1, "forward_backward", passing())
    room.submit(model, 2, "optim_step", step(model))
    room.submit(model, 3, "save_weights", save(model, path="whole"))
    answer(room, room.submit(model, 4, "forward_backward", passing(5)))
    ranks.errors["optim_step"] = [lost()]
    ranks.free.clear()
    stepped = room.submit(model, 5, "optim_step", step(model))
    expected = TableRanks()
    ranks.calls.clear()
    ranks.free.set()
    assert answer(room, stepped)["metrics"]
    assert ranks.calls == ["optim_step", "restart", "load optimizer=True", "forward_backward", "optim_step"]
    assert room.trouble is None
    undisturbed = rooms.start(expected)  # replays the same requests
    answer(undisturbed, undisturbed.submit(model, 6, "save_weights", save(model)))
    assert ranks.table == pytest.approx(expected.table)


def test_the_room_says_that_its_ranks_start_again(rooms: Rooms) -> None:
    ranks = TableRanks()
    room = rooms.start(ranks, max_restarts=2)
    model = begin(room)
    reached, go_on = threading.Event(), threading.Event()
    ranks.errors["forward_backward"] = [lost()]
    restart = ranks.restart
    ranks.restart = lambda: (reached.set(), go_on.wait(10), restart())  # type: ignore[method-assign]
    passed = room.submit(model, 1, "forward_backward", passing())
    assert reached.wait(10)
    text = (
        "the server starts its ranks again (1 of at most 2 times): actor.pass_rows died on rank 1 (tp=1): pid"
    )
    assert room.trouble is not None
    assert room.trouble.startswith(text)
    assert room.wait_reason(rooms.store.get(Request, passed)) == room.trouble
    go_on.set()
    assert answer(room, passed)
    assert room.trouble is None


def test_samples_are_drawn_again(rooms: Rooms) -> None:
    ranks = TableRanks()
    room = rooms.start(ranks, max_restarts=1)
    model = begin(room)
    sampling = sampler(room, model, 1)
    ranks.errors["sample 1 live"] = [lost()]
    assert answer(room, room.submit(sampling, 0, "sample", prompt()))
    assert ranks.calls == ["begin_model", "sample 1 live", "restart", "begin_model", "sample 1 live"]


def test_a_request_that_loses_the_ranks_twice_fails_alone(rooms: Rooms) -> None:
    ranks = TableRanks()
    room = rooms.start(ranks, max_restarts=4)
    model = begin(room)
    ranks.errors["forward_backward"] = [lost(), lost()]
    with pytest.raises(RequestError, match=r"actor.pass_rows died on rank 1"):
        answer(room, room.submit(model, 1, "forward_backward", passing()))
    with pytest.raises(
        RequestError, match=r"was stopped: forward_backward with seq_id=1 failed: actor.pass_rows died"
    ):
        room.submit(model, 2, "optim_step", step(model))
    begun = begin(room)
    assert ranks.calls == [
        "begin_model", "forward_backward", "restart", "begin_model", "forward_backward", "restart", "begin_model",
    ]  # fmt: skip
    own = Prompt((2,), num_samples=1, seed=0, max_tokens=1)
    ranks.errors["sample 1 live"] = [lost(1), lost(1)]
    (drawn,) = room.submit_prompts([own])
    with pytest.raises(RequestError, match=r"actor.pass_rows died on rank 1"):
        answer(room, drawn)
    assert answer(room, room.submit(begun, 1, "forward", passing(forward_only=True)))
    assert rooms.store.get(Request, drawn).category == "server"


def test_requests_that_may_be_the_cause_fail_at_once_and_use_up_no_restarts(rooms: Rooms) -> None:
    ranks = TableRanks()
    room = rooms.start(ranks, max_restarts=1)
    for number in range(3):
        model = begin(room)
        ranks.calls.clear()
        ranks.errors["forward_backward"] = [unforeseen(number)]
        failed = room.submit(model, 1, "forward_backward", passing())
        with pytest.raises(RequestError, match="pass_rows failed on rank 1"):
            answer(room, failed)
        assert rooms.store.get(Request, failed).category == "server"
        model = begin(room)  # on the new ranks
        assert ranks.calls == ["forward_backward", "restart", "begin_model"]
        room.finish(model.partition(":")[0])
    model = begin(room)
    ranks.errors["forward_backward"] = [lost()]
    assert answer(room, room.submit(model, 1, "forward_backward", passing()))
    assert room.failure is None


def test_a_model_stays_when_a_request_that_changes_nothing_fails(rooms: Rooms) -> None:
    ranks = TableRanks()
    room = rooms.start(ranks)
    model = begin(room)
    answer(room, room.submit(model, 1, "forward_backward", passing()))
    ranks.errors["forward"] = [unforeseen()]
    with pytest.raises(RequestError, match="pass_rows failed on rank 1"):
        answer(room, room.submit(model, 2, "forward", passing(forward_only=True)))
    assert answer(room, room.submit(model, 3, "optim_step", step(model)))["metrics"]
    assert ranks.calls == [
        "begin_model", "forward_backward", "forward", "restart", "begin_model", "forward_backward", "optim_step",
    ]  # fmt: skip


def test_a_sampler_that_fails_on_the_ranks_fails_alone(rooms: Rooms) -> None:
    ranks = TableRanks()
    room = rooms.start(ranks, quiet_s=0.5)
    model = begin(room)
    bad, good = sampler(room, model, 1, 0), sampler(room, model, 2, 1)
    ranks.calls.clear()
    ranks.errors = {"sample 3 live": [unforeseen()], "sample 2 live": [unforeseen()]}
    drawn = [room.submit(bad, 0, "sample", prompt()), room.submit(bad, 1, "sample", prompt())]
    assert answer(room, room.submit(good, 0, "sample", prompt()))
    for each in drawn:
        with pytest.raises(RequestError, match="pass_rows failed on rank 1"):
            answer(room, each)
    again = ["restart", "begin_model"]
    assert ranks.calls == ["sample 3 live", *again, "sample 2 live", *again, "sample 1 live"]


def test_after_two_losses_in_a_draw_its_callers_are_drawn_alone(rooms: Rooms) -> None:
    ranks = TableRanks()
    room = rooms.start(ranks, quiet_s=0.5, max_restarts=9)
    model = begin(room)
    bad, good = sampler(room, model, 1, 0), sampler(room, model, 2, 1)
    ranks.calls.clear()
    ranks.errors = {"sample 3 live": [lost(), lost()], "sample 2 live": [lost()]}
    drawn = [room.submit(bad, 0, "sample", prompt()), room.submit(bad, 1, "sample", prompt())]
    assert answer(room, room.submit(good, 0, "sample", prompt()))
    for each in drawn:
        with pytest.raises(RequestError, match="pass_rows died on rank 1"):
            answer(room, each)
    again = ["restart", "begin_model"]
    together = ["sample 3 live", *again]
    assert ranks.calls == [*together, *together, "sample 2 live", *again, "sample 1 live"]


def test_requests_that_lose_the_ranks_in_turn_fail(rooms: Rooms) -> None:
    ranks = TableRanks()
    room = rooms.start(ranks, quiet_s=0.1, max_restarts=4)
    model = begin(room)
    sampling = sampler(room, model, 1)
    ranks.free.clear()
    ranks.errors = {"sample 1 live": [lost(), lost()], "forward_backward": [lost(), lost()]}
    drawn, passed = (
        room.submit(sampling, 0, "sample", prompt()),
        room.submit(model, 2, "forward_backward", passing()),
    )
    ranks.free.set()
    for each in (drawn, passed):
        with pytest.raises(RequestError, match="pass_rows died on rank 1"):
            answer(room, each)
    assert begin(room)
    assert ranks.calls.count("restart") == 4
    assert room.failure is None


def test_a_model_whose_restoring_loses_the_ranks_twice_is_stopped(rooms: Rooms) -> None:
    room = rooms.start(TableRanks())
    model = begin(room)
    answer(room, room.submit(model, 1, "forward_backward", passing()))
    rooms.stop()
    ranks = TableRanks()
    ranks.errors["begin_model"] = [lost(), lost()]
    room = rooms.start(ranks, max_restarts=2)
    with pytest.raises(
        RequestError, match=r"was stopped: it could not be resumed after a restart: actor.pass_rows"
    ):
        answer(room, room.submit(model, 2, "optim_step", step(model)))
    assert begin(room)
    assert ranks.calls == ["begin_model", "restart", "begin_model", "restart", "begin_model"]


def test_a_room_ends_when_its_ranks_are_lost_too_often(rooms: Rooms) -> None:
    ranks = TableRanks()
    room = rooms.start(ranks, max_restarts=1)
    end = ended(room)
    model = begin(room)
    answer(room, room.submit(model, 1, "forward_backward", passing()))
    ranks.errors["optim_step"] = [lost(0), lost(1)]
    ranks.free.clear()
    stepped = room.submit(model, 2, "optim_step", step(model))
    waits = room.results.done(stepped)
    ranks.free.set()
    assert end.wait(10)
    waits.result(0)  # nobody waits for ever
    assert room.failure is not None
    assert str(room.failure).endswith("started again 1 times, and faults.max_restarts=1")
    assert room.trouble is not None
    assert "actor.pass_rows died on rank 1 (tp=1)" in room.trouble
    assert ranks.calls.count("restart") == 1
    room = rooms.start(TableRanks())  # the operator's restart carries the request out
    assert answer(room, stepped)["metrics"]


@pytest.mark.parametrize("errors", [[ConfigError("no node is left")], [lost(3), lost(3)]])
def test_a_room_ends_when_its_ranks_cannot_start(rooms: Rooms, errors: list[Exception]) -> None:
    ranks = TableRanks()
    room = rooms.start(ranks, max_restarts=5)
    end = ended(room)
    model = begin(room)
    ranks.errors = {"optim_step": [lost()], "restart": errors}
    room.submit(model, 1, "forward_backward", passing())
    room.submit(model, 2, "optim_step", step(model))
    assert end.wait(10)
    assert room.failure is not None
    assert "the ranks could not start again: " in str(room.failure)
    assert errors == []


def test_what_a_killed_save_has_left_is_removed(rooms: Rooms) -> None:
    room = rooms.start(TableRanks())
    model = begin(room)
    path = answer(room, room.submit(model, 1, "save_weights", save(model, path="whole")))["path"]
    (whole,) = rooms.folder.glob("*/weights/whole-*")
    left = whole.with_name(".other-seq000002.partial")
    left.mkdir()
    (left / "model.safetensors").write_bytes(b"half")
    again = rooms.start(TableRanks())
    assert not left.exists()
    assert whole.is_dir()
    assert again.store.checkpoint(path) is not None
