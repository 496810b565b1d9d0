"""How the guard of a process of user code ends what the code has started; test_reward_process.py has real processes."""

from __future__ import annotations

import os
import signal

import pytest

from hybridengine.guarded import guard


def test_programs_of_other_users_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as sudo, which a user cannot end."""
    ended = list[int]()

    def kill(number: int, _: signal.Signals) -> None:
        if number == 1:
            raise PermissionError
        ended.append(number)

    monkeypatch.setattr(os, "kill", kill)
    monkeypatch.setattr(os, "waitpid", lambda *_: (0, 0))
    monkeypatch.setattr(guard, "ORPHANS_S", 0.1)
    monkeypatch.setattr(guard, "_children", lambda: [one for one in (1, 2, 3) if one not in ended])
    guard._end_orphans()
    assert ended == [2, 3]
