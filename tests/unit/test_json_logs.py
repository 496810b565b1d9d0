"""Logs of JSON, of processes of their own: they replace the handlers of the root logger."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Mapping

FAILING = """
import logging, warnings
from hybridengine.controller.json_logs import json_logs
from hybridengine.errors import ConfigError
with json_logs("mine"):
    logging.getLogger("elsewhere").info("7 of %d", 9, extra={"metrics": {"step": 7}})
    logging.getLogger("ray").warning("of Ray")
    warnings.warn("old")
    raise ConfigError("parallel=3 does not fit; give 2")
"""
RANK = """
from hybridengine.controller.rank_process import RankProcess
from hybridengine.controller.relays import Share
rank = RankProcess("rank", 3, "mine", "main", json_logs=True)
assert rank.add_role(b"no pickle", Share()).failure
"""


def logged(program: str) -> list[Mapping[str, object]]:
    """Return the lines of JSON that a program logs, up to the first traceback of Python's own."""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert not done.stdout
    lines = done.stderr.partition("\nTraceback (most recent call last)")[0].splitlines()
    found = [json.loads(line) for line in lines]
    assert all((line["run"], line["host"]) == ("mine", socket.gethostname()) for line in found)
    return found


def test_the_controller_logs_what_ends_it():
    lines = logged(FAILING)
    assert [(line["role"], line["rank"]) for line in lines] == [("controller", None)] * 4
    first, second, third, last = lines
    assert (first["message"], first["metrics"], first["name"]) == ("7 of 9", {"step": 7}, "elsewhere")
    assert (second["message"], second["levelname"]) == ("of Ray", "WARNING")
    assert "old" in str(third["message"]) and third["name"] == "py.warnings"
    assert last["message"] == "ConfigError: parallel=3 does not fit; give 2"
    assert last["levelname"] == "CRITICAL" and "exc_text" not in last, (
        "this project's errors explain themselves"
    )


def test_a_rank_logs_its_failure():
    (line,) = logged(RANK)
    assert (line["role"], line["rank"], line["levelname"]) == ("pool", 3, "ERROR")
    assert "UnpicklingError" in str(line["message"])
    assert str(line["traceback"]).startswith("Traceback (most recent call last)")
    assert "add_role" in str(line["traceback"])
