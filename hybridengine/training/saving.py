"""Saving of checkpoints during a run, and loading of the state of a resumed run.

Between two iterations, every trained role copies its state to host memory and writes it in the background; the run waits
for the copies, of which a rank holds only some at a time (backends/megatron/checkpoint.py). Once all have written, the
checkpoint is renamed, if need be by the resumed run. A failed save does not end the run.
"""

from __future__ import annotations

import contextlib
import json
import math
import shutil
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from hybridengine.checkpoints.digests import FileDigest
from hybridengine.checkpoints.folders import Best, Checkpoint, DataState, RunState
from hybridengine.checkpoints.making import (
    begin_checkpoint,
    complete_checkpoint,
    discard,
    name_written,
    prune,
)
from hybridengine.config import Role, RunConfig
from hybridengine.config.run_config import TRAINED
from hybridengine.config.values import flat
from hybridengine.controller.worker_group import WorkerGroup
from hybridengine.drivers.roles import Roles, State
from hybridengine.errors import CheckpointError
from hybridengine.formatting import format_bytes
from hybridengine.machine import package_versions
from hybridengine.planning.costs.memory import checkpoint_bytes

SPARE_SHARE = 1.05
"""Disk space that a save needs, as a multiple of the checkpoint's size; includes metadata and concurrent writes."""
POLL_S, LONGEST_POLL_S = 0.05, 1.0
"""Initial and longest interval, in seconds, at which ranks are polled for the end of a save."""
FREE_KEYS = (
    "resume",
    "checkpoint",
    "faults",
    "timeouts",
    "run.folder",
    "run.name",
    "run.live",
    "run.trackers",
)
"""Parts of a configuration that do not change a run's results."""


@dataclass
class Progress:
    """State of a run, other than its models, that is passed from one iteration to the next."""

    step: int = 0
    """Number of completed iterations."""
    state: State = field(default_factory=dict)
    """Numbers that the dataflow keeps between iterations."""
    best: Best = field(default_factory=Best)
    prompts_drawn: int = 0
    """Number of prompts drawn in all iterations."""

    @classmethod
    def at(cls, checkpoint: Checkpoint | None, best_metric: str | None) -> Progress:
        """Return the progress at a checkpoint or of a new run; the best value counts only if it is of `best_metric`.

        Raises CheckpointError if the checkpoint's progress cannot be read.
        """
        if checkpoint is None:
            return cls()
        found = checkpoint.run_state()
        best = found.best if found.best.metric == best_metric else Best()
        return cls(found.step, found.state, best, found.data.prompts_drawn if found.step else 0)


@dataclass
class _Writing:
    """Checkpoint that ranks are writing."""

    folder: Path
    step: int
    roles: list[str]
    """Roles that are still writing."""
    error: CheckpointError | None
    """First error, because of which the checkpoint will be discarded; None otherwise."""


