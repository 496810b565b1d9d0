"""The engine as an episode sees it: a sequence of tokens, which grows by turns of the model and by what is added."""

from __future__ import annotations

import asyncio
import contextlib
import numbers
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from hybridengine.data.chat import Chat
from hybridengine.data.reward_child import LARGEST_SCORE
from hybridengine.episodes.wire import DrawnTurn, Limits, Wanted
from hybridengine.errors import DataError, shown

Message = Mapping[str, Any]
"""A chat message: `role`, `content`, and keys that the chat template reads."""


class EpisodeError(DataError):
    """An episode asked for what it cannot have; the message says what. Uncaught, it fails the episode."""


class LimitError(EpisodeError):
    """An episode is as long as it may be, and can end with what it has reached."""


class TokenLimitError(LimitError):
    """The tokens of an episode do not fit into `rollout.max_response_tokens`."""


class TurnLimitError(LimitError):
    """An episode wants more turns than `rollout.episode.max_turns`."""


@dataclass(frozen=True)
class Row:
    """The row of a data file that an episode belongs to."""

    number: int
    """Number of the row in its file, from 0."""
    prompt: str | list[Message]
    """Prompt as in the file: a text or chat messages."""
    prompt_tokens: tuple[int, ...]
    """Prompt in the chat template, up to where the model's first turn begins."""
    answer: str
    """The row's answer: a text, or the JSON of any other value."""
    seed: int
    """Seed of the response: others of the same prompt have other seeds."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """`rollout.episode.options` of the configuration."""

    @property
    def messages(self) -> list[Message]:
        """Prompt as chat messages: plain text is one user message."""
        return [{"role": "user", "content": self.prompt}] if isinstance(self.prompt, str) else self.prompt


@dataclass(eq=False)
class Turn:
    """Tokens that the model drew in one turn."""

    number: int
    """Number of the turn, from 0."""
    token_ids: tuple[int, ...]
    """Tokens, with the stop token if one has ended the turn."""
    log_probs: tuple[float, ...]
    """Log-probability of each token under the distribution that it was drawn from."""
    stopped: bool
    """True if a stop token or string has ended the turn; False if it reached its number of tokens."""
    is_trained: bool = True
    """Set it to False to keep the turn's tokens out of the loss."""
    _decode: Callable[[Sequence[int]], str] = field(default=str, repr=False)

    @cached_property
    def text(self) -> str:
        """Tokens as text, without special tokens."""
        return self._decode(self.token_ids)


@dataclass(frozen=True)
class Result:
    """What an episode returns."""

    reward: float | None = None
    """Its reward, for `reward.kind: episode`."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Numbers by name, whose means are metrics of the iteration: `episode/NAME`."""
    turns: Sequence[Turn] | None = None
    """Turns whose tokens are trained; all by default. They are the client's, unchanged."""


