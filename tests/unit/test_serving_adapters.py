"""Models with adapters of their own, several of which train at a time, on ranks in memory."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from hybridengine.errors import RanksLostError, RequestError
from hybridengine.serving.ranks import Prompt
from hybridengine.serving.room import Room
from hybridengine.serving.store import Checkpoint, Model
from tests.unit.serving_http import KEY, HttpServer
from tests.unit.serving_ranks import VOCABULARY, TableEngines, TableRanks
from tests.unit.serving_rooms import (
    Rooms,
    answer,
    begin,
    creation,
    from_checkpoint,
    passing,
    prompt,
    rooms,
    sampler,
    save,
    step,
)
from tests.unit.test_serving_openai import tiny_tokenizer

__all__ = ["rooms"]

RANK = 4


def adapter_ranks() -> TableRanks:
    """Return ranks on which each model has a table of its own."""
    ranks = TableRanks()
    ranks.facts = replace(ranks.facts, max_lora_rank=RANK, lora_parts=("attn",))
    return ranks


def begin_adapters(room: Room, number: int = 0, session: str | None = None) -> str:
    return begin(room, number, session, rank=2, train_mlp=False)


class Steps:
    """A model that learns a token, one step after the other."""

    def __init__(self, room: Room, token: int, session: str | None = None, number: int = 0) -> None:
        self.room, self.token = room, token
        self.model = begin_adapters(room, number, session)
        self._seq_id = 0

    def call(self, kind: str, body: bytes) -> Any:
        self._seq_id += 1
        return answer(self.room, self.room.submit(self.model, self._seq_id, kind, body))

    def forward_backward(self) -> None:
        self.call("forward_backward", passing(self.token))

    def optim_step(self) -> None:
        self.call("optim_step", step(self.model))

    def path(self, name: str) -> str:
        return self.call("save_weights_for_sampler", save(self.model, path=name))["path"]

    def sampler(self, number: int, kind: str = "snapshot") -> str:
        self._seq_id += 1
        return sampler(self.room, self.model, self._seq_id, number, kind)


def expected_row(token: int, num_steps: int) -> np.ndarray:
    """Return the logits after token 2 of a model that has learned `token` by steps at rate 1."""
    row = np.zeros(VOCABULARY)
    for _ in range(num_steps):
        gradient = np.exp(row) / np.exp(row).sum()
        gradient[token] -= 1
        row -= gradient
    return row


def saved_row(room: Room, path: str) -> np.ndarray:
    return np.load(f"{room.checkpoint(path).folder}/table.npy")[2]


def drawn_token(room: Room, key: str, number: int = 0) -> bytes:
    return answer(room, room.submit(key, number, "sample", prompt()))["bytes"]


def two_models(room: Room) -> tuple[Steps, Steps]:
    """Return two models that have learned for a step, tokens 3 and 5."""
    first, second = Steps(room, 3), Steps(room, 5)
    for one in (first, second):
        one.forward_backward()
        one.optim_step()
    return first, second


def test_models_with_gradients_at_a_time_have_each_its_own_step(rooms: Rooms) -> None:
    ranks = adapter_ranks()
    room = rooms.start(ranks, places=2)
    first, second = Steps(room, 3), Steps(room, 5)
    for _ in range(2):
        first.forward_backward()
        second.forward_backward()
        first.optim_step()
        second.optim_step()
    np.testing.assert_allclose(saved_row(room, first.path("end")), expected_row(3, 2))
    np.testing.assert_allclose(saved_row(room, second.path("end")), expected_row(5, 2))
    assert ranks.calls[:3] == ["hold 0", "begin_model rank=2", "hold 0"]
    second.forward_backward()
    with pytest.raises(RequestError, match="no gradients wait for an optim_step"):
        first.optim_step()  # those of the other model do not count
    second.optim_step()
    np.testing.assert_allclose(saved_row(room, second.path("on")), expected_row(5, 3))


@pytest.mark.parametrize("error", [RanksLostError("a rank died", "restarted"), OSError(28, "No space left")])
def test_adapters_that_cannot_be_saved_for_a_sample_are_no_other_clients_loss(
    rooms: Rooms, error: Exception
) -> None:
    ranks = adapter_ranks()
    room = rooms.start(ranks, places=2, max_restarts=1)
    first, second = two_models(room)
    key = first.sampler(1, kind="inflight")
    first.forward_backward()
    first.optim_step()
    ranks.errors["save_sampler"] = [error]
    waiting = room.submit(key, 0, "sample", prompt())
    if isinstance(error, RanksLostError):
        assert answer(room, waiting)["bytes"]
    else:
        with pytest.raises(Exception, match="No space left"):
            answer(room, waiting)
    second.forward_backward()
    second.optim_step()
    np.testing.assert_allclose(saved_row(room, second.path("on")), expected_row(5, 2))
    assert room.failure is None


def test_samples_of_several_models_and_of_the_base_are_one_call(rooms: Rooms) -> None:
    ranks = adapter_ranks()
    room = rooms.start(ranks, places=2, quiet_s=0.2)
    first, second = two_models(room)
    keys = [first.sampler(0), second.sampler(0), from_checkpoint(room, first.path("one"))]
    ranks.calls.clear()
    waiting = [room.submit(key, 0, "sample", prompt()) for key in keys]
    waiting += room.submit_prompts([Prompt((2,), 1, 0, max_tokens=1, temperature=0.0)])
    tokens = [answer(room, one)["bytes"] for one in waiting]
    assert ranks.calls == ["sample 4 base"]
    assert tokens[0] == tokens[2]
    assert len(set(tokens)) == 3


def test_a_snapshot_keeps_to_its_step_and_an_inflight_sampler_follows(rooms: Rooms) -> None:
    room = rooms.start(adapter_ranks(), places=2, kept_steps=2)
    model = Steps(room, 3)
    frozen, following = model.sampler(0), model.sampler(1, kind="inflight")
    before = drawn_token(room, frozen)
    assert drawn_token(room, following) == before
    model.forward_backward()
    model.optim_step()
    assert drawn_token(room, frozen, 1) == before
    assert drawn_token(room, following, 1) != before
    for number in (2, 3):
        model.forward_backward()
        model.optim_step()
        model.sampler(number)
    with pytest.raises(
        RequestError, match="weights of step 0, which are no longer kept: the model is at step 3"
    ):
        drawn_token(room, frozen, 2)


def test_a_model_waits_until_one_of_those_that_hold_the_ranks_is_unloaded(rooms: Rooms) -> None:
    ranks = adapter_ranks()
    room = rooms.start(ranks, places=2)
    session = room.create_session({})
    first, second = Steps(room, 3, session), Steps(room, 5, session, 1)
    with pytest.raises(RequestError, match=r"which train 2 models \(serve.max_adapters\) at a time"):
        room.create_model(*creation(room, 2, session, rank=1, train_mlp=False))
    third = room.create_model(*creation(room, rank=1, train_mlp=False))
    reason = room.wait_reason(rooms.store.get(type(rooms.store.queued()[0]), third))
    assert reason is not None
    assert "holds the ranks, which train 2 models" in reason
    path = first.path("one")
    unloaded = room.unload(first.model)
    assert room.unload(first.model) == unloaded  # a retry
    assert answer(room, unloaded) == {"type": "unload_model", "model_id": first.model}
    assert answer(room, third)["model_id"] == third.removesuffix(":0")
    second.forward_backward()
    with pytest.raises(RequestError, match="its client has unloaded it"):
        first.forward_backward()
    assert drawn_token(room, from_checkpoint(room, path))


@pytest.mark.parametrize("loses", [False, True])
def test_all_models_are_restored_on_new_ranks(rooms: Rooms, loses: bool) -> None:
    """One from its checkpoint, the other from the base, each with what was done since."""
    ranks = adapter_ranks()
    room = rooms.start(ranks, places=2, max_restarts=1)
    first, second = two_models(room)
    first.call("save_weights", save(first.model))
    first.forward_backward()
    if loses:
        ranks.errors["optim_step"] = [RanksLostError("actor died on rank 0", "gone")]
    else:
        ranks = adapter_ranks()
        room = first.room = second.room = rooms.start(ranks, places=2)
    first.optim_step()
    second.forward_backward()
    second.optim_step()
    np.testing.assert_allclose(saved_row(room, first.path("end")), expected_row(3, 2))
    np.testing.assert_allclose(saved_row(room, second.path("end")), expected_row(5, 2))
    assert ("restart" in ranks.calls) == loses


def test_a_failed_step_stops_its_own_model_alone(rooms: Rooms) -> None:
    ranks = adapter_ranks()
    room = rooms.start(ranks, places=2)
    first, second = Steps(room, 3), Steps(room, 5)
    for one in (first, second):
        one.forward_backward()
    ranks.errors["optim_step"] = [RequestError("no such step")]
    with pytest.raises(RequestError, match="no such step"):
        first.optim_step()
    with pytest.raises(RequestError, match=f"model {first.model} was stopped"):
        first.forward_backward()
    second.optim_step()
    np.testing.assert_allclose(saved_row(room, second.path("end")), expected_row(5, 1))


@pytest.mark.parametrize(
    ("lora", "message"),
    [
        ({"rank": 0}, f"lora_config.rank=0 must be 1 to {RANK}: this server trains adapters"),
        ({"rank": RANK + 1}, f"lora_config.rank={RANK + 1} must be 1 to {RANK}"),
        ({}, f"lora_config.rank=0 must be 1 to {RANK}"),
        ({"rank": 1}, "lora_config.train_mlp=true is not served: .*set train_mlp=false"),
        ({"rank": 1, "train_mlp": False, "train_attn": False}, "leave nothing to train"),
    ],
)
def test_adapters_that_the_ranks_do_not_have_are_refused(
    rooms: Rooms, lora: dict[str, Any], message: str
) -> None:
    room = rooms.start(adapter_ranks(), places=2)
    with pytest.raises(RequestError, match=message):
        room.create_model(*creation(room, **lora))


def test_states_of_another_rank_are_refused(rooms: Rooms) -> None:
    ranks = adapter_ranks()
    room = rooms.start(ranks, places=2)
    model = Steps(room, 3)
    state = model.call("save_weights", save(model.model, path="one"))["path"]
    weights = model.path("one")
    assert rooms.store.get(Model, model.model).lora_rank == 2
    other = begin(room, rank=3, train_mlp=False)
    body = json.dumps({"model_id": other, "path": state, "optimizer": True}).encode()
    with pytest.raises(
        RequestError, match=r"lora_rank=2 .*, and the model has lora_rank=3; create a training"
    ):
        answer(room, room.submit(other, 1, "load_weights", body))
    full = rooms.start(TableRanks())
    with pytest.raises(RequestError, match=r"lora_rank=2 .*, and the server's actor.lora.rank=0"):
        from_checkpoint(full, weights)


def test_engines_of_their_own_get_the_base_once(rooms: Rooms) -> None:
    ranks = adapter_ranks()
    TableEngines(ranks)
    room = rooms.start(ranks, places=2)
    first, second = Steps(room, 3), Steps(room, 5)
    tokens = set()
    for number in range(2):
        for one in (first, second):
            one.forward_backward()
            one.optim_step()
            tokens.add(drawn_token(room, one.sampler(number)))
    assert len(tokens) == 4  # log-probs change with each step
    assert [call for call in ranks.calls if call.startswith(("push", "sample"))] == ["push base"]


def test_openai_clients_name_saved_adapters_as_their_model(rooms: Rooms) -> None:
    room = rooms.start(adapter_ranks(), places=2)
    model = Steps(room, 3)
    path = model.path("one")
    state = model.call("save_weights", save(model.model))["path"]
    assert room.adapter_of(None) == room.adapter_of("tiny") == ""
    assert room.adapter_of(path) == rooms.store.checkpoint(path).folder  # type: ignore[union-attr]
    assert room.adapter_of(state) is room.adapter_of("another") is None
    with pytest.raises(RequestError, match="does not exist or has expired"):
        room.adapter_of("tinker://nobody/sampler_weights/one")


def test_calls_over_http_know_ranks_unload_models_and_sample_with_adapters(tmp_path: Path) -> None:
    server = HttpServer(tmp_path, adapter_ranks(), tokenizer=tiny_tokenizer())
    model = Steps(server.room, 3)
    model.forward_backward()
    model.optim_step()
    path = model.path("one")

    def post(path: str, **body: object) -> dict[str, Any]:
        headers = {"X-API-Key": KEY, "Authorization": f"Bearer {KEY}"}
        return httpx.post(f"{server.url}/{path}", json=body, headers=headers).json()

    def drawn(name: str) -> list[int]:
        sampling = {"max_tokens": 2, "temperature": 0}
        answer = post("inference/v1/generate", model=name, token_ids=[2], sampling_params=sampling)
        return answer["choices"][0]["token_ids"]

    info = post("api/v1/get_info", model_id=model.model)
    assert (info["is_lora"], info["lora_rank"]) == (True, 2)
    weights = {"base_model": "tiny", "is_lora": True, "lora_rank": 2}
    assert post("api/v1/weights_info", tinker_path=path) == weights
    assert drawn(path)[0] == 3
    assert drawn("tiny")[0] == 0
    unloaded = post("api/v1/unload_model", model_id=model.model)
    assert post("api/v1/retrieve_future", **unloaded) == {"type": "unload_model", "model_id": model.model}
    assert post("api/v1/unload_model", model_id="nobody")["category"] == "user"
    server.stop()


def test_what_restarts_need_of_each_model_survives_the_removal_of_old_results(rooms: Rooms) -> None:
    room = rooms.start(adapter_ranks(), places=2)
    first, second = two_models(room)
    state = first.call("save_weights", save(first.model, path="one"))["path"]
    folder = room.checkpoint(state).folder
    room.delete_checkpoint(state)
    rooms.stop()
    assert folder not in [each.folder for each in rooms.store.prune(float("inf"))]
    assert rooms.store.find(Checkpoint, folder) is not None
    ranks = adapter_ranks()
    room = first.room = second.room = rooms.start(ranks, places=2)
    np.testing.assert_allclose(saved_row(room, first.path("end")), expected_row(3, 1))
    np.testing.assert_allclose(saved_row(room, second.path("end")), expected_row(5, 1))
