"""A reward service: an HTTP server that is sent responses and returns scores; several calls are in flight.

A call is a POST of {"responses": [...], "answers": [...], ...}, with one value per row in each list. The reply is
{"scores": [...]}, with one finite number per row. Calls whose failure may pass are repeated: those without a reply, and
those with the status 408, 429 or 5xx.
"""

from __future__ import annotations

import asyncio
import json
import logging
import random
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any

import aiohttp
from pydantic import SecretStr

from hybridengine.config.reward_sections import RewardSection, ServiceSection
from hybridengine.data.reward_child import LARGEST_SCORE, shown
from hybridengine.data.reward_process import REPLY_BYTES, SCORE_BYTES, RewardTimeoutError, named_rows
from hybridengine.errors import DataError, raise_all
from hybridengine.redaction import remember_secrets

DROPPED = float("nan")
"""Score of a row whose call failed."""
PASSING = (408, 429)
"""Status codes below 500 after which a call is repeated."""
FIRST_PAUSE_S = 0.5
"""Longest pause before the first repetition; doubled for each further one."""

_logger = logging.getLogger(__name__)


class _CallError(Exception):
    """A call failed, and is repeated after at least `pause_s` if that is a number."""

    def __init__(self, text: str, pause_s: float | None = None, *, is_timeout: bool = False) -> None:
        super().__init__(text)
        self.pause_s, self.is_timeout = pause_s, is_timeout


class RewardService:
    """One service of a reward or cost section.

    Args:
        key: source of the addresses, for messages: "reward.service".
    """

    def __init__(self, key: str, service: ServiceSection, section: RewardSection) -> None:
        self.key, self._service, self._section = key, service, section
        self._retries = section.num_service_retries
        self._columns = ("responses", "answers", *service.columns)
        self._headers = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
        self._calls = random.randrange(len(service.urls))  # ranks begin with different addresses
        self.counts = Counter[str]()

    def start(self) -> tuple[str, ...]:
        """Read the key, if there is one; return the columns that each call must give; DataError for an invalid key."""
        if (path := self._service.key_file) is not None:
            self._headers["Authorization"] = f"Bearer {_read_key(f'{self.key}.key_file', path)}"
        return self._columns

    def check(self) -> None:
        """Call every address without rows; raise DataError listing those that do not answer as a service does."""
        self.start()
        raise_all(asyncio.run(self._problems()), DataError)

    def score(self, columns: Mapping[str, Sequence[Any]], rows: Sequence[int]) -> list[float]:
        """Return one score per row, NaN for dropped rows; raise DataError if a call failed and no rows are dropped."""
        return asyncio.run(self._score(columns, rows))

    def close(self) -> None:
        """Do nothing: no connection outlives the scoring."""

    async def _problems(self) -> list[str]:
        empty = {column: [] for column in self._columns}

        async def problems(session: aiohttp.ClientSession, url: str) -> list[str]:
            try:
                await self._score_part(session, empty, (), [url])
            except DataError as error:
                return [str(error)]
            return []

        async with self._session() as session:
            found = await asyncio.gather(*(problems(session, url) for url in self._service.urls))
        return [problem for one in found for problem in one]

    async def _score(self, columns: Mapping[str, Sequence[Any]], rows: Sequence[int]) -> list[float]:
        size, urls = self._section.rows_per_call, self._service.urls
        turn = asyncio.Semaphore(self._service.max_in_flight)

        async def score(session: aiohttp.ClientSession, part: slice) -> list[float]:
            async with turn:
                self._calls += 1
                first = self._calls % len(urls)
                sent = {name: list(columns[name][part]) for name in self._columns}
                return await self._score_part(session, sent, rows[part], [*urls[first:], *urls[:first]])

        try:
            async with self._session() as session, asyncio.TaskGroup() as group:
                starts = range(0, len(rows), size)
                calls = [group.create_task(score(session, slice(start, start + size))) for start in starts]
        except BaseExceptionGroup as failures:
            raise failures.exceptions[0] from None
        return [value for call in calls for value in call.result()]

    def _session(self) -> aiohttp.ClientSession:
        return aiohttp.ClientSession(
            headers=self._headers,
            timeout=aiohttp.ClientTimeout(total=self._section.timeout_s),
            connector=aiohttp.TCPConnector(limit=self._service.max_in_flight),
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
        )

    async def _score_part(
        self,
        session: aiohttp.ClientSession,
        columns: Mapping[str, list],
        rows: Sequence[int],
        urls: Sequence[str],
    ) -> list[float]:
        """Return the scores of one call's rows, tried at `urls` in turn."""
        body, section = json.dumps(columns).encode(), self.key.partition(".")[0]
        for number in range(self._retries + 1):
            url, began = urls[number % len(urls)], time.monotonic()
            try:
                return await self._call(session, url, body, rows)
            except _CallError as error:
                failure = error
            finally:
                self.counts.update(calls=1, call_s=time.monotonic() - began)  # type: ignore[arg-type]
            self.counts.update(failures=1, timeouts=int(failure.is_timeout))
            text = f"{self.key}={url}, {named_rows(rows) if rows else 'no rows'}: {failure}"
            if failure.pause_s is None or number == self._retries:
                break
            self.counts.update(retries=1)
            _logger.warning("called again, %d more at most: %s", self._retries - number, text)
            backoff_s = random.uniform(0.5, 1.0) * FIRST_PAUSE_S * 2**number
            await asyncio.sleep(min(max(backoff_s, failure.pause_s), self._section.timeout_s))
        if rows and self._section.on_failure == "drop":
            _logger.warning("%d rows dropped: %s", len(rows), text)
            self.counts.update(dropped_rows=len(rows))
            return [DROPPED] * len(rows)
        tries = f" in {number + 1} calls" if number else ""
        raise (RewardTimeoutError if failure.is_timeout else DataError)(
            f"{text}{tries}; correct the service or its address, or let {section}.on_failure drop the rows"
        )

    async def _call(
        self, session: aiohttp.ClientSession, url: str, body: bytes, rows: Sequence[int]
    ) -> list[float]:
        most_bytes = REPLY_BYTES + SCORE_BYTES * len(rows)
        try:
            async with session.post(url, data=body, allow_redirects=False) as reply:
                content = bytearray()
                async for part in reply.content.iter_any():
                    content += part
                    if len(content) > most_bytes:
                        reply.close()
                        raise _CallError(f"returned more than {most_bytes} bytes")
        except TimeoutError:
            limit_s = self._section.timeout_s
            raise _CallError(f"did not return within {limit_s:g} s", 0.0, is_timeout=True) from None
        except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError) as error:
            raise _CallError(f"no reply ({error or type(error).__name__})", 0.0) from None
        except aiohttp.ClientError as error:
            raise _CallError(f"no reply in HTTP ({type(error).__name__}: {error})") from None
        if reply.ok and reply.status < 300:
            return _scores(content, rows)
        raise self._refused(reply, content)

    def _refused(self, reply: aiohttp.ClientResponse, content: bytearray) -> _CallError:
        """Return the failure that a status stands for."""
        text = f"answered {reply.status} {reply.reason or ''}".rstrip()
        if target := reply.headers.get("Location"):
            return _CallError(f"{text}, a redirect to {shown(target)}, which is not followed")
        if content:
            text += f", {shown(content.decode(errors='replace'))}"
        if reply.status not in PASSING and reply.status < 500:
            return _CallError(text)
        pause_s, limit_s = _pause_s(reply.headers.get("Retry-After", "")), self._section.timeout_s
        if pause_s > limit_s:
            return _CallError(f"{text}, and asks for a pause of {pause_s:g} s, longer than {limit_s:g} s")
        return _CallError(text, pause_s)


