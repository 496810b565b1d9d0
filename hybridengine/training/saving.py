"""Saves a run while it goes on, and has a new one go on from there.

A save begins between two iterations: every trained role copies its state to host memory, and writes it in the background.
Between two later ones, once all have written, it gets its name; where a run ends before that, whoever goes on gives it.
A save that fails costs the run nothing but itself.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from hybridengine.checkpoints.folders import Checkpoint, checkpoints_in
from hybridengine.checkpoints.making import (
    begin_checkpoint,
    complete_checkpoint,
    discard,
    name_written,
    prune,
)
from hybridengine.config import RunConfig
from hybridengine.config.run_config import TRAINED
from hybridengine.controller.worker_group import WorkerGroup
from hybridengine.drivers.roles import Roles, State
from hybridengine.errors import CheckpointError
from hybridengine.metrics.formatting import format_bytes
from hybridengine.package_versions import package_versions
from hybridengine.planning.memory import checkpoint_bytes

SPARE_SHARE = 1.05
"""Space that a save needs, in sizes of a checkpoint: descriptions of tensors, and files that others write meanwhile."""
POLL_S, LONGEST_POLL_S = 0.05, 1.0
"""Seconds between two questions to ranks whether they have written: at first, and after a while."""
FREE_KEYS = (
    "resume",
    "run.folder",
    "run.name",
    "run.live",
    "run.trackers",
    "checkpoint",
    "faults",
    "timeouts",
)
"""Parts of a configuration that do not change a run's results."""


@dataclass(frozen=True)
class Best:
    """The checkpoint with the highest value of the metric that decides."""

    step: int | None = None
    value: float = -math.inf
    metric: str | None = None
    """Name of that metric."""


@dataclass
class Progress:
    """State of a run that passes from one iteration to the next, beside the models."""

    step: int
    """Iterations that are complete."""
    state: State
    """Numbers that the dataflow keeps."""
    best: Best
    prompts_drawn: int
    """By all iterations; not their number times the batch size, where a run has gone on with another one."""

    @classmethod
    def start(cls) -> Progress:
        """Return the progress of a new run."""
        return cls(0, {}, Best(), 0)

    @classmethod
    def at(cls, checkpoint: Checkpoint, best_metric: str | None) -> Progress:
        """Return the progress of a run that resumes from a checkpoint.

        Args:
            best_metric: the metric that decides from now on; the best by another one is forgotten.

        Raises:
            CheckpointError: it has no such progress.
        """
        found = checkpoint.run_state()
        try:
            state = {str(name): float(value) for name, value in found["state"].items()}
            step, value, metric = (found["best"].get(name) for name in ("step", "value", "metric"))
            best = Best() if step is None or metric != best_metric else Best(int(step), float(value), metric)
            # One that was converted has trained nothing.
            drawn = found["data"]["prompts_drawn"] if found["step"] else 0
            return cls(int(found["step"]), state, best, max(0, int(drawn)))
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise CheckpointError(f"{checkpoint.folder} does not say where its run was ({error!r})") from None


@dataclass
class _Writing:
    """A checkpoint that ranks are writing."""

    folder: Path
    step: int
    roles: list[str]
    """Those that have begun to write and have not ended."""
    error: CheckpointError | None
    """Reason why there will be no checkpoint."""


