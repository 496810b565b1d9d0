"""A server on ranks in memory for the Tinker SDK."""

from __future__ import annotations

import contextlib
import json
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import tinker
from tinker import types

from hybridengine.serving.ranks import LossRow
from tests.unit.serving_http import KEY, HttpServer
from tests.unit.serving_ranks import TableRanks


class Server(HttpServer):
    """A server for clients of the Tinker SDK."""

    @contextlib.contextmanager
    def client(self) -> Iterator[tinker.ServiceClient]:
        client = tinker.ServiceClient(base_url=self.url, api_key=KEY)
        try:
            yield client
        finally:
            client.close("success").result()


@pytest.fixture(autouse=True)
def no_telemetry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep clients from a thread and calls that a test does not need."""
    monkeypatch.setenv("TINKER_TELEMETRY", "0")


@pytest.fixture
def ranks() -> TableRanks:
    return TableRanks()


@pytest.fixture
def server(tmp_path: Path, ranks: TableRanks) -> Iterator[Server]:
    server = Server(tmp_path, ranks)
    yield server
    server.stop()


def row(tokens: list[int], targets: list[int], weights: list[float]) -> types.Datum:
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens),
        loss_fn_inputs={"target_tokens": targets, "weights": weights},  # type: ignore[arg-type]
    )


def training(client: tinker.ServiceClient) -> tinker.TrainingClient:
    return client.create_lora_training_client("tiny", rank=0).result()


def post(server: Server, path: str, body: dict, key: str = KEY) -> dict:
    call = urllib.request.Request(
        f"{server.url}/api/v1/{path}", json.dumps(body).encode(), {"X-API-Key": key}
    )
    with urllib.request.urlopen(call) as answer:
        return json.load(answer)


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


PROMPT = types.ModelInput.from_ints([1, 2])


DATA = [row([1, 2, 3], [2, 3, 4], [0.0, 1.0, 1.0])]


ROWS = [
    LossRow(np.array([1, 2, 3]), {"target_tokens": np.array([2, 3, 4]), "weights": np.array([0.0, 1.0, 1.0])})
]
