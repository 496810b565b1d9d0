"""The HTTP server, which lets clients go that wait for results when it ends."""

from __future__ import annotations

import socket
from collections.abc import Callable

import uvicorn
from fastapi import FastAPI

from hybridengine.serving.room import Room

CLOSING_S = 5
"""Seconds that calls in progress may take when the server ends; a client sends them again."""


class HttpServer(uvicorn.Server):
    """A server of an app of `room`, of which it answers all waits when it ends."""

    def __init__(
        self, room: Room, app: FastAPI, host: str, port: int, at_shutdown: Callable[[], None]
    ) -> None:
        self._room, self._at_shutdown = room, at_shutdown
        config = uvicorn.Config(
            app, host=host, port=port, log_level="warning", timeout_graceful_shutdown=CLOSING_S
        )
        super().__init__(config)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Answer those who wait with what is known so far, and end all connections."""
        self._at_shutdown()
        self._room.results.release()
        await super().shutdown(sockets)
