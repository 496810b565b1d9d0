"""Lists of hosts for a launch over ssh, and what is wrong with some."""

from __future__ import annotations

from pathlib import Path

import pytest

from hybridengine.errors import ConfigError
from hybridengine.launch.ssh import parse_hosts


def test_lists_of_hosts(tmp_path: Path):
    file = tmp_path / "hosts.txt"
    file.write_text("# rack 1\nnode-1\n  user@node-2  # the second\n\n")
    assert parse_hosts(None, file) == ("node-1", "user@node-2")
    file.write_bytes("\ufeffnode-1\r\nnode-2\r\n".encode())  # from Windows
    assert parse_hosts(None, file) == ("node-1", "node-2")
    assert parse_hosts(" a,b ", None) == ("a", "b")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a,,b", "--hosts: '' is not the name of a host; write names such as node1"),
        ("a,-oProxyCommand=x", "'-oProxyCommand=x' is not the name of a host"),
        ("a,b,a", "--hosts names a twice; a host is one node"),
        ("u@a,b,root@a", "--hosts names a twice; a host is one node"),
    ],
)
def test_wrong_lists_are_refused(text: str, message: str):
    with pytest.raises(ConfigError, match=message):
        parse_hosts(text, None)


def test_wrong_files_are_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match="does not exist; name a file with one host a line"):
        parse_hosts(None, tmp_path / "none")
    (tmp_path / "empty").write_text("# nothing\n")
    with pytest.raises(ConfigError, match="names no host"):
        parse_hosts(None, tmp_path / "empty")
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match=rf"^--hostfile {tmp_path}/binary is not UTF-8 text"):
        parse_hosts(None, tmp_path / "binary")
    with pytest.raises(ConfigError, match=rf"^--hostfile {tmp_path} is a folder, not a regular file; name"):
        parse_hosts(None, tmp_path)
    (tmp_path / "mpi").write_text("node-1 slots=8\n")
    with pytest.raises(ConfigError, match="'node-1 slots=8' is not the name of a host"):
        parse_hosts(None, tmp_path / "mpi")
