"""The iterations of a run: each with a row of metrics, a line on the console, and a checkpoint where it is time."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping

from hybridengine.config import RunConfig
from hybridengine.controller.exchange import row_exchange
from hybridengine.drivers.roles import Roles, Sampling
from hybridengine.errors import ConfigError, HybridEngineError, shown
from hybridengine.metrics import keys
from hybridengine.training.evaluation import evaluate
from hybridengine.training.files import RunFiles
from hybridengine.training.launch import RunPools
from hybridengine.training.output import RunOutput
from hybridengine.training.saving import Progress, RunSaver
from hybridengine.training.step_metrics import call_metrics
from hybridengine.training.stopping import StopRequest

LAST_WORDS_S = 5.0
"""How long the ranks of a step that has failed may take to say what their reward functions did."""

SEED_STRIDES = (1_000_003, 65_537)
"""Requests of one run must not share seeds: seed = (run · a + step) · b + row, with b no less than the rows of a step."""


def iterate(
    config: RunConfig,
    pools: RunPools,
    roles: Roles,
    files: RunFiles,
    output: RunOutput,
    progress: Progress,
    saver: RunSaver,
    stop: StopRequest,
) -> None:
    """All iterations that are left, or those until somebody asks to stop.

    Args:
        progress: where the run is; kept up to date.
    """
    steps, exchange = config.run.steps, row_exchange()

    def measure(step: int) -> dict[str, float]:
        if files.held_out is None:
            return {}
        output.begin_evaluation(step)
        metrics, samples = evaluate(roles, len(files.held_out))
        output.show_samples(step, samples)
        pools.wait()
        output.draw(step, exchange.take_records())
        return metrics

    @contextlib.contextmanager
    def failures_kept(step: int, known: Mapping[str, float] | None = None) -> Iterator[None]:
        """What is known of a step or an evaluation that does not end is written and drawn.

        Args:
            known: the metrics of a step whose evaluation follows.
        """
        try:
            yield
        except BaseException as error:
            counts = dict[str, float]()
            try:
                if isinstance(error, Exception):  # who interrupts a run does not want to wait
                    with contextlib.suppress(HybridEngineError):  # of ranks that can no longer say
                        counts = roles.take_scorer_metrics(LAST_WORDS_S)
            finally:
                if known is not None:
                    output.record(step, {**known, **counts})
                elif counts:
                    output.record_failure(step, counts)
                pools.settle()
                output.draw(step, exchange.take_records())
            raise

    exchange.take_records()  # of the start
    if progress.step == 0:
        with failures_kept(0):
            metrics = measure(0)
            counts = roles.take_scorer_metrics()
        output.record(0, metrics | counts)
    for step in range(progress.step + 1, steps + 1):
        pools.wait()
        exchange.take_records()  # what was asked between two steps is part of neither
        output.begin_step(step)
        begin, payload_bytes = time.time(), exchange.payload_bytes
        with failures_kept(step):
            metrics = _checked(
                config.algorithm.step(roles, _sampling(config, step), progress.state), config, step
            )
            _check_state(progress.state, config, step)
            pools.wait()
        seconds, records = time.time() - begin, exchange.take_records()
        payload_bytes = exchange.payload_bytes - payload_bytes
        metrics |= call_metrics(records, payload_bytes, begin, begin + seconds)
        metrics[keys.STEP_S] = seconds
        if keys.TOKENS in metrics:
            metrics[keys.TOKENS_PER_S] = metrics[keys.TOKENS] / seconds
        output.draw(step, records)
        every = config.run.eval_every
        with failures_kept(step, metrics):
            if step == steps or (every and step % every == 0):
                metrics |= measure(step)
            counts = roles.take_scorer_metrics()
        metrics |= counts
        output.record(step, metrics)
        progress.step, progress.prompts_drawn = step, progress.prompts_drawn + config.data.batch_size
        last = step == steps or stop.asked
        saver.after_step(metrics, last=last)
        if not last and (last := stop.asked):  # while a save was begun, which has to be completed then
            saver.after_step(metrics, last=True)
        if last:
            return


def _checked(metrics: object, config: RunConfig, step: int) -> dict[str, float]:
    """What a dataflow has returned, which may be anybody's.

    Raises:
        ConfigError: it is no dict of names and numbers.
    """
    who, remedy = (
        f"step {step} of algorithm.name={config.algorithm.name} returned",
        "return its metrics, a dict of",
    )
    if not isinstance(metrics, dict):
        raise ConfigError(f"{who} {shown(metrics)}; {remedy} numbers")
    for name, value in metrics.items():
        if not isinstance(name, str) or name == keys.STEP:
            raise ConfigError(
                f"{who} a metric called {shown(name)}; {remedy} names, others than {keys.STEP!r}"
            )
        try:
            metrics[name] = float(value)
        except (TypeError, ValueError, RuntimeError):  # torch raises the last for a tensor of several
            raise ConfigError(f"{who} {name}={shown(value)}; {remedy} numbers") from None
    return metrics


def _check_state(state: dict[str, float], config: RunConfig, step: int) -> None:
    """Make numbers of what a dataflow keeps: a checkpoint has nothing else.

    Raises:
        ConfigError: there is something else.
    """
    for name, value in state.items():
        try:
            state[name] = float(value)
            if not isinstance(name, str):
                raise TypeError
        except (TypeError, ValueError, RuntimeError):
            raise ConfigError(
                f"step {step} of algorithm.name={config.algorithm.name} keeps {shown(name)}={shown(value)} in its state;"
                " keep names and numbers, so that a checkpoint can have them"
            ) from None


def _sampling(config: RunConfig, step: int) -> Sampling:
    return Sampling(
        step=step,
        num_prompts=config.data.batch_size,
        samples_per_prompt=config.rollout.samples_per_prompt,
        first_seed=(config.run.seed * SEED_STRIDES[0] + step) * max(SEED_STRIDES[1], config.rows_per_step),
    )
