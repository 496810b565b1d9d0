"""Samplers that are used after their model has stepped: the weights of the newest steps are kept for them."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from hybridengine.errors import RanksLostError, RequestError
from hybridengine.serving.room import Room
from hybridengine.serving.store import KEPT, ClientSession
from tests.unit.serving_ranks import TableRanks
from tests.unit.test_serving_room import Rooms, answer, begin, passing, prompt, rooms, sampler, save, step

__all__ = ["rooms"]


class Steps:
    """A model that draws another token after each of its steps, and the sampler of each step."""

    def __init__(self, room: Room) -> None:
        self.room = room
        self.model = begin(room)
        self._seq_id = 0
        self.samplers: list[str] = []
        self.drawn: list[Any] = []
        """What each sampler has drawn in time."""

    def submit(self, kind: str, body: bytes) -> str:
        self._seq_id += 1
        return self.room.submit(self.model, self._seq_id, kind, body)

    def sample(self) -> None:
        """Make a sampler of the present step, and draw from it."""
        self._seq_id += 1
        self.samplers.append(sampler(self.room, self.model, self._seq_id, len(self.samplers)))
        self.drawn.append(self.draw(len(self.samplers) - 1, 0))

    def train(self) -> None:
        """Take a step after which the next token is the most likely one."""
        rate = 2.0 ** (len(self.samplers) - 5)
        answer(self.room, self.submit("forward_backward", passing(len(self.samplers))))
        answer(self.room, self.submit("optim_step", step(self.model, rate)))

    def draw(self, place: int, number: int) -> Any:
        return answer(self.room, self.room.submit(self.samplers[place], number, "sample", prompt()))


def folders(rooms: Rooms, model: str) -> list[str]:
    return sorted(path.name for path in (rooms.folder / model.replace(":", "-") / KEPT).iterdir())


def wait_for_folders(rooms: Rooms, model: str, names: list[str]) -> None:
    deadline_s = time.monotonic() + 10
    while folders(rooms, model) != names:
        assert time.monotonic() < deadline_s, folders(rooms, model)
        time.sleep(0.01)


def test_samplers_get_the_weights_of_their_own_step(rooms: Rooms) -> None:
    ranks = TableRanks()
    room = rooms.start(ranks, kept_steps=2)
    steps = Steps(room)
    for _ in range(4):
        steps.sample()
        steps.train()
    steps.sample()
    assert len({str(drawn) for drawn in steps.drawn}) == 5
    assert [steps.draw(place, 1) for place in (2, 3, 4)] == steps.drawn[2:]
    assert ranks.calls[-3:] == ["sample 1 step-000002", "sample 1 step-000003", "sample 1 live"]
    for place in (0, 1):
        with pytest.raises(RequestError, match=f"weights of step {place}, which are no longer kept"):
            steps.draw(place, 1)
    wait_for_folders(rooms, steps.model, ["step-000002", "step-000003"])
    assert not room.store.checkpoints(steps.model)  # clients did not save them
    with pytest.raises(RequestError, match="does not exist or has expired"):
        room.checkpoint(f"tinker://{steps.model}/{KEPT}/step-000003")


def test_weights_are_kept_only_for_samplers_that_need_them(rooms: Rooms) -> None:
    ranks = TableRanks()
    room = rooms.start(ranks, kept_steps=2)
    steps = Steps(room)
    sampler_of_newest = save(steps.model, sampling_session_seq_id=9, kind="inflight")
    answer(room, steps.submit("save_weights_for_sampler", sampler_of_newest))
    answer(room, steps.submit("save_weights", save(steps.model, path="whole")))
    steps.train()
    assert "save_sampler" not in ranks.calls
    steps.sample()
    body = save(steps.model, path=f"tinker://{steps.model}/weights/whole", optimizer=True)
    answer(room, steps.submit("load_weights", body))
    assert ranks.calls[-2:] == ["save_sampler", "load optimizer=True"]
    assert steps.draw(0, 1) == steps.drawn[0]


def test_weights_that_are_kept_survive_a_restart_of_the_server(rooms: Rooms) -> None:
    steps = Steps(rooms.start(TableRanks(), kept_steps=1))
    steps.sample()
    steps.train()
    steps.sample()
    ranks = TableRanks()
    steps.room = rooms.start(ranks, kept_steps=1)
    assert [steps.draw(place, 1) for place in (0, 1)] == steps.drawn
    assert ranks.calls.count("save_sampler") == 0  # what is carried out again keeps nothing
    steps.train()
    assert steps.draw(1, 2) == steps.drawn[1]
    wait_for_folders(rooms, steps.model, ["step-000001"])


def test_ranks_that_are_lost_while_weights_are_kept_keep_them_later(rooms: Rooms) -> None:
    ranks = TableRanks()
    steps = Steps(rooms.start(ranks, kept_steps=1, max_restarts=1))
    steps.sample()
    ranks.errors["save_sampler"] = [RanksLostError("rank 1 has died", "0")]
    steps.train()
    assert ranks.calls[-5:] == ["restart", "begin_model", "forward_backward", "save_sampler", "optim_step"]
    assert steps.draw(0, 1) == steps.drawn[0]


def test_weights_that_cannot_be_kept_do_not_stop_the_step(
    rooms: Rooms, caplog: pytest.LogCaptureFixture
) -> None:
    ranks = TableRanks()
    steps = Steps(rooms.start(ranks, kept_steps=1))
    steps.sample()
    ranks.errors["save_sampler"] = [OSError("No space left on device")]
    steps.train()
    assert f"the weights of step 0 of model {steps.model} are not kept" in caplog.text
    with pytest.raises(RequestError, match="weights of step 0, which are no longer kept"):
        steps.draw(0, 1)


def test_kept_weights_of_a_client_that_is_gone_are_removed(rooms: Rooms) -> None:
    steps = Steps(rooms.start(TableRanks(), kept_steps=1))
    steps.sample()
    steps.train()
    assert steps.draw(0, 1) == steps.drawn[0]
    rooms.store.update(ClientSession, steps.model.partition(":")[0], heartbeat_s=time.time() - 61)
    begin(steps.room)
    gone = rooms.store.prune(time.time())
    assert [Path(checkpoint.folder).name for checkpoint in gone] == ["step-000000"]
