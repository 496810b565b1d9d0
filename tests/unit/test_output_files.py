"""Files and streams that commands write to: checked before anything is computed, with one clear error."""

from __future__ import annotations

import contextlib
import io
import json
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import pytest

from hybridengine.cli.main import main
from hybridengine.models.presets import PRESETS
from tests.unit.plan_runs import GOOD, H100, ROOT, Plan

COMMAND = [sys.executable, "-m", "hybridengine.cli.main", "reshard", "plan", *GOOD]
COMMAND += ["--model", "llama3-8b", "--cluster", H100]


def test_checking_an_output_file_leaves_it_as_it_was(plan: Plan, tmp_path: Path) -> None:
    kept = tmp_path / "kept.json"
    kept.write_text('["old"]')
    code, _, _ = plan(*GOOD, "--json", str(kept), "--plot", "/nowhere/x.png")
    assert code == 2
    assert kept.read_text() == '["old"]'
    plan(*GOOD, "--json", str(tmp_path / "new.json"), "--plot", "/nowhere/x.png")
    assert sorted(tmp_path.iterdir()) == [kept]


def test_one_file_for_two_options_is_seen_through_links(plan: Plan, tmp_path: Path) -> None:
    folder, same = tmp_path / "folder", tmp_path / "same"
    folder.mkdir()
    same.symlink_to(folder)
    picture, file = folder / "x.svg", same / "x.json"
    file.symlink_to(picture)
    code, out, err = plan(*GOOD, "--json", str(file), "--plot", str(picture))
    assert (code, out) == (2, "")
    assert f"--json {file} and --plot {picture} are the same file; name two" in err


def test_checking_a_link_to_nowhere_leaves_the_link(plan: Plan, tmp_path: Path) -> None:
    link = tmp_path / "link.json"
    link.symlink_to(tmp_path / "later.json")
    plan(*GOOD, "--json", str(link), "--plot", "/nowhere/x.png")
    assert link.is_symlink()
    assert not link.exists()


def test_what_is_no_regular_file_is_refused(plan: Plan, tmp_path: Path) -> None:
    """A device cannot be replaced, and opening a pipe may wait for a reader forever."""
    full, pipe, folder = tmp_path / "full.svg", tmp_path / "pipe.json", tmp_path / "folder.json"
    full.symlink_to("/dev/full")
    os.mkfifo(pipe)
    folder.mkdir()
    for option, file in (("--plot", full), ("--json", pipe), ("--json", folder)):
        code, out, err = plan(*GOOD, option, str(file))
        assert (code, out) == (2, "")
        assert err == f"hybridengine: {option} {file} exists and is not a regular file; name another file\n"


def test_a_disk_that_fills_up_takes_nothing_away(plan: Plan, tmp_path: Path) -> None:
    file, linked = tmp_path / "x.json", tmp_path / "linked.json"
    file.write_text('["of an earlier run"]')
    linked.symlink_to(file)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1024, hard))
    try:
        code, _, err = plan(*GOOD, "--json", str(linked))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert code == 2
    assert f"--json {linked} cannot be written (File too large)" in err
    assert file.read_text() == '["of an earlier run"]'
    assert sorted(tmp_path.iterdir()) == [linked, file]
    code, _, _ = plan(*GOOD, "--json", str(linked))
    assert code == 0
    assert linked.is_symlink()
    assert json.loads(file.read_text())["layout"] == "2-4-2:1-2"
    assert sorted(tmp_path.iterdir()) == [linked, file]


def test_json_does_not_take_the_place_of_a_configuration(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`doctor --json CONFIG` is meant to print figures of that run to stdout, but CONFIG is read as the output file."""
    config = tmp_path / "own.yaml"
    config.write_text("run: {steps: 4}\n")
    assert main(["doctor", "--here", "--json", str(config)]) == 2
    assert f"--json {config} must end in .json; rename it" in capsys.readouterr().err
    assert config.read_text() == "run: {steps: 4}\n"


@contextlib.contextmanager
def unread() -> Iterator[IO[str]]:
    """Yield a pipe whose reader has gone away."""
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as pipe:
        yield pipe


def test_a_reader_that_goes_away() -> None:
    """Nothing is printed while the interpreter ends, either."""
    with unread() as stdout:
        done = subprocess.run(COMMAND, stdout=stdout, stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (141, "")


@pytest.mark.parametrize(
    "command",
    [[*COMMAND[3:], "--json"], ["train", str(ROOT / "configs/arithmetic.yaml"), "--dry-run"]],
    ids=["more than Python's buffer", "tables of Rich, which would end the program in its own way"],
)
def test_a_reader_of_other_output_that_goes_away(
    command: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with unread() as stdout:
        monkeypatch.setattr(sys, "stdout", stdout)
        assert main(command) == 141
    assert capsys.readouterr().err == ""


def test_a_closed_stdout_does_not_keep_files_from_being_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file, picture = tmp_path / "x.json", tmp_path / "x.svg"
    monkeypatch.setattr(sys, "stdout", None)  # as Python starts with `>&-`
    assert main([*COMMAND[3:], "--json", str(file), "--plot", str(picture)]) == 0
    assert capsys.readouterr().err == ""
    assert json.loads(file.read_text())["layout"] == "2-4-2:1-2"
    assert picture.read_text().startswith("<?xml")


def test_what_the_terminal_cannot_show_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = tmp_path / "cluster.yaml"
    text = Path(H100).read_text()
    cluster.write_text(text.replace("name: H100-80GB", "name: Zürich"))
    assert cluster.read_text() != text
    for arguments, part in (([], "cluster: Z?rich"), (["--help"], "p?t?d ranks")):
        shown = io.BytesIO()
        monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(shown, encoding="ascii", errors="strict"))
        with contextlib.suppress(SystemExit):
            assert main([*COMMAND[3:-1], str(cluster), *arguments]) == 0
        sys.stdout.flush()
        assert part in shown.getvalue().decode()


def test_a_file_that_is_read_is_not_written(plan: Plan, tmp_path: Path) -> None:
    cluster, folder = tmp_path / "cluster.json", tmp_path / "model"
    cluster.write_text(Path(H100).read_text())
    folder.mkdir()
    config = folder / "config.json"
    config.write_text(json.dumps(dict(PRESETS["llama3-8b"].config)))
    linked = tmp_path / "linked.json"
    linked.symlink_to(config)
    for model, file, option in (
        (str(folder), cluster, "--cluster"),
        (str(folder), config, "--model"),
        (str(config), linked, "--model"),
    ):
        before = file.read_text()
        code, out, err = plan(*GOOD, "--json", str(file), model=model, cluster=str(cluster))
        assert (code, out) == (2, "")
        assert err == f"hybridengine: --json {file} is what {option} reads; name another file\n"
        assert file.read_text() == before


def test_names_that_are_as_long_as_they_may_be(plan: Plan, tmp_path: Path) -> None:
    long = tmp_path / ("a" * 250 + ".json")
    code, _, err = plan(*GOOD, "--json", str(long))
    assert (code, err) == (0, "")
    assert json.loads(long.read_text())["layout"] == "2-4-2:1-2"


def test_dollars_in_a_name_are_no_formula(plan: Plan, tmp_path: Path) -> None:
    cluster, picture = tmp_path / "cluster.yaml", tmp_path / "x.svg"
    cluster.write_text(Path(H100).read_text().replace("name: H100-80GB", r"name: a$\frac$c"))
    code, out, err = plan(*GOOD, "--plot", str(picture), cluster=str(cluster))
    assert (code, err) == (0, "")
    assert r"cluster: a$\frac$c" in out
    assert picture.read_text().startswith("<?xml")
