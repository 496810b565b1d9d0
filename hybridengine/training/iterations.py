"""Iterations of a run, each with a row of metrics, a line on the console and, when due, a checkpoint."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping

from tensordict import TensorDict

from hybridengine.config import RunConfig
from hybridengine.controller.calls import call_log
from hybridengine.controller.rows import Rows
from hybridengine.drivers.roles import Roles, Sampling
from hybridengine.errors import ConfigError, DataError, shown
from hybridengine.report import keys
from hybridengine.training.files import RunFiles
from hybridengine.training.launch import RunPools
from hybridengine.training.output import RunOutput
from hybridengine.training.saving import Progress, RunSaver
from hybridengine.training.step_metrics import call_metrics
from hybridengine.training.stopping import StopRequest

NUM_SAMPLES = 16
"""Number of an evaluation's responses that are written as samples."""
SAMPLE_COLUMNS = ("tokens", "prompt_lengths", "response_lengths", "answers", "scores")

SEED_STRIDES = (1_000_003, 65_537)
"""Factors a, b of a request's seed = (run seed · a + step) · b + row; b is at least the rows per step, so seeds are
unique within a run."""


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
    """Carry out the remaining iterations, or stop early if `stop` is requested.

    Args:
        progress: state of the run; updated after each iteration.
    """
    steps, log = config.run.steps, call_log()

    def measure(step: int) -> dict[str, float]:
        if files.held_out is None:
            return {}
        output.begin(step, "evaluating:")
        metrics, samples = evaluate(roles, len(files.held_out))
        output.show_samples(step, samples)
        pools.wait()
        output.draw(step, log.take_records())
        return metrics

    log.take_records()  # discard the calls of the start
    if progress.step == 0:
        with _failures_drawn(pools, output, 0):
            metrics = measure(0)
            counts = roles.take_scorer_metrics()
        output.record(0, metrics | counts)
    for step in range(progress.step + 1, steps + 1):
        pools.wait()
        log.take_records()  # calls between two steps belong to neither
        output.begin(step)
        begin, payload_bytes = time.time(), log.payload_bytes
        with _failures_drawn(pools, output, step):
            metrics = _carry_out(config, roles, progress, step)
            pools.wait()
        seconds, records = time.time() - begin, log.take_records()
        payload_bytes = log.payload_bytes - payload_bytes
        metrics |= call_metrics(records, payload_bytes, begin, begin + seconds)
        metrics[keys.STEP_S] = seconds
        if keys.TOKENS in metrics:
            metrics[keys.TOKENS_PER_S] = metrics[keys.TOKENS] / seconds
        output.draw(step, records)
        every = config.run.eval_every
        with _failures_drawn(pools, output, step, metrics):
            if step == steps or (every and step % every == 0):
                metrics |= measure(step)
            counts = roles.take_scorer_metrics()
        metrics |= counts
        output.record(step, metrics)
        progress.step, progress.prompts_drawn = step, progress.prompts_drawn + config.data.batch_size
        last = step == steps or stop.asked
        saver.after_step(metrics, last=last)
        if not last and (last := stop.asked):  # asked while the save began, which must now be completed
            saver.after_step(metrics, last=True)
        if last:
            return


@contextlib.contextmanager
def _failures_drawn(
    pools: RunPools, output: RunOutput, step: int, known: Mapping[str, float] | None = None
) -> Iterator[None]:
    """Draw a step or an evaluation in the timeline if it fails.

    Args:
        known: metrics of the step, if its evaluation is what may fail; they are recorded.
    """
    try:
        yield
    except BaseException:  # a request to stop included; re-raised
        if known is not None:
            output.record(step, known)
        pools.settle()
        output.draw(step, call_log().take_records())
        raise


def _carry_out(config: RunConfig, roles: Roles, progress: Progress, step: int) -> dict[str, float]:
    """Run the algorithm's dataflow once; return its metrics.

    Raises:
        ConfigError: its metrics or its state are not numbers by name.
    """
    returned = config.algorithm.step(roles, _sampling(config, step), progress.state)
    who = f"step {step} of algorithm.name={config.algorithm.name}"
    names = f"names, others than {keys.STEP!r}, and numbers"
    metrics = _numbers(returned, f"{who} returned", f"return its metrics, a dict of {names}")
    _numbers(progress.state, f"{who} keeps in its state", f"keep {names}, which a checkpoint can have")
    return metrics


def _numbers(values: object, who: str, remedy: str) -> dict[str, float]:
    """Return the metrics or the state of a user's dataflow with every value as a float.

    Raises:
        ConfigError: `values` is not a dict of names and numbers, or has the reserved key of the step.
    """
    if not isinstance(values, dict):
        raise ConfigError(f"{who} {shown(values)}; {remedy}")
    for name, value in values.items():
        try:
            if not isinstance(name, str) or name == keys.STEP:
                raise TypeError
            values[name] = float(value)
        except (TypeError, ValueError, RuntimeError):  # torch raises it for a tensor of several elements
            raise ConfigError(f"{who} {name}={shown(value)}; {remedy}") from None
    return values


def evaluate(roles: Roles, num_prompts: int) -> tuple[dict[str, float], TensorDict]:
    """Return the metrics of greedy responses to held-out prompts, scored by the run's reward, and some responses.

    The metrics are `eval/score_mean` and, for a reward function alone, `eval/exact_match`, the share with full score.
    If there are fewer prompts than ranks, some are answered twice but counted once.
    """
    actor, reward = roles.actor, roles.reward
    num_rows = max(num_prompts, actor.num_ranks, reward.num_ranks)
    prompts = roles.prompts.held_out_prompts(Rows.numbered(num_rows))
    actor.switch_to_generate()
    rollout = prompts.union(actor.generate_sequences(prompts, greedy=True))
    actor.switch_to_train()
    answered = rollout.union(reward.compute_scores(rollout))[:num_prompts]
    judged = answered.get("scores", "dropped")
    scores = judged["scores"][~judged["dropped"]]
    if not len(scores):
        raise DataError("none of the held-out responses has a score; look at the reward function's failures")
    metrics = {keys.SCORE_MEAN: float(scores.mean())}
    if reward.has_full_score:
        metrics[keys.EXACT_MATCH] = float((scores >= 1.0).float().mean())
    return metrics, answered[:NUM_SAMPLES].get(*SAMPLE_COLUMNS)


def _sampling(config: RunConfig, step: int) -> Sampling:
    return Sampling(
        step=step,
        num_prompts=config.data.batch_size,
        samples_per_prompt=config.rollout.samples_per_prompt,
        first_seed=(config.run.seed * SEED_STRIDES[0] + step) * max(SEED_STRIDES[1], config.rows_per_step),
    )
