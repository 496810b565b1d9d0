"""Services that score responses: calls, retries, limits and failures, against real servers on this machine."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import socket
import threading
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from hybridengine.config.reward_sections import RewardSection, ServiceSection, TermSection
from hybridengine.data import reward_service
from hybridengine.data.rewards import RewardFunctions, check_reward_functions
from hybridengine.errors import DataError
from hybridengine.redaction import without_secrets

KEY = "a-key-of-this-test"


class Server(ThreadingHTTPServer):
    """Scores a response as its number plus 100 times that of its answer, after what `behaviours` holds is used up."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, *behaviours: Callable[[Handler], None]) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.behaviours, self.lock = list(behaviours), threading.Lock()
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.num_running = self.most_running = 0
        self.ends = threading.Event()
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/score"

    def handle_error(self, *_: object) -> None:
        """Ignore connections that the client has closed."""


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Server  # pyright: ignore[reportIncompatibleVariableOverride]

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.server.lock:
            self.server.bodies.append(body)
            self.server.headers.append(dict(self.headers))
            behave = self.server.behaviours.pop(0) if self.server.behaviours else None
            self.server.num_running += 1
            self.server.most_running = max(self.server.most_running, self.server.num_running)
        if behave is not None:
            behave(self)
        else:
            pairs = zip(body["responses"], body["answers"], strict=True)
            self.reply(json.dumps({"scores": [float(one) + 100 * float(other) for one, other in pairs]}))
        with self.server.lock:
            self.server.num_running -= 1

    def reply(self, text: str, status: int = 200, **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_: object) -> None:
        pass


def replies(text: str, status: int = 200, **headers: str) -> Callable[[Handler], None]:
    return lambda handler: handler.reply(text, status, **headers)


def hangs(handler: Handler) -> None:
    handler.server.ends.wait(60)


def drips(handler: Handler) -> None:
    """Send a byte every 50 ms, so that no single read takes long."""
    handler.send_response(200)
    handler.send_header("Content-Length", "100000")
    handler.end_headers()
    while not handler.server.ends.wait(0.05):
        handler.wfile.write(b" ")


def is_cut(handler: Handler) -> None:
    handler.send_response(200)
    handler.send_header("Content-Length", "100")
    handler.end_headers()
    handler.wfile.write(b'{"scores": ')
    handler.close_connection = True


def closes(handler: Handler) -> None:
    handler.close_connection = True


def sends_a_gigabyte(handler: Handler) -> None:
    handler.send_response(200)
    handler.end_headers()
    handler.close_connection = True
    with contextlib.suppress(ConnectionError):
        for _ in range(2**10):
            handler.wfile.write(b"1" * 2**20)


@pytest.fixture
def serve() -> Iterator[Callable[..., Server]]:
    servers: list[Server] = []

    def start(*behaviours: Callable[[Handler], None]) -> Server:
        servers.append(Server(*behaviours))
        return servers[-1]

    yield start
    for server in servers:
        server.ends.set()
        server.shutdown()
        server.server_close()


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reward_service, "FIRST_PAUSE_S", 0.01)


def scorer(*urls: str, options: dict[str, Any] | None = None, **keys: Any) -> RewardFunctions:
    service = ServiceSection(urls=urls, **(options or {}))
    return RewardFunctions("reward", RewardSection(kind="service", function=None, service=service, **keys))


def rows(*responses: str) -> dict[str, list[Any]]:
    return {
        "responses": list(responses),
        "answers": ["2"] * len(responses),
        "prompts": [f"<{text}>" for text in responses],
        "response_lengths": [len(text) for text in responses],
    }


def away() -> str:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return f"http://127.0.0.1:{free.getsockname()[1]}/score"


def counts(one: RewardFunctions) -> dict[str, int]:
    return {name.partition("/")[2]: round(value) for name, value in one.take_metrics().items() if value >= 1}


def test_rows_are_sent_in_parts_and_scores_come_in_their_order(serve):
    server = serve()
    one = scorer(server.url, rows_per_call=3, options={"columns": ("response_lengths",)})
    assert one.start() == ("responses", "answers", "response_lengths")
    found = one.score(rows(*map(str, range(10))), range(40, 50))
    assert found["scores"].tolist() == [200.0 + row for row in range(10)]
    assert found["dropped"].tolist() == [False] * 10
    bodies = sorted(server.bodies, key=lambda body: int(body["responses"][0]))
    assert bodies[1] == {"responses": ["3", "4", "5"], "answers": ["2"] * 3, "response_lengths": [1, 1, 1]}
    assert [len(body["responses"]) for body in bodies] == [3, 3, 3, 1]
    assert one.score(rows())["scores"].tolist() == []
    assert counts(one) == {"calls": 4}
    assert "Authorization" not in server.headers[0]


def test_calls_are_in_flight_together_up_to_a_limit(serve):
    def slow(handler: Handler) -> None:
        time.sleep(0.2)
        handler.reply('{"scores": [1]}')

    server = serve(*[slow] * 9)
    began = time.monotonic()
    one = scorer(server.url, rows_per_call=1, options={"max_in_flight": 3})
    one.score(rows(*"123456789"))
    assert server.most_running == 3
    assert 0.6 <= time.monotonic() - began < 1.7