class RunSaver:
    """Makes the checkpoints of a run; one is written at a time.

    Args:
        progress: read when a save begins, and told of the best one.
        say: told of every checkpoint, and of why one could not be written.
    """

    def __init__(
        self, config: RunConfig, roles: Roles, progress: Progress, say: Callable[[str], None]
    ) -> None:
        self._config, self._progress, self._say = config, progress, say
        self._groups, self._best_before = _trained_groups(config, roles), progress.best
        # A run goes on from the newest whole one: later ones are damaged, until they are written again.
        self._damaged = {one.step for one in checkpoints_in(config.run_folder) if one.step > progress.step}
        self._writing: _Writing | None = None
        self.saved_step = progress.step
        """Step of the newest checkpoint."""
        self._has_warned = False
        self._begun: int | None = None
        """Step whose checkpoint was begun last."""
        sha256_of(config.train_file)  # now, as it was read: every checkpoint says it

    def after_step(self, metrics: Mapping[str, float], *, last: bool = False) -> None:
        """Complete a checkpoint that all ranks have written meanwhile; begin another where it is time, or the run ends.

        Args:
            last: the run ends after this step; also where that turns out only after an earlier call for it.
        """
        self._poll()
        every, step = self._config.checkpoint.every, self._progress.step
        if not every or not (last or step % every == 0):
            return
        if self._begun != step:
            self._complete()
            self._rate(metrics)
            self._begin()
            self._begun = step
        if last:
            self._complete()

    def _rate(self, metrics: Mapping[str, float]) -> None:
        name, best = self._config.checkpoint.best, self._progress.best
        value = metrics.get(name, math.nan) if name else math.nan
        self._best_before = best
        is_measured = name is not None and (not _is_evaluated(name) or any(map(_is_evaluated, metrics)))
        if is_measured and name not in metrics and not self._has_warned:
            self._has_warned = True
            known = ", ".join(sorted(metrics))
            self._say(
                f"warning: checkpoint.best={name} is no metric of this run, so that no best checkpoint is kept; choose"
                f" from {known}"
            )
        if value > best.value:
            self._progress.best = Best(self._progress.step, value, name)

    def _begin(self) -> None:
        config, step = self._config, self._progress.step
        run_folder = config.run_folder
        try:
            name_written(run_folder, self._say)
            expected = SPARE_SHARE * checkpoint_bytes(config)
            if (free := shutil.disk_usage(run_folder).free) < expected:
                raise CheckpointError(
                    f"{run_folder} has {format_bytes(free)} free, and a checkpoint takes {format_bytes(int(expected))};"
                    " make room, or lower checkpoint.keep"
                )
            folder = begin_checkpoint(run_folder, step, run_state(config, self._progress), self._groups)
        except (OSError, CheckpointError) as error:
            self._give_up(step, error)
            return
        begun = {role: group.begin_save(str(folder / role)) for role, group in self._groups.items()}
        refused = {role: one.get()[0] for role, one in begun.items()}  # all ranks answer the same
        error = next((error for error in refused.values() if error is not None), None)
        roles = [role for role, error in refused.items() if error is None]
        self._writing = _Writing(folder, step, roles, error)
        if error is not None:
            self._complete()

    def _complete(self) -> None:
        """Wait until there is no checkpoint that is being written, for as long as `timeouts.save_s`."""
        deadline, pause = time.monotonic() + self._config.timeouts.save_s, POLL_S
        self._poll()
        while self._writing is not None:
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_POLL_S)
            self._poll(last=time.monotonic() >= deadline)

    def _poll(self, last: bool = False) -> None:
        """Ask the roles that still write whether they have; where all have, the checkpoint is complete, or given up.

        Args:
            last: they have had all the time that there is: those that have not written give up.
        """
        writing = self._writing
        if writing is None:
            return
        for role, asked in {role: self._groups[role].end_save(last) for role in writing.roles}.items():
            answers = asked.get()
            ended = next((one for one in answers if isinstance(one, CheckpointError)), answers[0])
            if isinstance(ended, CheckpointError):
                writing.error = writing.error or ended
            if ended:
                writing.roles.remove(role)
        if not writing.roles:
            self._name(writing)

    def _name(self, writing: _Writing) -> None:
        """Give a checkpoint that is written its name, and delete old ones."""
        try:
            if writing.error is not None:
                raise writing.error
            checkpoint = complete_checkpoint(writing.folder)
        except OSError as reason:
            # It has everything else: the next save gives the name, or whoever goes on.
            self._writing = None
            self._say(f"warning: {writing.folder} is written, but cannot have its name now ({reason})")
            return
        except CheckpointError as reason:
            self._give_up(writing.step, reason)
            return
        self._writing, self.saved_step = None, writing.step
        self._damaged.discard(writing.step)
        with contextlib.suppress(OSError):  # then they stay a while longer
            prune(
                self._config.run_folder,
                self._config.checkpoint.keep,
                self._progress.best.step,
                self._damaged,
            )
        size = format_bytes(checkpoint.num_bytes())
        self._say(f"checkpoint of step {writing.step} saved: {checkpoint.folder.name}, {size}")

    def _give_up(self, step: int, error: Exception) -> None:
        """A checkpoint could not be written: say so, and let the run go on."""
        if self._writing is not None:
            discard(self._writing.folder)
        self._writing = None
        if self._progress.best.step == step:
            self._progress.best = self._best_before
        self._say(f"warning: no checkpoint of step {step}: {error}; the run goes on, earlier ones are kept")


