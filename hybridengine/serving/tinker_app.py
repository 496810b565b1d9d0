"""HTTP endpoints of the Tinker API, as the SDK 0.38 calls them."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
from collections.abc import AsyncIterator, Callable
from typing import Annotated, Any

import pydantic
from fastapi import APIRouter, Depends, FastAPI, Header, HTTPException, Response
from fastapi import Request as Call
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import JSONResponse
from sqlalchemy.exc import OperationalError
from tinker import types

from hybridengine.errors import RequestError
from hybridengine.serving.bodies import parse_body, read_body
from hybridengine.serving.openai_app import WAIT_S, create_openai_app
from hybridengine.serving.openai_texts import Tokenizer
from hybridengine.serving.ranks import ModelFacts
from hybridengine.serving.room import Room
from hybridengine.serving.store import FAILED, QUEUED, Model, Request, Sampler
from hybridengine.serving.tinker_wire import (
    MAX_BODY_BYTES,
    PROTOBUF,
    decode_prompt,
    read_forward_backward,
)

HOLD_S = 40.0  # the SDK gives a call of retrieve_future 45 s
_SDK = "0.38"
_BINARY_KINDS = ("forward", "forward_backward", "sample")


class ModelRequest(pydantic.BaseModel):
    """The address of a model's request; the rest is checked in its turn, so that a bad one leaves no gap."""

    model_config = pydantic.ConfigDict(protected_namespaces=())
    model_id: str
    seq_id: int


class WeightsInfoRequest(pydantic.BaseModel):
    tinker_path: str


def create_app(
    room: Room,
    api_key: str,
    *,
    tokenizer: Tokenizer | None = None,
    max_body_bytes: int = MAX_BODY_BYTES,
    hold_s: float = HOLD_S,
    wait_s: float = WAIT_S,
) -> FastAPI:
    """Return the app that serves `room`, which it starts and closes; clients need `api_key`, which begins with "tml-".

    Args:
        tokenizer: the model's tokenizer, with which OpenAI's endpoints are served as well.
        hold_s: time after which a Tinker client that waits for a result is told to try again.
        wait_s: time after which a call of OpenAI's endpoints fails.
    """

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        await run_in_threadpool(room.start)
        yield
        await run_in_threadpool(room.close)

    def check_key(x_api_key: Annotated[str | None, Header()] = None) -> None:
        if not hmac.compare_digest((x_api_key or "").encode(), api_key.encode()):
            raise HTTPException(
                401, "X-API-Key is not this server's; set TINKER_API_KEY to the key it was started with"
            )

    app = FastAPI(title="hybridengine", lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None)
    app.add_exception_handler(RequestError, _refuse)
    app.add_exception_handler(
        OperationalError, lambda _, error: _unavailable(room.store.trouble or str(error))
    )
    api = APIRouter(prefix="/api/v1", dependencies=[Depends(check_key)])
    _add_sessions(api, room, max_body_bytes)
    _add_models(api, room, max_body_bytes)
    _add_sampling(api, room, max_body_bytes)
    _add_results(api, room, max_body_bytes, hold_s)

    @app.get("/api/v1/healthz")
    def healthz() -> JSONResponse:
        trouble = room.trouble
        return JSONResponse({"status": trouble or "ok"}, 503 if trouble else 200)

    @api.api_route("/{path:path}", methods=["GET", "POST", "PUT", "DELETE"])
    def unknown(path: str, call: Call) -> None:
        raise HTTPException(
            404, f"{call.method} /api/v1/{path} is not served: this server trains and samples one model"
        )

    app.include_router(api)
    if tokenizer is not None:
        app.mount("/", create_openai_app(room, tokenizer, api_key, max_body_bytes, wait_s))
    return app


def _refuse(_: Call, error: Exception) -> JSONResponse:
    return JSONResponse({"error": str(error), "category": "user"}, 400)


def _unavailable(reason: str) -> JSONResponse:
    return JSONResponse({"error": reason, "category": "server"}, 503)


