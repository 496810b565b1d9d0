"""Episodes whose processes are on another host: the lines, the key, and what ends."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import socket
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from hybridengine.config.episode_section import EpisodeSection
from hybridengine.data.chat import Chat
from hybridengine.data.tokenizer import build_arithmetic_tokenizer, load_tokenizer
from hybridengine.episodes import Client, Row, process, remote
from hybridengine.episodes.process import SERVER
from hybridengine.episodes.processes import Episodes
from hybridengine.episodes.remote import EpisodeHost, RemoteProcess, read_key
from hybridengine.episodes.wire import VERSION, DrawnTurn, Ended, Limits
from hybridengine.errors import ConfigError, DataError

KEY = b"a key of at least 16 bytes"
LIMITS = Limits(32, 4, 100, 60.0, 60.0, metrics=["pid"], needs_reward=True)
TIMEOUT_S = 120.0


async def number_of_process(client: Client, row: Row) -> Any:
    """Draw two turns, add a token between, and return the process."""
    from hybridengine.episodes import Result

    await client.generate(max_tokens=2)
    client.add([7])
    await client.generate(max_tokens=1)
    return Result(0.5, {"pid": os.getpid()})


async def another(client: Client, row: Row) -> float:
    """Do nothing."""
    return 0.0


FUNCTION = f"{__name__}:number_of_process"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("tokenizer")
    build_arithmetic_tokenizer().save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def key_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("key") / "key"
    file.write_bytes(KEY + b"\n")
    return file


@pytest.fixture(scope="module")
def address(tokenizer: str) -> Iterator[str]:
    """Return the address of a host in a thread of this process."""
    section = EpisodeSection(function=FUNCTION)
    with contextlib.closing(EpisodeHost(section, KEY, tokenizer, SERVER, "127.0.0.1", 0)) as host:
        threading.Thread(target=host.serve, daemon=True).start()
        yield f"127.0.0.1:{host.port}"


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "PAUSE_S", 0.01)


def episodes_at(
    addresses: list[str], key_file: Path, tokenizer: str | None = None, **changed: Any
) -> Episodes:
    described = {"function": FUNCTION, "addresses": addresses, "key_file": str(key_file), **changed}
    return Episodes(EpisodeSection.model_validate(described), LIMITS, tokenizer, TIMEOUT_S)


def row(number: int, answer: str = "2") -> dict[str, Any]:
    return {"number": number, "prompt": "1 + 1 =", "prompt_tokens": [5, 6], "answer": answer, "seed": 3}


def own_process() -> psutil.Process:
    """Return the process of episodes that a host in this process has started."""
    children = [one for one in psutil.Process().children() if one.status() != psutil.STATUS_ZOMBIE]
    (own,) = next(one for one in children if SERVER in one.cmdline()).children()
    return own


def events_of(episodes: Episodes, count: int) -> list[Any]:
    found, end = [], time.monotonic() + TIMEOUT_S
    while len(found) < count:
        assert time.monotonic() < end, found
        found += episodes.events(0.1)
    return found


def test_episodes_on_a_host_draw_and_begin_again_when_their_process_is_killed(
    address: str, tokenizer: str, key_file: Path, tmp_path: Path
) -> None:
    episodes = episodes_at([address], key_file, str(shutil.copytree(tokenizer, tmp_path / "copied")))
    episodes.start()
    try:
        episodes.begin(4, row(0), [])
        (first,) = events_of(episodes, 1)
        assert (first.number, first.turn, first.added, first.max_tokens) == (4, 0, [], 2)
        drawn = DrawnTurn([], [11, 12], [-1.0, -2.0], False)
        episodes.answer(4, drawn)
        (second,) = events_of(episodes, 1)
        assert (second.turn, second.added) == (1, [7])
        own = own_process()
        own.kill()  # the host then closes the connection; the first turn is replayed, and the second one still drawn
        episodes.answer(4, DrawnTurn([7], [13], [-3.0], True))
        (ended,) = events_of(episodes, 1)
        assert isinstance(ended, Ended)
        assert (ended.number, ended.reward, ended.kind) == (4, 0.5, "")
        assert int(ended.metrics["pid"]) not in (os.getpid(), own.pid)
    finally:
        episodes.close()


def test_on_a_host_too_only_the_episode_that_ends_its_process_fails(key_file: Path) -> None:
    function = "tests.unit.episode_cases:does_what_the_answer_says"  # its imports are light
    host = EpisodeHost(EpisodeSection(function=function), KEY, None, SERVER, "127.0.0.1", 0)
    threading.Thread(target=host.serve, daemon=True).start()
    address = f"127.0.0.1:{host.port}"
    section = EpisodeSection(function=function, addresses=(address,), key_file=str(key_file))
    ended, end = dict[int, Ended](), time.monotonic() + TIMEOUT_S
    with contextlib.closing(host), contextlib.closing(Episodes(section, LIMITS, None, TIMEOUT_S)) as episodes:
        episodes.start()
        for number in range(4):
            episodes.begin(number, row(number, "die" if number == 2 else "nap"), [])
        while len(ended) < 4:
            assert time.monotonic() < end, ended
            for event in episodes.events(0.1):
                if isinstance(event, Ended):
                    ended[event.number] = event
                else:
                    tokens = [11] * event.max_tokens
                    episodes.answer(event.number, DrawnTurn(event.added, tokens, [-1.0] * len(tokens), False))
    assert {number: one.kind for number, one in sorted(ended.items())} == {0: "", 1: "", 2: "process", 3: ""}
    assert f"its process on {address} ended, or the connection did" in ended[2].text
    assert "2 times with no other episode in it" in ended[2].text


def test_another_version_is_one_error_with_its_host(
    address: str, key_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "VERSION", "9.9.9")
    theirs = f"has hybridengine {re.escape(VERSION)}, and this rank 9.9.9; install the same version for both"
    with pytest.raises(DataError, match=rf"{FUNCTION}: {address} {theirs}"):
        episodes_at([address], key_file).start()
    with pytest.raises(DataError, match=rf"{FUNCTION}: {re.escape(sys.executable)} {theirs}"):
        Episodes(EpisodeSection(function=FUNCTION), LIMITS, None, TIMEOUT_S).start()


def test_a_host_of_an_earlier_version_is_one_error(key_file: Path) -> None:
    server = "tests.unit.episode_cases:serve_as_an_earlier_version"
    with contextlib.closing(
        EpisodeHost(EpisodeSection(function=FUNCTION), KEY, None, server, "127.0.0.1", 0)
    ) as host:
        threading.Thread(target=host.serve, daemon=True).start()
        theirs = f"has hybridengine of an earlier version, and this rank {re.escape(VERSION)}"
        with pytest.raises(DataError, match=rf"127\.0\.0\.1:{host.port} {theirs}"):
            episodes_at([f"127.0.0.1:{host.port}"], key_file).start()


def test_a_hosts_own_copy_of_the_tokenizer_is_compared_with_the_runs(
    address: str, tokenizer: str, key_file: Path, tmp_path: Path
) -> None:
    copied = shutil.copytree(tokenizer, tmp_path / "copied")
    (copied / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    theirs = (
        rf"{FUNCTION} on {address} has another tokenizer in {tokenizer} than the run has in {copied} \(other chat"
        r" template\); give `hybridengine episodes serve --tokenizer` a copy of the run's folder"
    )
    with pytest.raises(DataError, match=theirs):
        episodes_at([address], key_file, str(copied)).start()


def test_another_python_is_compared_with_the_ranks(tokenizer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its version of transformers may read the same folder in another way."""
    section = EpisodeSection(function=FUNCTION, python=sys.executable)
    digests = Chat(load_tokenizer(tokenizer)).digests() | {"text of tokens": "0"}
    monkeypatch.setattr(Chat, "digests", lambda self: digests)
    with pytest.raises(DataError, match=r"\(other text of tokens\).*use the same version of transformers"):
        Episodes(section, LIMITS, tokenizer, TIMEOUT_S).start()


