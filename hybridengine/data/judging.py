"""Prompts of a generative judge about responses, and the scores in its verdicts."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

from hybridengine.config.judge_section import JudgeSection
from hybridengine.data.reward_process import RewardProcess
from hybridengine.data.special_tokens import SpecialTokens
from hybridengine.data.tokenizer import load_tokenizer
from hybridengine.errors import ConfigError, DataError, shown

PLACES = re.compile(r"\{(prompt|response|answer)\}")


class JudgePrompts:
    """The prompts of a judge, in tokens of its own tokenizer.

    Args:
        key: of the judge's section, for messages: "reward.judge".
        folder: checkpoint with the judge's tokenizer.
    """

    def __init__(self, key: str, judge: JudgeSection, folder: str | Path) -> None:
        self._key, self._judge, self._folder = key, judge, folder
        self.tokenizer = load_tokenizer(folder, pad_with_eos=True)
        self._special = SpecialTokens(self.tokenizer)

    def check(self) -> None:
        """Raise ConfigError if the chat template refuses the messages, or they leave no room for a response."""
        try:
            num_tokens = len(self._tokens({"prompt": "", "response": "", "answer": ""}))
        except Exception as error:  # jinja's, and those of code in the template
            raise ConfigError(
                f"{self._key}.messages are refused by the chat template of {self._folder} ({error}); choose other roles,"
                f" or write {self._key}.text"
            ) from None
        most = self._judge.max_prompt_tokens
        if num_tokens >= most:
            raise ConfigError(
                f"{self._key}.max_prompt_tokens={most} leaves no room for a response beside the {num_tokens} tokens of"
                " the template; raise it, or shorten the template"
            )

    def tokens(self, prompt: str, response: str, answer: str) -> list[int] | None:
        """Return what the judge reads about one response, or None if it is longer than `max_prompt_tokens`.

        Special tokens of the judge in the three texts are left out, so that a response cannot end its message.
        """
        values = {"prompt": prompt, "response": response, "answer": answer}
        found = self._tokens(self._special.removed_from(values))
        return found if len(found) <= self._judge.max_prompt_tokens else None

    def _tokens(self, values: dict[str, str]) -> list[int]:
        def filled(text: str) -> str:
            return PLACES.sub(lambda place: values[place[1]], text)

        if self._judge.text:
            return list(self.tokenizer(filled(self._judge.text)).input_ids)
        messages = [{"role": one.role, "content": filled(one.content)} for one in self._judge.messages]
        text: Any = self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        return list(self.tokenizer(text, add_special_tokens=False).input_ids)


class Verdicts:
    """Scores of a judge's verdicts, by a regular expression or a function in a process of its own.

    Args:
        key: of the judge's section, for messages: "reward.judge".
        timeout_s: time limit of the function for one verdict.
        start_timeout_s: time limit of the function's start.
    """

    def __init__(self, key: str, judge: JudgeSection, timeout_s: float, start_timeout_s: float) -> None:
        self._key, self._judge = key, judge
        self._otherwise = f"choose another {key}.on_unparsed"
        self._regex = re.compile(judge.regex) if judge.regex else None
        self._parser = None
        if judge.parser is not None:
            self._parser = RewardProcess(
                judge.parser,
                key=f"{key}.parser",
                otherwise=self._otherwise,
                timeout_s=timeout_s,
                start_timeout_s=start_timeout_s,
            )

    def start(self) -> None:
        """Start the function's process, if there is a function; raise DataError if it cannot be loaded."""
        if self._parser is not None:
            self._parser.start()

    def score(self, verdict: str, answer: str, row: int) -> float:
        """Return the score of a verdict on a row's response; raise DataError if it has no valid one."""
        where = f"{self._key}, row {row}: the verdict {shown(verdict)} has no valid score"
        if self._parser is not None:
            try:
                (score,) = self._parser.call({"responses": [verdict], "answers": [answer]}, [row])
            except DataError as error:
                raise DataError(f"{where}: {error}") from error
        else:
            assert self._regex is not None, "a judge has a regular expression or a function"
            *_, match = [None, *self._regex.finditer(verdict)]
            try:
                score = float(match[1]) if match else math.nan
            except (TypeError, ValueError):  # a group that takes no part in the match, or not a number
                score = math.nan
        low, high = self._judge.range or (-math.inf, math.inf)
        if not (math.isfinite(score) and low <= score <= high):
            reads = f"{self._key}.{'regex' if self._parser is None else 'parser'}"
            raise DataError(f"{where}; look at the template, {reads} or the range, or {self._otherwise}")
        return score

    def close(self) -> None:
        """End the function's process."""
        if self._parser is not None:
            self._parser.close()


def check_judge(key: str, judge: JudgeSection, folder: str | Path, timeout_s: float) -> JudgePrompts:
    """Return the prompts of a judge; raise ConfigError or DataError for an unusable tokenizer, template or parser."""
    prompts = JudgePrompts(key, judge, folder)
    prompts.check()
    verdicts = Verdicts(key, judge, timeout_s, timeout_s)
    try:
        verdicts.start()
    finally:
        verdicts.close()
    return prompts
