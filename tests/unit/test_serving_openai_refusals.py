"""Calls of OpenAI's clients that are refused, and waits that end."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.unit.serving_http import KEY, HttpServer
from tests.unit.test_serving_openai import Server, server, trained

__all__ = ["server", "trained"]


def test_a_wrong_key_is_refused(trained: Server) -> None:
    before = list(trained.ranks.calls)
    with pytest.raises(openai.AuthenticationError, match="set OPENAI_API_KEY") as caught:
        trained.client_with("tml-other").models.list()
    assert caught.value.code == "invalid_api_key"
    assert httpx.post(f"{trained.url}/inference/v1/generate", json={}).status_code == 401
    assert trained.ranks.calls == before


@pytest.mark.parametrize(
    ("arguments", "param", "message"),
    [
        (
            {"stream": True},
            "stream",
            "stream=true is not served by this endpoint; leave it out, or send false",
        ),
        ({"tools": [{"type": "function"}]}, "tools", "is not served"),
        ({"response_format": {"type": "json_object"}}, "response_format", "is not served"),
        ({"logit_bias": {"2": 1}}, "logit_bias", "is not served"),
        ({"presence_penalty": 0.5}, "presence_penalty", "presence_penalty=0.5 is not served"),
        ({"min_p": 0.1}, "min_p", "min_p=0.1 is not served by this endpoint; leave it out, or send 0"),
        ({"reasoning_effort": "low"}, "reasoning_effort", "is not served"),
        ({"invented": 1}, "invented", "invented=1 is not served by this endpoint; leave it out"),
        ({"temperature": 3}, "temperature", "temperature=3: Input should be less than or equal to 2"),
        ({"n": 0}, "n", "n=0"),
        ({"stop": ""}, "stop", "stop="),
        ({"top_logprobs": 2}, "top_logprobs", "needs logprobs=true"),
        ({"max_tokens": 40}, None, "exceed the model's context length of 32"),
        ({"stop_token_ids": [8]}, None, "stop_token_ids has the token id 8, outside of 0 to 7"),
        ({"chat_template_kwargs": {"tokenize": False}}, "chat_template_kwargs", "has tokenize, which is not"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages",
            "that is not text",
        ),
        ({"messages": []}, "messages", "messages=[]"),
        ({"top_p": 0.5}, None, "top_p is not served by a table"),  # by the ranks
    ],
)
def test_what_is_not_served_is_refused(
    trained: Server, arguments: dict[str, Any], param: str | None, message: str
) -> None:
    body = {"model": "tiny", "messages": [{"role": "user", "content": "a"}]} | arguments
    with pytest.raises(openai.BadRequestError) as caught:
        trained.client.post("/chat/completions", body=body, cast_to=object)
    assert message in caught.value.message
    assert (caught.value.type, caught.value.param) == ("invalid_request_error", param)


@pytest.mark.parametrize(
    "body",
    [
        rb'{"model": "tiny", "prompt": "\ud800"}',
        rb'{"model": "tiny", "prompt": "a", "\udc00": 1}',
        rb'{"model": "\ud800", "prompt": "a"}',
        rb'{"model": "tiny", "messages": [{"role": "user", "content": "\ud800"}]}',
    ],
)
def test_text_that_is_not_unicode_is_refused(trained: Server, body: bytes) -> None:
    path = "chat/completions" if b"messages" in body else "completions"
    headers = {"Authorization": f"Bearer {KEY}"}
    answer = httpx.post(f"{trained.url}/v1/{path}", content=body, headers=headers)
    assert answer.status_code == 400
    assert "the body is not JSON" in answer.json()["error"]["message"]
    assert "hex escape" in answer.json()["error"]["message"]


def test_other_errors(trained: Server) -> None:
    with pytest.raises(openai.NotFoundError, match="this server has 'tiny'") as caught:
        trained.client.completions.create(model="other", prompt="a")
    assert caught.value.code == "model_not_found"
    with pytest.raises(openai.NotFoundError):
        trained.client.post("/embeddings", body={}, cast_to=object)
    with pytest.raises(openai.BadRequestError, match="the prompt has no tokens"):
        trained.client.completions.create(model="tiny", prompt=[])
    with pytest.raises(
        openai.NotFoundError, match="POST /v1/embeddings is not served; served are /v1/models, "
    ):
        trained.client.embeddings.create(model="tiny", input="a")
    answer = trained.generate(token_ids=[2], sampling_params={"min_tokens": 2})
    assert answer["error"]["param"] == "sampling_params.min_tokens"
    trained.ranks.error = RuntimeError("a rank has died")
    with pytest.raises(openai.InternalServerError, match="RuntimeError: a rank has died"):
        trained.client.completions.create(model="tiny", prompt="a")


def test_a_long_wait_ends(tmp_path: Path) -> None:
    server = Server(tmp_path, wait_s=0.5)
    server.train()
    server.ranks.free.clear()
    with pytest.raises(openai.InternalServerError, match="did not get to the call within") as caught:
        server.client.completions.create(model="tiny", prompt="a")
    assert (caught.value.status_code, caught.value.type) == (504, "server_error")
    server.ranks.free.set()
    server.stop()


def test_a_call_that_waits_when_the_server_ends_is_told_so(tmp_path: Path) -> None:
    server = Server(tmp_path)
    server.ranks.free.clear()
    with ThreadPoolExecutor(2) as threads:
        call = threads.submit(server.client.completions.create, model="tiny", prompt="a")
        while not server.room.results._futures:
            time.sleep(0.01)
        stopped = threads.submit(HttpServer.stop, server)
        with pytest.raises(
            openai.InternalServerError, match="the server ends; send the call again"
        ) as caught:
            call.result(4)
        server.ranks.free.set()
        stopped.result(10)
    assert caught.value.status_code == 503
    server.client.close()
