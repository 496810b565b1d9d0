"""`hybridengine doctor`: examine an installation or a cluster, and print what to fix."""

from __future__ import annotations

import argparse
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict

from rich.console import Console
from rich.markup import escape

from hybridengine.cli.options import add_json_option
from hybridengine.cli.outputs import check_outputs, emit, progress_printer
from hybridengine.config import RunConfig, load_config
from hybridengine.doctor.findings import THIS_MACHINE, Finding, Level, Subject, failure, merged
from hybridengine.doctor.judging import RunNeeds, examine_machine
from hybridengine.doctor.node_facts import node_facts
from hybridengine.errors import HybridEngineError
from hybridengine.planning.costs.memory import checkpoint_bytes
from hybridengine.training.dry_run import budgets_of

DESCRIPTION = """Examine this machine's installation, then every node of the cluster, and print what to fix: versions of
packages and Python, devices and drivers, memory, the shared run.folder, clocks, and ports and links between all nodes.

With CONFIG, also whether the run fits: ranks, memory, files, checkpoints; nodes that would get none of its ranks are then
left out. The cluster is that of cluster.address or RAY_ADDRESS; without either, a local Ray is started. Takes about a
minute, writes nothing that stays, and ends with status 1 where a run would fail."""
EPILOG = """examples:
  hybridengine doctor                                     this machine, with a local Ray
  hybridengine doctor --here                              the installation alone; starts nothing
  hybridengine doctor configs/llama3-70b-16nodes.yaml     the cluster, and whether this run fits
  RAY_ADDRESS=10.0.0.4:6379 hybridengine doctor --folder /shared/runs"""
COLORS = {Level.OK: "green", Level.WARNING: "yellow", Level.PROBLEM: "bold red"}


def add_options(parser: argparse.ArgumentParser) -> None:
    option = parser.add_argument
    option("config", metavar="CONFIG", nargs="?", help="YAML file of a run that shall fit")
    option("overrides", nargs="*", metavar="KEY=VALUE", help="values that replace those of the file")
    option("--here", action="store_true", help="this machine's installation only; starts nothing")
    option("--folder", metavar="FOLDER", help="of runs, in place of run.folder (default runs)")
    add_json_option(parser)


def run(options: argparse.Namespace) -> int:
    check_outputs({"--json": options.json}, {"CONFIG": options.config})
    config = load_config(options.config, options.overrides, dry_run=True) if options.config else None
    needs = _needs(config, options.folder)
    say = progress_printer()
    say("importing torch, Megatron-core and vLLM")
    own = node_facts()
    findings = examine_machine(needs, own)
    broken = any(found.subject == Subject.VERSIONS and found.level == Level.PROBLEM for found in findings)
    hosts = dict[str, str]()
    if not options.here and not broken:
        from ray.exceptions import RayError

        from hybridengine.controller.cluster import host_names
        from hybridengine.doctor.examination import examine_cluster

        try:
            _start_ray(config, needs, say)
            hosts = host_names()
            findings = examine_cluster(needs, own, say)
        except (HybridEngineError, RayError, OSError) as error:  # this machine's findings are still printed
            findings.append(failure(Subject.PORTS, error))
    findings = merged(findings)
    lines = [_text(findings, hosts)]
    if broken and not options.here:
        lines.append("the cluster was not examined: fix this machine's versions first")
    emit(options, [asdict(found) for found in findings], lines)
    return 1 if any(found.level == Level.PROBLEM for found in findings) else 0


def _needs(config: RunConfig | None, folder: str | None) -> RunNeeds:
    """Return the needs of a run; without a configuration, its folder alone."""
    if config is None:
        return RunNeeds(os.path.abspath(folder or "runs"))
    saved = checkpoint_bytes(config) if config.checkpoint.every else 0
    kept = config.checkpoint.keep + (2 if config.checkpoint.best else 1)
    return RunNeeds(
        folder=os.path.abspath(folder or config.run.folder),
        device=config.cluster.device,
        pools={name: tuple(pool.ranks_per_node) for name, pool in config.pools.items()},
        started=config.started_pools,
        budgets={on_gpus: budgets_of(config, on_gpus=on_gpus) for on_gpus in (False, True)},
        kept_bytes=kept * saved,
        checkpoint_bytes=saved,
        start_limit_s=config.timeouts.start_s,
        reads={key: str(path) for key, path in config.paths_to_read.items()},
    )


def _start_ray(config: RunConfig | None, needs: RunNeeds, say: Callable[[str], None]) -> None:
    from hybridengine.controller.cluster import start_ray

    if config is not None and config.cluster.address is not None:
        os.environ["RAY_ADDRESS"] = config.cluster.address
    address = os.environ.get("RAY_ADDRESS")
    say(f"connecting to the cluster at {address}" if address else "starting a local Ray")
    start_ray(num_cpus=max(2, sum(map(sum, needs.pools.values()))))


def _text(findings: Sequence[Finding], hosts: Mapping[str, str]) -> str:
    """Return the findings by subject, each followed by its remedy, with colours for a terminal.

    Nodes are named by address, and those of several hosts with the host.
    """
    names = {node: f"{node} (host {host})" for node, host in hosts.items() if len(set(hosts.values())) > 1}
    console = Console(highlight=False, soft_wrap=True)
    console.begin_capture()
    width = max(len(level) for level in Level)
    for number, found in enumerate(findings):
        if number == 0 or found.subject != findings[number - 1].subject:
            console.print(f"[bold]{found.subject}[/bold]")
        where = ", ".join(names.get(node, node) for node in found.nodes if node != THIS_MACHINE)
        color = COLORS[found.level]
        text = escape(f"{where}: {found.text}" if where else found.text)
        console.print(f"  [{color}]{found.level:<{width}}[/{color}]  {text}")
        if found.remedy:
            console.print(f"  {'':<{width}}  -> {escape(found.remedy)}")
    counts = Counter(found.level for found in findings)
    problems, warnings = counts[Level.PROBLEM], counts[Level.WARNING]
    if not problems and not warnings:
        console.print("nothing to fix")
    else:
        console.print(f"{problems} problem(s), with which a run fails; {warnings} warning(s)")
    return console.end_capture().rstrip("\n")
