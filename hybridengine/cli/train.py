"""A training run: files, processes, warm-up, the dataflow, and what a person sees of it."""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from rich.console import Console

from hybridengine.cli.dry_run import cost_of, layout_lines
from hybridengine.cli.prepare import RunFiles, claim_run, prepare_files
from hybridengine.cli.run_output import RunOutput, run_trackers, where_to_look
from hybridengine.config import RunConfig
from hybridengine.config.run_config import ranks_key
from hybridengine.controller.exchange import row_exchange
from hybridengine.drivers.dataflow import Step, load_step
from hybridengine.drivers.evaluation import evaluate
from hybridengine.drivers.launch import RunPools
from hybridengine.drivers.roles import Roles, Sampling, State
from hybridengine.drivers.step_metrics import call_metrics
from hybridengine.drivers.warmup import warm_up
from hybridengine.errors import ConfigError, HybridEngineError, raise_all, shown
from hybridengine.metrics import keys
from hybridengine.metrics.console import RunConsole
from hybridengine.metrics.formatting import format_bytes
from hybridengine.metrics.rows import read_rows
from hybridengine.metrics.trackers import missing_trackers

RANK_BYTES = 2**30
"""Host memory that the libraries of one rank's process take, roughly, before any weights."""

LAST_WORDS_S = 5.0
"""How long the ranks of a step that has failed may take to say what their reward functions did."""

SEED_STRIDES = (1_000_003, 65_537)
"""Requests of one run must not share seeds: seed = (run · a + step) · b + row."""


def train(config: RunConfig) -> None:
    """Carry out a run, and print its progress."""
    console = Console()
    started = time.perf_counter()

    def say(text: str) -> None:
        console.print(
            f"[{time.perf_counter() - started:6.1f}s] {text}", markup=False, highlight=False, soft_wrap=True
        )

    raise_all([*local_problems(config), *missing_trackers(config.run.trackers)])
    step_of = load_step(config.algorithm)
    runs_are_new = not Path(config.run.folder).exists()
    config = claim_run(config)
    say(f"run {_shown(config.run_folder)}: {config.run.steps} steps of {config.rows_per_step} sequences")
    with contextlib.ExitStack() as ends:
        with _nothing_left_behind(config, runs_are_new), contextlib.ExitStack() as begun:
            files = prepare_files(config)
            for line in layout_lines(config, cost_of(config)):
                say(line)
            trackers = begun.enter_context(run_trackers(config))
            pools = begun.enter_context(RunPools(config))
            ends.push(begun.pop_all())
        say(
            f"starting {config.num_ranks} ranks: Megatron-core and vLLM in each process (about a minute on a CPU)"
        )
        pools.start()
        actor = pools.start_actor(folder=config.model_folder, stop_token_ids=files.stop_token_ids)
        say("actor ready: one copy of the weights, two layouts")
        if config.warmup is not None and files.demonstrations is not None:
            steps = config.warmup.steps
            warm_up(
                actor,
                files.demonstrations,
                config.warmup,
                lambda step, loss: say(f"warm-up {step}/{steps}: loss {loss:.3f}"),
            )
            actor.save_checkpoint(str(config.start_folder), str(config.model_folder)).wait()
            say(f"warmed-up model saved: {_shown(config.start_folder)}")
        actor.start_training()
        roles = pools.start_roles(actor)
        say(f"{', '.join(role for role in config.algorithm.used_roles if role != 'actor')} ready")
        with RunOutput(config, pools.nodes, files.tokenizer, console, trackers) as output:
            iterate(config, step_of, pools, roles, files, output)
        actor.save_checkpoint(str(config.run_folder / "final"), str(config.model_folder)).wait()
        say(f"trained model saved: {_shown(config.run_folder / 'final')}")
    rows = read_rows(config.run_folder)
    RunConsole(config.run.steps, console).print_summary(rows)
    say(where_to_look(_shown(config.run_folder)))


def local_problems(config: RunConfig) -> list[str]:
    """Why this machine cannot be the whole cluster; empty where it can, or where a cluster is joined."""
    if config.cluster.address is not None or os.environ.get("RAY_ADDRESS"):
        return []
    remedy = "or join a cluster with cluster.address"
    problems = [
        f"{ranks_key(name)}={list(pool.ranks_per_node)} wants {len(pool.ranks_per_node)} nodes, this machine is one;"
        f" give one number, {remedy}"
        for name, pool in config.pools.items()
        if len(pool.ranks_per_node) > 1
    ]
    if problems:
        return problems
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    room = max(1, memory // RANK_BYTES)
    if config.num_ranks > room:
        asked = " and ".join(
            f"{ranks_key(name)}={list(pool.ranks_per_node)}" for name, pool in config.pools.items()
        )
        return [
            f"{asked} is more than this machine has room for: {room} ranks, at {format_bytes(RANK_BYTES)} of its"
            f" {format_bytes(memory)} for each rank's process; choose sizes whose product is at most {room}, {remedy}"
        ]
    return []


@contextlib.contextmanager
def _nothing_left_behind(config: RunConfig, runs_are_new: bool) -> Iterator[None]:
    """A run that its files, trackers or cluster rule out leaves no folder."""
    try:
        yield
    except HybridEngineError:
        shutil.rmtree(config.run_folder, ignore_errors=True)
        if runs_are_new:
            with contextlib.suppress(OSError):  # a tracker has files of its own there
                Path(config.run.folder).rmdir()
        raise


def _shown(path: Path) -> Path:
    """`path` as a person would type it here."""
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


def iterate(
    config: RunConfig, step_of: Step, pools: RunPools, roles: Roles, files: RunFiles, output: RunOutput
) -> None:
    """All iterations, with a row of metrics and a line on the console for each."""
    steps, exchange, state = config.run.steps, row_exchange(), State()

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
    with failures_kept(0):
        metrics = measure(0)
        counts = roles.take_scorer_metrics()
    output.record(0, metrics | counts)
    for step in range(1, steps + 1):
        pools.wait()
        exchange.take_records()  # what was asked between two steps is part of neither
        output.begin_step(step)
        begin, payload_bytes = time.time(), exchange.payload_bytes
        with failures_kept(step):
            metrics = _checked(step_of(roles, _sampling(config, step), config.algorithm, state), config, step)
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
        output.record(step, metrics | counts)


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


def _sampling(config: RunConfig, step: int) -> Sampling:
    return Sampling(
        step=step,
        num_prompts=config.data.batch_size,
        samples_per_prompt=config.rollout.samples_per_prompt,
        first_seed=(config.run.seed * SEED_STRIDES[0] + step) * SEED_STRIDES[1],
    )