def _add_sessions(api: APIRouter, room: Room, limit: int) -> None:
    @api.post("/client/config")
    @api.post("/client/dynamic_config")
    async def config(call: Call) -> dict[str, Any]:
        await read_body(call, limit)
        return {}

    @api.post("/create_session")
    async def create_session(call: Call) -> dict[str, Any]:
        message = await parse_body(types.CreateSessionRequest, await read_body(call, limit))
        session_id = await run_in_threadpool(room.create_session, message.model_dump(mode="json"))
        warning = None
        if not f"{message.sdk_version}.".startswith(f"{_SDK}."):
            warning = (
                f"tinker {message.sdk_version} was not tested with this server; with errors of decoding, install"
                f" tinker~={_SDK}.0"
            )
        return {"type": "create_session", "session_id": session_id, "warning_message": warning}

    @api.post("/session_heartbeat")
    async def heartbeat(call: Call) -> dict[str, str]:
        message = await parse_body(types.SessionHeartbeatRequest, await read_body(call, limit))
        await run_in_threadpool(room.heartbeat, message.session_id)
        return {"type": "session_heartbeat"}

    @api.post("/sessions/{session_id}/finish")
    async def finish(session_id: str, call: Call) -> dict[str, str]:
        await read_body(call, limit)
        await run_in_threadpool(room.finish, session_id)
        return {}

    @api.post("/telemetry")
    async def telemetry(call: Call) -> dict[str, str]:
        await read_body(call, limit)
        return {"status": "accepted"}

    @api.get("/get_server_capabilities")
    def capabilities() -> dict[str, Any]:
        facts = room.ranks.facts
        model = {"model_name": facts.name, "max_context_length": facts.context_tokens}
        return {"supported_models": [model | {"trainable": True, "sampleable": True}]}


def _add_models(api: APIRouter, room: Room, limit: int) -> None:
    async def accept(method: Callable[..., str], *arguments: Any) -> dict[str, str]:
        return {"request_id": await run_in_threadpool(method, *arguments)}

    @api.post("/create_model")
    async def create_model(call: Call) -> dict[str, str]:
        body = await read_body(call, limit)
        return await accept(room.create_model, await parse_body(types.CreateModelRequest, body), body)

    @api.post("/load_weights")
    async def load_weights(call: Call) -> dict[str, str]:
        body = await read_body(call, limit)
        return await accept(room.load_model, await parse_body(types.LoadWeightsRequest, body), body)

    @api.post("/forward_backward")
    async def forward_backward(call: Call) -> dict[str, str]:
        body = await read_body(call, limit)
        if call.headers.get("content-type", "").partition(";")[0].strip() != PROTOBUF:
            raise RequestError(f"forward_backward has a body that is not {PROTOBUF}; use tinker~={_SDK}.0")
        message = await run_in_threadpool(read_forward_backward, body)
        kind = "forward" if message.forward_only else "forward_backward"
        return await accept(room.submit, message.model_id, message.seq_id, kind, body)

    def queue(kind: str) -> Callable[[Call], Any]:
        async def endpoint(call: Call) -> dict[str, str]:
            body = await read_body(call, limit)
            address = await parse_body(ModelRequest, body)
            return await accept(room.submit, address.model_id, address.seq_id, kind, body)

        return endpoint

    # save_weights_external fails in its turn: refused at once it would leave a gap, for which all later requests wait
    for kind in ("optim_step", "save_weights", "save_weights_for_sampler", "save_weights_external"):
        api.post(f"/{kind}")(queue(kind))

    @api.post("/get_info")
    async def get_info(call: Call) -> dict[str, Any]:
        message = await parse_body(types.GetInfoRequest, await read_body(call, limit))
        model = await run_in_threadpool(room.store.get, Model, message.model_id)
        known = {"type": "get_info", "model_id": model.id} | _lora(model.lora_rank)
        return known | _model(room.ranks.facts)

    @api.post("/unload_model")
    async def unload_model(call: Call) -> dict[str, str]:
        message = await parse_body(types.UnloadModelRequest, await read_body(call, limit))
        return await accept(room.unload, message.model_id)

    @api.post("/weights_info")
    async def weights_info(call: Call) -> dict[str, Any]:
        message = await parse_body(WeightsInfoRequest, await read_body(call, limit))
        checkpoint = await run_in_threadpool(room.checkpoint, message.tinker_path)
        return {"base_model": checkpoint.base_model} | _lora(checkpoint.lora_rank)

    @api.get("/training_runs/{model_id}/checkpoints")
    def checkpoints(model_id: str) -> dict[str, Any]:
        room.store.get(Model, model_id)
        listed = [
            {
                "checkpoint_id": each.path.removeprefix(f"tinker://{model_id}/"),
                "checkpoint_type": each.kind,
                "time": each.created_s,
                "tinker_path": each.path,
                "expires_at": each.expires_s,
            }
            for each in room.store.checkpoints(model_id)
        ]
        return {"checkpoints": listed}

    @api.delete("/training_runs/{model_id}/checkpoints/{checkpoint_id:path}")
    def delete_checkpoint(model_id: str, checkpoint_id: str) -> dict[str, str]:
        room.delete_checkpoint(f"tinker://{model_id}/{checkpoint_id}")
        return {}


