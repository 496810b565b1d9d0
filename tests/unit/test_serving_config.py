"""The configuration of a server: what it needs, and the key that clients can use."""

from __future__ import annotations

from pathlib import Path

import pytest

from hybridengine.config import load_config
from hybridengine.errors import ConfigError

FILE = Path("configs/serve.yaml").absolute()
SHAPES = "model.hf_config=llama3-70b"


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run where the file's checkpoint does not exist: `make train` may have made it here."""
    monkeypatch.chdir(tmp_path)


def test_a_server_needs_no_data() -> None:
    config = load_config(FILE, [SHAPES], dry_run=True, serves=True)
    assert config.run.name == "serve"
    assert config.grid("actor").sizes.num_ranks == config.num_ranks
    with pytest.raises(ConfigError, match="data must be given by exactly one of"):
        load_config(FILE, [SHAPES], dry_run=True)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("serve.api_key=secret", "a text that begins with tml-"),
        ("serve.port=70000", "serve.port"),
        ("serve.hots=0.0.0.0", "unknown key serve.hots; did you mean serve.host"),
    ],
)
def test_settings_that_cannot_be_served_are_refused(override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        load_config(FILE, [SHAPES, override], dry_run=True, serves=True)
    assert "secret" not in str(caught.value)
