"""Steps of both sides in turn: first the way of each, then the counted steps, one of ours and one of TRL's."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

from hybridengine.bench import step_trl
from hybridengine.bench.machine import num_gpus
from hybridengine.bench.step_own import StepFiles, own_steps, run_config
from hybridengine.bench.step_result import Side, StepResult, StepTime
from hybridengine.bench.step_spec import (
    HOPELESS,
    SHORT_TRIAL_S,
    SHORT_TRIAL_STEPS,
    TRIAL_STEPS,
    WARM_UP_STEPS,
    OwnWay,
    StepSpec,
    TrlWay,
)
from hybridengine.bench.step_turns import TurnTaker
from hybridengine.controller.cluster import start_ray
from hybridengine.errors import WorkerError

Step = Callable[[int], StepTime]
"""Does the step of a number, from 1."""
Say = Callable[[str], None]
Way = TypeVar("Way", OwnWay, TrlWay)


class StepBench:
    """A measurement.

    Args:
        folder: for the files of this measurement alone.
        num_cores: what either side computes with.
        python: of TRL's environment; None measures this project alone.
    """

    def __init__(
        self, spec: StepSpec, files: StepFiles, folder: Path, num_cores: int, python: Path | None, say: Say
    ) -> None:
        self._spec, self._files, self._folder, self._say = spec, files, folder, say
        self._num_cores, self._python = num_cores, python

    def measure(self, own_ways: Sequence[OwnWay], trl_ways: Sequence[TrlWay]) -> StepResult:
        """Try the ways of each side where there are several, then let the fastest ones take turns.

        Raises:
            WorkerError: a side failed, or they did not do the same work.
        """
        # Ray would let every other process of the machine go first.
        os.environ.setdefault("RAY_worker_niceness", "0")
        start_ray(num_cpus=max(way.train.num_ranks for way in own_ways))
        own_way, own_trials = self._choose(own_ways, self._own)
        if self._python is None:
            with self._own(own_way) as own:
                steps = list(self._turns({"ours": own}))
            return StepResult(Side(own_way, own_trials, [turn["ours"] for turn in steps]), None)
        trl_way, trl_trials = self._choose(trl_ways, self._trl)
        with self._own(own_way) as own, self._trl(trl_way) as trl:
            steps = list(self._turns({"ours": own, "TRL": trl}))
        return StepResult(
            Side(own_way, own_trials, [turn["ours"] for turn in steps]),
            Side(trl_way, trl_trials, [turn["TRL"] for turn in steps]),
        )

    def _choose(
        self, ways: Sequence[Way], start: Callable[[Way], contextlib.AbstractContextManager[Step]]
    ) -> tuple[Way, list[tuple[Way, float]]]:
        if len(ways) == 1:
            return ways[0], []
        trials: list[tuple[Way, float]] = []
        for way in ways:
            best = min((seconds for _, seconds in trials), default=float("inf"))
            with start(way) as step:
                first, *others = _trial(step, HOPELESS * best)
            trials.append((way, min(others, default=first)))
            self._say(f"tried: {trials[-1][1]:.3f} s")
        return min(trials, key=lambda trial: trial[1])[0], trials

    def _turns(self, sides: dict[str, Step]) -> Iterator[dict[str, StepTime]]:
        """Counted steps; who begins changes from turn to turn, in case the machine slows down or speeds up."""
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

    @contextlib.contextmanager
    def _own(self, way: OwnWay) -> Iterator[Step]:
        self._say(f"starting our ranks: {way}")
        with own_steps(run_config(self._spec, way, self._files, self._folder), way) as steps:
            yield steps.step

    @contextlib.contextmanager
    def _trl(self, way: TrlWay) -> Iterator[Step]:
        self._say(f"starting TRL: {way}")
        assert self._python is not None, "measure leaves TRL out otherwise"
        settings = self._folder / "trl.json"
        settings.write_text(json.dumps(self._trl_settings(way)))
        # Neither this project nor its packages are TRL's, and ranks leave variables behind for their children.
        kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
        quiet = {
            "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "OMP_NUM_THREADS": str(self._num_cores),
            **({"CUDA_VISIBLE_DEVICES": "0"} if num_gpus() else {}),  # all that one process of TRL can use
        }
        command = [str(self._python), "-u", step_trl.__file__, str(settings)]
        with TurnTaker("TRL", command, self._folder / "trl.log", kept | quiet) as child:
            child.receive(self._spec.timeout_s)

            def step(number: int) -> StepTime:
                answer = child.ask({"step": number}, self._spec.timeout_s)
                return StepTime(answer["seconds"], answer["tokens"], answer["phases"])

            yield step

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


def _trial(step: Step, hopeless_s: float) -> Iterator[float]:
    """Seconds of a candidate's steps."""
    passed = 0.0
    for number in range(1, SHORT_TRIAL_STEPS + 1):
        seconds = step(number).seconds
        yield seconds
        passed += seconds
        if passed > SHORT_TRIAL_S and (number >= TRIAL_STEPS or seconds > hopeless_s):
            return