@pytest.mark.parametrize(
    ("behaviour", "text"),
    [
        (replies("broken", 500), "answered 500 Internal Server Error, 'broken'"),
        (replies("", 503), "answered 503 Service Unavailable"),
        (replies("", 429, Retry_After="0"), "answered 429 Too Many Requests"),
        (closes, "no reply (Server disconnected)"),
        (is_cut, "no reply (Response payload is not completed"),
        (hangs, "did not return within 0.4 s"),
        (drips, "did not return within 0.4 s"),
    ],
)
def test_a_failure_that_may_pass_is_followed_by_another_call(serve, caplog, behaviour, text):
    server = serve(behaviour, behaviour)
    one = scorer(server.url, timeout_s=0.4, retries=2)
    with caplog.at_level(logging.WARNING):
        assert one.score(rows("1", "2"), [5, 6])["scores"].tolist() == [201.0, 202.0]
    timeouts = {"timeouts": 2} if "within" in text else {}
    found = one.take_metrics()
    assert found["reward/call_s"] < 5
    del found["reward/call_s"]
    expected = {"calls": 3, "failures": 2, "retries": 2, "timeouts": 0, "dropped_rows": 0, **timeouts}
    assert found == {f"reward/{name}": value for name, value in expected.items()}
    assert f"called again, 2 more at most: reward.service={server.url}, rows 5 to 6: {text}" in caplog.text
    again = serve(*[behaviour] * 3)
    with pytest.raises(
        DataError, match=r"in 2 calls; correct the service or its address, or let reward\.on_"
    ):
        scorer(again.url, timeout_s=0.4, retries=1).score(rows("1"))
    assert len(again.bodies) == 2


@pytest.mark.parametrize(
    ("behaviour", "text"),
    [
        (replies("no such thing", 404), "answered 404 Not Found, 'no such thing'"),
        (replies("", 401), "answered 401 Unauthorized"),
        (
            replies("", 307, Location="http://elsewhere/score"),
            "answered 307 Temporary Redirect, a redirect to 'http://elsewhere/score', which is not followed",
        ),
        (replies("[1, 2]"), 'returned [1, 2], and a reply is {"scores": [...]}'),
        (replies('{"scores": 1}'), "returned {'scores': 1}, and a reply is"),
        (replies("<html>"), "returned '<html>', which is not JSON"),
        (replies("[" * 100_000), "which is not JSON"),
        (replies('{"scores": [1]}'), "returned 1 scores for 2 responses, and each has one"),
        (replies('{"scores": [1, 2, 3]}'), "returned 3 scores for 2 responses"),
        (replies('{"scores": [1, NaN]}'), "returned nan for row 6, and a score is a finite number"),
        (replies('{"scores": [Infinity, 1]}'), "returned inf for row 5"),
        (replies('{"scores": [1, 1e39]}'), "returned 1e+39 for row 6"),
        (replies('{"scores": [1, "2"]}'), "returned '2' for row 6"),
        (replies('{"scores": [1, null]}'), "returned None for row 6"),
        (sends_a_gigabyte, "returned more than 1048640 bytes"),
        (replies("", 503, Retry_After="3600"), "asks for a pause of 3600 s, longer than 5 s"),
    ],
)
def test_a_failure_that_stays_is_an_error_at_once_or_drops_the_rows(serve, behaviour, text):
    server = serve(behaviour)
    began = time.monotonic()
    with pytest.raises(DataError) as caught:
        scorer(server.url, timeout_s=5.0).score(rows("1", "2"), [5, 6])
    assert str(caught.value).startswith(f"reward.service={server.url}, rows 5 to 6: ")
    assert text in str(caught.value)
    assert len(server.bodies) == 1
    assert time.monotonic() - began < 4

    server = serve(behaviour)
    one = scorer(server.url, timeout_s=5.0, on_failure="drop", rows_per_call=2, options={"max_in_flight": 1})
    found = one.score(rows("1", "2", "3"))
    assert [None if math.isnan(score) else score for score in found["scores"].tolist()] == [None, None, 203.0]
    assert found["dropped"].tolist() == [True, True, False]
    assert counts(one) == {"calls": 2, "failures": 1, "dropped_rows": 2}


def test_pauses_grow_and_respect_what_the_service_asks_for(serve, monkeypatch):
    monkeypatch.setattr(reward_service, "FIRST_PAUSE_S", 0.2)
    later = format_datetime(datetime.now(UTC) + timedelta(seconds=2), usegmt=True)
    slept: list[float] = []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)

    monkeypatch.setattr(reward_service.asyncio, "sleep", sleep)
    answers = [replies("", 500)] * 3 + [
        replies("", 429, Retry_After="4"),
        replies("", 503, Retry_After=later),
    ]
    server = serve(*answers, replies("", 500, Retry_After="soon"))
    scorer(server.url, retries=6, timeout_s=10.0).score(rows("1"))
    for number, seconds in enumerate(slept[:3]):
        assert 0.1 * 2**number <= seconds <= 0.2 * 2**number
    assert slept[3] == 4.0
    assert 1.5 <= slept[4] <= 3.2
    assert 3.2 <= slept[5] <= 6.4