class Client:
    """One episode's sequence of tokens. It belongs to the episode's function; one turn is drawn at a time."""

    def __init__(
        self,
        number: int,
        row: Row,
        limits: Limits,
        chat: Chat,
        ask: Callable[[Wanted], Awaitable[DrawnTurn]],
        recorded: Sequence[DrawnTurn] = (),
    ) -> None:
        self._turns: list[Turn] = []
        self._drawn: list[tuple[int, ...]] = []
        """Tokens of each turn, also where a function has changed `Turn.token_ids`."""
        self._number, self._row, self._limits = number, row, limits
        self._chat, self._ask = chat, ask
        self._recorded = [*recorded]
        self._tokens: list[int] = []
        """Tokens after the prompt."""
        self._added: list[int] = []
        """Those since the last turn."""
        self._is_open = True
        """True if the chat template has opened the assistant's next turn."""
        self._is_drawing = False

    @property
    def tokens(self) -> tuple[int, ...]:
        """All tokens so far: the row's prompt, and everything after it."""
        return (*self._row.prompt_tokens, *self._tokens)

    @property
    def turns(self) -> tuple[Turn, ...]:
        """Turns so far."""
        return tuple(self._turns)

    @property
    def metric_names(self) -> tuple[str, ...]:
        """Names of the numbers that the function may return: `rollout.episode.metrics`."""
        return tuple(self._limits.metrics)

    @property
    def num_tokens_left(self) -> int:
        """Number of tokens that can still be drawn or added."""
        return self._limits.max_tokens - len(self._tokens)

    def add(self, content: str | Sequence[int] | Message | Sequence[Message]) -> tuple[int, ...]:
        """Add what the model reads next, and does not learn; return its tokens.

        A text is added as it is: special tokens written in it are special, and none are put around it. Chat messages are
        added in the model's template, so that the assistant's next turn follows, without special tokens in their texts;
        a turn that ended without its stop token gets it first. Tokens drawn before are never tokenised again.

        Raises:
            TokenLimitError: it does not fit.
            EpisodeError: tokens that the model does not know.
            DataError: messages that the chat template refuses, or a template that does not repeat earlier turns.
        """
        if isinstance(content, str):
            added = self._chat.text_tokens(content)
        elif isinstance(content, Mapping):
            added = self._message_tokens([content])
        elif content and all(isinstance(one, Mapping) for one in content):
            added = self._message_tokens(content)  # type: ignore[arg-type]
        else:
            added = self._checked_tokens(content)  # type: ignore[arg-type]
        if len(added) > self.num_tokens_left:
            raise TokenLimitError(
                f"{len(added)} tokens were added where {self.num_tokens_left} of rollout.max_response_tokens="
                f"{self._limits.max_tokens} are left; add less, or raise the limit"
            )
        self._tokens += added
        self._added += added
        return tuple(added)

    async def generate(
        self,
        prompt: Sequence[int] | None = None,
        *,
        max_tokens: int | None = None,
        stop: str | Sequence[str] = (),
        stop_token_ids: Sequence[int] = (),
    ) -> Turn:
        """Draw the model's next turn.

        Args:
            prompt: all tokens before the turn, which begin with `tokens`; by default `tokens`.
            max_tokens: longest turn; by default and at most `num_tokens_left`.
            stop: texts that end the turn, in addition to the tokens that end a response; the turn ends with them.
            stop_token_ids: tokens that end the turn, likewise.

        Raises:
            TokenLimitError: no token is left.
            TurnLimitError: there have been `rollout.episode.max_turns` turns.
            EpisodeError: another turn is being drawn, or an argument is out of range.
        """
        if self._is_drawing:
            raise EpisodeError("another turn of this episode is being drawn; await it first")
        if prompt is not None:
            self._add_rest(prompt)
        stops = [stop] if isinstance(stop, str) else [*stop]
        if any(not isinstance(one, str) or not one for one in stops):
            raise EpisodeError(f"stop={shown(stop)} must be texts that are not empty; leave it out for none")
        if max_tokens is not None and max_tokens < 1:
            raise EpisodeError(f"max_tokens={max_tokens} must be at least 1")
        if len(self._turns) >= self._limits.max_turns:
            raise TurnLimitError(
                f"turn {len(self._turns)} exceeds rollout.episode.max_turns={self._limits.max_turns}; end earlier, or"
                " raise the limit"
            )
        if self.num_tokens_left < 1:
            raise TokenLimitError(
                f"none of rollout.max_response_tokens={self._limits.max_tokens} is left; end earlier, or raise the limit"
            )
        most = min(max_tokens or self.num_tokens_left, self.num_tokens_left)
        ends = self._checked_tokens(stop_token_ids)
        wanted = Wanted(self._number, len(self._turns), [*self._added], most, ends, stops)
        self._is_drawing = True
        try:
            if (drawn := self._replayed(wanted)) is None:
                drawn = await self._ask(wanted)
            else:
                await asyncio.sleep(0)  # others run between two turns here as well
        finally:
            self._is_drawing = False
        self._tokens += drawn.token_ids
        self._added, self._is_open = [], False
        tokens, log_probs = tuple(drawn.token_ids), tuple(drawn.log_probs)
        self._turns.append(
            Turn(len(self._turns), tokens, log_probs, drawn.stopped, _decode=self._chat.decoded)
        )
        self._drawn.append(tokens)
        return self._turns[-1]

    def _replayed(self, wanted: Wanted) -> DrawnTurn | None:
        """Return the turn that an earlier process has drawn here; None for a new one.

        A function that adds something else than before gets new turns from there on.
        """
        if wanted.turn >= len(self._recorded):
            return None
        if (drawn := self._recorded[wanted.turn]).added == wanted.added:
            return drawn
        del self._recorded[wanted.turn :]
        return None

    def _add_rest(self, prompt: Sequence[int]) -> None:
        tokens, given = [*self.tokens], self._checked_tokens(prompt)
        if given[: len(tokens)] != tokens:
            pairs = enumerate(zip(tokens, given, strict=False))
            place = next((place for place, (ours, theirs) in pairs if ours != theirs), len(given))
            raise EpisodeError(
                f"the prompt of turn {len(self._turns)} differs from the {len(tokens)} tokens of the episode at token"
                f" {place}: an episode is one sequence of tokens, which are never tokenised again; pass client.tokens and"
                " what follows"
            )
        self.add(given[len(tokens) :])

    def _message_tokens(self, messages: Sequence[Message]) -> list[int]:
        if self._is_open:
            raise EpisodeError(
                "messages were added where the chat template has opened the assistant's turn; add all messages between"
                " two turns at once, and those before the first turn to the data's prompt"
            )
        last = self._turns[-1].token_ids if not self._added else ()
        tokens = self._chat.message_tokens(messages, last)
        self._is_open = True
        return tokens

    def _checked_tokens(self, tokens: Sequence[int]) -> list[int]:
        wrong = next((one for one in tokens if not _is_token(one, self._limits.vocab_size)), None)
        if wrong is not None:
            raise EpisodeError(
                f"{shown(wrong)} is not a token of the model, which knows 0 to {self._limits.vocab_size - 1}; use its own"
                " tokenizer"
            )
        return [int(one) for one in tokens]

    def check_result(self, returned: object) -> tuple[float | None, dict[str, float], list[bool]]:
        """Return the reward, the metrics and which turns are trained of what the function has returned.

        Raises EpisodeError for what is none of `Result`, a finite number that a float32 can hold and None, and for turns
        that the model did not draw.
        """
        if returned is None or isinstance(returned, numbers.Real):
            returned = Result(returned)  # type: ignore[arg-type]
        if not isinstance(returned, Result):
            raise EpisodeError(
                f"it returned {shown(returned)}, a {type(returned).__name__}; return a Result, a number or None"
            )
        if returned.reward is None and self._limits.needs_reward:
            raise EpisodeError(
                "it returned no reward, which a kind=episode of the run's scores reads; return one"
            )
        if strange := {*map(str, returned.metrics)} - {*self._limits.metrics}:
            raise EpisodeError(
                f"it returned the metric {min(strange)!r}, and rollout.episode.metrics has {self._limits.metrics};"
                " add it there"
            )
        reward = None if returned.reward is None else _finite(returned.reward, "the reward")
        metrics = {
            str(name): _finite(value, f"metrics[{name!r}]") for name, value in returned.metrics.items()
        }
        own = [self._checked_turn(turn) for turn in self._turns]
        trained = [self._turns[number].is_trained for number in own]
        if returned.turns is not None:
            kept = {self._checked_turn(turn) for turn in returned.turns}
            trained = [flag and number in kept for number, flag in enumerate(trained)]
        return reward, metrics, trained

    def _checked_turn(self, turn: object) -> int:
        number: Any = getattr(turn, "number", None)
        drawn = self._drawn[number] if isinstance(number, int) and 0 <= number < len(self._drawn) else None
        if drawn is None or tuple(getattr(turn, "token_ids", ())) != drawn:
            raise EpisodeError(
                f"it returned turn {shown(number)} with tokens that the model did not draw; return turns of client.turns"
                " as they are"
            )
        return number


def _is_token(value: object, vocab_size: int) -> bool:
    return (
        isinstance(value, numbers.Integral) and not isinstance(value, bool) and 0 <= int(value) < vocab_size
    )


def _finite(value: object, name: str) -> float:
    with contextlib.suppress(OverflowError):  # oversized integers
        if isinstance(value, numbers.Real) and abs(number := float(value)) <= LARGEST_SCORE:
            return number
    raise EpisodeError(
        f"{name} of an episode is {shown(value)}, a {type(value).__name__}; return a finite number that a float32 can"
        " hold"
    )
