"""Iterations of a run, each with a row of metrics, a line on the console and, when due, a checkpoint."""

from __future__ import annotations

import contextlib
import time
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from tensordict import TensorDict

from hybridengine.config import RunConfig
from hybridengine.controller.call_log import CallRecord, call_log
from hybridengine.controller.rows import Rows
from hybridengine.data.datasets import PromptDataset
from hybridengine.data.responses import ResponseDataset
from hybridengine.drivers.dataflow import NO_SCORES
from hybridengine.drivers.offline import Offline
from hybridengine.drivers.roles import Roles, Sampling
from hybridengine.errors import ConfigError, DataError, shown
from hybridengine.planning.costs.dataflows import phase_of_call
from hybridengine.report import keys
from hybridengine.rollouts.queue import first_seed
from hybridengine.training.files import RunFiles
from hybridengine.training.launch import RunPools
from hybridengine.training.output import RunOutput
from hybridengine.training.saving import Progress, RunSaver
from hybridengine.training.stopping import StopRequest

NUM_SAMPLES = 16
"""Number of an evaluation's responses that are written as samples."""
SAMPLE_COLUMNS = ("tokens", "prompt_lengths", "response_lengths", "answers", "scores")


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
    """Carry out the remaining iterations, or stop early if requested; `progress` is updated after each."""
    run = _Iterations(config, pools, roles, files.held_out, output, progress)
    call_log().take_records()  # discard the calls of the start
    if progress.step == 0:
        run.complete(0, {}, evaluates=True)
    steps, every = config.run.steps, config.run.eval_every
    for step in range(progress.step + 1, steps + 1):
        metrics = run.train(step)
        run.complete(step, metrics, evaluates=step == steps or bool(every and step % every == 0))
        progress.step, progress.prompts_drawn = step, progress.prompts_drawn + config.data.batch_size
        last = step == steps or stop.asked
        saver.after_step(metrics, last=last)
        if not last and (last := stop.asked):  # asked while the save began, which must now be completed
            saver.after_step(metrics, last=True)
        if last:
            return


@dataclass(frozen=True)
class _Iterations:
    """Parts of one iteration."""

    config: RunConfig
    pools: RunPools
    roles: Roles
    held_out: PromptDataset | ResponseDataset | None
    output: RunOutput
    progress: Progress

    def train(self, step: int) -> dict[str, float]:
        """Run the algorithm's step and draw its calls; return its metrics."""
        log = call_log()
        self.pools.wait()
        # Calls between two steps belong to neither, but for those of engines, which are at work all the time.
        between = [record for record in log.take_records() if record.role == "generation"]
        self.output.begin(step)
        begin, payload_bytes = time.time(), log.payload_bytes
        with self._failures_drawn(step):
            metrics = _carry_out(self.config, self.roles, self.progress, step)
            self.pools.wait()
        end, records = time.time(), [*between, *log.take_records()]
        payload_bytes = log.payload_bytes - payload_bytes
        metrics |= call_metrics(records, payload_bytes, begin, end, self.pools.nodes)
        metrics[keys.STEP_S] = end - begin
        if keys.TOKENS in metrics:
            metrics[keys.TOKENS_PER_S] = metrics[keys.TOKENS] / (end - begin)
        self.output.draw(step, records)
        metrics[keys.RECORDS_S] = time.time() - end
        return metrics

    def complete(self, step: int, metrics: dict[str, float], *, evaluates: bool) -> None:
        """Add the evaluation and the counts of the scorers to the metrics of a step, and record them."""
        with self._failures_drawn(step, metrics):
            if evaluates and self.held_out is not None:
                self.output.begin(step, "evaluating:")
                algorithm, num_rows = self.config.algorithm, len(self.held_out)
                if isinstance(algorithm, Offline):
                    found = algorithm.evaluate(self.roles, num_rows)
                else:
                    found, samples = evaluate(self.roles, num_rows)
                    self.output.show_samples(step, samples)
                self.pools.wait()
                self.output.draw(step, call_log().take_records())
                metrics |= found
            counts = self.roles.take_scorer_metrics()
        metrics |= counts
        self.output.record(step, metrics)

    @contextlib.contextmanager
    def _failures_drawn(self, step: int, known: Mapping[str, float] | None = None) -> Iterator[None]:
        """Draw a step or an evaluation in the timeline if it fails, and record the metrics known by then, if any."""
        try:
            yield
        except BaseException:  # a request to stop included; re-raised
            if known:
                self.output.record(step, known)
            self.pools.settle()
            self.output.draw(step, call_log().take_records())
            raise


