"""Questions of an examination about nodes, folders, clocks and ports, and the command's report."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from hybridengine.cli.doctor import _text
from hybridengine.cli.main import main
from hybridengine.doctor import examination
from hybridengine.doctor import node_facts as facts_module
from hybridengine.doctor.findings import Subject, problem
from hybridengine.doctor.links import LinkFacts, open_port, probe_all, reach
from hybridengine.doctor.node_facts import (
    ask_libraries,
    driver_version,
    is_seen,
    lock_is_seen,
    locked_mark,
    made,
    sources_digest,
    try_folder,
    unreadable,
)


def test_libraries_that_cannot_be_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "raising.py").write_text("raise RuntimeError('operator does not exist')")
    (tmp_path / "dying.py").write_text("import os; os._exit(3)")
    (tmp_path / "talking.py").write_text("print('{}')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert ask_libraries(["raising", "talking"])["import_errors"] == {
        "raising": "RuntimeError: operator does not exist"
    }
    assert ask_libraries(["not_installed", "not_installed.part", "talking"])["import_errors"] == {}
    assert ask_libraries(["dying"])["import_errors"] == {
        "dying": "the process that imported them ended with status 3 (nothing on stderr)"
    }
    (tmp_path / "hanging.py").write_text("import time; time.sleep(60)")
    monkeypatch.setattr(facts_module, "IMPORT_LIMIT_S", 1.0)
    assert ask_libraries(["hanging"])["import_errors"] == {"hanging": "importing took more than 1 s"}


def test_a_digest_is_that_of_all_python_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = {"__init__.py": "", "one.py": "a = 1\n", "part/two.py": "b = 2\n"}
    changes: list[dict[str, str]] = [
        {},
        {"read.me": "text", "__pycache__/one.pyc": "code"},  # no sources
        {"one.py": "a = 2\n"},
        {"one.py": "a = 1\nb = 2\n", "part/two.py": ""},  # the same bytes, in another file
        {"three.py": ""},
    ]
    digests = list[str]()
    for number, change in enumerate(changes):
        name = f"sources_{number}"
        for file, text in (files | change).items():
            path = tmp_path / name / "sources_package" / file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        with monkeypatch.context() as patched:
            patched.syspath_prepend(tmp_path / name)
            digests.append(sources_digest(["sources_package", "not_installed"]))
    assert digests[0] == digests[1] and len(set(digests)) == 4
    assert len(sources_digest()) == 12


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar  5 22:23:56 UTC 2024", "550.54.15"),
        (
            "NVIDIA UNIX Open Kernel Module for x86_64  570.86.15  Release Build  (dvs-builder@U16)",
            "570.86.15",
        ),
        ("something else", None),
        (None, None),
    ],
)
def test_the_version_of_a_driver(text: str | None, expected: str | None, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / "version").write_text(
            f"NVRM version: {text}\nGCC version:  gcc version 12.2.0 (Debian)\n"
        )
    assert driver_version(tmp_path / "version") == expected


def test_folders_and_marks(tmp_path: Path) -> None:
    facts = try_folder(str(tmp_path))
    assert (facts.error, facts.free_bytes > 0, facts.write_s > 0) == ("", True, True)
    assert try_folder(str(tmp_path / "none")).error == "FileNotFoundError: No such file or directory"
    with locked_mark(str(tmp_path)) as mark:
        assert is_seen(mark) and not is_seen(str(tmp_path / ".doctor-other"), limit_s=0.1)
        assert lock_is_seen(mark)
        (tmp_path / "free").touch()
        assert not lock_is_seen(str(tmp_path / "free"))
    (tmp_path / "free").unlink()
    assert list(tmp_path.iterdir()) == []


def test_folders_that_were_made_go_again(tmp_path: Path) -> None:
    with made(str(tmp_path / "one" / "two")) as error:
        assert (error, (tmp_path / "one" / "two").is_dir()) == ("", True)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").touch()
    with made(str(tmp_path / "file" / "runs")) as error:
        assert error == "NotADirectoryError: Not a directory"


def test_an_offset_is_known_within_half_of_the_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock is 3 s ahead; the second of three answers takes the shortest time, 0.2 s, and was given after 0.15 s."""
    now, waits = [100.0], iter([(0.5, 0.0), (0.15, 0.05), (0.0, 0.9)])

    class Posts:
        def ask_all(self, function: object) -> dict[str, float]:
            there, back = next(waits)
            now[0] += there
            answer = now[0] + 3.0
            now[0] += back
            return {"10.0.0.2": answer}

    monkeypatch.setattr(examination, "CLOCK_READINGS", 3)
    monkeypatch.setattr(examination.time, "time", lambda: now[0])
    ((node, (offset, doubt)),) = examination.clock_offsets(Posts()).items()  # type: ignore[arg-type]
    assert node == "10.0.0.2"
    assert doubt == pytest.approx(0.1)
    assert offset == pytest.approx(3.05)
    assert abs(offset - 3.0) <= doubt


