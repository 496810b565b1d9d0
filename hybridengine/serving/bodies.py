"""Bodies of HTTP calls, read with a limit."""

from __future__ import annotations

import asyncio

from fastapi import HTTPException
from fastapi import Request as Call
from fastapi.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect

from hybridengine.errors import RequestError
from hybridengine.serving.tinker_wire import Message, decompress, parse

ARRIVAL_S = 60.0
"""Time within which a body has to arrive."""
SHORT_BYTES = 2**13
"""Size up to which a body is parsed faster than it is handed to another thread."""


async def read_body(call: Call, limit_bytes: int) -> bytes:
    """Return the body of a call, decompressed.

    Refuse a body that is longer than `limit_bytes`, before it is read, and one that does not arrive within `ARRIVAL_S`.
    """
    refusal = HTTPException(413, f"the body has more than {limit_bytes} bytes; send fewer rows per call")
    announced = call.headers.get("content-length", "0")
    if not announced.isdecimal() or int(announced) > limit_bytes:
        raise refusal
    parts, num_bytes = [], 0
    try:
        async with asyncio.timeout(ARRIVAL_S):
            async for part in call.stream():
                num_bytes += len(part)
                if num_bytes > limit_bytes:
                    raise refusal
                parts.append(part)
    except TimeoutError:
        raise HTTPException(
            408,
            f"{num_bytes} bytes of the body have arrived within {ARRIVAL_S:.0f} s, in which a whole body has to arrive;"
            " send it again, with fewer rows per call on a slow connection",
            {"Connection": "close"},
        ) from None
    except ClientDisconnect:
        raise HTTPException(400, "the client has left before its body had arrived") from None
    body = b"".join(parts)
    encoding = call.headers.get("content-encoding", "identity")
    if encoding == "zstd":
        return await run_in_threadpool(decompress, body, limit_bytes)
    if encoding != "identity":
        raise RequestError(f"Content-Encoding {encoding} is not served; send the body as it is, or as zstd")
    return body


async def parse_body(message: type[Message], body: bytes) -> Message:
    """Return a body as a message of the SDK; a long one is parsed in another thread, as it would hold other calls up."""
    return parse(message, body) if len(body) <= SHORT_BYTES else await run_in_threadpool(parse, message, body)
