"""Hosts need root, and nothing else that a machine with iproute2 and util-linux lacks."""

from __future__ import annotations

import os

import pytest


@pytest.fixture(scope="session", autouse=True)
def root() -> None:
    """Skip the tests of this folder if they cannot make hosts."""
    if os.geteuid() != 0:
        pytest.skip("hosts in namespaces of their own need root")
