"""Cluster files: those that come with the project, and the errors of invalid ones."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from hybridengine.errors import ConfigError
from hybridengine.planning.costs.clusters import load_cluster
from hybridengine.topology.links import LinkClass

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "configs" / "clusters").glob("*.yaml"))
PAPER = ROOT / "configs" / "clusters" / "a100-80gb-16x8.yaml"


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_every_file_is_a_cluster_whose_links_get_slower(file: Path) -> None:
    cluster = load_cluster(file)
    present = [link for link in LinkClass if getattr(cluster.links, link.value) is not None]
    rates = [cluster.links.of(link).bytes_per_s for link in present]
    assert rates == sorted(rates, reverse=True)
    assert cluster.source
    for link in present:
        shared = cluster.links.of(link).node_bytes_per_s
        assert shared is None or shared <= cluster.links.of(link).bytes_per_s * cluster.devices_per_node


def test_the_papers_cluster() -> None:
    """Section 8.1: 16 machines of 8, NVLink 600 GB/s in both directions, 200 Gb/s between machines."""
    cluster = load_cluster(PAPER)
    assert (cluster.nodes, cluster.devices_per_node, cluster.num_devices) == (16, 8, 128)
    assert cluster.links.of(LinkClass.SAME_NODE).bytes_per_s == 600e9 / 2
    between = cluster.links.of(LinkClass.BETWEEN_NODES)
    assert between.node_bytes_per_s == 200e9 / 8
    assert cluster.device_memory_bytes == 80 * 2**30


def changed(tmp_path: Path, old: str, new: str) -> Path:
    text = PAPER.read_text()
    assert old in text
    file = tmp_path / "cluster.yaml"
    file.write_text(text.replace(old, new, 1))
    return file


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("nodes: 16", "nodes: -1", "nodes=-1 must be at least 1; correct it"),
        ("nodes: 16", "nodes: 1.5", r"nodes=1\.5 must be an integer;"),
        ("nodes: 16\n", "", "nodes is missing; add it"),
        ("300e9", "-3", r"links\.same_node\.bytes_per_s=-3 must be at least 1;"),
        ("300e9", "0", r"links\.same_node\.bytes_per_s=0 must be at least 1;"),
        ("300e9", ".inf", r"links\.same_node\.bytes_per_s"),
        ("300e9", "fast", r'links\.same_node\.bytes_per_s="fast" must be a number'),
        (
            "latency_s: 20e-6",
            "latency_s: -1",
            r"links\.between_nodes\.latency_s=-1 must be at least 0",
        ),
        ("    latency_s: 20e-6\n", "", r"links\.between_nodes\.latency_s is missing"),
        ("node_bytes_per_s: 25e9", "node_bytes_per_s: -25e9", r"links\.between_nodes\.node_bytes_per_s"),
        (
            "between_nodes:",
            "between_node:",
            r"unknown key links\.between_node; did you mean links\.between_nodes\?",
        ),
        ("devices_per_node: 8", "devices_per_nodes: 8", r"did you mean devices_per_node\?"),
        ("80GiB", "80XB", "'80XB' is not a size in bytes"),
        ("name: A100", "name: [", r"not valid YAML \(line 3, column 7: did not find expected"),
        ("nodes: 16", "nodes: 99999999999", "nodes=99999999999 must be at most 1048576; correct it"),
        ("devices_per_node: 8", "devices_per_node: 10000", "devices_per_node=10000 must be at most 4096;"),
        ("80GiB", "1e400GiB", "is not a size in bytes"),
        ("80GiB", "99999999999GiB", "device_memory_bytes.* must be at most 1152921504606846976;"),
        ("80GiB", "9" * 5000, r"not valid YAML \(a number has thousands of digits\)"),
        ("300e9", "1e-320", r"bytes_per_s=1e-320 must be at least 1; correct it"),
        ("300e9", "1e308", r"bytes_per_s=1e\+308 must be at most 1000000000000000000;"),
        ("latency_s: 20e-6", "latency_s: 1e300", r"latency_s=1e\+300 must be at most 3600;"),
        ("name: A100", 'name: ""\nother: A100', 'name="" must be a text that is not empty; correct it'),
    ],
)
def test_wrong_values_are_named(tmp_path: Path, old: str, new: str, message: str) -> None:
    file = changed(tmp_path, old, new)
    with pytest.raises(ConfigError, match=message) as raised:
        load_cluster(file)
    assert str(file) in str(raised.value)


def test_all_problems_come_in_one_error(tmp_path: Path) -> None:
    file = changed(tmp_path, "nodes: 16", "nodes: 0")
    file.write_text(file.read_text().replace("300e9", "-1"))
    with pytest.raises(ConfigError, match=r"2 problems:(?s:.*)nodes=0(?s:.*)same_node\.bytes_per_s=-1"):
        load_cluster(file)


def test_files_that_are_none(tmp_path: Path) -> None:
    (tmp_path / "list.yaml").write_text("- 1\n")
    (tmp_path / "number.yaml").write_text("42\n")
    (tmp_path / "run.yaml").write_text("run: {steps: 3}\n")
    (tmp_path / "bytes.yaml").write_bytes(b"\xff\xfe\x00\x80")
    wrong = {
        "missing.yaml": "does not exist",
        "": "is a folder, not a regular file",
        "list.yaml": "has none of the keys name, source, nodes",
        "number.yaml": "is not valid YAML",
        "x" * 300: "cannot be read .File name too long.",
        "bytes.yaml": "is not UTF-8 text",
        "run.yaml": "has none of the keys name, source",
    }
    for name, message in wrong.items():
        with pytest.raises(ConfigError, match=message):
            load_cluster(tmp_path / name)


def test_several_nodes_need_links_between_them(tmp_path: Path) -> None:
    text = PAPER.read_text()
    file = tmp_path / "cluster.yaml"
    file.write_text(text[: text.index("  between_nodes:")])
    with pytest.raises(ConfigError, match=r"nodes=16 need links\.between_nodes"):
        load_cluster(file)
    file.write_text(file.read_text().replace("nodes: 16", "nodes: 1"))
    alone = load_cluster(file)
    with pytest.raises(ConfigError, match=r"cluster .*: nodes=2 need links\.between_nodes"):
        alone.resized(2)
    assert alone.links.network is alone.links.same_node


def test_ranks_fill_the_nodes_in_turn() -> None:
    nodes = load_cluster(PAPER).node_map(20)
    assert nodes.ranks_per_node == (8, 8, 4)


def test_more_ranks_than_devices_name_the_nodes_they_need() -> None:
    cluster = load_cluster(PAPER)
    with pytest.raises(ConfigError, match=re.escape("1024 ranks exceed the 128 devices")) as raised:
        cluster.node_map(1024)
    assert "--nodes 128" in str(raised.value)
    assert cluster.resized(128).node_map(1024).num_ranks == 1024
    for nodes, rule in ((0, "at least 1;"), (99999999999999999999, "at most 1048576;")):
        with pytest.raises(ConfigError, match=f"nodes={nodes} must be {rule}"):
            cluster.resized(nodes)
