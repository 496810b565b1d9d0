"""A server of ranks in memory that listens on a port of this machine."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

from hybridengine.serving import http_server
from hybridengine.serving.ranks import Ranks
from hybridengine.serving.room import Limits, Room
from hybridengine.serving.store import Store
from hybridengine.serving.tinker_app import create_app

KEY = "tml-test"


class HttpServer:
    """A server with a database and checkpoints in `folder`; port 0 is a free one. `options` are those of create_app."""

    def __init__(
        self,
        folder: Path,
        ranks: Ranks,
        *,
        port: int = 0,
        quiet_s: float = 0.01,
        collect_s: float = 1.0,
        **options: Any,
    ) -> None:
        self.store = Store(f"sqlite:///{folder}/server.db")
        self.room = Room(
            ranks, self.store, folder / "checkpoints", Limits(quiet_s=quiet_s, collect_s=collect_s)
        )
        app = create_app(self.room, KEY, **options)
        self._server = http_server.HttpServer(self.room, app, "127.0.0.1", port, lambda: None)
        self._thread = threading.Thread(target=self._server.run)
        self._thread.start()
        while not self._server.started:
            time.sleep(0.005)
        self.port: int = self._server.servers[0].sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"

    def stop(self) -> None:
        self._server.should_exit = True
        self._thread.join()
        self.store.close()
