"""Logs as lines of JSON with run, role, rank and host, as Ray's formatter writes them."""

from __future__ import annotations

import contextlib
import logging
import socket
from collections.abc import Iterator

import ray

from hybridengine.errors import HybridEngineError
from hybridengine.redaction import without_secrets

logger = logging.getLogger(__name__)


class JsonLogs(logging.Filter):
    """Adds run, role, rank and host to every record of this process."""

    def __init__(self, run: str, role: str, rank: int | None) -> None:
        super().__init__()
        self.run, self.role, self.rank, self.host = run, role, rank, socket.gethostname()

    def filter(self, record: logging.LogRecord) -> bool:
        """Add the fields; keep the record."""
        vars(record).update(run=self.run, role=self.role, rank=self.rank, host=self.host)
        return True

    def install(self) -> None:
        """Write this process's logs and warnings to stderr as JSON, in place of its other handlers."""
        root = logging.getLogger()
        root.handlers.clear()
        ray.LoggingConfig(encoding="JSON", additional_log_standard_attrs=["name"])._apply()
        for handler in root.handlers:
            handler.addFilter(self)
        rays = logging.getLogger("ray")  # `ray.init` takes its handlers away
        rays.handlers.clear()
        rays.propagate = True
        logging.captureWarnings(True)


@contextlib.contextmanager
def json_logs(run: str) -> Iterator[None]:
    """Write the controller's logs as JSON, and log the error that ends the block."""
    JsonLogs(run, "controller", None).install()
    try:
        yield
    except Exception as error:
        known = isinstance(error, HybridEngineError)
        logger.critical(without_secrets(f"{type(error).__name__}: {error}"), exc_info=not known)
        raise
