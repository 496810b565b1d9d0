"""Reward functions that cannot be loaded or called: they are refused at the start, and the message names their place."""

from __future__ import annotations

from contextlib import closing

import pytest

from hybridengine.data.reward_process import RewardProcess
from hybridengine.errors import DataError

CASES = "tests.unit.reward_cases"
EXTRA = ("prompts", "prompt_lengths", "response_lengths")
LOAD_TIMEOUT_S = 4.5


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("no_such", "reward.function=tests.unit.reward_cases:no_such cannot be imported (module "),
        (
            "not_a_function",
            "reward.function=tests.unit.reward_cases:not_a_function is a int; name a function",
        ),
        (
            "unknown_column",
            "reward.function=tests.unit.reward_cases:unknown_column takes (responses: 'Texts', answers: 'Texts', judge:"
            " 'str') -> 'list[float]', and cannot be called with (responses, answers): missing a required argument:"
            " 'judge'; write function(responses, answers), and after them any of prompts, prompt_lengths,"
            " response_lengths",
        ),
    ],
)
def test_functions_that_cannot_be_called_are_refused_at_the_start(function, message):
    with pytest.raises(DataError) as caught:
        RewardProcess(f"{CASES}:{function}", offered=EXTRA).start()
    assert str(caught.value).startswith(message)
    assert "Traceback" not in str(caught.value)


MODULES = {
    "raises": (
        "1 / 0",
        "raised ZeroDivisionError: division by zero when it was imported; correct the module\n",
    ),
    "leaves": ("import sys; sys.exit('no')", "calls sys.exit('no') while it is imported"),
    "lacks": ("import not_installed", "cannot be imported (No module named 'not_installed')"),
    "misspelt": ("def f(:\n", "raised SyntaxError: invalid syntax when it was imported"),
    "ends": (
        "import os; os._exit(9)",
        "while it was loaded: its process ended, exit code 9; correct the function",
    ),
    "waits": (
        "import time; time.sleep(100)",
        f"while it was loaded: did not return within {LOAD_TIMEOUT_S} s, and was ended (its stacks are in the log"
        " above); correct the function or raise timeouts.start_s",
    ),
}


@pytest.mark.parametrize("name", MODULES)
def test_modules_that_cannot_be_loaded(tmp_path, monkeypatch, capfd, name):
    text, message = MODULES[name]
    module = f"reward_module_that_{name}"
    (tmp_path / f"{module}.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    limit = LOAD_TIMEOUT_S if name == "waits" else 60.0
    with (
        closing(RewardProcess(f"{module}:f", start_timeout_s=limit)) as one,
        pytest.raises(DataError) as caught,
    ):
        one.start()
    assert message in str(caught.value)
    assert f"{module}:f" in str(caught.value)
    if name not in ("ends",):
        where = capfd.readouterr().err if name == "waits" else str(caught.value)
        assert f"{module}.py" in where