def test_no_reply_from_one_address_goes_on_at_the_next(serve):
    servers = serve(), serve()
    one = scorer(servers[0].url, away(), servers[1].url, rows_per_call=1, options={"max_in_flight": 2})
    assert one.score(rows(*"123456"))["scores"].tolist() == [201.0, 202.0, 203.0, 204.0, 205.0, 206.0]
    assert {len(server.bodies) for server in servers} == {2, 4}  # its own, and what the one between them got
    assert counts(one) == {"calls": 8, "failures": 2, "retries": 2}
    with pytest.raises(DataError, match=r"no reply \(Cannot connect to host 127\.0\.0\.1:.* in 5 calls"):
        scorer(away()).score(rows("1"))


def test_the_key_of_a_file_is_sent_and_shown_nowhere(serve, tmp_path, caplog):
    file = tmp_path / "key"
    file.write_text(f"{KEY}\n")
    server = serve(replies(f"Authorization: Bearer {KEY}", 500), replies(f"wrong: {KEY}", 403))
    one = scorer(server.url, options={"key_file": str(file)})
    one.start()
    with caplog.at_level(logging.WARNING), pytest.raises(DataError) as caught:
        one.score(rows("1"))
    assert [headers["Authorization"] for headers in server.headers] == [f"Bearer {KEY}"] * 2
    assert KEY not in without_secrets(str(caught.value)) and KEY not in without_secrets(caplog.text)
    assert KEY not in without_secrets(f"anything with {KEY} inside")


@pytest.mark.parametrize("content", [None, "", "two words", "sch\u00f6n", "one\r\nX-Header: 2"])
def test_a_key_that_cannot_be_sent_is_an_error_before_the_first_call(serve, tmp_path, content):
    server, file = serve(), tmp_path / "key"
    if content is not None:
        file.write_text(content)
    text = "cannot be read" if content is None else "must hold one word of ASCII characters"
    section = RewardSection(
        kind="service", service=ServiceSection(urls=(server.url,), key_file=str(file)), function=None
    )
    with pytest.raises(DataError, match=f"^reward.service.key_file={file} {text}"):
        check_reward_functions("reward", section)
    assert server.bodies == []


def test_every_address_is_called_without_rows_before_a_run(serve):
    good, wrong = serve(), serve(replies("", 404))
    terms = {
        "one": TermSection(
            kind="service", service=ServiceSection(urls=(good.url, wrong.url, nowhere := away()))
        ),
        "two": TermSection(function="tests.unit.reward_cases:no_such"),
    }
    with pytest.raises(DataError) as caught:
        check_reward_functions("cost", RewardSection(terms=terms, retries=1))
    assert [problem.partition(",")[0] for problem in caught.value.problems] == [
        "cost.terms.two.function=tests.unit.reward_cases:no_such cannot be imported (module 'tests.unit.reward_cases' has"
        " no attribute 'no_such'); name package.module:function of a module that is installed",
        f"cost.terms.one.service={wrong.url}",
        f"cost.terms.one.service={nowhere}",
    ]
    assert good.bodies == [{"responses": [], "answers": []}]


def test_functions_and_services_are_terms_of_one_sum(serve):
    server = serve(replies('{"scores": [1, -1.5]}'))
    terms = {
        "served": TermSection(kind="service", service=ServiceSection(urls=(server.url,)), weight=2.0),
        "length": TermSection(function="tests.unit.reward_cases:lengths", weight=0.5),
    }
    with RewardFunctions("reward", RewardSection(terms=terms)) as one:
        found = one.score(rows("1", "\ud800 2"))
    assert found["reward/served"].tolist() == [1.0, -1.5]
    assert found["reward/length"].tolist() == [1.0, 3.0]
    assert found["scores"].tolist() == [2.5, -1.5]
    assert counts(one)["calls"] == 2


def test_the_documented_service_answers(serve, tmp_path):
    """The server of docs/how-to/rewards.md, started as a reader does."""
    page = Path(__file__).parents[2].joinpath("docs/how-to/rewards.md").read_text()
    code = next(block for block in page.split("```python\n")[1:] if "ThreadingHTTPServer" in block).partition(
        "```"
    )[0]
    names: dict[str, Any] = {"__name__": "scorer"}
    exec(compile(code, "scorer.py", "exec"), names)
    server = names["ThreadingHTTPServer"](("127.0.0.1", 0), names["Scorer"])
    threading.Thread(target=server.serve_forever, daemon=True).start()
    with contextlib.closing(server.socket):
        url = f"http://127.0.0.1:{server.server_port}/score"
        one = scorer(url)
        one.check()
        assert one.score(rows("the 2", "3"))["scores"].tolist() == [1.0, 0.0]
        server.shutdown()
