"""Prompts through a tokenizer's chat template: a program of whoever made the tokenizer, which must fail well and end.

Jinja's sandbox, in which transformers renders, keeps it from the machine, not from computing for ever or filling the
memory; the limits here do.
"""

from __future__ import annotations

import contextlib
import resource
import signal
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from threading import current_thread, main_thread
from typing import Any

import jinja2
from transformers import PreTrainedTokenizerBase

from hybridengine.data.rows import MAX_LISTED_PROBLEMS, Row, raise_listed
from hybridengine.errors import DataError

MAX_RENDER_S = 10.0
"""CPU time that one prompt may take; a template takes a thousandth of a second."""
MAX_RENDER_BYTES = 2 * 2**30
"""Memory beyond the process's own that rendering may take."""
MAX_CHARACTERS_PER_TOKEN = 256
"""Twice the longest tokens of known vocabularies, runs of spaces: a text with more on average has too many tokens."""


class _TooLongError(Exception):
    """The template has not ended in time."""


def rendered_prompts(
    rows: Sequence[Row], tokenizer: PreTrainedTokenizerBase, max_tokens: int
) -> tuple[list[str], list[str]]:
    """Return each row's prompt with the start of the assistant's turn, "" where there is a problem, and the problems.

    Raises:
        DataError: the template does not end, fills the memory, or fails for as many rows as a message lists.
    """
    template = f"the chat template of {tokenizer.name_or_path or 'the tokenizer'}"
    texts, problems, place = list[str](), list[str](), ""
    try:
        with _limited() as begin:
            for row in rows:
                place = row.place
                begin()
                text, problem = _rendered(row, tokenizer, template, max_tokens)
                texts.append("" if problem else text)
                problems += [problem] if problem else []
                if len(problems) > MAX_LISTED_PROBLEMS:  # each may have taken seconds
                    raise_listed(problems)
    except _TooLongError:
        raise DataError(
            f"{place}: {template} did not end in {MAX_RENDER_S:g} s; correct its loops in the tokenizer's folder"
        ) from None
    except MemoryError:
        raise DataError(
            f"{place}: {template} takes more than {MAX_RENDER_BYTES >> 30} GiB of memory; correct it in the tokenizer's"
            " folder"
        ) from None
    return texts, problems


def length_problem(row: Row, key: str, num_characters: int, max_tokens: int) -> str:
    """Return the problem of a text that is too long to be tokenised, or "". Tokenising 100 MB would take a minute."""
    most = max_tokens * MAX_CHARACTERS_PER_TOKEN
    if num_characters <= most:
        return ""
    return (
        f"{row.place}: the {key} has {num_characters} characters, max_{key}_tokens={max_tokens} holds at most {most};"
        f" raise the limit or shorten the {key}"
    )


def _rendered(
    row: Row, tokenizer: PreTrainedTokenizerBase, template: str, max_tokens: int
) -> tuple[str, str]:
    """A row's text and what is wrong with it, "" for nothing."""
    given = sum(len(message["content"]) for message in row.messages)
    if problem := length_problem(row, "prompt", given, max_tokens):
        return "", problem
    try:
        text: Any = tokenizer.apply_chat_template(row.messages, tokenize=False, add_generation_prompt=True)
        text.encode()
    except (_TooLongError, MemoryError):
        raise
    except jinja2.TemplateError as error:
        return "", f"{row.place}: the chat template refuses the prompt ({error}); correct its roles"
    except Exception as error:  # a template is a program: arithmetic, types, the sandbox's own limits
        reason = f"{type(error).__name__}: {error}"
        return "", f"{row.place}: {template} fails ({reason}); correct it in the tokenizer's folder"
    return text, length_problem(row, "prompt", len(text), max_tokens)


@contextlib.contextmanager
def _limited() -> Iterator[Callable[[], object]]:
    """Limit memory, and CPU time from each call of what is returned: MemoryError and `_TooLongError` end what exceeds.

    CPU time, since a busy machine must not fail a run. Python runs signal handlers on the main thread only.
    """

    def end(*_: object) -> None:
        raise _TooLongError

    if current_thread() is not main_thread():
        yield lambda: None
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    most = min(limit for limit in (soft, hard, used + MAX_RENDER_BYTES) if limit != resource.RLIM_INFINITY)
    before = signal.signal(signal.SIGVTALRM, end)
    resource.setrlimit(resource.RLIMIT_AS, (most, hard))
    try:
        yield lambda: signal.setitimer(signal.ITIMER_VIRTUAL, MAX_RENDER_S, 1.0)
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
        signal.signal(signal.SIGVTALRM, before)
