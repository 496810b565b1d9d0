"""Input that a real server refuses: each time one clear error in the client's terms, and the next call is answered."""

from __future__ import annotations

import contextlib
import http.client
import json
import select
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import zstandard

from hybridengine.serving.tinker_wire import MAX_BODY_BYTES
from tests.clients.servers import KEY, Server, result_of
from tests.clients.warm_model import NAME

pytestmark = pytest.mark.timeout(900)

CALLS = Path(__file__).with_name("bad_calls.py")
PROMPT = [2, 40, 41, 42]
GIB = 2**30
CHUNK = bytes(2**20)

ERRORS = {
    "loss": "loss_fn='mystery' is not built here; choose one of cross_entropy, importance_sampling, ",
    "shape": "data[0].weights has the shape [3], which must be [4] or [4, K]",
    "dtype": "data[0].target_tokens has the dtype float32, which must be int64",
    "vocabulary": "data[0].target_tokens has the token id 1000040, outside of 0 to 459; use the tokenizer of",
    "row": "data[0] has 399 tokens, which must be 1 to 320; shorten or drop the row",
    "prompt": "the prompt has 400 tokens and max_tokens=1; ",
    "state": "path='../../outside' must be a name of at most 128 letters, digits",
    "sampler": "path='/outside' must be a name of at most 128 letters, digits",
    "load": "checkpoint 'tinker://a/weights/../../../outside' does not exist or has expired",
    "source": "checkpoint 'tinker://a/weights/../../../outside' does not exist or has expired",
    "key": "X-API-Key is not this server's; set TINKER_API_KEY to the key it was started with",
}


