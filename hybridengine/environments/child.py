"""The process that writes an environment's prompts, perhaps with another Python (`files.py` starts it).

It imports nothing but the standard library, this project's light modules and the environment's own packages.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import socket
import traceback
from collections.abc import Iterator
from typing import Any

from hybridengine.environments.environment import Environment, Prompt, load_environment
from hybridengine.errors import DataError

DRAWS_PER_ROW = 50
"""Prompts drawn per requested row, after which the environment is considered to have too few different ones."""
REPEATS, LEAST_REPEATS = 10, 1000
"""Draws in a row without a new prompt, per prompt found and at least, after which no others are expected: one of N
equally likely ones would be missed with a chance of (1 - 1/N)^(10 N) < 1e-4."""
MAX_TEXT = 2000
"""Characters of an error's text that are sent."""
HTTP_PACKAGES = ("requests", "urllib3", "httpx", "aiohttp", "huggingface_hub")


def serve(channel: socket.socket) -> None:
    """Answer a section with ["rows", ROWS], or ["wrong", TEXT] that says what is wrong with the environment."""
    section = json.loads(channel.makefile("rb").readline())
    _seed_globally(section["seed"])
    try:
        environment = load_environment(section["name"], section["options"], section["settings"])
        wanted = section["eval_rows"] + section["train_rows"]
        text = json.dumps(["rows", different_rows(environment, section["seed"], wanted)])
    except DataError as error:
        text = json.dumps(["wrong", f"{error}{_network_hint(error)}"])
    except BaseException as error:  # foreign code may raise anything
        traceback.print_exc()
        reason = " ".join("".join(traceback.format_exception_only(error)).split())[:MAX_TEXT]
        offline = _network_hint(error)
        text = json.dumps(
            [
                "wrong",
                f"raised {reason} while it wrote its prompts{offline}; correct its options or the environment",
            ]
        )
    channel.sendall(text.encode() + b"\n")
    os._exit(0)  # whatever threads it has started


def _seed_globally(seed: int) -> None:
    """Seed the generators of Python and of NumPy, if that is installed: environments may draw from them."""
    random.seed(seed)
    with contextlib.suppress(ImportError):
        import numpy as np

        np.random.seed(seed % 2**32)


def different_rows(environment: Environment, seed: int, wanted: int) -> list[dict[str, Any]]:
    """Return rows of `wanted` different problems; raise DataError if there are fewer."""
    found: dict[str, dict[str, Any]] = {}
    most = wanted * DRAWS_PER_ROW
    prompts: Iterator[Prompt] = environment.prompts(seed, most)
    repeats = 0
    for prompt in itertools.islice(prompts, most):
        repeats = repeats + 1 if prompt.key in found else 0
        found.setdefault(prompt.key, {"prompt": prompt.prompt, "answer": prompt.answer})
        if len(found) == wanted:
            return [*found.values()]
        if repeats == max(LEAST_REPEATS, REPEATS * len(found)):
            break
    raise DataError(
        f"has {len(found)} different prompts, and train_rows + eval_rows is {wanted}; lower them, or change its options"
    )


def _network_hint(error: BaseException | None) -> str:
    """Return a hint if an error, or one that has caused it, is of the network."""
    while error is not None:
        module = type(error).__module__.partition(".")[0]
        if isinstance(error, socket.gaierror | ConnectionError | TimeoutError) or module in HTTP_PACKAGES:
            return " (it wants the network: download beforehand what it reads)"
        error = error.__cause__ or error.__context__
    return ""