def test_a_host_that_is_away_is_one_error_with_its_address(key_file: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        away = f"127.0.0.1:{free.getsockname()[1]}"
    with pytest.raises(DataError, match=f"no host answered in 5 tries \\({away}: Connection refused\\)"):
        episodes_at([away], key_file).start()


def test_a_host_that_goes_away_ends_the_episodes_with_its_address(tokenizer: str, key_file: Path) -> None:
    section = EpisodeSection(function=FUNCTION)
    with contextlib.closing(EpisodeHost(section, KEY, tokenizer, SERVER, "127.0.0.1", 0)) as host:
        threading.Thread(target=host.serve, daemon=True).start()
        episodes = episodes_at([f"127.0.0.1:{host.port}"], key_file)
        episodes.start()
    try:
        episodes.begin(0, row(0), [])
        events_of(episodes, 1)
        own_process().kill()
        with pytest.raises(DataError, match=f"no host answered in 5 tries \\(127.0.0.1:{host.port}: "):
            events_of(episodes, 1)
    finally:
        episodes.close()


def test_another_host_is_used_if_one_is_away(address: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        away = f"127.0.0.1:{free.getsockname()[1]}"
    for _ in range(5):
        with contextlib.closing(RemoteProcess([away, address], KEY)) as process:
            assert process.address == address


def test_a_host_refuses_another_key_and_strangers(address: str) -> None:
    with pytest.raises(DataError, match=f"{address}: it closed the connection: its key is another"):
        RemoteProcess([address], b"another key of 16 bytes and more")
    host, _, port = address.rpartition(":")
    for text in (b"\n\n", b'["load", {}]\n["load", {}]\n', b"GET / HTTP/1.1\r\n\r\n"):
        with socket.create_connection((host, int(port)), 5) as channel:
            channel.sendall(text)
            received = b""
            with contextlib.suppress(ConnectionError):
                while part := channel.recv(4096):
                    received += part
            assert received.count(b"\n") == 1  # its random bytes, nothing that is made with the key
            assert len(received) == 65


def test_a_rank_refuses_a_host_without_the_key() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def repeat() -> None:
            while True:
                try:
                    channel, _ = server.accept()
                except OSError:
                    return
                with channel, contextlib.suppress(OSError):  # an echo has every line of the rank's own
                    while part := channel.recv(4096):
                        channel.sendall(part)

        threading.Thread(target=repeat, daemon=True).start()
        with pytest.raises(DataError, match="its key is another"):
            RemoteProcess([f"127.0.0.1:{server.getsockname()[1]}"], KEY)


def test_a_rank_cannot_ask_for_another_function(address: str, key_file: Path) -> None:
    other = f"{__name__}:another"
    with pytest.raises(DataError, match=f"{other} on {address} is not what this host serves, {FUNCTION}"):
        episodes_at([address], key_file, function=other).start()


@pytest.mark.parametrize(
    ("content", "text"),
    [(None, "cannot be read"), (b"short\n", "has 5 bytes, fewer than 16")],
)
def test_keys(tmp_path: Path, content: bytes | None, text: str) -> None:
    file = tmp_path / "key"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ConfigError, match=text):
        read_key(file)