def _carry_out(config: RunConfig, roles: Roles, progress: Progress, step: int) -> dict[str, float]:
    """Run the dataflow once; return its metrics; raise ConfigError if they or its state are not numbers by name."""
    sampling = Sampling(
        step=step,
        num_prompts=config.data.batch_size,
        samples_per_prompt=config.rollout.samples_per_prompt,
        first_seed=first_seed(config.run.seed, step, config.rows_per_step * config.algorithm.num_rounds),
    )
    returned = config.algorithm.step(roles, sampling, progress.state)
    who = f"step {step} of algorithm.name={config.algorithm.name}"
    names = f"names, others than {keys.STEP!r}, and numbers"
    metrics = _numbers(returned, f"{who} returned", f"return its metrics, a dict of {names}")
    _numbers(progress.state, f"{who} keeps in its state", f"keep {names}, which a checkpoint can have")
    return metrics


def _numbers(values: object, who: str, remedy: str) -> dict[str, float]:
    """Return a user's metrics or state as floats; raise ConfigError for other values, or for the key of the step."""
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

    The metrics are `eval/score_mean` and, for a reward function alone, `eval/exact_match`, the share with full score,
    both of the responses that have a score; `eval/dropped_share` is the share of those without one. If there are fewer
    prompts than ranks, some are answered twice but counted once.
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
        raise DataError(f"none of the held-out responses has a score; {NO_SCORES}")
    dropped_share = float(judged["dropped"].float().mean())
    metrics = {keys.SCORE_MEAN: float(scores.mean()), keys.HELD_OUT_DROPPED: dropped_share}
    if reward.has_full_score:
        metrics[keys.EXACT_MATCH] = float((scores >= 1.0).float().mean())
    return metrics, answered[:NUM_SAMPLES].get(*SAMPLE_COLUMNS)


def call_metrics(
    records: Sequence[CallRecord],
    payload_bytes: int,
    begin: float,
    end: float,
    pools: Collection[str] = (),
) -> dict[str, float]:
    """Return the metrics of one iteration's calls, which lasted from `begin` to `end` (seconds since the epoch).

    They are the seconds by phase, the bytes that moved between ranks and through the controller, its overhead, the
    largest memory of a rank's process after any call, and the idle share of each pool, if there are several; `pools` may
    name some without a call.
    """
    by_pool, edges = defaultdict[tuple[str, str], float](float), Counter[str]()
    for record in records:
        by_pool[phase_of_call(record.role, record.method), record.pool] += record.seconds
        for producer, num_bytes in record.transferred.items():
            edges[f"transfer/{producer}->{record}_bytes"] += num_bytes
    seconds = dict[str, float]()
    for (phase, _), total in by_pool.items():  # engines make the same calls at the same time
        key = keys.time_key(phase)
        seconds[key] = max(seconds.get(key, 0.0), total)
    held = dict[str, int]()
    for by_name in (by_name for record in records for by_name in record.held_bytes.values()):
        for name, num_bytes in by_name.items():
            if num_bytes > held.get(name, -1):
                held[name] = num_bytes
    spans = sorted(span for record in records for span in record.spans.values())
    busy, last = 0.0, begin
    for start, stop in spans:
        busy += max(0.0, min(stop, end) - max(start, last))
        last = max(last, stop)
    return {
        **seconds,
        **_idle_shares(records, end - begin, pools),
        **edges,
        **{keys.memory_key(name): num_bytes for name, num_bytes in held.items()},
        keys.TRANSFER_BYTES: sum(edges.values()),
        keys.PAYLOAD_BYTES: payload_bytes,
        keys.OVERHEAD_S: end - begin - busy,
    }


def _idle_shares(records: Sequence[CallRecord], seconds: float, pools: Collection[str]) -> dict[str, float]:
    """Return the share of a step of `seconds` in which the ranks of each pool were in no call; {} for a single pool.

    A call belongs to the step in which it ends.
    """
    busy = {pool: defaultdict[int, float](float) for pool in (*pools, *(record.pool for record in records))}
    for record in records:
        for rank, (begin, end) in record.spans.items():
            busy[record.pool][rank] += end - begin
    if len(busy) < 2:
        return {}
    return {
        keys.idle_key(pool): max(0.0, 1.0 - sum(by_rank.values()) / max(1, len(by_rank)) / seconds)
        for pool, by_rank in busy.items()
    }
