"""The light packages load nothing heavy: planning works on a laptop, and the command line answers at once."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

HEAVY = ("torch", "ray", "megatron", "vllm", "transformers", "tensordict")

LIGHT = (
    "hybridengine.config",
    "hybridengine.models.checkpoint_files",
    "hybridengine.topology",
    "hybridengine.reshard",
    "hybridengine.planning",
    "hybridengine.models.presets",
)

REPORT = """
import importlib, json, pkgutil, sys
package = importlib.import_module(sys.argv[1])
for module in pkgutil.walk_packages(getattr(package, "__path__", []), sys.argv[1] + "."):
    importlib.import_module(module.name)
ours = [name for name in sys.modules if name.startswith(sys.argv[1])]
print(json.dumps([sorted({name.partition(".")[0] for name in sys.modules}), len(ours)]))
"""


def loaded_by(name: str) -> tuple[set[str], int]:
    """Return (top-level modules of a fresh interpreter that imported all modules of `name`, number of the latter)."""
    done = subprocess.run([sys.executable, "-c", REPORT, name], capture_output=True, text=True, check=True)
    modules, count = json.loads(done.stdout)
    return set(modules), count


@pytest.mark.parametrize("name", [*LIGHT, "hybridengine.rows.protocols"])
def test_light_floor_loads_nothing_heavy(name: str) -> None:
    modules, count = loaded_by(name)
    assert count >= 1
    assert sorted(modules & set(HEAVY)) == []


def test_topology_loads_the_standard_library_only() -> None:
    modules, count = loaded_by("hybridengine.topology")
    assert count >= 4  # the package, sizes, grid, generation
    foreign = modules - set(sys.stdlib_module_names) - {"hybridengine"}
    assert {
        name for name in foreign if not name.startswith("_")
    } == set()  # "_": hooks of the installation itself


def test_heavy_modules_would_be_seen() -> None:
    modules, _ = loaded_by("tensordict")
    assert {"torch", "tensordict"} <= modules