def _is_evaluated(metric: str) -> bool:
    """Return True if only steps with an evaluation have the metric."""
    return metric.startswith("eval/")


def _trained_groups(config: RunConfig, roles: Roles) -> dict[str, WorkerGroup]:
    return {role: getattr(roles, role) for role in TRAINED if role in config.algorithm.roles}


def load_roles(checkpoint: Checkpoint, config: RunConfig, roles: Roles) -> None:
    """Have every trained role go on from a checkpoint, and the prompts; of one that was converted, roles that it has.

    Raises:
        RankFailedError: it is another model's, or cannot be read.
        CheckpointError: it lacks a role.
    """
    groups = {role: getattr(roles, role) for role in roles_to_load(checkpoint, config)}
    progress = Progress.at(checkpoint, config.checkpoint.best)
    for loaded in [
        *(group.load_checkpoint(str(checkpoint.folder / role)) for role, group in groups.items()),
        roles.prompts.go_on_after(progress.step, progress.prompts_drawn),
    ]:
        loaded.wait()


def roles_to_load(checkpoint: Checkpoint, config: RunConfig) -> list[str]:
    """Roles that a run trains and a checkpoint has: all, or of one that was converted some.

    Raises:
        CheckpointError: it lacks one.
    """
    trained = [role for role in TRAINED if role in config.algorithm.roles]
    there = [role for role in trained if (checkpoint.folder / role).is_dir()]
    missing = [role for role in trained if role not in there]
    if missing and not (there and checkpoint.step == 0):
        raise CheckpointError(
            f"{checkpoint.folder} has no {missing[0]}, which algorithm.name={config.algorithm.name} trains; resume with"
            " the algorithm that it was written by, or from a checkpoint before the change, into another run.name"
        )
    return there


def roles_left_out(checkpoint: Checkpoint, config: RunConfig) -> list[str]:
    """Roles of a checkpoint that a run does not train: it will save none of them."""
    return [
        role for role in TRAINED if role not in config.algorithm.roles and (checkpoint.folder / role).is_dir()
    ]


def run_state(config: RunConfig, progress: Progress) -> dict[str, Any]:
    """Return the contents of run.json."""
    return {
        "state": dict(progress.state),
        "best": {
            "step": progress.best.step,
            "value": None if progress.best.step is None else progress.best.value,
            "metric": progress.best.metric,
        },
        "data": {
            "prompts_drawn": progress.prompts_drawn,
            "batch_size": config.data.batch_size,
            "seed": config.run.seed,
            "sha256": sha256_of(config.train_file),
        },
        "config": config.described(),
        "versions": dict(package_versions()),
    }


@lru_cache(maxsize=2)
def sha256_of(file: Path) -> str | None:
    """Return the digest of a file's contents at the first call; None where it is gone, which ends no run."""
    try:
        with file.open("rb") as opened:
            return hashlib.file_digest(opened, "sha256").hexdigest()
    except OSError:
        return None


def changed_surroundings(config: RunConfig, checkpoint: Checkpoint) -> list[str]:
    """Return changes since a checkpoint was written, beside the configuration: prompts, packages."""
    state = checkpoint.run_state()
    data, versions = (
        found if isinstance(found := state.get(name), dict) else {} for name in ("data", "versions")
    )
    changes = []
    if data.get("sha256") not in (None, sha256_of(config.train_file)):
        changes.append(f"{config.train_file} has other contents: prompts may come twice, or not at all")
    if versions:
        changes += [f"version of {change}" for change in changed_values(versions, package_versions())]
    return changes


def differences(config: RunConfig, checkpoint: Checkpoint) -> list[str]:
    """Return values of a configuration that differ from the checkpoint's and change results; sizes and ranks too.

    There are none for a converted checkpoint, which no run has written.
    """
    before = checkpoint.run_state().get("config")
    return [
        change
        for change in (changed_values(before, config.described()) if before else [])
        if not change.startswith(tuple(f"{free}{end}" for free in FREE_KEYS for end in ".:"))
    ]


def changed_values(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return the keys whose values differ, "key: before -> now", in alphabetical order."""
    old, new = dict(_flat(before)), dict(_flat(now))
    return [
        f"{key}: {json.dumps(old.get(key))} -> {json.dumps(new.get(key))}"
        for key in sorted({*old, *new})
        if old.get(key) != new.get(key)
    ]


def _flat(tree: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, dict) and value:
            yield from _flat(value, f"{above}{key}.")
        else:
            yield f"{above}{key}", value