@contextmanager
def refusing() -> Iterator[int]:
    """Yield a port that is taken, so that nobody else gets it, and refuses connections: nothing listens."""
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        yield silent.getsockname()[1]


def test_ports_that_are_reached_and_those_that_are_not() -> None:
    """A node is called by any address."""
    port = open_port()
    assert reach({"127.0.0.1": port, "::1": port}) == {"127.0.0.1": LinkFacts(), "::1": LinkFacts()}
    with refusing() as silent:
        assert reach({"127.0.0.1": silent}, ["127.0.0.1"]) == {
            "127.0.0.1": LinkFacts(error="ConnectionRefusedError: Connection refused")
        }


def test_a_port_whose_server_hangs_up_is_reached() -> None:
    """As Ray's does when it is sent what it does not understand."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def hang_up() -> None:
            while True:
                try:
                    connection, _ = server.accept()
                except OSError:
                    return
                connection.recv(10)
                connection.close()

        threading.Thread(target=hang_up, daemon=True).start()
        assert probe_all({"127.0.0.1": server.getsockname()[1]}) == {"127.0.0.1": LinkFacts()}


def test_the_command_needs_none_of_the_libraries_that_it_examines() -> None:
    code = (
        "import sys; from hybridengine.cli import doctor; from hybridengine.doctor import judging;"
        "heavy = [name for name in ('torch', 'ray', 'megatron', 'vllm', 'transformers') if name in sys.modules];"
        "sys.exit(str(heavy) if heavy else 0)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr


def test_a_machine_whose_torch_is_broken_is_told_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Nothing is asked of Ray, which would fail here."""
    found = {"import_errors": {"torch": "ImportError: libtorch_cpu.so"}}
    monkeypatch.setattr(facts_module, "ask_libraries", lambda names: found)
    assert main(["doctor", "configs/arithmetic.yaml", "--folder", str(tmp_path)]) == 1
    told = capsys.readouterr()
    assert "torch cannot be imported: ImportError: libtorch_cpu.so" in told.out
    assert "the cluster was not examined" in told.out and "starting a local Ray" not in told.err


@pytest.mark.parametrize(
    ("hosts", "where"),
    [
        ({"10.0.0.1": "first", "10.0.0.2": "second"}, "10.0.0.2 (host second)"),
        ({"10.0.0.1": "first", "10.0.0.2": "first"}, "10.0.0.2"),  # nodes on one machine
        ({}, "10.0.0.2"),
    ],
)
def test_a_finding_names_the_host_of_its_node(hosts: dict[str, str], where: str) -> None:
    assert f"problem  {where}: late\n" in _text(
        [problem(Subject.CLOCK, "late", "correct it", "10.0.0.2")], hosts
    )


@pytest.mark.usefixtures("no_ray")
def test_a_cluster_that_is_not_there_takes_no_finding_away(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(facts_module, "ask_libraries", lambda names: {})
    with refusing() as port:
        monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{port}")
        assert main(["doctor", "--folder", str(tmp_path)]) == 1
    told = capsys.readouterr().out
    assert f"problem  no Ray cluster answers at '127.0.0.1:{port}'" in told and "-> start one with" in told
    assert "ok       Python 3." in told


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["none.yaml"], "none.yaml"),
        (["run.steps=3"], "run.steps=3"),
        (["--json", "/none/figures.json"], "/none"),
    ],
)
def test_wrong_input(arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", *arguments]) == 2
    assert text in capsys.readouterr().err


def test_files_and_folders_that_a_node_cannot_read(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text("{}")
    (tmp_path / "link").symlink_to(tmp_path / "none")
    paths = [str(tmp_path), str(tmp_path / "rows.jsonl"), str(tmp_path / "link"), "/none"]
    assert unreadable(paths) == dict.fromkeys(paths[2:], "No such file or directory")
