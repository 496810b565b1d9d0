"""Bodies of HTTP calls, read with a limit."""

from __future__ import annotations

from fastapi import HTTPException
from fastapi import Request as Call
from fastapi.concurrency import run_in_threadpool

from hybridengine.serving.tinker_wire import decompress


async def read_body(call: Call, limit_bytes: int) -> bytes:
    """Return the body of a call, decompressed; refuse one that is longer than `limit_bytes`, before it is read."""
    refusal = HTTPException(413, f"the body has more than {limit_bytes} bytes; send fewer rows per call")
    announced = call.headers.get("content-length", "0")
    if not announced.isdecimal() or int(announced) > limit_bytes:
        raise refusal
    parts, num_bytes = [], 0
    async for part in call.stream():
        num_bytes += len(part)
        if num_bytes > limit_bytes:
            raise refusal
        parts.append(part)
    body = b"".join(parts)
    if call.headers.get("content-encoding") == "zstd":
        return await run_in_threadpool(decompress, body, limit_bytes)
    return body
