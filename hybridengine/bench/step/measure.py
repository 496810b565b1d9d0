"""Measurement of steps of this project and of TRL: choice of each side's way, then counted steps in turn."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any

from hybridengine.bench.step.own import StepFiles, own_steps, prepare_step
from hybridengine.bench.step.spec import TRIAL_STEPS, WARM_UP_STEPS, OwnWay, Side, StepSpec, StepTime, TrlWay
from hybridengine.bench.step.trl_side import make_environment, trl_steps
from hybridengine.controller.cluster import start_ray
from hybridengine.errors import WorkerError
from hybridengine.temporary import temporary_folder

Step = Callable[[int], StepTime]
"""Function that does the step of a given number, from 1."""
Start = Callable[[Any], AbstractContextManager[Step]]
"""Function that starts a side in a given way, and ends it when the context is left."""


def measure_steps(
    config_file: str,
    spec: StepSpec,
    ours: Sequence[OwnWay],
    theirs: Sequence[TrlWay],
    environment: Path,
    say: Callable[[str], None],
) -> tuple[Side, Side | None]:
    """Find the fastest way of each side, then measure both in turn; without TRL if `theirs` is empty.

    Raises:
        ConfigError, CheckpointError, DataError: the model, the prompts or TRL cannot be used.
        WorkerError: a side failed, or the sides did not do the same work.
    """
    with temporary_folder("step") as folder:
        files = prepare_step(config_file, spec, folder)
        sides: dict[str, tuple[Sequence[Any], Start]] = {
            "ours": (ours, lambda way: own_steps(spec, way, files, folder, say))
        }
        if theirs:
            python = make_environment(environment, say)
            sides["TRL"] = theirs, lambda way: trl_steps(spec, way, files, folder, python, say)
        # By default Ray's workers have a lower priority than other processes.
        os.environ.setdefault("RAY_worker_niceness", "0")
        start_ray(num_cpus=max(way.train.num_ranks for way in ours))
        chosen = {name: _fastest(name, ways, start, say) for name, (ways, start) in sides.items()}
        with ExitStack() as stack:
            steps = {name: stack.enter_context(start(chosen[name])) for name, (_, start) in sides.items()}
            turns = list(_turns(spec, files, steps, say))
    found = {name: Side(chosen[name], [turn[name] for turn in turns]) for name in sides}
    return found["ours"], found.get("TRL")


def _fastest(name: str, ways: Sequence[Any], start: Start, say: Callable[[str], None]) -> Any:
    """Return the way whose fastest trial step takes the least time."""
    trials = []
    for way in ways if len(ways) > 1 else ():
        with start(way) as step:
            trials.append((min([step(number).seconds for number in range(1, TRIAL_STEPS + 1)][1:]), way))
        say(f"tried {name}, {way}: {trials[-1][0]:.3f} s")
    return min(trials, key=lambda trial: trial[0])[1] if trials else ways[0]


def _turns(
    spec: StepSpec, files: StepFiles, sides: Mapping[str, Step], say: Callable[[str], None]
) -> Iterator[dict[str, StepTime]]:
    """Yield the counted steps; the sides alternate in going first, in case the machine's speed drifts."""
    for turn in range(WARM_UP_STEPS + spec.repetitions):
        order = list(sides) if turn % 2 == 0 else list(sides)[::-1]
        taken = {name: sides[name](turn + 1) for name in order}
        prompts = sum(len(files.prompts.tokens[row]) for row in files.step_rows(spec.num_prompts, turn + 1))
        wanted = spec.samples_per_prompt * prompts + spec.num_rows * spec.response_tokens
        for name, step in taken.items():
            if step.tokens != wanted:
                raise WorkerError(
                    f"step {turn + 1} of {name} had {step.tokens} tokens and not {wanted}; both sides must do the same"
                    " work: name a model whose tokenizer adds no tokens of its own"
                )
        if turn >= WARM_UP_STEPS:
            seconds = ", ".join(f"{name} {taken[name].seconds:.3f} s" for name in sides)
            say(f"{turn - WARM_UP_STEPS + 1} of {spec.repetitions}: {seconds}")
            yield taken