def _lora(rank: int) -> dict[str, Any]:
    return {"is_lora": True, "lora_rank": rank} if rank else {"is_lora": False}


def _model(facts: ModelFacts) -> dict[str, Any]:
    return {
        "model_name": facts.name,
        "model_data": {
            "model_name": facts.name,
            "tokenizer_id": facts.tokenizer,
            "arch": facts.architecture,
        },
    }


def _add_sampling(api: APIRouter, room: Room, limit: int) -> None:
    @api.post("/create_sampling_session")
    async def create_sampling_session(call: Call) -> dict[str, str]:
        message = await parse_body(types.CreateSamplingSessionRequest, await read_body(call, limit))
        key = await run_in_threadpool(room.create_sampler, message)
        return {"type": "create_sampling_session", "sampling_session_id": key}

    @api.get("/samplers/{key}")
    def sampler(key: str) -> dict[str, Any]:
        found = room.store.get(Sampler, key)
        return {"sampler_id": found.id, "base_model": found.base_model, "model_path": found.checkpoint}

    def submit(message: types.SampleRequest, body: bytes) -> str:
        if message.sampling_session_id is None:
            raise RequestError("asample has no sampling_session_id; create a sampling session first")
        # refuses at once, since no other request waits for this one
        decode_prompt(message, room.ranks.facts, "")
        return room.submit(message.sampling_session_id, message.seq_id, "sample", body)

    @api.post("/asample")
    async def asample(call: Call) -> dict[str, Any]:
        body = await read_body(call, limit)
        with room.arriving():
            message = await parse_body(types.SampleRequest, body)
            request_id = await run_in_threadpool(submit, message, body)
        names = [f"{request_id}:{number}" for number in range(message.num_samples)]
        return {"request_id": request_id, "sample_sequence_ids": names}


def _add_results(api: APIRouter, room: Room, limit: int, hold_s: float) -> None:
    @api.post("/retrieve_future")
    async def retrieve_future(call: Call) -> Response:
        request_id = (await parse_body(types.FutureRetrieveRequest, await read_body(call, limit))).request_id
        try:
            done = await run_in_threadpool(room.results.done, request_id)
            await asyncio.wait({asyncio.wrap_future(done)}, timeout=hold_s)
            request = await run_in_threadpool(room.store.get, Request, request_id)
        except RequestError as error:
            if room.failure is not None:  # nothing is stored any more
                return JSONResponse({"error": room.trouble, "category": "server"})
            raise HTTPException(404, str(error)) from None
        if request.state == QUEUED:
            if room.failure is not None:
                return JSONResponse({"error": room.trouble, "category": "server"})
            answer = {"type": "try_again", "request_id": request_id, "queue_state": "active"}
            reason = await run_in_threadpool(room.wait_reason, request)
            if reason is not None:
                answer |= {"queue_state": "paused_capacity", "queue_state_reason": reason}
            return JSONResponse(answer)
        if request.state == FAILED:
            return JSONResponse({"error": request.error, "category": request.category})
        if request.result is None:
            raise HTTPException(410, f"the result of {request_id} has been removed; fetch results sooner")
        kind = PROTOBUF if request.kind in _BINARY_KINDS else "application/json"
        return Response(request.result, media_type=kind)
