"""Stand-ins for wandb and mlflow, which the tests do not depend on: the parts that are used, with their rules.

They accept, refuse and keep the same values as wandb 0.31.0 and mlflow 3.17.2 (docs/decisions/0022-trackers.md).
"""

from __future__ import annotations

import re
import sys
import threading
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any

MLFLOW_NAME = re.compile(r"^[/\w.\- :]*$", re.ASCII)


@dataclass
class WandbRun:
    """The result of wandb.init."""

    arguments: dict[str, Any]
    command_line: list[str]
    """The command line, which wandb stores with the given values."""
    history: list[tuple[int, dict[str, float]]] = field(default_factory=list)
    exit_code: int | None = None

    def log(self, data: dict[str, float], step: int) -> None:
        assert self.exit_code is None, "a finished run takes nothing"
        self.history.append((step, data))

    def finish(self, exit_code: int) -> None:
        self.exit_code = exit_code


class Wandb(ModuleType):
    """The package wandb, with the runs that were created."""

    def __init__(self, failure: Exception | None = None) -> None:
        super().__init__("wandb")
        self.failure, self.runs = failure, list[WandbRun]()

        class Settings(SimpleNamespace):
            model_fields = ("console", "login_timeout", "finish_timeout")

        self.Settings = Settings

    def init(self, *, project: str, name: str, dir: str, config: dict[str, Any], settings: Any) -> WandbRun:
        if self.failure:
            raise self.failure
        told = {"project": project, "name": name, "dir": dir, "config": config} | vars(settings)
        self.runs.append(WandbRun(told, sys.argv[1:]))
        return self.runs[-1]


@dataclass
class MlflowRun:
    """A run as a server stores it."""

    name: str
    experiment: str
    params: dict[str, str] = field(default_factory=dict)
    metrics: list[tuple[int, str, float]] = field(default_factory=list)
    status: str = "RUNNING"


class MlflowServer:
    """Replaces a server: experiments and runs, and the rules by which it refuses requests."""

    def __init__(self) -> None:
        self.uri: str | None = None
        self.experiments: list[str] = []
        self.runs: list[MlflowRun] = []
        self._active = threading.local()

    def module(self) -> ModuleType:
        """Return the package mlflow, whose functions act on the run that the calling thread has started."""
        names = ("set_tracking_uri", "set_experiment", "start_run", "log_params", "log_metrics", "end_run")
        module = ModuleType("mlflow")
        for name in names:
            setattr(module, name, getattr(self, name))
        return module

    def set_tracking_uri(self, uri: str) -> None:
        self.uri = uri

    def set_experiment(self, name: str) -> None:
        if name not in self.experiments:
            self.experiments.append(name)
        self._active.experiment = name

    def start_run(self, run_name: str) -> None:
        self.runs.append(MlflowRun(run_name, self._active.experiment))
        self._active.run = self.runs[-1]

    def log_params(self, params: dict[str, str]) -> None:
        for key, value in params.items():
            if not MLFLOW_NAME.match(key) or len(value) > 500 or key in self._active.run.params:
                raise ValueError(f"Invalid value for param {key!r}")
            self._active.run.params[key] = value

    def log_metrics(self, metrics: dict[str, float], step: int) -> None:
        for key, value in metrics.items():
            if not MLFLOW_NAME.match(key) or not isinstance(value, float):
                raise ValueError(f"Invalid value for metric {key!r}")
            self._active.run.metrics.append((step, key, value))

    def end_run(self, status: str) -> None:
        self._active.run.status = status
