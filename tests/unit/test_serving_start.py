"""Database, key and file of calls, which a server opens before its ranks start."""

from __future__ import annotations

import contextlib
import errno
import sqlite3
from pathlib import Path

import pytest

from hybridengine.config.sections import ServeSection
from hybridengine.errors import ConfigError, OutputError
from hybridengine.serving.serve import _api_key, _call_file, _store


def test_a_random_key_is_kept_for_the_next_start(tmp_path: Path) -> None:
    key = _api_key(ServeSection(), tmp_path)
    assert key.startswith("tml-") and len(key) > 30
    assert _api_key(ServeSection(), tmp_path) == key
    assert (tmp_path / "api_key").stat().st_mode & 0o777 == 0o600
    assert _api_key(ServeSection.model_validate({"api_key": "tml-own"}), tmp_path) == "tml-own"


@pytest.mark.parametrize("kept", ["", "secret"])
def test_a_kept_key_that_no_client_accepts_is_refused(kept: str, tmp_path: Path) -> None:
    (tmp_path / "api_key").write_text(kept)
    with pytest.raises(
        ConfigError, match=f"has a key of {len(kept)} characters that .*; delete the file"
    ) as caught:
        _api_key(ServeSection(), tmp_path)
    assert "secret" not in str(caught.value)


def test_a_key_that_was_not_written_whole_is_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fill_disk(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(Path, "write_text", fill_disk)
        with pytest.raises(OutputError, match="No space left on device"):
            _api_key(ServeSection(), tmp_path)
    assert _api_key(ServeSection(), tmp_path).startswith("tml-")


@pytest.mark.parametrize(
    "url", ["hello", "foo://x", "sqlite:////nonexistent/x.db", "postgresql://nobody@nowhere/x"]
)
def test_a_database_that_cannot_be_opened_is_refused(url: str, tmp_path: Path) -> None:
    section = ServeSection.model_validate({"database": url})
    with pytest.raises(
        ConfigError, match=r"serve\.database cannot be opened .*; give an SQLAlchemy URL such as"
    ):
        _store(section, tmp_path)


def test_a_database_of_another_version_is_refused(tmp_path: Path) -> None:
    _store(ServeSection(), tmp_path).close()
    _store(ServeSection(), tmp_path).close()
    with contextlib.closing(sqlite3.connect(tmp_path / "server.db")) as database:
        database.execute("ALTER TABLE models DROP COLUMN gradients")
        database.execute("ALTER TABLE requests DROP COLUMN folder")
    with pytest.raises(
        ConfigError,
        match=r"sqlite:///.*server\.db has no columns models\.gradients, requests\.folder.*; choose another run\.name",
    ):
        _store(ServeSection(), tmp_path)


def test_a_file_of_calls_in_no_folder_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "none" / "calls.jsonl"
    with pytest.raises(
        ConfigError, match=r"serve\.calls_file=.* cannot be written .*; name a file in a folder"
    ):
        _call_file(str(path))
