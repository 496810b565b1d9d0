"""Stand-ins for wandb and mlflow, which the tests do not depend on: the parts that are used, with their rules.

They accept, refuse and keep the same values as wandb 0.31.0 and mlflow 3.17.2 (docs/decisions/0022-trackers.md).
"""

from __future__ import annotations

import re
import sys
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

    def modules(self) -> dict[str, ModuleType]:
        """Return the package mlflow, as modules by name."""
        server = self

        @dataclass
        class Metric:
            key: str
            value: float
            timestamp: int
            step: int

        @dataclass
        class Param:
            key: str
            value: str

        class MlflowClient:
            def __init__(self, tracking_uri: str) -> None:
                server.uri = tracking_uri

            def get_experiment_by_name(self, name: str) -> Any:
                if name not in server.experiments:
                    return None
                return SimpleNamespace(experiment_id=str(server.experiments.index(name)))

            def create_experiment(self, name: str) -> str:
                server.experiments.append(name)
                return str(len(server.experiments) - 1)

            def create_run(self, experiment_id: str, run_name: str) -> Any:
                server.runs.append(MlflowRun(run_name, server.experiments[int(experiment_id)]))
                return SimpleNamespace(info=SimpleNamespace(run_id=str(len(server.runs) - 1)))

            def log_batch(self, run_id: str, metrics: list[Metric] = [], params: list[Param] = []) -> None:  # noqa: B006
                run = server.runs[int(run_id)]
                if len(params) > 100 or len(metrics) > 1000:
                    raise ValueError("too many for one request")
                for item in [*metrics, *params]:
                    if not MLFLOW_NAME.match(item.key):
                        raise ValueError(f"Invalid value {item.key!r} for parameter 'name' supplied")
                for param in params:
                    if not isinstance(param.value, str) or len(param.value) > 500 or param.key in run.params:
                        raise ValueError(f"Invalid value for param {param.key!r}")
                    run.params[param.key] = param.value
                for metric in metrics:
                    if not isinstance(metric.value, float) or not isinstance(metric.timestamp, int):
                        raise ValueError(f"Invalid value for metric {metric.key!r}")
                    run.metrics.append((metric.step, metric.key, metric.value))

            def set_terminated(self, run_id: str, status: str) -> None:
                server.runs[int(run_id)].status = status

        entities, tracking = ModuleType("mlflow.entities"), ModuleType("mlflow.tracking")
        entities.Metric, entities.Param = Metric, Param  # type: ignore[attr-defined]
        tracking.MlflowClient = MlflowClient  # type: ignore[attr-defined]
        return {"mlflow": ModuleType("mlflow"), "mlflow.entities": entities, "mlflow.tracking": tracking}
