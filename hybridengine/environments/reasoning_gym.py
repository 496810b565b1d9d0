"""Problems of reasoning-gym (github.com/open-thought/reasoning-gym), scored by their dataset."""

from __future__ import annotations

import ast
import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from hybridengine.environments.environment import (
    Prompt,
    constructed,
    meant,
    plain,
    settings_of,
    system_message,
)
from hybridengine.episodes.client import Client, LimitError, Result, Row
from hybridengine.errors import DataError, shown

SEED_STRIDE = 1_000_003
"""Distance between seeds: reasoning-gym draws entry i from seed s + i, so neighbouring seeds would share problems."""
SOLVED = 1.0
"""Score of a right answer."""


@dataclass(frozen=True)
class Settings:
    """How a problem is asked and answered."""

    instructions: str = ""
    """Text of a system message before the problem."""
    tries: int = 1
    """Answers that the model may give, until one is right."""
    feedback: str = "That is not right. Try again."
    """Message after a wrong answer."""
    max_tokens: int = 0
    """Longest answer; no limit but the response's with 0."""

    def __post_init__(self) -> None:
        if self.tries < 1:
            raise DataError("settings.tries=0 must be at least 1: the model would never answer; correct it")


class ReasoningGym:
    """A dataset. An answer is the text in <answer>...</answer> where the model writes that, else the whole turn.

    The reward is the dataset's `score_answer` of the last answer, from 0 to 1, and 0 if it raises an error; metrics are
    `tries`, `solved` and `unread`, the number of answers for which it does.
    """

    def __init__(self, name: str, options: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
        from reasoning_gym.factory import DATASETS

        if name not in DATASETS:
            raise DataError(f"is not a dataset of reasoning-gym; {meant(name, DATASETS)}")
        if reserved := {"seed", "size"} & {*options}:
            raise DataError(
                f"options.{min(reserved)} is set by data.environment's seed and rows; leave it out"
            )
        self._name, self._options = name, options
        self._settings = settings_of(Settings, settings)
        self._scorer = self._dataset(0, 1)

    def prompts(self, seed: int, count: int) -> Iterator[Prompt]:
        # Some datasets take seeds of 32 bits only, to which they add the number of the row.
        source = self._largest(seed * SEED_STRIDE % 2**31, count)
        for index in range(len(source)):
            entry = source[index]
            asked = {"role": "user", "content": entry["question"]}
            # All of the entry: some datasets take seconds for one, or make another one in another process.
            answer = {"answer": str(entry["answer"]), "entry": _literal(entry)}
            yield Prompt([*system_message(self._settings.instructions), asked], answer, f"{asked['content']}")

    async def play(self, client: Client, row: Row, answer: Any) -> Result:
        from reasoning_gym.utils import extract_answer

        entry = ast.literal_eval(answer["entry"])
        tries, score, unread = 0, 0.0, 0
        with contextlib.suppress(LimitError):  # it is cut off, and its last answer counts
            while score < SOLVED and tries < self._settings.tries:
                if tries:
                    client.add({"role": "user", "content": self._settings.feedback})
                turn = await client.generate(max_tokens=self._settings.max_tokens or None)
                tries += 1
                found = extract_answer(turn.text)
                given = turn.text.strip() if found is None else found
                try:
                    score = float(self._scorer.score_answer(answer=given, entry=entry))
                # Some datasets evaluate the text, or raise an error where they find no answer in it.
                except (Exception, SystemExit):
                    score, unread = 0.0, unread + 1
        return Result(score, {"tries": tries, "solved": float(score >= SOLVED), "unread": unread})

    def _largest(self, seed: int, count: int) -> Any:
        """Return a dataset of `count` problems, or of the largest size that it takes (word_ladder)."""
        found, fits, size = None, 0, count
        while size > fits:
            try:
                found, fits = self._dataset(seed, size), size
            except DataError:
                if size == 1:
                    raise
                count = size
            size = (fits + count) // 2
        return found

    def _dataset(self, seed: int, size: int) -> Any:
        import reasoning_gym
        from reasoning_gym.composite import DatasetSpec

        options = dict(self._options)
        try:
            if self._name == "composite":
                options["datasets"] = [DatasetSpec(**one) for one in options.get("datasets", ())]
            return reasoning_gym.create_dataset(self._name, seed=seed, size=size, **options)
        except Exception as error:  # asserts and whatever a dataset's configuration raises
            raise constructed(error) from None


def _literal(entry: Any) -> str:
    """Return an entry as a literal of Python: JSON would make lists of its tuples, and strings of its keys."""
    text = repr(plain(entry))
    try:
        ast.literal_eval(text)
    except (ValueError, SyntaxError):
        raise DataError(
            f"has a problem that is not made of numbers, texts and collections of them ({shown(text)}), and cannot be"
            " written to a data file; choose another dataset"
        ) from None
    return text
