"""A server that the session shares, on a model that `hybridengine train` has warmed up on the recipes' questions."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.clients.servers import CLIENT_PYTHON, Server, run_command
from tests.clients.warm_model import NAME, warm_up, write_datasets


@pytest.fixture(scope="session")
def warm_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train the small model on the demonstrations; return the folder of its checkpoint."""
    assert CLIENT_PYTHON.exists(), f"{CLIENT_PYTHON} does not exist; run `make test-clients`"
    return warm_up(tmp_path_factory.mktemp("warm"), run_command)


@pytest.fixture(scope="session")
def server(warm_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Serve the warmed-up model on two ranks."""
    server = Server(tmp_path_factory.mktemp("server"), warm_model)
    try:
        server.start()
        yield server
    finally:
        status = server.stop()
    assert status == 128 + signal.SIGTERM, server.log.read_text()


@pytest.fixture(scope="session")
def client_folder(warm_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder in which the recipes find tokenizer and data sets under their names on the Hugging Face Hub."""
    folder = tmp_path_factory.mktemp("client")
    (folder / NAME).parent.mkdir()
    (folder / NAME).symlink_to(warm_model)
    write_datasets(folder)
    return folder
