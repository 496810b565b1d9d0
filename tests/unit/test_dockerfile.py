"""The Dockerfile copies what there is, runs what the Makefile has, and is built as the documentation says."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import tomllib
from dataclasses import dataclass, field
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "Dockerfile").read_text()
LANES = {"cpu": (".venv", "requirements/cpu.lock.txt"), "gpu": (".venv-gpu", "requirements/gpu.lock.txt")}
"""Environment and lock of each target."""
MADE = {"cpu": "", "gpu": " GPU=1"}
"""What `make` is given."""


@dataclass
class Stage:
    """Instructions of one build target, and the arguments that it may use."""

    image: str
    lines: list[tuple[str, str]] = field(default_factory=list)

    def of(self, instruction: str) -> list[str]:
        return [rest for name, rest in self.lines if name == instruction]


def instructions() -> list[tuple[str, str]]:
    """Return (instruction, the rest) of each, without comments and line ends."""
    lines = "\n".join(line for line in TEXT.splitlines() if not line.lstrip().startswith("#"))
    whole = re.sub(r"\\\n\s*", "", lines).splitlines()
    return [(line.split(None, 1)[0], line.split(None, 1)[1]) for line in whole if line.strip()]


def read_stages() -> tuple[dict[str, str], dict[str, Stage]]:
    """Return the arguments before the first stage with their defaults, and the stages by name."""
    before, stages, name = dict[str, str](), dict[str, Stage](), ""
    for instruction, rest in instructions():
        if instruction == "FROM":
            image, word, name = rest.split()
            assert word == "AS"
            stages[name] = Stage(image)
        elif name:
            stages[name].lines.append((instruction, rest))
        else:
            assert instruction == "ARG"
            before[rest.split("=", 1)[0]] = rest.split("=", 1)[1]
    return before, stages


BEFORE, STAGES = read_stages()


def is_sent(path: str) -> bool:
    """Return whether .dockerignore, whose first rule excludes everything, lets a path of the repository through."""
    rules = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line and line[0] != "#"]
    assert rules[0] == "*"
    return f"!{path.split('/')[0]}" in rules


def dry_run(*arguments: str) -> str:
    command = ["make", "--dry-run", "--always-make", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout


def test_the_last_target_is_that_of_gpus():
    assert [*STAGES] == [*LANES], "without --target, Docker builds the last one"
    for stage in STAGES.values():
        assert re.fullmatch(r"[\w./-]+:[\w.-]+", BEFORE[stage.image.strip("${}")]), "an image and its version"


@pytest.mark.parametrize("name", STAGES)
def test_what_is_copied_exists_and_is_sent(name: str):
    copied = [words.split() for words in STAGES[name].of("COPY")]
    for *sources, _ in copied:
        for source in sources:
            assert source == "." or ((ROOT / source).is_file() and is_sent(source)), source
    assert ["requirements/" in words[-1] and words[0] for words in copied][1] == LANES[name][1]
    needed = (
        "Makefile",
        "Dockerfile",
        ".dockerignore",
        "pyproject.toml",
        "README.md",
        "LICENSE",
        "hybridengine",
        "workers",
        "configs",
        "tests",
    )
    assert all(is_sent(path) and (ROOT / path).exists() for path in (*needed, "docs", "scripts", ".ci"))


@pytest.mark.parametrize("name", STAGES)
def test_commands_are_those_of_the_makefile(name: str, monkeypatch: pytest.MonkeyPatch):
    folder, lock = LANES[name]
    runs = STAGES[name].of("RUN")
    made = re.findall(
        r"make ([\w-]+)((?: \w+=\w+)*)", " ; ".join(run for run in runs if "apt-get" not in run)
    )
    assert made == [("install-lock", MADE[name]), ("install", MADE[name])]
    assert f"PATH=/opt/hybridengine/{folder}/bin:" in " ".join(STAGES[name].of("ENV"))
    assert STAGES[name].of("WORKDIR") == ["/opt/hybridengine"]
    (version,) = {int(minor) for minor in re.findall(r"python3\.(\d+)", runs[0])}
    monkeypatch.setenv("PYTHON", f"python3.{version}")
    supported = {"cpu": {11, 12}, "gpu": {12}}[name]
    assert version in supported and (name != "cpu" or version == 11), "the lock is of one version of Python"
    if name == "cpu":  # without that Python here, make refuses the other
        told = dry_run("install-lock")
        assert lock in told and f"{folder}/bin/python" in told


@pytest.mark.parametrize("name", STAGES)
def test_it_starts_a_command_of_the_project(name: str):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    command, *_ = json.loads(STAGES[name].of("CMD")[0])
    assert command in project["scripts"]


@pytest.mark.parametrize("page", ["Dockerfile", "docs/how-to/install.md", "docs/how-to/gpu.md"])
def test_documented_builds_are_of_targets_and_arguments_that_exist(page: str):
    text = (ROOT / page).read_text()
    builds = [shlex.split(line.split("#")[0]) for line in re.findall(r"docker build ([^\n]+)", text)]
    assert builds
    tags = set[str]()
    for words in builds:
        target = words[words.index("--target") + 1] if "--target" in words else [*STAGES][-1]
        given = {words[at + 1].split("=")[0] for at, word in enumerate(words) if word == "--build-arg"}
        known = {rest.split("=")[0] for rest in STAGES[target].of("ARG")} | BEFORE.keys()
        assert given <= known, f"{target} has no {given - known}"
        tags.add(words[words.index("-t") + 1])
    assert set(re.findall(r"docker run [^\n]*?(hybridengine(?:-cpu)?)(?= |$|\n)", text)) <= tags
