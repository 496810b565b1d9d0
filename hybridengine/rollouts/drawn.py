"""Tokens that an engine has drawn in one call."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from hybridengine.episodes.wire import Ended
from hybridengine.rows.supports import WHOLE

ADDED, DRAWN, CUT, STOPPED = range(4)
"""Marks of a token of an episode: added by its function; drawn; the last of a turn that reached its number of tokens; the
last of a turn that a stop token or string has ended."""


@dataclass(frozen=True)
class DrawnSupports:
    """Supports of tokens, one after another: without any, all have been drawn from the whole vocabulary."""

    sizes: np.ndarray
    """Number of words of each, int64 [T]."""
    words: np.ndarray
    """int32."""

    @classmethod
    def of(cls, supports: Sequence[np.ndarray]) -> DrawnSupports:
        """Return the supports as they are sent and saved."""
        sizes = np.array([len(one) for one in supports], dtype=np.int64)
        return cls(sizes, np.concatenate([WHOLE, *supports]))

    def each(self, num_tokens: int) -> list[np.ndarray]:
        """Return the support of each of the tokens."""
        if not len(self.words):
            return [WHOLE] * num_tokens
        return np.split(self.words, np.cumsum(self.sizes)[:-1])


@dataclass(frozen=True)
class Drawn:
    """New tokens of some responses, one after another: N responses, T tokens in all."""

    numbers: np.ndarray
    """Numbers of the responses, int64 [N]."""
    counts: np.ndarray
    """New tokens of each, int64 [N]."""
    has_ended: np.ndarray
    """True for responses that are complete, bool [N]."""
    tokens: np.ndarray
    """int32 [T]."""
    log_probs: np.ndarray
    """Log-probabilities at which the tokens were drawn, float32 [T]."""
    versions: np.ndarray
    """Versions of the weights that drew them, int32 [T]."""
    routes: tuple[np.ndarray, ...] = ()
    """New experts of each response's tokens, [n, L, K] (`Response.routes`); none unless engines keep them."""
    supports: DrawnSupports = field(default_factory=lambda: DrawnSupports.of(()))
    """Supports of the tokens (`Response.supports`)."""
    marks: np.ndarray | None = None
    """Marks of the tokens of episodes, uint8 [T]; an added token has the log-probability 0 and the version -1."""
    kept: np.ndarray | None = None
    """Number of earlier tokens of each episode that the new ones follow, int64 [N]; others are forgotten."""
    kept_routes: np.ndarray | None = None
    """Number of tokens of each episode's prompt and response whose earlier experts the new ones follow, likewise."""
    outcomes: dict[int, Ended] = field(default_factory=dict)
    """Outcomes of the episodes that have ended, by the number of their responses."""

    @property
    def num_tokens(self) -> int:
        """New tokens of all responses, T."""
        return len(self.tokens)

    def parts(self) -> Iterator[tuple[int, bool, slice]]:
        """Yield (number, has ended, place of its new tokens) of every response."""
        ends = np.cumsum(self.counts)
        for number, has_ended, count, end in zip(
            self.numbers, self.has_ended, self.counts, ends, strict=True
        ):
            yield int(number), bool(has_ended), slice(int(end - count), int(end))
