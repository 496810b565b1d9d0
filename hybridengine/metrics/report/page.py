"""A run's report as one HTML page: styles, drawings and the library that draws them are inside."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from bokeh.document import Document
from bokeh.embed import components
from bokeh.plotting import figure
from bokeh.resources import Resources
from jinja2 import Environment, StrictUndefined

from hybridengine.metrics import keys
from hybridengine.metrics.report.blocks import ChartGroup, Listing, Section, format_value, unit_of
from hybridengine.metrics.report.curves import column, evaluation_section, memory_section, training_section
from hybridengine.metrics.report.phases import phases_section
from hybridengine.metrics.report.run_record import CONFIG_FILE, RunRecord
from hybridengine.metrics.report.samples import samples_section
from hybridengine.metrics.report.template import PAGE, STYLE
from hybridengine.metrics.report.timeline_rows import timeline_section
from hybridengine.metrics.report.transfers import transfers_section
from hybridengine.metrics.summary import summarise

POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:; font-src data:"
"""What browsers let the page load: nothing from anywhere, whatever a prompt contains."""


def render_page(run: RunRecord) -> str:
    """The page as text."""
    sections = [
        evaluation_section(run),
        training_section(run),
        phases_section(run),
        memory_section(run),
        transfers_section(run),
        timeline_section(run),
        samples_section(run),
        _config_section(run),
    ]
    script, drawings = _embedded(sections)
    environment = Environment(autoescape=True, undefined=StrictUndefined)
    return environment.from_string(PAGE).render(
        policy=POLICY,
        run_name=run.name,
        style=STYLE,
        library=Resources(mode="inline", components=["bokeh"]).render_js() if drawings else "",
        facts=_facts(run),
        sections=sections,
        drawings=drawings,
        score=lambda value: format_value(value, ""),
        script=script,
    )


def _embedded(sections: Sequence[Section]) -> tuple[str, Mapping[figure, str]]:
    """The script that makes all drawings, and the element that each is drawn into."""
    groups = [block for section in sections for block in section.blocks if isinstance(block, ChartGroup)]
    models = [chart.model for group in groups for chart in group.charts]
    if not models:
        return "", {}
    document = Document()
    with document.models.freeze():  # added one by one, each would have all of them looked through again
        for model in models:
            document.add_root(model)
    script, elements = components(tuple(models))
    return script, dict(zip(models, elements, strict=True))


def _facts(run: RunRecord) -> list[tuple[str, str]]:
    """The run in a few numbers."""
    summary = summarise(run.rows)
    facts = [("training steps", str(summary.num_steps))]
    if before := summary.held_out_before:
        ends = [str(one) for one in (before, summary.held_out_after) if one]
        facts.append((before.name, " \N{RIGHTWARDS ARROW} ".join(ends)))
    rewards = [value for value in column(run.rows, keys.REWARD_MEAN)[1] if value is not None]
    if rewards:
        ends = (f"{value:.3g}" for value in (rewards[0], rewards[-1]))
        facts.append(("mean reward", " \N{RIGHTWARDS ARROW} ".join(ends)))
    for name, key in (("step, mean", keys.STEP_S), ("tokens per second, mean", keys.TOKENS_PER_S)):
        values = [value for value in column(run.rows, key)[1] if value is not None]
        if values:
            facts.append((name, format_value(sum(values) / len(values), unit_of(key))))
    return facts


def _config_section(run: RunRecord) -> Section:
    blocks = [Listing(run.config)] if run.config.strip() else []
    notes = run.notes.get(CONFIG_FILE, [] if blocks else [f"{CONFIG_FILE} is empty."])
    return Section(
        "configuration",
        "Configuration",
        blocks,
        "The run's values, with what was left to the defaults.",
        notes,
    )