def _scores(content: bytearray, rows: Sequence[int]) -> list[float]:
    """Return the scores of a reply; raise _CallError if it does not have one finite number for each row."""
    try:
        reply = json.loads(content)
    except (ValueError, RecursionError):
        raise _CallError(f"returned {shown(content.decode(errors='replace'))}, which is not JSON") from None
    scores = reply.get("scores") if isinstance(reply, dict) else None
    if not isinstance(scores, list):
        raise _CallError(f'returned {shown(reply)}, and a reply is {{"scores": [...]}}')
    if len(scores) != len(rows):
        raise _CallError(f"returned {len(scores)} scores for {len(rows)} responses, and each has one")
    for row, score in zip(rows, scores, strict=True):
        if not (isinstance(score, int | float) and abs(score) <= LARGEST_SCORE):
            raise _CallError(
                f"returned {shown(score)} for row {row}, and a score is a finite number that a float32 can hold"
            )
    return [float(score) for score in scores]


def _pause_s(retry_after: str) -> float:
    """Return the seconds that a header Retry-After asks for, a number or a date; 0 if there is none."""
    if retry_after.isascii() and retry_after.isdigit():
        return float(retry_after)
    try:
        until = parsedate_to_datetime(retry_after)
    except ValueError:
        return 0.0
    until = until if until.tzinfo else until.replace(tzinfo=UTC)
    return max(0.0, (until - datetime.now(UTC)).total_seconds())


def _read_key(name: str, path: str) -> str:
    """Return the key in a file, without white space around it, which is hidden in all later output."""
    try:
        key = Path(path).read_bytes().strip()
    except OSError as error:
        raise DataError(
            f"{name}={path} cannot be read ({error.strerror}); write the service's key into it, on all nodes"
        ) from None
    if not key or any(not 32 < byte < 127 for byte in key):
        raise DataError(
            f"{name}={path} must hold one word of ASCII characters, the service's key; write it anew"
        )
    remember_secrets(SecretStr(key.decode()))
    return key.decode()
