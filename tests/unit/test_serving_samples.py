"""Samplers of models and checkpoints, and samples that are drawn together, on ranks in memory."""

from __future__ import annotations

import json
import time

import pytest

from hybridengine.errors import RequestError
from hybridengine.serving import sampling as serving_sampling
from hybridengine.serving.ranks import Prompt
from tests.unit.serving_ranks import TableRanks
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

__all__ = ["rooms"]


def test_samplers_that_move_with_the_model(rooms: Rooms) -> None:
    ranks = TableRanks()
    room = rooms.start(ranks)
    model = begin(room)
    inflight = sampler(room, model, 1, 0, "inflight")
    snapshot = sampler(room, model, 2, 1)
    room.submit(model, 3, "forward_backward", passing())
    answer(room, room.submit(model, 4, "optim_step", step(model)))
    assert answer(room, room.submit(inflight, 0, "sample", prompt()))
    stale = room.submit(snapshot, 0, "sample", prompt())
    with pytest.raises(
        RequestError,
        match="weights of step 0, which are no longer kept: the model is at step 1; save a new",
    ):
        answer(room, stale)
    room = rooms.start(TableRanks(), newest=True)
    assert answer(room, room.submit(snapshot, 1, "sample", prompt()))


def test_a_sampler_of_a_deleted_checkpoint_does_not_get_its_successor(rooms: Rooms) -> None:
    room = rooms.start(TableRanks())
    model = begin(room)
    path = answer(room, room.submit(model, 1, "save_weights_for_sampler", save(model, path="a")))["path"]
    first = from_checkpoint(room, path)
    answer(room, room.submit(model, 2, "forward_backward", passing()))
    answer(room, room.submit(model, 3, "optim_step", step(model)))
    drawn = answer(room, room.submit(first, 0, "sample", prompt()))
    room.delete_checkpoint(path)
    answer(room, room.submit(model, 4, "save_weights_for_sampler", save(model, path="a")))
    with pytest.raises(RequestError, match=f"sampler {first} holds weights of {path} that have been deleted"):
        answer(room, room.submit(first, 1, "sample", prompt()))
    second = from_checkpoint(room, path)
    assert answer(room, room.submit(second, 0, "sample", prompt())) != drawn


def test_a_training_checkpoint_is_not_sampled(rooms: Rooms) -> None:
    room = rooms.start(TableRanks())
    model = begin(room)
    path = answer(room, room.submit(model, 1, "save_weights", save(model)))["path"]
    with pytest.raises(
        RequestError, match=f"{path} has weights for training, .* that save_weights_for_sampler"
    ):
        from_checkpoint(room, path)


def test_a_prompt_that_the_ranks_refuse_fails_alone(rooms: Rooms) -> None:
    ranks = TableRanks()
    room = rooms.start(ranks, quiet_s=0.5)
    sampling = sampler(room, begin(room), 1)
    good = room.submit(sampling, 0, "sample", prompt())
    bad = room.submit(sampling, 1, "sample", prompt(top_p=0.5))
    assert answer(room, good)
    with pytest.raises(RequestError, match="top_p is not served by a table"):
        answer(room, bad)
    assert ranks.calls == ["begin_model", "sample 2 live", "sample 1 live", "sample 1 live"]


def test_samples_that_arrive_with_pauses_are_drawn_together(rooms: Rooms) -> None:
    """The third comes later than `quiet_s` after the first, but not after the second."""
    ranks = TableRanks()
    room = rooms.start(ranks, quiet_s=0.5, collect_s=60)
    sampling = sampler(room, begin(room), 1)
    requests = []
    for number, pause_s in enumerate((0.3, 0.3, 0)):
        requests.append(room.submit(sampling, number, "sample", prompt()))
        time.sleep(pause_s)
    assert answer(room, requests[0]) == answer(room, requests[1]) == answer(room, requests[2])
    assert ranks.calls == ["begin_model", "sample 3 live"]


def test_a_draw_has_a_limit(rooms: Rooms, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving_sampling, "MOST_RESPONSES", 3)
    ranks = TableRanks()
    room = rooms.start(ranks, quiet_s=0.5)
    sampling = sampler(room, begin(room), 1)
    counts = (2, 1, 1, 4, 2)
    bodies = [json.dumps(json.loads(prompt()) | {"num_samples": count}).encode() for count in counts]
    requests = [room.submit(sampling, number, "sample", body) for number, body in enumerate(bodies)]
    for request in requests:
        assert answer(room, request)
    assert ranks.calls == ["begin_model", "sample 2 live", *["sample 1 live"] * 3]


def test_samples_wait_for_one_that_is_being_stored(rooms: Rooms) -> None:
    ranks = TableRanks()
    room = rooms.start(ranks, collect_s=60)
    sampling = sampler(room, begin(room), 1)
    with room.arriving():
        first = room.submit(sampling, 0, "sample", prompt())
        time.sleep(0.5)  # fifty times quiet_s
        assert ranks.calls == ["begin_model"]
        second = room.submit(sampling, 1, "sample", prompt())
    assert answer(room, first) == answer(room, second)
    assert ranks.calls == ["begin_model", "sample 2 live"]


def test_prompts_without_a_session_join_the_samplers(rooms: Rooms) -> None:
    ranks = TableRanks()
    room = rooms.start(ranks, quiet_s=0.5)
    own = Prompt((2,), num_samples=1, seed=0, max_tokens=1, temperature=0.0)
    before = room.submit_prompts([own])
    room.results.done(before[0]).result(10)
    model = begin(room)
    sampling = sampler(room, model, 1)
    first = room.submit(sampling, 0, "sample", prompt())
    twins = room.submit_prompts([own, own])
    assert len({*twins, *before}) == 3  # none is a retry
    assert answer(room, first) == answer(room, twins[0]) == answer(room, twins[1])
    assert ranks.calls == ["sample 1 base", "begin_model", "sample 3 live"]


def test_prompts_that_nobody_waits_for_are_not_carried_out(rooms: Rooms) -> None:
    ranks = TableRanks()
    room = rooms.start(ranks, quiet_s=0.5)
    own = Prompt((2,), num_samples=1, seed=0, max_tokens=1)
    withdrawn, left = room.submit_prompts([own, own])
    room.withdraw([withdrawn], "waited too long")
    with pytest.raises(RequestError, match="waited too long"):
        answer(room, withdrawn)
    room = rooms.start(ranks)
    with pytest.raises(RequestError, match="the server restarted; send it again"):
        answer(room, left)
    assert ranks.calls == []


def test_a_model_that_waits_to_begin_is_not_sampled(rooms: Rooms) -> None:
    ranks = TableRanks()
    room = rooms.start(ranks, quiet_s=0.5)
    drawn = room.submit_prompts([Prompt((2,), num_samples=1, seed=0, max_tokens=1)])
    begin(room)  # arrives while prompts are collected
    room.results.done(drawn[0]).result(10)
    assert ranks.calls == ["sample 1 base", "begin_model"]


def test_a_sampler_of_a_deleted_checkpoint_is_refused_before_the_next_step(rooms: Rooms) -> None:
    room = rooms.start(TableRanks())
    model = begin(room)
    path = answer(room, room.submit(model, 1, "save_weights_for_sampler", save(model, path="a")))["path"]
    sampling = from_checkpoint(room, path)
    assert answer(room, room.submit(sampling, 0, "sample", prompt()))
    room.delete_checkpoint(path)
    with pytest.raises(RequestError, match="have been deleted"):
        answer(room, room.submit(sampling, 1, "sample", prompt()))
