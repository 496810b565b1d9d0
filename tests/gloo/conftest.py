"""Imports that all tests of this folder share."""

from __future__ import annotations

from tests.gloo import preload  # noqa: F401  # before the test modules, which import the same without its filter
