"""Weights & Biases and MLflow as places to log rows to. Each package is imported where it is opened."""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from hybridengine.redaction import redacted, without_secrets

PROJECT = "hybridengine"
"""wandb's project and MLflow's experiment, where the environment names no other."""
LOGIN_TIMEOUT_S = 60.0
"""For an answer to wandb's question for a key."""
FINISH_TIMEOUT_S = 50.0

MLFLOW_FILE = "mlflow.db"
MLFLOW_MAX_PARAMS = 100
"""Of one request."""
MLFLOW_MAX_VALUE = 500
"""Characters of a parameter's value that every server takes."""


@dataclass(frozen=True)
class TrackedRun:
    """What trackers are told of a run."""

    name: str
    folder: Path
    config: Mapping[str, Any]
    """As it is written to config.yaml."""


class Tracker(Protocol):
    """A place to log to; used by one thread, and may raise anything."""

    def log(self, step: int, values: Mapping[str, float]) -> None: ...

    def close(self, failed: bool) -> None: ...


class WandbTracker:
    """A run of Weights & Biases; keys and steps are those of metrics.jsonl."""

    def __init__(self, run: TrackedRun) -> None:
        import wandb  # pyright: ignore[reportMissingImports]

        # The terminal is the live view's: wandb must not record or replace what is printed.
        settings: dict[str, Any] = {"console": "off", "login_timeout": LOGIN_TIMEOUT_S}
        if "finish_timeout" in getattr(wandb.Settings, "model_fields", ()):  # newer versions
            settings["finish_timeout"] = FINISH_TIMEOUT_S
        with _arguments_without_secrets():
            self._run = wandb.init(
                project=os.environ.get("WANDB_PROJECT", PROJECT),
                name=run.name,
                dir=str(run.folder),
                config=dict(run.config),
                settings=wandb.Settings(**settings),
            )

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Log a row. wandb leaves out a step that is not beyond the last one, and says so."""
        self._run.log(dict(values), step=step)

    def close(self, failed: bool) -> None:
        self._run.finish(exit_code=1 if failed else 0)


@contextlib.contextmanager
def _arguments_without_secrets() -> Iterator[None]:
    """For wandb, which keeps the command line of whoever opens a run; an override may have a secret."""
    typed = sys.argv
    sys.argv = [_without_secret(argument) for argument in typed]
    try:
        yield
    finally:
        sys.argv = typed


def _without_secret(argument: str) -> str:
    key, is_override, value = argument.partition("=")
    return f"{key}={redacted(value, key)}" if is_override else without_secrets(argument)


class MlflowTracker:
    """A run of MLflow, on the server of MLFLOW_TRACKING_URI, or in a file beside the runs."""

    def __init__(self, run: TrackedRun) -> None:
        from mlflow.entities import Metric, Param  # pyright: ignore[reportMissingImports]
        from mlflow.tracking import MlflowClient  # pyright: ignore[reportMissingImports]

        self._metric = Metric
        file = f"sqlite:///{(run.folder.parent / MLFLOW_FILE).absolute()}"
        self._client = MlflowClient(os.environ.get("MLFLOW_TRACKING_URI") or file)
        experiment = os.environ.get("MLFLOW_EXPERIMENT_NAME") or PROJECT
        found = self._client.get_experiment_by_name(experiment)
        identity = found.experiment_id if found else self._client.create_experiment(experiment)
        self._run_id = self._client.create_run(identity, run_name=run.name).info.run_id
        params = [Param(key, value[:MLFLOW_MAX_VALUE]) for key, value in flat_config(run.config)]
        for first in range(0, len(params), MLFLOW_MAX_PARAMS):
            self._client.log_batch(self._run_id, params=params[first : first + MLFLOW_MAX_PARAMS])

    def log(self, step: int, values: Mapping[str, float]) -> None:
        now = int(1000 * time.time())
        self._client.log_batch(
            self._run_id,
            metrics=[
                self._metric(mlflow_name(key), float(value), now, step) for key, value in values.items()
            ],
        )

    def close(self, failed: bool) -> None:
        self._client.set_terminated(self._run_id, "FAILED" if failed else "FINISHED")


def mlflow_name(key: str) -> str:
    """The key as MLflow takes it, which knows no arrows: "a.b->c.d" is "a.b to c.d"."""
    return re.sub(r"[^\w./: -]", "_", key.replace("->", " to "), flags=re.ASCII)


def flat_config(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Dotted key and value of every field, values as JSON but for texts."""
    for name, value in config.items():
        if isinstance(value, Mapping) and value:
            yield from flat_config(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value if isinstance(value, str) else json.dumps(value)


OPENERS: Mapping[str, Callable[[TrackedRun], Tracker]] = {"wandb": WandbTracker, "mlflow": MlflowTracker}
"""Name of the package -> how it is opened."""
