"""What a rank and a process of episodes tell each other, as lines of JSON: reading them executes no code."""

from __future__ import annotations

import json
import zlib
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from hybridengine.version import __version__


@dataclass(frozen=True)
class Limits:
    """Limits of an episode."""

    max_tokens: int
    """Largest number of tokens after the prompt, drawn and added."""
    max_turns: int
    vocab_size: int
    """Tokens are numbers from 0 to this, exclusive."""
    deadline_s: float
    """Time limit of an episode from its start in this process."""
    blocked_s: float
    """Time for which code of an episode may run without a pause."""
    metrics: list[str] = field(default_factory=list)
    """Names of the numbers that it may return."""
    needs_reward: bool = False
    """True if its reward is a score of the run."""


@dataclass(frozen=True)
class RunTokenizer:
    """The tokenizer of a run, for processes that may read another one."""

    folder: str
    """Its folder on the rank's host."""
    digests: dict[str, str]
    """What `Chat.digests` returns for it."""


@dataclass(frozen=True)
class DrawnTurn:
    """One turn of the model."""

    added: list[int]
    """Tokens that were added before it, since the turn before."""
    token_ids: list[int]
    log_probs: list[float]
    stopped: bool
    """True if a stop token or string has ended the turn; False if it reached its number of tokens."""


@dataclass(frozen=True)
class Wanted:
    """Request of an episode for a turn."""

    number: int
    """Number of the episode."""
    turn: int
    """Number of the turn, from 0. Turns from this one on that an earlier process has drawn are forgotten."""
    added: list[int]
    """Tokens since the turn before."""
    max_tokens: int
    stop_token_ids: list[int]
    """Tokens that end the turn, in addition to those that end a response."""
    stop_strings: list[str]


@dataclass(frozen=True)
class Ended:
    """End of an episode."""

    number: int
    reward: float | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    trained: list[bool] = field(default_factory=list)
    """For each turn that the function has had, False if its tokens are not trained; empty if it failed."""
    kind: str = ""
    """Why it failed: a key of `FAILURES`; empty if it did not."""
    text: str = ""
    """Description of the failure."""
    turn: int = 0
    """Turn at which it failed."""


_MESSAGES = (Limits, RunTokenizer, DrawnTurn, Wanted, Ended)
_FIELDS = {kind.__name__: [one.name for one in fields(kind)] for kind in _MESSAGES}
_FIELDS |= {"ping": [], "alive": [], "worn": []}  # messages without content
VERSION = f"{__version__} (messages {zlib.crc32(repr(_FIELDS).encode()):08x})"
"""Version of this project and of these messages, which must be that of the other side."""

FAILURES = {
    "raised": "the function raised an error",
    "deadline": "it took longer than deadline_s",
    "blocked": "it kept the other episodes from running",
    "tokens": "its tokens did not fit into rollout.max_response_tokens",
    "turns": "it wanted more than max_turns turns",
    "result": "it returned what no episode can",
    "process": "its process ended",
}
"""Kind of a failure -> its meaning."""


def line(kind: str, content: Any) -> bytes:
    """Return a line with a message; its content is a dataclass or plain values."""
    plain = asdict(content) if hasattr(type(content), "__dataclass_fields__") else content
    return json.dumps([kind, plain]).encode() + b"\n"
