"""Samplers that are used after their model has stepped: the weights of the newest steps are kept for them."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from tinker import types

from hybridengine.errors import RanksLostError, RequestError
from hybridengine.serving.room import Room
from hybridengine.serving.store import KEPT, ClientSession
from tests.unit.serving_ranks import TableRanks
from tests.unit.serving_rooms import Rooms, answer, begin, passing, prompt, rooms, sampler, save, step

__all__ = ["rooms"]


class Steps:
    """A model that draws another token after each of its steps, and the sampler of each step."""

    def __init__(self, room: Room) -> None:
        self.room = room
        self.model = begin(room)
        self._seq_id = 0
        self.samplers: list[str] = []
        self.drawn: list[Any] = []
        """What each sampler drew before the next step."""

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


@pytest.mark.parametrize("unforeseen", [False, True])
def test_ranks_that_are_lost_while_weights_are_kept_take_the_step_without(
    rooms: Rooms, unforeseen: bool
) -> None:
    """The step is not to blame; who samples afterwards learns of it."""
    ranks = TableRanks()
    steps = Steps(rooms.start(ranks, kept_steps=1, max_restarts=1))
    steps.sample()
    ranks.errors["save_sampler"] = [RanksLostError("rank 1 has died", "0", unforeseen)]
    steps.train()
    assert ranks.calls[-4:] == ["restart", "begin_model", "forward_backward", "optim_step"]
    with pytest.raises(
        RequestError, match="weights of step 0, which are no longer kept: the model is at step 1"
    ):
        steps.draw(0, 1)
    steps.sample()
    steps.train()
    assert steps.draw(1, 1) == steps.drawn[1]


@pytest.mark.parametrize("kept_steps", [0, 1])
def test_samplers_of_a_model_that_is_stopped(rooms: Rooms, kept_steps: int) -> None:
    """They answer as long as the weights are on the ranks, and afterwards if they are kept."""
    ranks = TableRanks()
    steps = Steps(rooms.start(ranks, kept_steps=kept_steps))
    steps.train()
    steps.sample()
    with pytest.raises(RequestError):
        answer(steps.room, steps.submit("forward_backward", b"nonsense"))
    assert steps.draw(0, 1) == steps.drawn[0]
    assert ranks.calls[-1] == "sample 1 live"
    begin(steps.room)
    if kept_steps:
        assert steps.draw(0, 2) == steps.drawn[0]
        assert ranks.calls[-1] == "sample 1 step-000001"
    else:
        with pytest.raises(
            RequestError, match="no longer holds the ranks, and they are not kept; sample from"
        ):
            steps.draw(0, 2)


def test_a_stopped_model_whose_ranks_are_lost_has_no_weights(rooms: Rooms) -> None:
    """New ranks hold the base model's, which nobody may take for its own."""
    ranks = TableRanks()
    steps = Steps(rooms.start(ranks, kept_steps=1, max_restarts=1))
    steps.train()
    steps.sample()
    ranks.errors["forward_backward"] = [RanksLostError("rank 1 ran out of memory", "0", True)]
    with pytest.raises(RequestError):
        answer(steps.room, steps.submit("forward_backward", passing(1)))
    with pytest.raises(RequestError, match="no longer holds the ranks, and they are not kept"):
        steps.draw(0, 1)
    begin(steps.room)
    assert "save_sampler" not in ranks.calls


def test_each_model_keeps_its_own_steps(rooms: Rooms) -> None:
    ranks = TableRanks()
    room = rooms.start(ranks, kept_steps=1)
    first = Steps(room)
    first.sample()
    first.train()
    rooms.store.update(ClientSession, first.model.partition(":")[0], heartbeat_s=time.time() - 61)
    second = Steps(room)
    answer(room, second.submit("forward_backward", passing(5)))
    answer(room, second.submit("optim_step", step(second.model)))
    second.sample()
    second.train()
    assert first.draw(0, 1) == first.drawn[0] != second.drawn[0] == second.draw(0, 1)
    assert (folders(rooms, first.model), folders(rooms, second.model)) == (["step-000000"], ["step-000001"])


def test_a_save_that_fails_leaves_nothing_behind(rooms: Rooms) -> None:
    ranks = TableRanks()
    steps = Steps(rooms.start(ranks))
    ranks.save = ranks.save_sampler = fails_half_way  # type: ignore[method-assign]
    for kind in ("save_weights", "save_weights_for_sampler"):
        with pytest.raises(RequestError, match="No space left"):
            answer(steps.room, steps.submit(kind, save(steps.model, path="name")))
    assert not [path for path in rooms.folder.rglob("*") if path.name.endswith(".partial")]


def fails_half_way(folder: Path) -> None:
    folder.mkdir()
    (folder / "half").write_text("")
    raise OSError("No space left on device")


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
    assert not rooms.store.prune(time.time())  # the model is live
    begin(steps.room)
    assert not rooms.store.prune(time.time() - 60)
    gone = rooms.store.prune(time.time())
    assert [Path(checkpoint.folder).name for checkpoint in gone] == ["step-000000"]


def test_what_a_sampler_names_is_its_own(rooms: Rooms) -> None:
    ranks = TableRanks()
    steps = Steps(rooms.start(ranks))
    steps.sample()
    for settings, message in (
        ({"base_model": "other"}, "base_model='other' is not that of sampler"),
        ({"model_path": "tinker://a/b/c"}, r"model_path='tinker://a/b/c' is not that of sampler .* \(None\)"),
    ):
        body = json.dumps(json.loads(prompt()) | settings).encode()
        number = 10 + len(message)
        with pytest.raises(RequestError, match=message):
            answer(steps.room, steps.room.submit(steps.samplers[0], number, "sample", body))
    again = save(steps.model, sampling_session_seq_id=0, kind="inflight")
    with pytest.raises(RequestError, match="sampling_session_seq_id=0 is that of a sampler that exists"):
        answer(steps.room, steps.submit("save_weights_for_sampler", again))
    session = steps.model.partition(":")[0]
    base = types.CreateSamplingSessionRequest(
        session_id=session, sampling_session_seq_id=7, base_model="tiny"
    )
    assert steps.room.create_sampler(base) == steps.room.create_sampler(base)
    path = answer(steps.room, steps.submit("save_weights_for_sampler", save(steps.model, path="a")))["path"]
    other = base.model_copy(update={"base_model": None, "model_path": path})
    with pytest.raises(RequestError, match="sampling_session_seq_id=7 is that of another sampler"):
        steps.room.create_sampler(other)


@pytest.mark.parametrize("ttl_s", [0, -5, 10**400])
def test_a_time_to_live_without_sense_is_refused(rooms: Rooms, ttl_s: int) -> None:
    steps = Steps(rooms.start(TableRanks()))
    with pytest.raises(RequestError, match=r"ttl_seconds=.* must be 1 to 315360000 \(ten years\)"):
        answer(steps.room, steps.submit("save_weights", save(steps.model, ttl_seconds=ttl_s)))
