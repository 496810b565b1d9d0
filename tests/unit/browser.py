"""Headless Chromium for tests of pages; a test that needs it fails where there is none.

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
"""Programs that are Chromium, the smallest first."""
MISSING = (
    "tests of pages need Chromium, and there is none: install it with `apt-get install --no-install-recommends"
    " chromium-headless-shell` (Debian; some 60 MB) or `playwright install --with-deps --only-shell chromium`, or name"
    " one in the environment variable CHROMIUM"
)
PACKAGE = "chromium-headless-shell"
"""Debian's."""
QUIET = ("--disable-background-networking", "--disable-component-update", "--disable-sync", "--no-first-run")
"""Options without which Chromium looks for updates."""

_DRAWN_COLOURS = """figure => {
  const canvases = []
  const collect = node => {
    if (node instanceof HTMLCanvasElement) canvases.push(node)
    for (const child of [...node.children, ...(node.shadowRoot?.children ?? [])]) collect(child)
  }
  collect(figure)
  const colours = new Map()
  for (const canvas of canvases) {
    if (canvas.width === 0 || canvas.height === 0) continue
    const {data} = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height)
    for (let at = 0; at < data.length; at += 4) {
      if (data[at + 3] < 250) continue
      const hex = [0, 1, 2].map(offset => data[at + offset].toString(16).padStart(2, "0")).join("")
      colours.set("#" + hex, (colours.get("#" + hex) ?? 0) + 1)
    }
  }
  return Object.fromEntries(colours)
}"""


@dataclass
class OpenPage:
    """A page in the browser, and what has happened to it."""

    page: Page
    complaints: list[str] = field(default_factory=list)
    """Errors and warnings of the console, uncaught exceptions, failed requests."""
    requests: list[str] = field(default_factory=list)
    """Addresses that the page asked for, its own first."""

    def colours(self) -> dict[str, dict[str, int]]:
        """Title of every figure -> colour -> number of opaque pixels of exactly that colour in its drawing."""
        figures = self.page.locator("figure").all()
        return {figure.locator(".name").inner_text(): figure.evaluate(_DRAWN_COLOURS) for figure in figures}

    def tooltip(self, title: str, x: float, y: float) -> list[str]:
        """Values of the tooltip at a place in the drawing of the figure `title`, from 0, 0 to 1, 1."""
        figure = self.page.locator("figure").filter(has=self.page.get_by_text(title, exact=True))
        drawing = figure.locator(".drawing")
        drawing.scroll_into_view_if_needed()
        box = drawing.bounding_box()
        assert box is not None, title
        self.page.mouse.move(box["x"] + box["width"] * x, box["y"] + box["height"] * y)
        tooltip = self.page.locator(".bk-Tooltip", has=self.page.locator(".bk-tooltip-row-value")).last
        tooltip.wait_for(timeout=10_000)
        values = [
            " ".join(text.split()) for text in tooltip.locator(".bk-tooltip-row-value").all_inner_texts()
        ]
        self.page.mouse.move(0, 0)
        tooltip.wait_for(state="hidden", timeout=10_000)
        return values


def check_chromium(bundled: str) -> str:
    """Path of a Chromium, of playwright's own (`bundled`) where there is no other; fails the test where there is none."""
    path = find_chromium() or bundled
    if path == bundled and not Path(bundled).exists():
        pytest.fail(MISSING)
    return path


def find_chromium() -> str | None:
    """Path of a Chromium: the one that CHROMIUM names, else one on PATH; None where there is none."""
    named = os.environ.get("CHROMIUM")
    return named or next((path for name in NAMES if (path := shutil.which(name)) is not None), None)


def provide_chromium(bundled: str) -> None:
    """Install Debian's package where there is no Chromium; without root, end with one line that says what to do."""
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
    """A headless Chromium; fails the test where there is none."""
    with sync_playwright() as playwright:
        path = check_chromium(playwright.chromium.executable_path)
        browser = playwright.chromium.launch(executable_path=path, args=list(QUIET))
        try:
            yield browser
        finally:
            browser.close()


@contextmanager
def opened(browser: Browser, file: Path, width: int = 1280, height: int = 900) -> Iterator[OpenPage]:
    """The page of `file`, after all its drawings are done."""
    page = browser.new_page(viewport={"width": width, "height": height})
    result = OpenPage(page)
    complain = result.complaints.append
    page.on("console", lambda said: complain(said.text) if said.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: complain(str(error)))
    page.on("requestfailed", lambda request: complain(f"{request.url}: {request.failure}"))
    page.on("request", lambda request: result.requests.append(request.url))
    try:
        page.goto(file.as_uri())
        if page.locator("figure").count():
            page.wait_for_function(
                "window.Bokeh?.documents.length && Bokeh.documents.every(one => one.is_idle)"
            )
        yield result
    finally:
        page.close()


if __name__ == "__main__":
    with sync_playwright() as started:
        own = started.chromium.executable_path
    provide_chromium(own)
