"""Distributions of response lengths, and the micro-batches of rows with such lengths.

They are written as KIND:PARAMETERS, with lengths in tokens:

    constant:512                      the same length for every response
    uniform:1-1024                    every length of the range with equal probability
    lognormal:mean=400,cv=0.8         mean and coefficient of variation (standard deviation over mean)
    lengths.txt                       empirical distribution of the lengths in a file, one number per line

Lengths beyond the longest response that a run allows are cut to it, as in generation.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np

from hybridengine.errors import ConfigError, UnreadableError, shown
from hybridengine.files import read_text
from hybridengine.rows.balance import balance_rows

FORMS = "constant:N, uniform:LOW-HIGH, lognormal:mean=M,cv=C, or a file with one length a line"
RANGES = "N and LOW from 1 on, HIGH no lower than LOW, M from 1 to 1e9, C above 0 and at most 20"
GOLDEN = 0.6180339887498949
"""Golden ratio minus 1; the fractional parts of its multiples are evenly spread."""
NUMBER = r"[0-9]{1,9}(?:\.[0-9]+)?(?:e[0-9])?"


@dataclass(frozen=True, eq=False)
class Lengths:
    """Distribution of response lengths, from 1 to `max_tokens` tokens."""

    name: str
    survival_T: np.ndarray
    """P(length > i) for i = 0, 1, ..., max_tokens - 1: the share that runs while token i + 1 is made. The first is 1."""
    cut_share: float = 0.0
    """Share of the responses that are cut to the longest length that the run allows."""

    def __str__(self) -> str:
        """Return the name, mean and longest response: "lognormal:mean=400,cv=0.8 (mean 382, 4% cut to 1024)"."""
        cut = f"{self.cut_share:.0%} cut to" if self.cut_share >= 0.005 else "at most"
        return f"{self.name} (mean {self.mean:.0f}, {cut} {self.max_tokens})"

    @property
    def max_tokens(self) -> int:
        return len(self.survival_T)

    @cached_property
    def mean(self) -> float:
        return float(self.survival_T.sum())

    @cached_property
    def mean_square(self) -> float:
        return float(((2 * np.arange(self.max_tokens) + 1) * self.survival_T).sum())

    @property
    def mean_position(self) -> float:
        """Mean number of tokens generated so far by the responses that run at a random moment, mostly long ones."""
        return self.mean_square / (2 * self.mean)

    def quantiles(self, shares: np.ndarray) -> np.ndarray:
        """Return, for each share, the smallest length that at least this share of the responses does not exceed."""
        cumulative = 1.0 - self.survival_T[1:]  # P(length <= 1), P(length <= 2), ..., without the last, 1
        return 1 + np.searchsorted(cumulative, np.asarray(shares) - 1e-12)

    def spread(self, count: int) -> np.ndarray:
        """Return `count` lengths that represent the distribution, ascending: its quantiles at (k + 1/2) / count."""
        return self.quantiles((np.arange(count) + 0.5) / count)

    def sample(self, generator: np.random.Generator, count: int) -> np.ndarray:
        return self.quantiles(generator.random(count))

    @classmethod
    def of(cls, text: str, max_tokens: int) -> Lengths:
        """Return the distribution that `text` describes, cut to `max_tokens`; a ConfigError says why it is none."""
        kind, colon, values = text.partition(":")
        if colon and kind in _KINDS:
            pattern, survival_of = _KINDS[kind]
            match = re.fullmatch(pattern, values)
            survival = survival_of(np.arange(max_tokens + 1), *map(float, match.groups())) if match else None
            if survival is None:
                raise ConfigError(f"lengths {shown(text)} must have {RANGES}; write {FORMS}")
        else:
            survival = counted(_read(text), max_tokens + 1)
        return cls(text, survival[:-1], float(survival[-1]))

    @classmethod
    def between(
        cls, name: str, shares: Sequence[float], quantiles: Sequence[Sequence[float]], max_tokens: int
    ) -> Lengths:
        """Return the distribution with the given quantiles, uniform between two of them.

        `shares` ascend from 0 to 1; `quantiles` are the lengths at them, for each of several samples of equal weight.
        """
        positions = np.arange(max_tokens)
        survivals = []
        for known in quantiles:
            # P(length > i) for a whole number i: lengths fill (low - 1, high] between two quantiles.
            lengths = np.array([known[0] - 1.0, *known[1:]])
            steps = np.maximum.accumulate(lengths + 1e-9 * np.arange(len(lengths)))
            survivals.append(1.0 - np.interp(positions, steps, shares, left=0.0, right=1.0))
        survival = np.mean(survivals, axis=0)
        survival[0] = 1.0
        return cls(name, survival)


def counted(lengths: Sequence[int], max_tokens: int) -> np.ndarray:
    """Return `survival_T` of the empirical distribution of `lengths`, which must not be empty."""
    cut = np.sort(np.clip(np.asarray(lengths, dtype=np.int64), 1, max_tokens))
    longer = len(cut) - np.searchsorted(cut, np.arange(max_tokens), side="right")
    return longer / len(cut)


def _uniform(positions: np.ndarray, low: float, high: float) -> np.ndarray | None:
    if not 1 <= low <= high:
        return None
    return np.clip((high - positions) / (high - low + 1), 0.0, 1.0)


def _lognormal(positions: np.ndarray, mean: float, variation: float) -> np.ndarray | None:
    """Return P(length > i) of a lognormal distribution, rounded up to integers; `mean` is that before the cut."""
    if not (1.0 <= mean <= 1e9 and 0.0 < variation <= 20.0):
        return None
    from scipy.special import ndtr  # slow to import, and not needed for other lengths

    sigma = math.sqrt(math.log1p(variation**2))
    # log(0) is -inf, for which the share is 1: every response is longer than 0 tokens.
    with np.errstate(divide="ignore"):
        return ndtr((math.log(mean) - sigma**2 / 2 - np.log(positions)) / sigma)


_KINDS: dict[str, tuple[str, Callable[..., np.ndarray | None]]] = {
    "constant": (r"([0-9]{1,9})", lambda positions, length: _uniform(positions, length, length)),
    "uniform": (r"([0-9]{1,9})-([0-9]{1,9})", _uniform),
    "lognormal": (rf"mean=({NUMBER}),cv=({NUMBER})", _lognormal),
}
"""Pattern of the numbers of each kind, and function that returns P(length > i), or None if a number is out of range."""


def _read(path: str) -> list[int]:
    """Return the lengths in a file, rounded up; 0 is allowed."""
    try:
        lines = read_text(path).splitlines()
    except (UnreadableError, FileNotFoundError) as error:
        missing = f"{shown(path)}: no such form, and no such file"
        fault = error if isinstance(error, UnreadableError) else missing
        raise ConfigError(f"lengths {fault}; write {FORMS}") from None
    found = []
    for number, line in enumerate(lines, start=1):
        if line.strip():
            if not re.fullmatch(NUMBER, line.strip()):
                raise ConfigError(
                    f"lengths {path}, line {number}: {shown(line)} is not a number of tokens; write a number from 0 on"
                )
            found.append(math.ceil(float(line)))
    if not found:
        raise ConfigError(f"lengths {path}: the file has no lengths; write one a line")
    return found


@dataclass(frozen=True)
class MicroBatches:
    """Micro-batches of packed rows of one replica."""

    count: int
    tokens: float
    """Mean number of tokens of a micro-batch, prompts and responses."""
    response_tokens: float
    """Mean number of tokens of a micro-batch whose logits are needed."""
    length: float
    """Number of tokens of a row, averaged over tokens."""

    @classmethod
    @lru_cache(maxsize=16384)
    def of(
        cls,
        num_rows: int,
        prompt_tokens: float,
        lengths: Lengths,
        max_tokens: int,
        unit: int = 1,
        row_unit: int = 1,
    ) -> MicroBatches:
        """Return the micro-batches of rows with quantiles of `lengths` as lengths; `unit` rows stay together.

        Each row is padded to a multiple of `row_unit` tokens, which do not count towards `max_tokens`.
        """
        prompt = round(prompt_tokens)
        totals, count = _packed_rows(num_rows, prompt, lengths, max_tokens, unit)
        padded = -(-totals // row_unit) * row_unit
        whole = float(padded.sum())
        return cls(
            count,
            whole / count,
            float(totals.sum() - prompt * len(totals)) / count,
            float((padded.astype(np.float64) ** 2).sum()) / whole,
        )


@lru_cache(maxsize=4096)
def _packed_rows(
    num_rows: int, prompt: int, lengths: Lengths, max_tokens: int, unit: int
) -> tuple[np.ndarray, int]:
    """Return the tokens of rows, with as many added as fill the last unit, and the number of their micro-batches."""
    responses = lengths.spread(num_rows)
    # Lengths within a group differ as much as any others.
    responses = responses[np.argsort(np.arange(num_rows) * GOLDEN % 1.0)] if unit > 1 else responses
    totals = np.resize(prompt + responses, -(-num_rows // unit) * unit)
    units = totals.reshape(-1, unit).sum(axis=1)
    return totals, len(balance_rows(units.tolist(), max(max_tokens, int(units.max()))))
