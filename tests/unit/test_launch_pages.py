"""The commands on docs/how-to/launch.md, which are accepted as they stand there."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from hybridengine.cli.launch_kuberay import EPILOG as kuberay
from hybridengine.cli.launch_node import EPILOG as node
from hybridengine.cli.launch_slurm import EPILOG as slurm
from hybridengine.cli.launch_ssh import EPILOG as ssh
from hybridengine.cli.main import main, parse

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/how-to/launch.md").read_text()
COMMANDS = [
    shlex.split(block.strip().replace("\\\n", " "))[1:]
    for block in PAGE.split("```")[1::2]
    if block.strip().startswith("hybridengine launch ")
]


def test_each_launcher_has_a_recipe_for_both_models():
    named = [(command[1], command[2]) for command in COMMANDS]
    models = ("configs/llama3-70b-16nodes.yaml", "configs/qwen3-235b.yaml")
    assert named == [(launcher, model) for launcher in ("slurm", "kuberay", "ssh") for model in models]


@pytest.mark.parametrize("help_text", [kuberay, node, slurm, ssh], ids=["kuberay", "node", "slurm", "ssh"])
def test_the_configurations_of_examples_are_there(help_text: str):
    named = re.findall(r"configs/\S+", help_text)
    assert named and all((ROOT / name).is_file() for name in named)


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_a_recipe_is_accepted(command: list[str], capsys: pytest.CaptureFixture[str]):
    """What ssh would start is not started: `main` prints what the other two would submit."""
    if command[1] == "ssh":
        assert parse(command).overrides == []
        return
    if "--output" in command:
        place = command.index("--output")
        command = command[:place] + command[place + 2 :]
    assert main([word for word in command if word != "--submit"]) == 0
    printed = capsys.readouterr().out
    nodes = "16" if "llama3" in command[2] else "32"
    assert (f"#SBATCH --nodes={nodes}\n" if command[1] == "slurm" else f"replicas: {nodes}\n") in printed
