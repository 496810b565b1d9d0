"""Groups for all roles of any dataflow, and the output of failing runs on them."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import dataclass

import pytest
from rich.console import Console

from hybridengine.config import RunConfig
from hybridengine.config.algorithm import Algorithm
from hybridengine.drivers.roles import Roles, Sampling, State
from hybridengine.report.step_rows import Row, read_rows
from hybridengine.report.timeline import TIMELINE_FILE, read_timeline
from hybridengine.training.files import RunFiles
from hybridengine.training.iterations import iterate
from hybridengine.training.launch import RunPools
from hybridengine.training.output import RunOutput
from hybridengine.training.saving import Progress, RunSaver
from hybridengine.training.stopping import StopRequest

COST_LIMIT, MULTIPLIER_LR = 20.0, 0.1


Step = Callable[[Roles, Sampling, Algorithm, State], dict[str, float]]


def with_step(algorithm: Algorithm, step: Step) -> Algorithm:
    """Return the algorithm with another step."""

    def carry_out(self: Algorithm, roles: Roles, sampling: Sampling, state: State) -> dict[str, float]:
        return step(roles, sampling, self, state)

    kind = type(algorithm.name, (type(algorithm),), {"step": carry_out, "__module__": __name__})
    return kind.model_construct(**dict(algorithm))


@dataclass(frozen=True)
class Started:
    """Groups for all roles of any dataflow."""

    config: RunConfig
    files: RunFiles
    pools: RunPools
    roles: Roles


def own_run(started: Started, name: str, **changes: dict[str, object]) -> RunConfig:
    """Return the configuration of a run with a folder of its own; changes are {section: {key: value}}."""
    changes["run"] = {"name": name} | changes.get("run", {})
    sections = {
        section: getattr(started.config, section).model_copy(update=values)
        for section, values in changes.items()
    }
    config = started.config.model_copy(update=sections)
    config.run_folder.mkdir()
    return config


def go_on(
    started: Started,
    config: RunConfig,
    step: Step,
    progress: Progress,
    saver: RunSaver,
    stop: StopRequest | None = None,
    roles: Roles | None = None,
) -> None:
    """Run the remaining iterations as `hybridengine train` does."""
    with RunOutput(
        config, started.pools.nodes, started.files.tokenizer, Console(file=io.StringIO())
    ) as output:
        iterate(
            config.model_copy(update={"algorithm": with_step(config.algorithm, step)}),
            started.pools,
            roles or started.roles,
            started.files,
            output,
            progress,
            saver,
            stop or StopRequest(),
        )


def left_by(
    started: Started, roles: Roles, step: Step, name: str, error: type[BaseException], match: str
) -> tuple[list[Row], set[tuple[int | None, str]]]:
    """Return the rows of metrics and the (step, bar) pairs of the timeline that a failing run writes."""
    config = own_run(started, name)
    progress = Progress()
    with pytest.raises(error, match=match):
        go_on(started, config, step, progress, RunSaver(config, roles, progress, print), roles=roles)
    spans = read_timeline(config.run_folder / TIMELINE_FILE).spans
    return read_rows(config.run_folder), {(span.step, span.name) for span in spans}
