"""Rooms of a server on ranks in memory, and the requests of a client."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tinker import types
from tinker.proto import tinker_public_pb2 as pb

from hybridengine.errors import RequestError
from hybridengine.serving.ranks import Ranks
from hybridengine.serving.room import Limits, Room
from hybridengine.serving.store import Request, Store


class Rooms:
    """Rooms on one database and one folder, one after the other."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.store = Store(f"sqlite:///{folder}/server.db")
        self.room: Room | None = None

    def start(
        self,
        ranks: Ranks,
        *,
        places: int = 1,
        kept_steps: int = 0,
        newest: bool = False,
        max_restarts: int = 0,
        **limits: float,
    ) -> Room:
        self.stop()
        self.room = Room(
            ranks,
            self.store,
            self.folder,
            Limits(**{"quiet_s": 0.01} | limits),
            places=places,
            kept_steps=kept_steps,
            newest=newest,
            max_restarts=max_restarts,
        )
        self.room.start()
        return self.room

    def stop(self) -> None:
        if self.room is not None:
            self.room.close()
            self.room = None


@pytest.fixture
def rooms(tmp_path: Path) -> Iterator[Rooms]:
    rooms = Rooms(tmp_path)
    yield rooms
    rooms.stop()
    rooms.store.close()


def begin(room: Room, number: int = 0, session: str | None = None, **lora: Any) -> str:
    """Create a model and return its id."""
    return answer(room, room.create_model(*creation(room, number, session, **lora)))["model_id"]


def creation(
    room: Room, number: int = 0, session: str | None = None, **lora: Any
) -> tuple[types.CreateModelRequest, bytes]:
    """Return a request for a model, with adapters if `lora` has settings of them, and its body."""
    session = session or room.create_session({})
    config = types.LoraConfig(**lora) if lora else None
    message = types.CreateModelRequest(
        session_id=session, model_seq_id=number, base_model="tiny", lora_config=config
    )
    return message, message.model_dump_json().encode()


def answer(room: Room, request_id: str) -> dict[str, Any]:
    """Return the JSON result of a request, or raise its error."""
    room.results.done(request_id).result(10)
    request = room.store.get(Request, request_id)
    if request.error is not None:
        raise RequestError(request.error)
    assert request.result is not None
    return json.loads(request.result) if request.result.startswith(b"{") else {"bytes": request.result}


def passing(target: int = 3, forward_only: bool = False) -> bytes:
    message = pb.ForwardBackwardRequest(loss_fn="cross_entropy", forward_only=forward_only)
    row = message.data.add()
    row.model_input.add().encoded_text.tokens = np.array([2], np.int32).tobytes()
    row.loss_fn_inputs["target_tokens"].CopyFrom(
        pb.Tensor(dtype=pb.DTYPE_INT64, dense=np.array([target]).tobytes())
    )
    row.loss_fn_inputs["weights"].CopyFrom(
        pb.Tensor(dtype=pb.DTYPE_FLOAT32, dense=np.ones(1, np.float32).tobytes())
    )
    return message.SerializeToString()


def step(model: str, rate: float = 1.0) -> bytes:
    return json.dumps({"model_id": model, "adam_params": {"learning_rate": rate}}).encode()


def save(model: str, **fields: object) -> bytes:
    return json.dumps({"model_id": model} | fields).encode()


def prompt(**params: object) -> bytes:
    return json.dumps(
        {
            "prompt": {"chunks": [{"type": "encoded_text", "tokens": [2]}]},
            "sampling_params": {"max_tokens": 1, "temperature": 0.0} | params,
        }
    ).encode()


def sampler(room: Room, model: str, seq_id: int, number: int = 0, kind: str = "snapshot") -> str:
    body = save(model, sampling_session_seq_id=number, kind=kind)
    return answer(room, room.submit(model, seq_id, "save_weights_for_sampler", body))["sampling_session_id"]


def from_checkpoint(room: Room, path: str) -> str:
    """Create a sampler from a checkpoint and return its id."""
    message = types.CreateSamplingSessionRequest(
        session_id=room.create_session({}), sampling_session_seq_id=0, model_path=path
    )
    return room.create_sampler(message)