def call(server: Server, path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    """Return status and answer of a call with both kinds of key."""
    with contextlib.closing(connect(server)) as connection:
        connection.request("POST", path, json.dumps(body), headers())
        answer = connection.getresponse()
        return answer.status, json.load(answer)


def connect(server: Server) -> http.client.HTTPConnection:
    return http.client.HTTPConnection("127.0.0.1", server.port, timeout=120)


def headers(**more: str) -> dict[str, str]:
    return {"X-API-Key": KEY, "Authorization": f"Bearer {KEY}"} | more


def greedy(server: Server) -> list[int]:
    """Return the token ids of a greedy response."""
    body = {"model": NAME, "prompt": PROMPT, "temperature": 0, "max_tokens": 4, "return_token_ids": True}
    status, answer = call(server, "/v1/completions", body)
    assert status == 200, answer
    return answer["choices"][0]["token_ids"]


@pytest.fixture(autouse=True)
def answers_as_before(server: Server) -> Iterator[None]:
    """Check that a good call is answered after the test as before it."""
    before = greedy(server)
    yield
    assert greedy(server) == before


def test_what_the_sdk_lets_through_is_refused_by_name(server: Server, tmp_path: Path) -> None:
    found = result_of(server.client(CALLS, cwd=tmp_path))
    assert found["errors"].keys() == ERRORS.keys()
    for problem, (name, category, message) in found["errors"].items():
        assert ERRORS[problem] in message, problem
        assert (name, category) in (
            ("RequestFailedError", "user"),
            ("BadRequestError", ""),
            ("AuthenticationError", ""),
        ), problem
    assert found["errors"]["key"][0] == "AuthenticationError"
    assert len(found["good"]) == len(ERRORS)
    assert all(values == found["good"][0] for values in found["good"])
    assert found["passed"] == pytest.approx(found["good"][0][1:], abs=1e-5)
    assert not [*server.folder.rglob("outside*")]


@pytest.fixture
def session(server: Server) -> Iterator[str]:
    """Return a session of raw calls, which the SDK would number itself."""
    sdk = {"tags": [], "user_metadata": {}, "sdk_version": "0.38.0"}
    session_id = call(server, "/api/v1/create_session", sdk)[1]["session_id"]
    yield session_id
    assert call(server, f"/api/v1/sessions/{session_id}/finish", {})[0] == 200


def begin_model(server: Server, session: str) -> str:
    body = {
        "session_id": session,
        "model_seq_id": 0,
        "base_model": NAME,
        "lora_config": {"rank": 0},
    }
    status, answer = call(server, "/api/v1/create_model", body)
    assert status == 200, answer
    return result(server, answer["request_id"])["model_id"]


def result(server: Server, request_id: str) -> dict[str, Any]:
    status, answer = call(server, "/api/v1/retrieve_future", {"request_id": request_id})
    assert (status, answer.get("error")) == (200, None)
    return answer


def test_a_seq_id_that_goes_backwards_is_refused(server: Server, session: str) -> None:
    model = begin_model(server, session)
    status, answer = call(server, "/api/v1/save_weights", {"model_id": model, "seq_id": 1, "path": "one"})
    assert status == 200
    assert result(server, answer["request_id"])["path"].endswith("/weights/one")
    for seq_id, rule in (
        (1, f"seq_id=1 of {model} is a request of the kind save_weights, and now of optim_step"),
        (-1, f"seq_id=-1 of {model} must be 0 to {2**63 - 1}"),
    ):
        body = {"model_id": model, "seq_id": seq_id, "adam_params": {"learning_rate": 1e-3}}
        status, refusal = call(server, "/api/v1/optim_step", body)
        assert (status, refusal["category"]) == (400, "user")
        assert rule in refusal["error"]
    status, answer = call(server, "/api/v1/save_weights", {"model_id": model, "seq_id": 2, "path": "two"})
    assert result(server, answer["request_id"])["path"].endswith("/weights/two")


def test_an_sdk_that_the_server_does_not_know_is_warned(server: Server) -> None:
    sdk = {"tags": [], "user_metadata": {}, "sdk_version": "9.9.0"}
    status, answer = call(server, "/api/v1/create_session", sdk)
    assert status == 200
    assert "tinker 9.9.0 was not tested with this server" in answer["warning_message"]
    assert call(server, f"/api/v1/sessions/{answer['session_id']}/finish", {})[0] == 200


def test_a_client_that_leaves_while_it_waits_is_forgotten(server: Server, session: str) -> None:
    long = {"model": NAME, "prompt": PROMPT, "n": 16, "max_tokens": 64, "ignore_eos": True}
    leave(server, "/v1/completions", long)
    model = begin_model(server, session)
    address = {"model_id": model, "seq_id": 2, "path": "after"}  # waits for a request that does not arrive
    status, answer = call(server, "/api/v1/save_weights", address)
    assert status == 200
    leave(server, "/api/v1/retrieve_future", {"request_id": answer["request_id"]})
    call(server, "/api/v1/save_weights", {"model_id": model, "seq_id": 1, "path": "before"})
    assert result(server, answer["request_id"])["path"].endswith("/weights/after")


def leave(server: Server, path: str, body: dict[str, Any]) -> None:
    with contextlib.closing(connect(server)) as connection:
        connection.request("POST", path, json.dumps(body), headers())
        time.sleep(0.3)


@pytest.mark.parametrize("path", ["/api/v1/forward_backward", "/v1/completions"])
@pytest.mark.parametrize("form", ["announced", "streamed", "compressed"])
def test_a_body_of_a_gibibyte_is_not_held_in_memory(server: Server, path: str, form: str) -> None:
    before = peak = server.memory_bytes()
    with contextlib.closing(connect(server)) as connection:
        if form == "announced":
            connection.putrequest("POST", path)
            for name, value in headers(**{"Content-Length": str(GIB)}).items():
                connection.putheader(name, value)
            connection.endheaders(CHUNK)
        elif form == "compressed":
            compressor = zstandard.ZstdCompressor().compressobj(size=GIB)
            body = b"".join(compressor.compress(CHUNK) for _ in range(GIB // len(CHUNK)))
            body += compressor.flush()
            assert len(body) < 2**20
            connection.request("POST", path, body, headers(**{"Content-Encoding": "zstd"}))
        else:
            connection.putrequest("POST", path)
            for name, value in headers(**{"Transfer-Encoding": "chunked"}).items():
                connection.putheader(name, value)
            connection.endheaders()
            for _ in range(GIB // len(CHUNK)):
                if select.select([connection.sock], [], [], 0)[0]:  # it has answered, or closed
                    break
                connection.send(b"%x\r\n%b\r\n" % (len(CHUNK), CHUNK))
                peak = max(peak, server.memory_bytes())
        answer = connection.getresponse()
        text = answer.read().decode()
        peak = max(peak, server.memory_bytes())
    assert answer.status == (400 if form == "compressed" else 413), text
    assert f"the body has more than {MAX_BODY_BYTES} bytes" in text
    assert peak - before < 4 * MAX_BODY_BYTES, f"{(peak - before) / 2**20:.0f} MiB"
