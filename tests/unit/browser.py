"""Headless Chromium for tests of pages; a test that needs it fails if there is none.

python -m tests.unit.browser    installs one as root on Debian, or says what to install
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, sync_playwright

NAMES = (
    "chromium-headless-shell", "chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome",
)  # fmt: skip
"""Names of Chromium programs, the smallest first."""
MISSING = (
    "tests of pages need Chromium, and there is none: install it with `apt-get install --no-install-recommends"
    " chromium-headless-shell` (Debian; some 60 MB) or `playwright install --with-deps --only-shell chromium`, or name"
    " one in the environment variable CHROMIUM"
)
PACKAGE = "chromium-headless-shell"
"""Debian's package."""
QUIET = ("--disable-background-networking", "--disable-component-update", "--disable-sync", "--no-first-run")
"""Options without which Chromium looks for updates."""

_UNSEEN_IMAGES = (
    """() => [...document.images].filter(one => !one.complete || !one.naturalWidth).map(one => one.alt)"""
)


@dataclass
class OpenPage:
    """A page in the browser, and the events recorded on it."""

    page: Page
    complaints: list[str] = field(default_factory=list)
    """Errors and warnings of the console, uncaught exceptions, failed requests."""
    requests: list[str] = field(default_factory=list)
    """Addresses that the page requested, its own first."""

    def unseen_images(self) -> list[str]:
        """Return the descriptions of the images that the browser could not draw."""
        return self.page.evaluate(_UNSEEN_IMAGES)


def check_chromium(bundled: str) -> str:
    """Return the path of a Chromium, by default playwright's own (`bundled`); fails the test if there is none."""
    path = find_chromium() or bundled
    if path == bundled and not Path(bundled).exists():
        pytest.fail(MISSING)
    return path


def find_chromium() -> str | None:
    """Return the path of the Chromium that CHROMIUM names, or else of one on PATH; None if there is none."""
    named = os.environ.get("CHROMIUM")
    return named or next((path for name in NAMES if (path := shutil.which(name)) is not None), None)


def provide_chromium(bundled: str) -> None:
    """Install Debian's package if there is no Chromium; without root, exit with one line that says what to do."""
    if (
        find_chromium() is None
        and not Path(bundled).exists()
        and os.geteuid() == 0
        and shutil.which("apt-get")
    ):
        print(f"Installing {PACKAGE}, once: tests of pages need a browser", flush=True)
        environment = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
        for command in (["update"], ["install", "-y", "--no-install-recommends", PACKAGE]):
            subprocess.run(["apt-get", "-q", *command], env=environment, check=False)
    if find_chromium() is None and not Path(bundled).exists():
        sys.exit(f"make: {MISSING}")


@contextmanager
def running_browser() -> Iterator[Browser]:
    """Yield a headless Chromium; fails the test if there is none."""
    with sync_playwright() as playwright:
        path = check_chromium(playwright.chromium.executable_path)
        browser = playwright.chromium.launch(executable_path=path, args=list(QUIET))
        try:
            yield browser
        finally:
            browser.close()


@contextmanager
def opened(browser: Browser, file: Path, width: int = 1280, height: int = 900) -> Iterator[OpenPage]:
    """Yield the page of `file` once it has loaded, its images included."""
    page = browser.new_page(viewport={"width": width, "height": height})
    result = OpenPage(page)
    complain = result.complaints.append
    page.on("console", lambda said: complain(said.text) if said.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: complain(str(error)))
    page.on("requestfailed", lambda request: complain(f"{request.url}: {request.failure}"))
    page.on("request", lambda request: result.requests.append(request.url))
    try:
        page.goto(file.as_uri())
        yield result
    finally:
        page.close()


if __name__ == "__main__":
    with sync_playwright() as started:
        own = started.chromium.executable_path
    provide_chromium(own)
