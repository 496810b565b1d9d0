"""The report in headless Chromium: every figure drawn, nothing asked for, nothing in the console, on any screen."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser

from hybridengine.cli.main import main
from hybridengine.metrics.report import colours as palette
from hybridengine.metrics.timeline import Reading, Span, TimelineWriter
from tests.unit import browser as browsers
from tests.unit.browser import opened, running_browser
from tests.unit.report_runs import HOSTILE, write_run

SINGLE = palette.LINE
"""Colour of a curve that is alone in its figure."""
MANY = {
    "Seconds of every phase, step by step": {
        "generate",
        "log_probs",
        "values",
        "update_actor",
        "update_critic",
    },
    "Bytes of every edge, step by step": {
        "actor.generate_sequences \N{RIGHTWARDS ARROW} actor.compute_log_probs"
    },
    "memory/held_bytes": {"node-0 rank 0", "node-0 rank 1", "node-1 rank 2", "node-1 rank 3"},
    "What every rank did": {"generate", "log-probs", "values", "updates", "scores", "transfers"},
}
"""Figures with a legend -> names that must be among the drawn."""


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
    """On a desk and on a phone: every curve's colour is there, nothing is asked for, nothing is wider than the screen."""
    with opened(browser, page, width, height) as seen:
        drawn = seen.colours()
        legends = {
            figure.locator(".name").inner_text(): {
                item.inner_text().strip(): item.locator(".swatch").get_attribute("style")
                for item in figure.locator(".legend li").all()
            }
            for figure in seen.page.locator("figure").all()
        }
        assert seen.complaints == []
        assert seen.requests == [page.as_uri()]
        assert seen.page.evaluate("document.documentElement.scrollWidth") <= width
    keys = {
        key for line in (page.parent / "metrics.jsonl").read_text().splitlines() for key in json.loads(line)
    }
    curves = {key for key in keys if not key.startswith("time/") and "->" not in key} - {"step"}
    assert drawn.keys() == curves | {"time/step_s"} | MANY.keys()
    for title, colours in drawn.items():
        if title not in MANY:
            assert colours.get(SINGLE, 0) > 30, title
            continue
        for name in MANY[title]:
            style = legends[title][name]
            assert style is not None
            assert colours.get(style.removeprefix("background: "), 0) > 30, (title, name)


def test_tooltips_show_what_is_under_the_pointer(browser: Browser, page: Path) -> None:
    rows = [json.loads(line) for line in (page.parent / "metrics.jsonl").read_text().splitlines()]
    values = {row["step"]: row["reward/mean"] for row in rows if row["step"]}
    with opened(browser, page) as seen:
        step, value = seen.tooltip("reward/mean", 0.6, 0.5)
        assert float(value) == pytest.approx(values[int(step)], rel=1e-5)
        name, phase, row, begin, seconds, details = seen.tooltip("What every rank did", 0.2, 0.38)
        assert (name, phase) == ("actor.generate_sequences", "generate")
        assert (row, details) == ("node-0 rank 1", "role actor, step 58")
        assert 1.5 < float(seconds.removesuffix(" s")) < 2.1
        assert float(begin.removesuffix(" s")) < 0.2
        assert seen.tooltip("Seconds of every phase, step by step", 0.5, 0.7)[1] == "generate"


def test_names_and_texts_are_shown_and_never_run(browser: Browser, tmp_path: Path) -> None:
    """Tags, quotes and formulas in names of metrics, ranks, nodes, phases, in samples, configuration and folder."""
    name = f"x{HOSTILE}"
    folder = tmp_path / HOSTILE.replace("/", "|")
    extra = {
        f"{name}/loss": 0.5,
        f"time/{name}_s": 50.0,
        f"transfer/{name}->{name}_bytes": 2**30,
        f"memory/{name}": 5.0,
    }
    write_run(folder, num_steps=3, extra=extra)
    (folder / "config.yaml").write_text(HOSTILE)
    (folder / "timeline.json").unlink()
    with TimelineWriter(folder / "timeline.json") as writer:
        own = {"pool": name, "node": name, "role": name, "phase": name, "name": name}
        writer.write(
            [Span(rank=rank, start_s=10, end_s=12, step=1, **own) for rank in range(2)],
            [Reading(name, rank, name, moment, moment, name) for rank in range(2) for moment in (10, 11)],
        )
    with opened(browser, _report(folder)) as seen:
        said = " ".join(HOSTILE.split())
        assert seen.tooltip("What every rank did", 0.6, 0.3) == [f"x{said}", f"x{said}", f"x{said} rank 0", "0.000 s",
            "2.000 s", f"role x{said}, step 1"]  # fmt: skip
        assert seen.tooltip("Seconds of every phase, step by step", 0.5, 0.4)[1] == f"x{said}"
        assert (
            seen.tooltip("Bytes of every edge, step by step", 0.5, 0.4)[1]
            == f"x{said} \N{RIGHTWARDS ARROW} x{said}"
        )
        assert seen.page.locator("figcaption .name", has_text="/loss").text_content() == f"{name}/loss"
        assert seen.page.locator("#samples td .words").nth(3).text_content() == HOSTILE
        assert seen.page.locator("#configuration pre").text_content() == HOSTILE
        assert seen.page.locator("h1").text_content() == folder.name
        assert seen.page.locator("img, script[src], link, iframe").count() == 0
        assert seen.page.title().startswith("<script>document.title")
        assert seen.complaints == []
        assert len(seen.requests) == 1


def test_a_page_without_drawings_is_silent_too(browser: Browser, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("run: {}\n")
    with opened(browser, _report(tmp_path)) as seen:
        assert seen.complaints == []
        assert seen.page.locator("figure").count() == 0
        assert seen.page.locator("section .note").count() >= 6


def test_a_long_run_of_many_ranks_stays_small(browser: Browser, tmp_path: Path) -> None:
    """More steps, metrics and ranks than are drawn one by one: under 5 MB, and all of it drawn."""
    run = write_run(
        tmp_path / "long", 700, 1, 1, {f"other/metric_{number}": number / 7 for number in range(45)}
    )
    with TimelineWriter(run / "timeline.json") as writer:
        for rank in range(80):
            starts = [1.8e9 + call for call in range(49)]
            phase, node = f"phase {rank % 11}", "node-0"
            writer.write(
                Span("work", phase, rank, node, "actor", start, start + 0.9, step=701) for start in starts
            )
    report = _report(run)
    assert report.stat().st_size < 5e6
    with opened(browser, report) as seen:
        assert seen.complaints == []
        assert len(seen.page.locator("figure").all()) > 60
        timeline = seen.page.locator("#timeline figure").inner_text()
        assert "Steps 699 to 701. The first 64 of 80 ranks." in timeline
        assert seen.page.locator("#timeline .legend li").count() == 7 + 11


def test_the_checks_of_a_page_can_fail(browser: Browser, page: Path, tmp_path: Path) -> None:
    """Curves that are hidden, a script that fails, a picture from elsewhere: each is noticed."""
    with opened(browser, page) as seen:
        seen.page.evaluate(
            "Bokeh.documents[0].roots().forEach(plot => plot.renderers.forEach(one => one.visible = false))"
        )
        seen.page.wait_for_timeout(500)
        assert all(SINGLE not in colours for colours in seen.colours().values())
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
