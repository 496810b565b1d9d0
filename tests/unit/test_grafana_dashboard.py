"""configs/grafana.json is a dashboard that Grafana imports, of metrics that runs export."""

from __future__ import annotations

import json
import re
from collections import Counter
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from tests.unit.exported_metrics import CONTROLLER_NAMES, NAMES, RANK_LABELS

ROOT = Path(__file__).parents[2]
DASHBOARD: dict[str, Any] = json.loads((ROOT / "configs" / "grafana.json").read_text())
PANELS: list[dict[str, Any]] = DASHBOARD["panels"]
VARIABLES = {one["name"]: one for one in DASHBOARD["templating"]["list"]}
QUERIES = [target["expr"] for panel in PANELS for target in panel.get("targets", ())]
LOOKUPS = [one["query"]["query"] for one in VARIABLES.values() if one["type"] == "query"]
WIDTH = 24
"""Columns of Grafana's grid."""
UNITS = {"none", "s", "bytes", "Bps", "percentunit"}
FUNCTIONS = {"avg", "label_values", "max", "quantile", "rate", "sum", "topk"}
LABELS = RANK_LABELS | {"role", "phase", "kind"}


def selectors(query: str) -> list[tuple[str, str]]:
    """Return (metric, matchers) of each selector of a query."""
    return re.findall(r"(ray_\w+)\{([^}]*)\}", query)


def test_it_is_a_dashboard_that_can_be_imported():
    """Source: "JSON model" in Grafana's documentation, and its limit of 40 characters for a uid."""
    assert re.fullmatch(r"[\w-]{1,40}", DASHBOARD["uid"]) and DASHBOARD["title"]
    assert "id" not in DASHBOARD, "an id belongs to one database"
    assert DASHBOARD["schemaVersion"] >= 36, "data sources are objects since Grafana 9"
    (repeated,) = Counter(panel["id"] for panel in PANELS).most_common(1)
    assert repeated[1] == 1
    for panel in PANELS:
        place = panel["gridPos"]
        assert place["x"] >= 0 and place["x"] + place["w"] <= WIDTH and place["h"] > 0
        if panel["type"] == "row":
            continue
        assert panel["type"] in ("stat", "timeseries") and panel["title"] and panel["description"]
        assert panel["fieldConfig"]["defaults"]["unit"] in UNITS
        references = [target["refId"] for target in panel["targets"]]
        assert references == [*"ABC"[: len(references)]]
        for source in (panel, *panel["targets"]):
            assert source["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
    assert VARIABLES["datasource"]["type"] == "datasource"


def test_no_panel_hides_another():
    for one, other in combinations((panel["gridPos"] for panel in PANELS), 2):
        apart = [
            one[at] + one[size] <= other[at] or other[at] + other[size] <= one[at]
            for at, size in (("x", "w"), ("y", "h"))
        ]
        assert any(apart), (one, other)


def test_it_shows_every_exported_metric_and_no_other():
    named = {name for query in (*QUERIES, *LOOKUPS) for name in re.findall(r"ray_\w+", query)}
    assert named == NAMES


@pytest.mark.parametrize("query", [*QUERIES, *LOOKUPS])
def test_queries_use_what_metrics_have(query: str):
    assert query.count("(") == query.count(")") and query.count("{") == query.count("}")
    for name, matchers in selectors(query):
        labels = {"run", "metric"} if name in CONTROLLER_NAMES else LABELS
        assert set(re.findall(r'(\w+)(?:=~|!=|=)"', matchers)) <= labels
        assert 'run=~"$run"' in matchers
    grouped = re.findall(r"by \(([\w, ]+)\)", query)
    assert {label for one in grouped for label in one.split(", ")} <= LABELS
    assert set(re.findall(r"(\w+)\s*\(", query)) - {"by"} <= FUNCTIONS
    assert set(re.findall(r"\$(\w+)", query)) <= VARIABLES.keys()
    counted = re.findall(r"(rate\()?(ray_\w+_total)", query)
    assert query.startswith("label_values") or all(rate for rate, _ in counted), "a counter only grows"


def test_its_keys_are_those_of_the_documentation():
    """Of expressions such as eval/.+, some documented key must match."""
    keys = set(re.findall(r"`([\w/]+)`", (ROOT / "docs" / "reference" / "metrics.md").read_text()))
    keys.add("idle/main_share")
    for query in QUERIES:
        for pattern in re.findall(r'metric(?:=~|!=|=)"([^"]+)"', query):
            for one in pattern.split("|"):
                assert any(re.fullmatch(one, key) for key in keys), one


def test_the_documentation_lists_what_is_exported():
    page = (ROOT / "docs" / "how-to" / "observe.md").read_text()
    assert {
        f"ray_hybridengine_{name}" for name in re.findall(r"^\| `(\w+)` \| ", page, re.MULTILINE)
    } == NAMES
