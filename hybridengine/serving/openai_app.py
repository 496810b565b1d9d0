"""OpenAI's HTTP endpoints, and vLLM's for token ids, on the weights that are being trained."""

from __future__ import annotations

import asyncio
import hmac
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Annotated, Any

from fastapi import Depends, FastAPI, Header
from fastapi import Request as Call
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import JSONResponse
from openai.types import Model
from starlette.exceptions import HTTPException
from tinker.proto.response_conv import deserialize_sample_response
from tinker.types import SampleResponse

from hybridengine.errors import RequestError
from hybridengine.serving.bodies import read_body
from hybridengine.serving.openai_answers import chat_completion, completion, generated
from hybridengine.serving.openai_texts import ArgumentError, Texts, Tokenizer
from hybridengine.serving.openai_wire import ChatRequest, CompletionRequest, GenerateRequest, read
from hybridengine.serving.ranks import Prompt
from hybridengine.serving.room import Room
from hybridengine.serving.store import QUEUED, Request

WAIT_S = 600.0
"""Longest wait of a call, in seconds: the default of the `openai` client."""
_NO_MODEL = "model_not_found"


def create_openai_app(
    room: Room, tokenizer: Tokenizer, api_key: str, max_body_bytes: int, wait_s: float
) -> FastAPI:
    """Return an app that samples from what the ranks of `room` hold: the model in training, or else the base model.

    If clients train adapters, it samples from the base model, or with saved adapters that a call names as its model.
    """

    def check_key(authorization: Annotated[str | None, Header()] = None) -> None:
        if not hmac.compare_digest((authorization or "").encode(), f"Bearer {api_key}".encode()):
            raise HTTPException(
                401,
                "the API key is not this server's; set OPENAI_API_KEY, or Authorization: Bearer, to the key it was"
                " started with",
            )

    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None, dependencies=[Depends(check_key)])
    app.add_exception_handler(RequestError, _refuse)
    app.add_exception_handler(HTTPException, _refuse)
    facts, texts, started_s = room.ranks.facts, Texts(tokenizer), int(time.time())
    # a tokenizer is for one thread at a time, and long texts would hold other calls up
    tokenizing = ThreadPoolExecutor(1, "tokenizer")

    @app.get("/v1/models")
    def models() -> dict[str, Any]:
        served = {"max_model_len": facts.context_tokens, "root": facts.tokenizer}
        model = Model(id=facts.name, object="model", created=started_s, owned_by="hybridengine", **served)
        return {"object": "list", "data": [model.model_dump(mode="json", exclude_unset=True)]}

    def serve(path: str, kind: type[Any], answer: Callable[..., dict[str, Any]]) -> None:
        @app.post(path)
        async def endpoint(call: Call) -> JSONResponse:
            request = await run_in_threadpool(read, kind, await read_body(call, max_body_bytes))
            adapter = await run_in_threadpool(room.adapter_of, request.model)
            if adapter is None:
                raise ArgumentError(
                    f"model={request.model!r} is not served; this server has {facts.name!r}",
                    "model",
                    _NO_MODEL,
                )
            loop = asyncio.get_running_loop()
            asked = await loop.run_in_executor(tokenizing, request.prompts, texts, facts)
            prompts = [replace(prompt, adapter=adapter) for prompt in asked]
            drawn = await _draw(room, prompts, wait_s, call)
            return JSONResponse(
                await loop.run_in_executor(tokenizing, answer, request, prompts, drawn, texts)
            )

    serve("/v1/completions", CompletionRequest, completion)
    serve("/v1/chat/completions", ChatRequest, chat_completion)
    serve("/inference/v1/generate", GenerateRequest, generated)
    served_paths = [path for route in app.routes if (path := getattr(route, "path", None))]

    @app.api_route("/{path:path}", methods=["GET", "POST", "PUT", "DELETE"])
    def unknown(path: str, call: Call) -> None:
        raise HTTPException(404, f"{call.method} /{path} is not served; served are {', '.join(served_paths)}")

    return app


async def _draw(room: Room, prompts: Sequence[Prompt], wait_s: float, call: Call) -> Sequence[SampleResponse]:
    """Return the samples of each prompt, all of the same weights; give up when the client of `call` disconnects."""

    _check_running(room)

    def submit() -> dict[str, Future[None]]:
        return {request_id: room.results.done(request_id) for request_id in room.submit_prompts(prompts)}

    def results() -> Sequence[Request]:
        return [room.store.get(Request, request_id) for request_id in futures]

    futures = await run_in_threadpool(submit)
    drawn = asyncio.create_task(asyncio.wait({asyncio.wrap_future(each) for each in futures.values()}))
    gone = asyncio.create_task(_disconnected(call))
    await asyncio.wait({drawn, gone}, timeout=wait_s, return_when=asyncio.FIRST_COMPLETED)
    if not drawn.done():
        reason = (
            "the client has disconnected"
            if gone.done()
            else f"the ranks did not get to the call within {wait_s:.0f} s; send it again when they train less"
        )
        drawn.cancel()  # not the futures, which the room completes
        gone.cancel()
        await run_in_threadpool(room.withdraw, list(futures), reason)
        raise HTTPException(504, reason, {"x-should-retry": "false"})  # the client would only queue it again
    gone.cancel()
    _check_running(room)
    responses = []
    for request in await run_in_threadpool(results):
        if request.state == QUEUED:
            raise HTTPException(503, "the server ends; send the call again once it has been started again")
        if request.result is None:
            user = request.category == "user"
            raise RequestError(request.error) if user else HTTPException(500, str(request.error))
        responses.append(deserialize_sample_response(request.result))
    return responses


async def _disconnected(call: Call) -> None:
    """Return when the client of a call whose body has been read is gone."""
    while (await call.receive())["type"] != "http.disconnect":
        pass


def _check_running(room: Room) -> None:
    if room.failure is not None:
        raise HTTPException(503, room.trouble)


def _refuse(_: Call, error: Exception) -> JSONResponse:
    """Return an error as OpenAI's clients read it."""
    status, param, code, headers = 400, None, None, None
    message = str(error)
    if isinstance(error, ArgumentError):
        param, code = error.param, error.code
        status = 404 if code == _NO_MODEL else 400
    elif isinstance(error, HTTPException):
        status, message, headers = error.status_code, error.detail, error.headers
        code = "invalid_api_key" if status == 401 else None
    kind = "invalid_request_error" if status < 500 else "server_error"
    return JSONResponse(
        {"error": {"message": message, "type": kind, "param": param, "code": code}}, status, headers
    )
