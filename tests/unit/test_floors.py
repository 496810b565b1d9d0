"""The light packages load nothing heavy: planning works on a laptop, and the command line answers at once."""

from __future__ import annotations

import json
import subprocess
import sys

HEAVY = ("torch", "ray", "megatron", "vllm", "transformers", "tensordict")

LIGHT = (
    "hybridengine.config",
    "hybridengine.models.checkpoint_files",
    "hybridengine.topology",
    "hybridengine.reshard",
    "hybridengine.planning",
    "hybridengine.models.presets",
    "hybridengine.rows.protocols",
)

REPORT = """
import importlib, json, pkgutil, sys
for name in sys.argv[1:]:
    package = importlib.import_module(name)
    for module in pkgutil.walk_packages(getattr(package, "__path__", []), name + "."):
        importlib.import_module(module.name)
print(json.dumps([*sys.modules]))
"""


def loaded_by(*names: str) -> tuple[set[str], set[str]]:
    """Return (modules of a fresh interpreter that imported all modules of `names`, their top-level packages)."""
    done = subprocess.run([sys.executable, "-c", REPORT, *names], capture_output=True, text=True, check=True)
    modules = json.loads(done.stdout)
    return set(modules), {name.partition(".")[0] for name in modules}


def test_light_floors_load_nothing_heavy() -> None:
    modules, packages = loaded_by(*LIGHT)
    assert {"hybridengine.planning.search.search", "hybridengine.config.sections", *LIGHT} <= modules
    assert sorted(packages & set(HEAVY)) == []


def test_topology_loads_the_standard_library_only() -> None:
    modules, packages = loaded_by("hybridengine.topology")
    assert {f"hybridengine.topology.{name}" for name in ("sizes", "grid", "generation")} <= modules
    foreign = packages - set(sys.stdlib_module_names) - {"hybridengine"}
    assert {
        name for name in foreign if not name.startswith("_")
    } == set()  # "_": hooks of the installation itself
