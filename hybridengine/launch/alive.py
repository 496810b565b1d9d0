"""Live nodes of a Ray cluster, asked by a process of its own: a driver that cannot reach Ray may end its process."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from subprocess import DEVNULL, PIPE
from typing import IO

from hybridengine.launch.ray_node import fated

INTERVAL_S = 1.0


class LiveNodes:
    """Addresses of the live nodes, asked again and again; a context manager."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        """Ask the cluster that RAY_ADDRESS names in `environment`."""
        self._environment = dict(environment)
        self._latest: list[str] | None = None
        self._start()

    def __enter__(self) -> LiveNodes:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()

    def addresses(self) -> list[str] | None:
        """Return the addresses of the nodes that were alive when Ray answered last; None if it does not answer."""
        if self._process.poll() is not None:
            self._latest = None
            self._start()
        return self._latest

    def wait(self, limit_s: float) -> list[str] | None:
        """Return the addresses as soon as Ray answers; None if it does not within the limit."""
        deadline = time.monotonic() + limit_s
        while (found := self.addresses()) is None and time.monotonic() < deadline:
            time.sleep(INTERVAL_S / 4)
        return found

    def _start(self) -> None:
        command = [sys.executable, "-m", __name__]
        self._process = fated(command, env=self._environment, stdin=DEVNULL, stdout=PIPE, stderr=DEVNULL)
        threading.Thread(
            target=self._read, args=(self._process.stdout,), daemon=True
        ).start()  # until it ends

    def _read(self, lines: IO[bytes]) -> None:
        for line in lines:
            with suppress(ValueError):  # Ray prints there as well
                self._latest = list(json.loads(line))


def main() -> None:
    """Print the addresses of the live nodes as a line of JSON, again and again."""
    from hybridengine.controller.cluster import node_offers, start_ray

    start_ray()
    while True:
        print(json.dumps([offer.address for offer in node_offers()]), flush=True)
        time.sleep(INTERVAL_S)


if __name__ == "__main__":
    main()
