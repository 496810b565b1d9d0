"""The report in headless Chromium: every image is drawn, nothing is requested, the console is silent, on any screen."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from playwright.sync_api import Browser

from hybridengine.cli.main import main
from hybridengine.report import page as page_module
from hybridengine.report.figures import FIGURES
from hybridengine.report.timeline import Reading, Span, TimelineWriter
from tests.unit import browser as browsers
from tests.unit.browser import opened, running_browser
from tests.unit.report_runs import HOSTILE, write_run

MADE_UP_LACKS = {"Rows and steps left out, failures", "Memory of the rank with the most"}
"""Figures for which `write_run` writes no values."""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """One Chromium for all tests of this file."""
    with running_browser() as running:
        yield running


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The report of a run of 60 steps on four ranks."""
    return _report(write_run(tmp_path_factory.mktemp("runs") / "made-up"))


def _report(run: Path) -> Path:
    assert main(["report", str(run)]) == 0
    return run / "report.html"


@pytest.mark.parametrize(("width", "height"), [(1280, 900), (390, 844)])
def test_every_figure_is_drawn_and_the_console_is_silent(
    browser: Browser, page: Path, width: int, height: int
) -> None:
    """On a desktop and on a phone: all images are there, nothing is requested, nothing is wider than the screen."""
    with opened(browser, page, width, height) as seen:
        captions = [figure.locator("figcaption").inner_text() for figure in seen.page.locator("figure").all()]
        assert seen.unseen_images() == []
        assert seen.page.locator("figure img").count() == len(captions)
        assert seen.complaints == []
        assert seen.requests == [page.as_uri()]
        assert seen.page.evaluate("document.documentElement.scrollWidth") <= width
    lacking = {*MADE_UP_LACKS, *(figure.title for figure in FIGURES if figure.is_of_some)}
    wanted = [figure.title for figure in FIGURES if figure.title not in lacking]
    assert [caption.split(" Values")[0] for caption in captions] == [*wanted, "What every rank did"]


def test_an_image_says_what_it_shows(browser: Browser, page: Path) -> None:
    rows = [json.loads(line) for line in (page.parent / "metrics.jsonl").read_text().splitlines()]
    values = [row["kl/mean"] for row in rows if row["step"]]
    with opened(browser, page) as seen:
        figure = seen.page.locator("figure", has_text="KL divergence")
        said = figure.locator("img").get_attribute("alt")
    assert said == (
        f"kl/mean: first {values[0]:.4g}, last {values[-1]:.4g}, lowest {min(values):.4g}, highest {max(values):.4g}"
    )


