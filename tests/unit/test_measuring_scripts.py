"""Scripts that measure for minutes refuse wrong arguments at their start."""

from __future__ import annotations

import subprocess
import sys

import pytest

from scripts import measure_links

CALLS = """
import sys
from scripts import controller_scale
controller_scale.plan = controller_scale.steps = lambda *_: ["-"] * 7
for arguments in (["steps", "33"], ["steps", "0"], ["plans", "64"], ["steps", "64"]):
    sys.argv = ["controller_scale.py", *arguments]
    try:
        controller_scale.main()
    except SystemExit as ended:
        print("ended with", ended.code, file=sys.stderr)
"""


def test_numbers_of_ranks_are_multiples_of_32():
    """In a process of its own: the script sets variables that Ray reads."""
    done = subprocess.run(
        [sys.executable, "-c", CALLS], capture_output=True, text=True, timeout=300, check=False
    )
    errors = [line for line in done.stderr.splitlines() if "error: " in line or "ended with" in line]
    refused = "controller_scale.py: error: argument num_ranks: '{}' must be a multiple of 32, such as 1024"
    assert errors == [
        refused.format(33),
        "ended with 2",
        refused.format(0),
        "ended with 2",
        "controller_scale.py: error: numbers of ranks and --direct are for steps; leave them out with plans",
        "ended with 2",
    ], done.stderr
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("file", "message"),
    [
        ("x.bmp", "--plot x.bmp must end in .png or .svg or .pdf; rename it"),
        ("/no/such/x.svg", "--plot /no/such/x.svg cannot be written (No such file or directory)"),
        ("links.svg", "hosts are made by root alone; start it as root"),
    ],
)
def test_a_chart_that_cannot_be_written_and_a_user_who_makes_no_hosts_are_refused(
    file: str, message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    monkeypatch.setattr("sys.argv", ["measure_links.py", "--plot", file])
    with pytest.raises(SystemExit) as ended:
        measure_links.parse()
    assert ended.value.code == 2
    assert f"measure_links.py: error: {message}" in capsys.readouterr().err
