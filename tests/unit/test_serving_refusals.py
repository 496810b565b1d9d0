"""Calls of the Tinker API that are refused, waits that end, and a server that cannot go on."""

from __future__ import annotations

import contextlib
import gzip
import http.client
import json
import logging
import re
import sqlite3
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import tinker
from sqlalchemy.exc import OperationalError
from tinker import types

from hybridengine.errors import RanksLostError
from hybridengine.serving import bodies
from hybridengine.serving.store import Request
from hybridengine.serving.tinker_wire import MAX_BODY_BYTES
from tests.unit.serving_http import KEY
from tests.unit.serving_ranks import VOCABULARY, TableRanks
from tests.unit.serving_tinker import (
    DATA,
    PROMPT,
    Server,
    no_telemetry,
    post,
    ranks,
    row,
    server,
    training,
    wait_for,
)

__all__ = ["no_telemetry", "ranks", "server"]


def refusal(server: Server, path: str, body: dict, key: str = KEY) -> tuple[int, str]:
    with pytest.raises(urllib.error.HTTPError) as caught:
        post(server, path, body, key)
    return caught.value.code, caught.value.read().decode()


def test_calls_that_are_refused(server: Server) -> None:
    assert refusal(server, "create_session", {}, key="tml-other")[0] == 401
    status, text = refusal(server, "copy_weights", {})
    assert (status, "POST /api/v1/copy_weights is not served" in text) == (404, True)
    assert refusal(server, "retrieve_future", {"request_id": "nobody:1"})[0] == 404
    status, text = refusal(server, "session_heartbeat", {"session_id": "nobody"})
    assert (status, json.loads(text)["category"]) == (400, "user")
    assert "session 'nobody' does not exist" in text
    assert "is not application/x-protobuf" in refusal(server, "forward_backward", {})[1]
    with urllib.request.urlopen(f"{server.url}/api/v1/healthz") as answer:
        assert json.load(answer) == {"status": "ok"}
    announced = urllib.request.Request(
        f"{server.url}/api/v1/forward_backward", b"", {"X-API-Key": KEY, "Content-Length": str(10**9)}
    )
    with pytest.raises(urllib.error.HTTPError, match="413"):
        urllib.request.urlopen(announced)
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", server.port)) as connection:
        endless = (bytes(2**20) for _ in range(2 + MAX_BODY_BYTES // 2**20))
        with contextlib.suppress(ConnectionError):  # the server need not read to the end
            connection.request("POST", "/api/v1/asample", endless, {"X-API-Key": KEY}, encode_chunked=True)
        assert connection.getresponse().status == 413


@contextlib.contextmanager
def stalled_upload(server: Server, path: str) -> Iterator[http.client.HTTPConnection]:
    """Send one of 100 bytes."""
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", server.port, timeout=20)) as connection:
        connection.request("POST", f"/api/v1/{path}", b"{", {"X-API-Key": KEY, "Content-Length": "100"})
        yield connection


def test_a_stalled_upload_is_refused(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "ARRIVAL_S", 0.1)
    with stalled_upload(server, "asample") as connection:
        answer = connection.getresponse()
        assert (answer.status, answer.headers["Connection"]) == (408, "close")
        assert "1 bytes of the body have arrived within 0 s" in answer.read().decode()


def test_a_client_that_leaves_while_it_sends_is_no_fault(
    server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    with stalled_upload(server, "asample"):
        pass
    time.sleep(0.5)
    assert refusal(server, "retrieve_future", {"request_id": "nobody:1"})[0] == 404  # it still answers
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


def test_bodies_in_another_encoding_are_refused(server: Server) -> None:
    headers = {"X-API-Key": KEY, "Content-Encoding": "gzip"}
    call = urllib.request.Request(f"{server.url}/api/v1/create_session", gzip.compress(b"{}"), headers)
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(call)
    assert caught.value.code == 400
    assert (
        "Content-Encoding gzip is not served; send the body as it is, or as zstd"
        in caught.value.read().decode()
    )


def test_samples_do_not_wait_for_a_stalled_upload(tmp_path: Path, ranks: TableRanks) -> None:
    with contextlib.ExitStack() as ends:
        server = Server(tmp_path, ranks, collect_s=60)
        ends.callback(server.stop)
        client = ends.enter_context(server.client())
        sampler = client.create_sampling_client(base_model="tiny").result()
        ends.enter_context(stalled_upload(server, "asample"))
        time.sleep(0.3)  # until the server reads the body
        drawn = sampler.sample(PROMPT, 1, types.SamplingParams(max_tokens=1, temperature=0.0))
        assert drawn.result(20).sequences[0].tokens == [0]


def test_a_long_body_is_parsed_beside_the_connections(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    parsing, parse = list[str](), bodies.parse

    def note(*arguments: Any) -> Any:
        parsing.append(threading.current_thread().name)
        return parse(*arguments)

    monkeypatch.setattr(bodies, "parse", note)
    tokens = {"chunks": [{"type": "encoded_text", "tokens": ["a"] * 10_000}]}
    body = {"sampling_session_id": "s", "seq_id": 0, "prompt": tokens, "sampling_params": {}}
    status, text = refusal(server, "asample", body)
    assert (status, len(text) < 2000) == (400, True)
    assert "; and 10006 others" in text
    assert parsing == ["AnyIO worker thread"]


def test_an_unknown_sdk_is_warned(server: Server) -> None:
    session = {"tags": [], "user_metadata": {}, "sdk_version": "0.99.0"}
    assert "tinker 0.99.0 was not tested" in post(server, "create_session", session)["warning_message"]
    assert post(server, "create_session", session | {"sdk_version": "0.38.1"})["warning_message"] is None


def test_models_that_are_refused(server: Server) -> None:
    with server.client() as client:
        with pytest.raises(tinker.BadRequestError, match="use lora_rank=0 for full fine-tuning"):
            client.create_lora_training_client("tiny").result()
        with pytest.raises(tinker.BadRequestError, match=r"lora_config.train_mlp=false is not served"):
            client.create_lora_training_client("tiny", rank=0, train_mlp=False).result()
        with pytest.raises(
            tinker.BadRequestError, match="base_model='other' is not served; this server has 'tiny'"
        ):
            client.create_lora_training_client("other", rank=0).result()
        model = training(client)
        with pytest.raises(
            tinker.BadRequestError, match=f"{model.model_id} of the same session holds the ranks"
        ):
            training(client)
        with pytest.raises(tinker.RequestFailedError, match="must be a name of at most 128 letters"):
            model.save_state("../outside").result()
        assert model.save_state("inside").result().path.endswith("/weights/inside")
        with pytest.raises(
            tinker.BadRequestError, match=r"checkpoint 'tinker://a/weights/\.\./\.\./b' does not exist"
        ):
            client.create_training_client_from_state("tinker://a/weights/../../b").result()
    with server.client() as third:
        training(third)  # the first session has ended


def test_a_failed_request_stops_its_client(server: Server, ranks: TableRanks) -> None:
    with server.client() as client:
        model = training(client)
        bad = model.forward_backward([row([1], [VOCABULARY], [1.0])], "cross_entropy")
        step = model.optim_step(types.AdamParams(learning_rate=1.0))
        with pytest.raises(tinker.RequestFailedError, match="token id 8, outside of 0 to 7") as caught:
            bad.result()
        assert caught.value.category == "user"
        with pytest.raises(
            (tinker.RequestFailedError, tinker.BadRequestError), match="was stopped: forward_backward"
        ):
            step.result()
        assert "optim_step" not in ranks.calls
        other = training(client)
        ranks.error = RuntimeError("a rank has died")
        with pytest.raises(tinker.RequestFailedError, match="RuntimeError: a rank has died") as caught:
            other.forward_backward(DATA, "cross_entropy").result()
        assert caught.value.category == "server"


def test_a_wait_for_a_result_ends_with_try_again(tmp_path: Path, ranks: TableRanks) -> None:
    server = Server(tmp_path, ranks, hold_s=0.05)
    with server.client() as client:
        model = training(client)
        ranks.free.clear()
        passed = model.forward_backward(DATA, "cross_entropy")
        key = f"{model.model_id}:1"
        wait_for(lambda: server.store.find(Request, key) is not None)
        answer = post(server, "retrieve_future", {"request_id": key})
        assert answer == {"type": "try_again", "request_id": key, "queue_state": "active"}
        ranks.free.set()
        assert passed.result().metrics
    server.stop()


def test_those_who_wait_are_told_to_try_again_when_the_server_ends(
    tmp_path: Path, ranks: TableRanks, caplog: pytest.LogCaptureFixture
) -> None:
    server = Server(tmp_path, ranks)
    session = server.room.create_session({})
    ranks.free.clear()
    key = post(server, "create_model", {"session_id": session, "model_seq_id": 0, "base_model": "tiny"})[
        "request_id"
    ]
    with ThreadPoolExecutor(2) as threads:
        answer = threads.submit(post, server, "retrieve_future", {"request_id": key})
        wait_for(lambda: key in server.room.results._futures)
        stopped = threads.submit(server.stop)
        assert answer.result(4)["type"] == "try_again"
        ranks.free.set()
        stopped.result(10)
    assert caplog.records == []


def test_a_model_that_waits_for_the_ranks_says_for_whom(tmp_path: Path, ranks: TableRanks) -> None:
    server = Server(tmp_path, ranks, hold_s=0.05)
    with server.client() as first:
        model = training(first)
        session = server.room.create_session({})
        creation = {"session_id": session, "model_seq_id": 0, "base_model": "tiny"}
        key = post(server, "create_model", creation)["request_id"]
        answer = post(server, "retrieve_future", {"request_id": key})
        assert answer["queue_state"] == "paused_capacity"
        assert f"model {model.model_id} holds the ranks" in answer["queue_state_reason"]
        with server.client() as second:
            waiting = second.create_lora_training_client("tiny", rank=0)
            wait_for(lambda: len(server.store.queued()) == 2)
            server.room.finish(session)
            first.close("success").result()
            assert waiting.result().get_info().model_data.model_name == "tiny"
    server.stop()


def test_a_server_whose_ranks_are_lost_for_good_says_so(server: Server, ranks: TableRanks) -> None:
    ended = threading.Event()
    server.room.at_failure = ended.set
    client = tinker.ServiceClient(base_url=server.url, api_key=KEY)
    model = training(client)
    text = "actor.pass_rows died on rank 1 (tp=1): gone"
    ranks.error = RanksLostError(f"{text}\ntraceback")
    passed = model.forward_backward(DATA, "cross_entropy")
    stepped = model.optim_step(types.AdamParams(learning_rate=1.0))
    for future in (passed, stepped):
        with pytest.raises(tinker.RequestFailedError, match=re.escape(text)) as caught:
            future.result()
        assert caught.value.category == "server"
    assert ended.wait(10)
    with pytest.raises(urllib.error.HTTPError, match="503") as health:
        urllib.request.urlopen(f"{server.url}/api/v1/healthz")
    assert text in json.load(health.value)["status"]
    late = post(server, "optim_step", {"model_id": model.model_id, "seq_id": 9})
    answer = post(server, "retrieve_future", late)
    assert answer == {"error": server.room.trouble, "category": "server"}
    client.close("success").result()


def test_a_database_that_cannot_be_written_is_named(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OperationalError("INSERT", {}, sqlite3.OperationalError("database or disk is full"))

    session = {"tags": [], "user_metadata": {}, "sdk_version": "0.38.0"}
    with monkeypatch.context() as patched:
        patched.setattr("sqlalchemy.orm.Session.add_all", full)
        status, text = refusal(server, "create_session", session)
        assert (status, json.loads(text)["category"]) == (503, "server")
        assert "the database cannot be written (database or disk is full); look for a full disk" in text
        with pytest.raises(urllib.error.HTTPError, match="503"):
            urllib.request.urlopen(f"{server.url}/api/v1/healthz")
    post(server, "create_session", session)
    with urllib.request.urlopen(f"{server.url}/api/v1/healthz") as answer:
        assert json.load(answer) == {"status": "ok"}
