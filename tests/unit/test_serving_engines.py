"""Samples that engines on ranks of their own draw while requests of a model are carried out, in memory."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable

import pytest

from hybridengine.errors import CheckpointError, ConfigError, RequestError
from hybridengine.serving.fair_lock import FairLock
from hybridengine.serving.ranks import Prompt
from hybridengine.serving.room import Room
from tests.unit.serving_ranks import TableEngines, TableRanks
from tests.unit.serving_rooms import (
    Rooms,
    answer,
    begin,
    from_checkpoint,
    passing,
    prompt,
    rooms,
    sampler,
    save,
    step,
)
from tests.unit.test_serving_restarts import ended, lost, unforeseen

__all__ = ["rooms"]


def ranks_with_engines() -> tuple[TableRanks, TableEngines]:
    ranks = TableRanks()
    return ranks, TableEngines(ranks)


def until(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.005)


def train(room: Room, model: str, seq_id: int, target: int = 3) -> None:
    """Take a training step with the requests `seq_id` and the next."""
    room.submit(model, seq_id, "forward_backward", passing(target))
    answer(room, room.submit(model, seq_id + 1, "optim_step", step(model)))


def test_engines_sample_while_the_actor_trains(rooms: Rooms) -> None:
    ranks, _ = ranks_with_engines()
    room = rooms.start(ranks)
    model = begin(room)
    sampling = sampler(room, model, 1)
    before = answer(room, room.submit(sampling, 0, "sample", prompt(max_tokens=4)))
    ranks.free.clear()
    passed = room.submit(model, 2, "forward_backward", passing())
    until(lambda: ranks.asked[-1] == "forward_backward")
    assert answer(room, room.submit(sampling, 1, "sample", prompt(max_tokens=4))) == before
    stepped = room.submit(model, 3, "optim_step", step(model))
    ranks.free.set()
    assert answer(room, passed)
    assert answer(room, stepped)["metrics"]
    assert ranks.calls == ["begin_model", "push live", "draw 1", "draw 1", "forward_backward", "optim_step"]


def test_the_actor_trains_while_engines_sample(rooms: Rooms) -> None:
    ranks, engines = ranks_with_engines()
    room = rooms.start(ranks)
    model = begin(room)
    sampling = sampler(room, model, 1)
    engines.free.clear()
    drawn = room.submit(sampling, 0, "sample", prompt())
    until(lambda: ranks.asked[-1] == "draw 1")
    train(room, model, 2)
    engines.free.set()
    assert answer(room, drawn)
    assert ranks.calls == ["begin_model", "push live", "forward_backward", "optim_step", "draw 1"]


def test_samples_are_those_of_the_weights_that_a_sampler_means(rooms: Rooms) -> None:
    """The same requests get the same answers in place, with kept weights where engines have gone on to newer ones."""
    answers = []
    ranks, _ = ranks_with_engines()
    for own in (ranks, TableRanks()):
        room = rooms.start(own, kept_steps=2)
        model = begin(room)
        first = sampler(room, model, 1, 0)
        found = [room.submit(first, 0, "sample", prompt(max_tokens=3))]
        answer(room, found[-1])
        train(room, model, 2)
        found.append(room.submit(first, 1, "sample", prompt(max_tokens=3)))
        answer(room, found[-1])
        second = sampler(room, model, 4, 1)
        for number, owner in enumerate((second, first, second)):
            found.append(room.submit(owner, 2 + number, "sample", prompt(max_tokens=3)))
            answer(room, found[-1])
        found += room.submit_prompts([Prompt((2,), num_samples=2, seed=3, max_tokens=4)])
        answers.append([answer(room, each) for each in found])
        room.finish(model.partition(":")[0])
    assert answers[0] == answers[1]
    assert answers[0][0] == answers[0][1] == answers[0][3] != answers[0][2]
    assert ranks.calls == [
        "begin_model", "push live", "draw 1", "forward_backward", "save_sampler", "optim_step", "draw 1",
        "push live", "draw 1", "push step-000000", "draw 1", "push live", "draw 1", "draw 1",
    ]  # fmt: skip


def test_weights_are_those_that_were_kept_while_a_request_waited(rooms: Rooms) -> None:
    ranks, _ = ranks_with_engines()
    room = rooms.start(ranks, kept_steps=2)
    model = begin(room)
    frozen = sampler(room, model, 1)
    answer(room, room.submit(model, 2, "forward_backward", passing()))
    ranks.free.clear()
    room.submit(model, 3, "optim_step", step(model))
    until(lambda: ranks.asked[-1] == "save_sampler")
    drawn = room.submit(frozen, 0, "sample", prompt())
    until(lambda: room._actor._asked == room._actor._served + 2)
    ranks.free.set()
    assert answer(room, drawn)
    assert ranks.calls[-3:] == ["optim_step", "push step-000000", "draw 1"]


def test_weights_that_only_engines_hold_are_sampled(rooms: Rooms) -> None:
    ranks, engines = ranks_with_engines()
    room = rooms.start(ranks)  # keeps no weights
    model = begin(room)
    first = sampler(room, model, 1, 0)
    drawn = answer(room, room.submit(first, 0, "sample", prompt()))
    assert engines.held == f"{model}:0"
    train(room, model, 2)
    assert answer(room, room.submit(first, 1, "sample", prompt())) == drawn
    second = sampler(room, model, 4, 1)
    assert answer(room, room.submit(second, 0, "sample", prompt())) != drawn
    assert engines.held == f"{model}:1"
    with pytest.raises(RequestError, match="weights of step 0, which are no longer kept"):
        answer(room, room.submit(first, 2, "sample", prompt()))


SCORED = json.dumps({
    "prompt": {"chunks": [{"type": "encoded_text", "tokens": [2, 3]}]},
    "sampling_params": {"max_tokens": 1, "temperature": 0.0},
    "prompt_logprobs": True,
}).encode()  # fmt: skip


def test_prompts_that_ask_for_log_probs_are_drawn_in_place(rooms: Rooms) -> None:
    ranks, _ = ranks_with_engines()
    room = rooms.start(ranks, quiet_s=0.3)
    sampling = sampler(room, begin(room), 1)
    for number in (0, 2):
        both = [
            room.submit(sampling, number, "sample", SCORED),
            room.submit(sampling, number + 1, "sample", prompt()),
        ]
        for each in both:
            assert answer(room, each)
    assert ranks.calls == ["begin_model", "sample 1 live", "push live", "draw 1", "sample 1 live", "draw 1"]


def test_ranks_that_are_lost_in_place_are_started_again_once(rooms: Rooms) -> None:
    """New engines hold no weights: what was to be drawn with those of before waits for another push."""
    ranks, _ = ranks_with_engines()
    room = rooms.start(ranks, quiet_s=0.5, max_restarts=1)
    sampling = sampler(room, begin(room), 1)
    ranks.errors["sample 1 live"] = [lost()]
    both = [room.submit(sampling, 0, "sample", prompt()), room.submit(sampling, 1, "sample", SCORED)]
    for each in both:
        assert answer(room, each)
    assert ranks.calls.count("restart") == 1
    assert ranks.calls.count("draw 1") == 1


def test_the_newest_weights_are_pushed_once(rooms: Rooms) -> None:
    ranks, _ = ranks_with_engines()
    room = rooms.start(ranks, newest=True)
    model = begin(room)
    old = sampler(room, model, 1)
    train(room, model, 2)
    for number in range(3):
        assert answer(room, room.submit(old, number, "sample", prompt()))
    assert ranks.calls[-4:] == ["push live", "draw 1", "draw 1", "draw 1"]


def test_a_room_that_has_failed_starts_no_ranks_for_a_draw(rooms: Rooms) -> None:
    ranks, engines = ranks_with_engines()
    room = rooms.start(ranks, max_restarts=5)
    end = ended(room)
    model = begin(room)
    sampling = sampler(room, model, 1)
    engines.free.clear()
    room.submit(sampling, 0, "sample", prompt())
    until(lambda: ranks.asked[-1] == "draw 1")
    ranks.errors = {"forward_backward": [lost()], "restart": [ConfigError("no node")], "draw 1": [lost(2)]}
    room.submit(model, 2, "forward_backward", passing())
    assert end.wait(10)
    threading.Timer(0.3, engines.free.set).start()
    room.close()
    assert ranks.calls[-1] == "draw 1"  # which the room has waited for
    assert ranks.calls.count("restart") == 1


def test_those_who_came_first_are_drawn_first(rooms: Rooms) -> None:
    ranks, engines = ranks_with_engines()
    room = rooms.start(ranks, kept_steps=2)
    model = begin(room)
    old = sampler(room, model, 1, 0)
    train(room, model, 2)
    new = sampler(room, model, 4, 1)
    assert answer(room, room.submit(new, 0, "sample", prompt()))
    engines.free.clear()
    ranks.asked.clear()
    room.submit(new, 1, "sample", prompt())
    until(lambda: ranks.asked == ["draw 1"])
    waiting = [
        room.submit(owner, 2 + number, "sample", prompt())
        for number, owner in enumerate((old, new, old, new))
    ]
    ranks.calls.clear()
    engines.free.set()
    for each in waiting:
        assert answer(room, each)
    assert ranks.calls == ["draw 1", "push step-000000", "draw 2", "push live", "draw 2"]


def test_a_sampler_of_a_deleted_checkpoint_is_refused_though_engines_hold_its_weights(rooms: Rooms) -> None:
    ranks, _ = ranks_with_engines()
    room = rooms.start(ranks)
    model = begin(room)
    path = answer(room, room.submit(model, 1, "save_weights_for_sampler", save(model, path="a")))["path"]
    sampling = from_checkpoint(room, path)
    assert answer(room, room.submit(sampling, 0, "sample", prompt()))
    room.delete_checkpoint(path)
    with pytest.raises(RequestError, match="have been deleted"):
        answer(room, room.submit(sampling, 1, "sample", prompt()))


def test_a_prompt_that_engines_refuse_fails_alone(rooms: Rooms) -> None:
    ranks, _ = ranks_with_engines()
    room = rooms.start(ranks, quiet_s=0.5)
    sampling = sampler(room, begin(room), 1)
    good = room.submit(sampling, 0, "sample", prompt())
    bad = room.submit(sampling, 1, "sample", prompt(top_p=0.5))
    assert answer(room, good)
    with pytest.raises(RequestError, match="top_p is not served by a table"):
        answer(room, bad)
    assert ranks.calls == ["begin_model", "push live", "draw 2", "draw 1", "draw 1"]


def test_weights_that_cannot_be_pushed_fail_those_who_wait_for_them(rooms: Rooms) -> None:
    ranks, _ = ranks_with_engines()
    room = rooms.start(ranks)
    sampling = sampler(room, begin(room), 1)
    ranks.errors["push live"] = [CheckpointError("the file is damaged")]
    with pytest.raises(RequestError, match="the file is damaged"):
        answer(room, room.submit(sampling, 0, "sample", prompt()))
    assert answer(room, room.submit(sampling, 1, "sample", prompt()))


@pytest.mark.parametrize("where", ["push live", "draw 1"])
def test_samples_in_which_engines_are_lost_are_drawn_again(rooms: Rooms, where: str) -> None:
    ranks, _ = ranks_with_engines()
    room = rooms.start(ranks, max_restarts=1)
    sampling = sampler(room, begin(room), 1)
    ranks.errors[where] = [lost()]
    assert answer(room, room.submit(sampling, 0, "sample", prompt()))
    lines = ["push live", "draw 1"]
    begun = lines[: lines.index(where) + 1]
    assert ranks.calls == ["begin_model", *begun, "restart", "begin_model", *lines]
    ranks.errors["draw 1"] = [lost(5), lost(5)]
    room = rooms.start(ranks, max_restarts=3)
    with pytest.raises(RequestError, match="died on rank 1"):
        answer(room, room.submit(sampling, 1, "sample", prompt()))


def test_engines_that_die_with_the_actor_are_started_again_once(rooms: Rooms) -> None:
    ranks, engines = ranks_with_engines()
    room = rooms.start(ranks, max_restarts=1)
    model = begin(room)
    sampling = sampler(room, model, 1)
    engines.free.clear()
    drawn = room.submit(sampling, 0, "sample", prompt())
    until(lambda: ranks.asked[-1] == "draw 1")
    ranks.errors = {"forward_backward": [lost(1)], "draw 1": [lost(2)]}
    assert answer(room, room.submit(model, 2, "forward_backward", passing()))
    engines.free.set()
    assert answer(room, drawn)
    assert ranks.calls.count("restart") == 1
    assert ranks.calls[-3:] == ["draw 1", "push live", "draw 1"]


def test_a_sampler_that_fails_on_engines_fails_alone(rooms: Rooms) -> None:
    ranks, _ = ranks_with_engines()
    room = rooms.start(ranks, quiet_s=0.5)
    model = begin(room)
    bad, good = sampler(room, model, 1, 0), sampler(room, model, 2, 1)
    ranks.calls.clear()
    ranks.errors = {"draw 3": [unforeseen()], "draw 2": [unforeseen()]}
    drawn = [room.submit(bad, 0, "sample", prompt()), room.submit(bad, 1, "sample", prompt())]
    assert answer(room, room.submit(good, 0, "sample", prompt()))
    for each in drawn:
        with pytest.raises(RequestError, match="pass_rows failed on rank 1"):
            answer(room, each)
    again = ["restart", "begin_model", "push live"]
    assert ranks.calls == ["push live", "draw 3", *again, "draw 2", *again, "draw 1"]


def test_a_lock_is_given_in_the_order_of_those_who_ask() -> None:
    lock, order, threads = FairLock(), list[int](), list[threading.Thread]()

    def take(number: int) -> None:
        with lock:
            order.append(number)

    with lock:
        for number in range(8):
            threads.append(threading.Thread(target=take, args=(number,)))
            threads[-1].start()
            until(lambda number=number: lock._asked == number + 2)
    for thread in threads:
        thread.join(10)
    assert order == [*range(8)]