class RunSaver:
    """Writer of a run's checkpoints, one at a time; `say` prints a message for each, saved or failed.

    `progress` is read when a save begins, and its best checkpoint is updated.
    """

    def __init__(
        self, config: RunConfig, roles: Roles, progress: Progress, say: Callable[[str], None]
    ) -> None:
        self._config, self._progress, self._say = config, progress, say
        self._groups: dict[str, WorkerGroup] = {
            role: getattr(roles, role) for role in TRAINED if role in config.algorithm.roles
        }
        self._engines = roles.generation if config.engines else None
        self._best_before = progress.best
        self._writing: _Writing | None = None
        self.saved_step = progress.step
        """Step of the newest checkpoint."""
        self._has_warned = False
        self._said = set[str]()
        """Warnings about checkpoints without a name, which every attempt to rename them would repeat."""
        self._begun: int | None = None
        """Step of the last save that was begun."""
        sha256_of(config.train_file)  # cached now, as it was read; every checkpoint records it

    def after_step(self, metrics: Mapping[str, float], *, last: bool = False) -> None:
        """Complete a checkpoint that all ranks have written; begin another if one is due or the run ends.

        A second call for the same step may set `last`.
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
        self._best_before = best
        if name is None:
            return
        if name in metrics:
            sign = -1.0 if name.endswith(("loss", "perplexity")) else 1.0
            if sign * metrics[name] > (-math.inf if best.value is None else sign * best.value):
                self._progress.best = Best(step=self._progress.step, value=metrics[name], metric=name)
        elif not self._has_warned and (
            not name.startswith("eval/") or any(metric.startswith("eval/") for metric in metrics)
        ):
            self._has_warned = True
            self._say(
                f"warning: checkpoint.best={name} is not a metric of this run, so that no best checkpoint is kept; choose"
                f" from {', '.join(sorted(metrics))}"
            )

    def _begin(self) -> None:
        config, step = self._config, self._progress.step
        run_folder = config.run_folder
        try:
            name_written(run_folder, self._say_once)
            expected = SPARE_SHARE * checkpoint_bytes(config)
            if (free := shutil.disk_usage(run_folder).free) < expected:
                raise CheckpointError(
                    f"{run_folder} has {format_bytes(free)} free, and a checkpoint takes {format_bytes(int(expected))};"
                    " make room, or lower checkpoint.keep"
                )
            folder = begin_checkpoint(run_folder, run_state(config, self._progress, self._groups))
            if self._engines is not None:
                self._engines.save(folder)
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
        else:
            self._wait_for_copies(roles)

    def _wait_for_copies(self, roles: list[str]) -> None:
        """Wait until all ranks have copied their state, which a step would change, for at most `timeouts.save_s`."""
        deadline, pause = time.monotonic() + self._config.timeouts.save_s, POLL_S
        while True:
            asked = {role: self._groups[role].copy_save() for role in roles}
            roles = [role for role, copied in asked.items() if not all(copied.get())]
            if not roles:
                return
            if time.monotonic() >= deadline:
                self._poll(last=True)
                return
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_POLL_S)

    def _complete(self) -> None:
        """Wait until no checkpoint is being written, for at most `timeouts.save_s`."""
        deadline, pause = time.monotonic() + self._config.timeouts.save_s, POLL_S
        self._poll()
        while self._writing is not None:
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_POLL_S)
            self._poll(last=time.monotonic() >= deadline)

    def _poll(self, last: bool = False) -> None:
        """Complete or discard the checkpoint if all roles have ended; at the `last` time, those that write give up."""
        writing = self._writing
        if writing is None:
            return
        for role, asked in {role: self._groups[role].end_save(last) for role in writing.roles}.items():
            answers = asked.get()
            # A late rank names itself; rank 0, which answers first, may only know that some are late.
            ended = next((one for one in reversed(answers) if isinstance(one, CheckpointError)), answers[0])
            if isinstance(ended, CheckpointError):
                writing.error = writing.error or ended
            if ended:
                writing.roles.remove(role)
        if not writing.roles:
            self._name(writing)

    def _name(self, writing: _Writing) -> None:
        """Rename a written checkpoint to its final name, and delete old ones."""
        try:
            if writing.error is not None:
                raise writing.error
            checkpoint = complete_checkpoint(writing.folder)
        except OSError as reason:
            self._writing = None
            self._say_once(
                f"warning: checkpoint {writing.folder} was written but could not be renamed: {reason}; it will be renamed"
                " at the next save"
            )
            return
        except CheckpointError as reason:
            self._give_up(writing.step, reason)
            return
        self._writing, self.saved_step = None, writing.step
        with contextlib.suppress(OSError):  # old ones are then deleted after a later save
            prune(self._config.run_folder, self._config.checkpoint.keep, self._progress.best.step)
        size = format_bytes(checkpoint.num_bytes())
        self._say(f"checkpoint of step {writing.step} saved: {checkpoint.folder.name}, {size}")

    def _say_once(self, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            self._say(text)

    def _give_up(self, step: int, error: Exception) -> None:
        """Discard a checkpoint that could not be written, and print a warning; the run continues."""
        if self._writing is not None:
            discard(self._writing.folder)
        self._writing = None
        if self._progress.best.step == step:
            self._progress.best = self._best_before
        self._say(f"warning: no checkpoint of step {step}: {error}; the run goes on, earlier ones are kept")


def load_roles(checkpoint: Checkpoint, config: RunConfig, roles: Roles) -> None:
    """Load a checkpoint's trained roles, and set the position in the prompts; RankFailedError if one cannot be read."""
    progress = Progress.at(checkpoint, config.checkpoint.best)
    there, _, _ = check_roles(checkpoint, config)
    begun = [getattr(roles, role).load_checkpoint(str(checkpoint.folder / role)) for role in there]
    for loaded in [*begun, roles.prompts.go_on_after(progress.step, progress.prompts_drawn)]:
        loaded.wait()


def check_roles(checkpoint: Checkpoint, config: RunConfig) -> tuple[list[Role], ...]:
    """Return the roles to load, the roles to initialise, and the checkpoint's roles that the run does not train.

    Raises CheckpointError if a checkpoint that was not converted lacks a role that the run trains.
    """
    trained: set[Role] = set(config.algorithm.roles) & set(TRAINED)
    there: set[Role] = {role for role in TRAINED if (checkpoint.folder / role).is_dir()}
    missing = trained - there
    if missing and not (trained & there and checkpoint.step == 0):
        lost = min(missing, key=TRAINED.index)
        raise CheckpointError(
            f"{checkpoint.folder} has no {lost}, which algorithm.name={config.algorithm.name} trains; resume with"
            " the algorithm that it was written by, or from a checkpoint before the change, into another run.name"
        )
    return tuple(sorted(roles, key=TRAINED.index) for roles in (trained & there, missing, there - trained))


def run_state(config: RunConfig, progress: Progress, roles: Iterable[str]) -> RunState:
    """Return the contents of run.json."""
    return RunState(
        step=progress.step,
        roles=tuple(roles),
        state=progress.state,
        best=progress.best,
        data=DataState(
            prompts_drawn=progress.prompts_drawn,
            batch_size=config.data.batch_size,
            seed=config.run.seed,
            sha256=sha256_of(config.train_file),
        ),
        config=config.described(),
        versions=dict(package_versions()),
    )


@lru_cache(maxsize=2)
def sha256_of(file: Path) -> str | None:
    """Return the digest of a file's contents at the first call; None if it cannot be read."""
    with contextlib.suppress(OSError):
        return FileDigest.of(file).sha256
    return None


def changes_since(config: RunConfig, checkpoint: Checkpoint) -> list[str]:
    """Return the changes of configuration, prompts and packages since a checkpoint was written that affect results."""
    before = checkpoint.run_state()
    changes = [
        f"the configuration has changed: {change}"
        for change in (changed_values(before.config, config.described()) if before.config else [])
        if not change.startswith(tuple(f"{free}{end}" for free in FREE_KEYS for end in ".:"))
    ]
    if before.data.sha256 not in (None, sha256_of(config.train_file)):
        changes.append(f"{config.train_file} has other contents: prompts may come twice, or not at all")
    if before.versions:
        changes += [f"version of {one}" for one in changed_values(before.versions, package_versions())]
    return changes


def changed_values(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return the keys whose values differ, as "key: before -> now" in alphabetical order."""
    old, new = dict(flat(before)), dict(flat(now))
    return [
        f"{key}: {json.dumps(old.get(key))} -> {json.dumps(new.get(key))}"
        for key in sorted({*old, *new})
        if old.get(key) != new.get(key)
    ]
