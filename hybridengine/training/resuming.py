"""Start of a resumed run from its folder: kept configuration, checkpoints and trained model."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import yaml

from hybridengine.checkpoints.conversion import read_role_of
from hybridengine.checkpoints.folders import Checkpoint, checkpoint_at
from hybridengine.checkpoints.making import settle_checkpoints
from hybridengine.config import RunConfig
from hybridengine.config.run_config import model_holders
from hybridengine.data.datasets import PromptDataset, prompts_digest
from hybridengine.errors import CheckpointError, ConfigError, UnreadableError, shown
from hybridengine.files import read_object, writing
from hybridengine.models.checkpoint_files import adapter_problems, checkpoint_problems
from hybridengine.models.shapes import ModelShape
from hybridengine.report.keys import STEP
from hybridengine.report.step_rows import CONFIG_FILE, read_rows
from hybridengine.rollouts.queue import QUEUE_FILE, read_queue
from hybridengine.training.files import config_text
from hybridengine.training.saving import changed_values, check_roles

SETTLED = ("model.build", "model.gguf", "data.task", "data.environment", "warmup")
"""Keys that must not change on resume, because their results (model, data, warmed-up weights) are in the run's folder."""
FINAL_FILE = "final.json"
"""File with the step of a run's trained model."""


def resume_command(config: RunConfig) -> str:
    """Return a hint with the command that resumes the run: from the folder's configuration, if it is the whole of it."""
    file, described = config.run_folder / CONFIG_FILE, config_text(config)
    if "(hidden" in described or "*****" in described or not file.is_file() or file.read_text() != described:
        return f"the same command with run.name={config.run.name} resume=auto resumes it"
    return f"hybridengine train {as_typed(file)} resume=auto resumes it"


def kept_config(config: RunConfig) -> dict[str, Any]:
    """Return the folder's configuration, empty if there is none or without resume=auto; ConfigError if unreadable."""
    file = config.run_folder / CONFIG_FILE
    if config.resume != "auto" or not os.path.lexists(file):
        return {}
    try:
        kept = yaml.safe_load(file.read_text())
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        kept = error
    if not isinstance(kept, dict):
        raise ConfigError(
            f"{as_typed(file)} is not a configuration ({shown(kept)}); remove it, or choose another run.name"
        )
    return kept


def check_settled(config: RunConfig, kept: Mapping[str, Any]) -> None:
    """Raise a ConfigError if a key in `SETTLED` has changed since the run began."""
    changes = [change for change in changed_values(kept, config.described()) if change.startswith(SETTLED)]
    if kept and changes:
        raise ConfigError(
            f"resume=auto: {'; '.join(changes)}, which was settled when {as_typed(config.run_folder)} began; take it"
            " back, or choose another run.name"
        )


def checkpoint_of(
    config: RunConfig, origin: object, say: Callable[[str], None]
) -> tuple[RunConfig, Checkpoint | None]:
    """Return the configuration, whose `resume` names the run's first checkpoint, and the checkpoint to resume or None.

    `origin` is the value of `resume` when the run began; it is used until the run has its own checkpoint. Raises
    CheckpointError if `resume` names a folder that is not a complete checkpoint.
    """
    if config.resume == "never":
        return config, None
    found = None
    if config.resume == "auto":
        found = settle_checkpoints(config.run_folder, say)
        begun = origin not in (None, "auto", "never")
        config = config.model_copy(update={"resume": str(origin)}) if begun else config
    if found is None and config.resume != "auto":
        try:
            found = checkpoint_at(Path(config.resume))
            found.check()
        except CheckpointError as error:
            raise CheckpointError(
                f"resume={config.resume} cannot be used: {error}; name another one, or write resume=auto"
            ) from None
    if found is None:
        return config, None
    _, anew, left_out = check_roles(found, config)
    say(f"resuming after step {found.step}: {as_typed(found.folder)}; all digests match")
    if anew:
        say(f"  not in it, and initialised as in a new run: {', '.join(anew)}")
    if left_out:
        names, algorithm = " and ".join(left_out), config.algorithm.name
        say(f"  {names} will not be in later checkpoints: algorithm.name={algorithm} trains none")
    if found.step > (steps := config.run.steps):
        say(f"  run.steps={steps} is less than the {found.step} that are done: nothing more is trained")
    return config, found


def check_models(config: RunConfig, checkpoint: Checkpoint) -> None:
    """Raise CheckpointError if a role to be loaded has another model than the run, whose files are prepared."""
    there, _, _ = check_roles(checkpoint, config)
    for holder in model_holders(config):
        if holder.role in there:
            shape = ModelShape.from_folder(holder.path or config.model_folder)
            own = shape.with_score_head() if holder.has_score_head else shape
            if holder.role == "actor":
                own = shape.with_adapters(config.actor.lora.adapters)
            read_role_of(checkpoint.folder / holder.role, own, config.model.dtype)


def check_responses(config: RunConfig, checkpoint: Checkpoint, prompts: PromptDataset) -> None:
    """Raise CheckpointError if an asynchronous run cannot go on with the responses in flight of a checkpoint."""
    file = checkpoint.folder / QUEUE_FILE
    if not checkpoint.step or not file.exists():
        return
    queue, digest = read_queue(config, file)
    if prompts_digest(prompts, config.run.seed, queue.prompts) != digest:
        raise CheckpointError(
            f"the responses in flight of {as_typed(checkpoint.folder)} were begun for other prompts: run.seed, the data,"
            " or the tokenizer has changed since; take that back, or begin another run with"
            f" model.path={as_typed(final_folder(config))}"
        )


def final_folder(config: RunConfig) -> Path:
    """Return the folder of the trained model."""
    return config.run_folder / "final"


def _final_problems(config: RunConfig) -> list[str]:
    """Return the problems of the run's trained model, or of its adapters."""
    check = adapter_problems if config.actor.lora.rank else checkpoint_problems
    return check(final_folder(config))


def note_final(config: RunConfig, step: int) -> None:
    """Write the step of the trained model to `FINAL_FILE`."""
    with writing(file := config.run_folder / FINAL_FILE):
        file.write_text(json.dumps({STEP: step}) + "\n")


def steps_done(config: RunConfig) -> int:
    """Return the number of steps of a run whose trained model is complete; 0 for any other run."""
    if _final_problems(config):
        return 0
    try:
        step = read_object(config.run_folder / FINAL_FILE).get(STEP)
    except (FileNotFoundError, UnreadableError):
        return 0
    return step if isinstance(step, int) else 0


def check_final(config: RunConfig, checkpoint: Checkpoint | None, say: Callable[[str], None]) -> None:
    """Raise ConfigError if the run would overwrite a trained model that its own checkpoints cannot reproduce.

    Raises DataError if the run's rows, which are read again at its end, are damaged.
    """
    final, rows = final_folder(config), read_rows(config.run_folder)
    has_own = checkpoint is not None and checkpoint.folder.is_relative_to(config.run_folder)
    if not os.path.lexists(final):
        if checkpoint is None and rows:
            say("no checkpoint to resume from: the run begins anew")
    elif checkpoint is None or not has_own or checkpoint.step < steps_done(config):
        raise ConfigError(
            f"resume=auto: {as_typed(config.run_folder)} has a trained model and no whole checkpoint of its step to"
            f" resume from; choose another run.name, or move {as_typed(final)} away"
        )
    elif problems := _final_problems(config):
        say(f"warning: {as_typed(final)} is damaged, and will be written again: {problems[0]}")


def as_typed(path: Path) -> Path:
    """Return `path` relative to the current directory if it is inside."""
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
