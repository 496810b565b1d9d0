"""Measurement of steps of this project and of TRL: choice of each side's way, then counted steps in turn."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from hybridengine.bench.machine import num_gpus
from hybridengine.bench.step import trl_process
from hybridengine.bench.step.own import StepFiles, own_steps, run_config
from hybridengine.bench.step.spec import (
    TRIAL_STEPS,
    WARM_UP_STEPS,
    OwnWay,
    Side,
    StepSpec,
    StepTime,
    TrlWay,
)
from hybridengine.bench.step.turns import TurnTaker
from hybridengine.controller.cluster import start_ray
from hybridengine.errors import WorkerError

Step = Callable[[int], StepTime]
"""Function that does the step of a given number, from 1."""


class StepBench:
    """Measurement of the steps of both sides.

    Args:
        folder: folder for the files of this measurement.
        num_cores: number of cores that each side uses.
        python: Python executable of TRL's environment; None to measure this project alone.
    """

    def __init__(
        self,
        spec: StepSpec,
        files: StepFiles,
        folder: Path,
        num_cores: int,
        python: Path | None,
        say: Callable[[str], None],
    ) -> None:
        self._spec, self._files, self._folder, self._say = spec, files, folder, say
        self._num_cores, self._python = num_cores, python

    def measure(self, own_ways: Sequence[OwnWay], trl_ways: Sequence[TrlWay]) -> tuple[Side, Side | None]:
        """Find the fastest way of each side, then measure both in turn.

        Raises:
            WorkerError: a side failed, or the sides did not do the same work.
        """
        # By default Ray's workers have a lower priority than other processes.
        os.environ.setdefault("RAY_worker_niceness", "0")
        start_ray(num_cpus=max(way.train.num_ranks for way in own_ways))
        sides: dict[str, tuple[Sequence[Any], Any]] = {"ours": (own_ways, self._own)}
        if self._python is not None:
            sides["TRL"] = trl_ways, self._trl
        chosen = {name: self._choose(ways, start) for name, (ways, start) in sides.items()}
        with contextlib.ExitStack() as stack:
            steps = {name: stack.enter_context(start(chosen[name][0])) for name, (_, start) in sides.items()}
            turns = list(self._turns(steps))
        found = {name: Side(*chosen[name], [turn[name] for turn in turns]) for name in sides}
        return found["ours"], found.get("TRL")

    def _choose(
        self, ways: Sequence[Any], start: Callable[[Any], contextlib.AbstractContextManager[Step]]
    ) -> tuple[Any, list[tuple[Any, float]]]:
        """Return the fastest way, and the seconds of each way tried."""
        if len(ways) == 1:
            return ways[0], []
        trials = []
        for way in ways:
            with start(way) as step:
                trials.append((way, min([step(number).seconds for number in range(1, TRIAL_STEPS + 1)][1:])))
            self._say(f"tried: {trials[-1][1]:.3f} s")
        return min(trials, key=lambda trial: trial[1])[0], trials

    def _turns(self, sides: dict[str, Step]) -> Iterator[dict[str, StepTime]]:
        """Yield the counted steps; the sides alternate in going first, in case the machine's speed drifts."""
        for turn in range(WARM_UP_STEPS + self._spec.repetitions):
            order = list(sides) if turn % 2 == 0 else list(reversed(sides))
            taken = {name: sides[name](turn + 1) for name in order}
            self._check(turn + 1, taken)
            if turn >= WARM_UP_STEPS:
                seconds = ", ".join(f"{name} {taken[name].seconds:.3f} s" for name in sides)
                self._say(f"{turn - WARM_UP_STEPS + 1} of {self._spec.repetitions}: {seconds}")
                yield taken

    def _check(self, number: int, taken: dict[str, StepTime]) -> None:
        spec, tokens = self._spec, self._files.prompts.tokens
        prompts = sum(len(tokens[row]) for row in self._files.step_rows(spec.num_prompts, number))
        wanted = spec.samples_per_prompt * prompts + spec.num_rows * spec.response_tokens
        for name, step in taken.items():
            if step.tokens != wanted:
                raise WorkerError(
                    f"step {number} of {name} had {step.tokens} tokens and not {wanted}; both sides must do the same"
                    " work: name a model whose tokenizer adds no tokens of its own"
                )

    def _own(self, way: OwnWay) -> contextlib.AbstractContextManager[Step]:
        self._say(f"starting our ranks: {way}")
        return own_steps(run_config(self._spec, way, self._files, self._folder), way)

    @contextlib.contextmanager
    def _trl(self, way: TrlWay) -> Iterator[Step]:
        self._say(f"starting TRL: {way}")
        # TRL must not see this project's packages, nor variables that ranks set for their children.
        kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
        quiet = {
            "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "OMP_NUM_THREADS": str(self._num_cores),
            **({"CUDA_VISIBLE_DEVICES": "0"} if num_gpus() else {}),  # a process of TRL uses one GPU
        }
        command = [str(self._python), "-uP", trl_process.__file__]
        with TurnTaker("TRL", command, self._folder / "trl.log", kept | quiet) as child:
            child.ask(self._trl_settings(way), self._spec.timeout_s)
            yield lambda number: StepTime(**child.ask(number, self._spec.timeout_s))

    def _trl_settings(self, way: TrlWay) -> dict[str, object]:
        spec, files = self._spec, self._files
        rows = [files.step_rows(spec.num_prompts, step + 1) for step in range(spec.num_steps)]
        return {
            "folder": str(self._folder / "trl"),
            "model": str(files.model),
            "tokenizer": str(files.tokenizer),
            "on_cpu": not num_gpus(),
            "num_threads": self._num_cores,
            "prompts": [[files.texts[row] for row in step] for step in rows],
            "prompt_tokens": [[list(files.prompts.tokens[row]) for row in step] for step in rows],
            "samples_per_prompt": spec.samples_per_prompt,
            "response_tokens": spec.response_tokens,
            "rows_per_batch": way.rows_per_batch,
            "precision": way.precision,
            "lr": spec.lr,
            "kl_coef": spec.kl_coef,
        }