def test_names_and_texts_are_shown_and_never_run(
    browser: Browser, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tags, quotes and formulas in names of metrics, ranks, nodes, phases, in samples, configuration and folder."""
    name = f"x{HOSTILE}"
    folder = tmp_path / HOSTILE.replace("/", "|")
    extra = {
        f"{name}_loss": 0.5,
        f"time/{name}_s": 50.0,
        f"transfer/{name}->{name}_bytes": 2**30,
        f"memory/{name}": 5.0,
    }
    figures = [figure for figure in FIGURES if any(map(figure.has, extra))]
    assert len(figures) == len(extra)
    monkeypatch.setattr(page_module, "FIGURES", figures)
    write_run(folder, num_steps=3, extra=extra)
    (folder / "config.yaml").write_text(HOSTILE)
    (folder / "timeline.json").unlink()
    with closing(TimelineWriter(folder / "timeline.json")) as writer:
        own = {"pool": name, "node": name, "role": name, "phase": name, "name": name}
        writer.write(
            [Span(rank=rank, start_s=10, end_s=12, step=1, **own) for rank in range(2)],
            [Reading(name, rank, name, moment, moment, name) for rank in range(2) for moment in (10, 11)],
        )
    with opened(browser, _report(folder)) as seen:
        assert seen.unseen_images() == []
        images = seen.page.locator("figure", has_text="Loss").locator("img")
        assert f"{name}_loss: first 0.5" in str(images.get_attribute("alt"))
        assert seen.page.locator("#samples td .words").nth(3).text_content() == HOSTILE
        assert seen.page.locator("#configuration pre").text_content() == HOSTILE
        assert seen.page.locator("h1").text_content() == folder.name
        assert seen.page.locator("script, link, iframe").count() == 0
        assert seen.page.evaluate("[...document.images].every(one => one.src.startsWith('data:image/svg'))")
        assert seen.page.title().startswith("<script>document.title")
        assert seen.complaints == []
        assert len(seen.requests) == 1


def test_a_page_without_drawings_is_silent_too(browser: Browser, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("run: {}\n")
    with opened(browser, _report(tmp_path)) as seen:
        assert seen.complaints == []
        assert seen.page.locator("figure").count() == 0
        assert seen.page.locator("section .note").count() >= 3


def test_a_long_run_of_many_ranks_stays_small(browser: Browser, tmp_path: Path) -> None:
    """It has more steps, metrics and ranks than are drawn one by one: under 5 MB, and everything is drawn."""
    run = write_run(
        tmp_path / "long", 200, 1, 1, {f"other/metric_{number}_loss": number / 7 for number in range(45)}
    )
    with closing(TimelineWriter(run / "timeline.json")) as writer:
        for rank in range(66):
            starts = [1.8e9 + call for call in range(64)]
            phase, node = f"phase {rank % 11}", "node-0"
            writer.write(
                Span("work", phase, rank, node, "actor", start, start + 0.9, step=201) for start in starts
            )
    report = _report(run)
    assert report.stat().st_size < 5e6
    with opened(browser, report) as seen:
        assert seen.complaints == []
        assert seen.unseen_images() == []
        timeline = seen.page.locator("#timeline figure").inner_text()
        assert "The first 64 of 66 ranks." in timeline


def test_the_checks_of_a_page_can_fail(browser: Browser, page: Path, tmp_path: Path) -> None:
    """A damaged image, a script that fails and a picture from another site are each noticed."""
    broken = tmp_path / "page.html"
    broken.write_text(
        '<!doctype html><script>console.error("said"); missing()</script><img src="https://example.invalid/x.png">'
    )
    with opened(browser, broken) as seen:
        assert len(seen.requests) == 2
        complaints = " ".join(seen.complaints)
        assert "said" in complaints
        assert "missing is not defined" in complaints
        assert "https://example.invalid/x.png" in complaints
    broken.write_text(
        page.read_text().replace("data:image/svg+xml;base64,", "data:image/svg+xml;base64,AAAA", 1)
    )
    with opened(browser, broken) as seen:
        assert len(seen.unseen_images()) == 1
    broken.write_text(
        page.read_text().replace("<main>", '<main><img src="https://example.invalid/x.png">', 1)
    )
    with opened(browser, broken) as seen:
        seen.page.evaluate("fetch('https://example.invalid/y').catch(error => null)")
        assert "https://example.invalid/x.png: csp" in seen.complaints, (
            "the page's policy keeps it from asking"
        )
        assert len(seen.requests) == 2
        assert any("invalid/y" in said and "Content Security Policy" in said for said in seen.complaints)


def test_without_chromium_a_test_fails_and_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CHROMIUM", raising=False)
    assert browsers.find_chromium() is None
    with pytest.raises(
        pytest.fail.Exception, match="install it with `apt-get install --no-install-recommends"
    ):
        browsers.check_chromium(str(tmp_path / "none"))
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(SystemExit, match="make: tests of pages need Chromium, and there is none: install it"):
        browsers.provide_chromium(str(tmp_path / "none"))
    monkeypatch.setenv("CHROMIUM", "chromium-of-mine")
    browsers.provide_chromium(str(tmp_path / "none"))
    assert browsers.check_chromium(str(tmp_path / "none")) == "chromium-of-mine"
