"""Configuration files that cannot be read, or are not configurations."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from hybridengine.config import load_config
from hybridengine.errors import ConfigError
from tests.unit.test_config import SMALL, problems_of, small

__all__ = ["small"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("run:\n  steps: 3\n bad\n", "a.yaml: not valid YAML (line 3, column 2: "),
        ("run:\n  steps: [1, 2\n", "a.yaml: not valid YAML (line 3, column 1: "),
        (
            "run: {steps: 1}\nrun: {steps: 2}\n",
            "a.yaml: not valid YAML (line 2, column 1: found duplicate key run)",
        ),
        (
            "run:\n  steps: 1\ncluster:\n  address: [fd77::1]:6379\n",
            "expected <block end>, but found '<scalar>'); write \"[fd77::1]:6379\", in quotation marks",
        ),
        ("- 1\n- 2\n", "a.yaml holds a list, not sections; start it with a section such as 'run:'"),
        ("3\n", "a.yaml"),
        ("run:\n  name: ???\n", "a.yaml at run.name: Missing mandatory value: name; write"),
        ("run: 3\n" + SMALL, "run=3 must be a section with keys of its own; write them beneath run"),
        ("actr: {}\n" + SMALL, "unknown key actr; did you mean actor?"),
    ],
)
def test_bad_files(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "a.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    assert message in str(caught.value)


def test_a_file_that_does_not_exist(tmp_path: Path) -> None:
    (message,) = problems_of(tmp_path / "no.yaml")
    assert (
        message
        == f"{tmp_path}/no.yaml does not exist; name a run configuration such as configs/arithmetic.yaml"
    )
    (message,) = problems_of(tmp_path)
    assert message == f"{tmp_path} is a folder, not a regular file; name a YAML file"
    os.mkfifo(tmp_path / "fifo.yaml")  # opening it would wait for a writer forever
    (message,) = problems_of(tmp_path / "fifo.yaml")
    assert (
        message
        == f"{tmp_path}/fifo.yaml is a pipe, a socket or a device, not a regular file; name a YAML file"
    )


def test_names_that_are_not_utf8(tmp_path: Path, small: Path) -> None:
    named = tmp_path / "a\udcff.yaml"  # Python's representation of the byte FF in an argument
    named.write_text(small.read_text())
    (problem,) = problems_of(named)
    assert re.search(r"\\udcff\S* is not UTF-8 text; write other characters", problem)
    assert load_config(named, ["run.name=a"]).run.name == "a"


def test_a_binary_file(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_bytes(b"\xff\xfe\x00\x80\x81")
    (message,) = problems_of(path)
    assert str(path) in message
