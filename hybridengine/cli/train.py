"""A training run: files, processes, warm-up, the dataflow, and what a person sees of it."""

from __future__ import annotations

import os
import shutil
import time
from importlib import import_module
from pathlib import Path

from rich.console import Console

from hybridengine.backends.vllm import environment
from hybridengine.cli.dry_run import cost_of, layout_lines
from hybridengine.cli.prepare import RunFiles, claim_run, prepare_files
from hybridengine.cli.run_output import RunOutput
from hybridengine.config import RunConfig
from hybridengine.config.algorithm_sections import Role
from hybridengine.config.reward_sections import RewardSection
from hybridengine.config.run_config import SCORERS
from hybridengine.controller.cluster import node_offers, start_ray
from hybridengine.controller.exchange import row_exchange
from hybridengine.controller.pool import ResourcePool
from hybridengine.controller.worker_group import WorkerGroup
from hybridengine.drivers.evaluation import evaluate
from hybridengine.drivers.roles import Roles, Sampling, Scorers, State
from hybridengine.drivers.step_metrics import call_metrics
from hybridengine.drivers.warmup import warm_up
from hybridengine.errors import ConfigError, HybridEngineError, raise_all
from hybridengine.metrics import keys
from hybridengine.metrics.console import RunConsole
from hybridengine.metrics.formatting import format_bytes
from hybridengine.metrics.recorder import read_rows
from hybridengine.topology.sizes import TrainSizes

RANK_BYTES = 2**30
"""Host memory that the libraries of one rank's process take, roughly, before any weights."""

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

    raise_all(local_problems(config))
    runs_are_new = not Path(config.run.folder).exists()
    config = claim_run(config)
    say(f"run {_shown(config.run_folder)}: {config.run.steps} steps of {config.rows_per_step} sequences")
    files = _prepared(config, runs_are_new)
    for line in layout_lines(config, cost_of(config)):
        say(line)
    with _pool(config) as pool:
        say(
            f"starting {config.num_ranks} ranks: Megatron-core and vLLM in each process (about a minute on a CPU)"
        )
        actor = _group(pool, config, "actor", folder=config.model_folder, stop_token_ids=files.stop_token_ids)
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
        roles = _roles(pool, config, actor)
        say(f"{', '.join(config.algorithm.used_roles[1:])} ready on the same ranks")
        _iterate(config, roles, files, console)
        actor.save_checkpoint(str(config.run_folder / "final"), str(config.model_folder)).wait()
        say(f"trained model saved: {_shown(config.run_folder / 'final')}")
    rows = read_rows(config.run_folder)
    RunConsole(config.run.steps, console).print_summary(rows)
    folder = _shown(config.run_folder)
    say(f"metrics: {folder / 'metrics.jsonl'}; tensorboard --logdir {folder / 'tensorboard'}")


def local_problems(config: RunConfig) -> list[str]:
    """Why this machine cannot be the whole cluster; empty where it can, or where a cluster is joined."""
    if config.cluster.address is not None or os.environ.get("RAY_ADDRESS"):
        return []
    asked = f"cluster.ranks_per_node={list(config.cluster.ranks_per_node)}"
    remedy = "or join a cluster with cluster.address"
    if len(config.cluster.ranks_per_node) > 1:
        return [
            f"{asked} wants {len(config.cluster.ranks_per_node)} nodes, this machine is one; give one number, {remedy}"
        ]
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    room = max(1, memory // RANK_BYTES)
    if config.num_ranks > room:
        return [
            f"{asked} is more than this machine has room for: {room} ranks, at {format_bytes(RANK_BYTES)} of its"
            f" {format_bytes(memory)} for each rank's process; choose sizes whose product is at most {room}, {remedy}"
        ]
    return []


def _prepared(config: RunConfig, runs_are_new: bool) -> RunFiles:
    """The run's files; a run that they rule out leaves nothing behind."""
    try:
        return prepare_files(config)
    except HybridEngineError:
        shutil.rmtree(config.run_folder)
        if runs_are_new:
            Path(config.run.folder).rmdir()
        raise


def _shown(path: Path) -> Path:
    """`path` as a person would type it here."""
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


def _roles(pool: ResourcePool, config: RunConfig, actor: WorkerGroup) -> Roles:
    """All groups of the run's dataflow, and those that read data and compute."""
    folders = {
        "critic": config.critic_folder,
        "cost_critic": config.cost_critic_folder,
        "reference": config.start_folder,
    }
    used = config.algorithm.used_roles
    compute = _helper(pool, config, "compute", "workers.compute.ComputeWorker")
    groups: dict[str, WorkerGroup | Scorers] = {
        role: _group(pool, config, role, folder=folders[role]) for role in used if role in folders
    }
    groups |= {role: _scorers(pool, config, role, compute) for role in SCORERS if role in used}
    prompts = _helper(pool, config, "prompts", "workers.prompts.PromptWorker")
    return Roles(actor=actor, prompts=prompts, compute=compute, **groups)


def _iterate(config: RunConfig, roles: Roles, files: RunFiles, console: Console) -> None:
    """All iterations, with a row of metrics and a line on the console for each."""
    steps, pool, exchange = config.run.steps, roles.actor.pool, row_exchange()
    driver, state = import_module(config.algorithm.driver), State()

    def measure(step: int) -> dict[str, float]:
        if files.held_out is None:
            return {}
        metrics, samples = evaluate(roles, len(files.held_out))
        output.show_samples(step, samples)
        return metrics

    with RunOutput(config, pool.nodes, files.tokenizer, console) as output:
        output.record(0, measure(0))
        for step in range(1, steps + 1):
            pool.wait()  # what an evaluation has called belongs to no step
            exchange.take_records()
            begin, payload_bytes = time.time(), exchange.payload_bytes
            metrics = driver.step(roles, _sampling(config, step), config.algorithm, state)
            pool.wait()
            seconds, records = time.time() - begin, exchange.take_records()
            payload_bytes = exchange.payload_bytes - payload_bytes
            metrics |= call_metrics(records, payload_bytes, begin, begin + seconds)
            metrics |= {keys.STEP_S: seconds, keys.TOKENS_PER_S: metrics["rollout/tokens"] / seconds}
            output.draw(step, records)
            every = config.run.eval_every
            if step == steps or (every and step % every == 0):
                metrics |= measure(step)
            output.record(step, metrics)


def _sampling(config: RunConfig, step: int) -> Sampling:
    return Sampling(
        step=step,
        num_prompts=config.data.batch_size,
        samples_per_prompt=config.rollout.samples_per_prompt,
        first_seed=(config.run.seed * SEED_STRIDES[0] + step) * SEED_STRIDES[1],
    )


def _pool(config: RunConfig) -> ResourcePool:
    if config.cluster.address is not None:
        os.environ["RAY_ADDRESS"] = config.cluster.address
    start_ray(num_cpus=config.num_ranks)
    has_gpus = any(offer.num_gpus for offer in node_offers())
    use_gpus = config.cluster.device == "cuda" or (config.cluster.device == "auto" and has_gpus)
    if config.rollout.cuda_graphs and not use_gpus:
        raise ConfigError("rollout.cuda_graphs=true needs GPUs, and the cluster has none; leave it false")
    return ResourcePool(
        ranks_per_node=config.cluster.ranks_per_node,
        use_gpus=use_gpus,
        env=environment.ON_GPU if use_gpus else environment.ON_CPU,
        start_timeout_s=config.timeouts.start_s,
        timeout_s=config.timeouts.call_s,
    )


WORKERS = {
    "actor": "workers.actor.ActorWorker",
    "critic": "workers.critic.CriticWorker",
    "cost_critic": "workers.critic.CriticWorker",
    "reference": "workers.reference.ReferenceWorker",
}
"""Worker classes by import path: this package never imports them."""


def _group(pool: ResourcePool, config: RunConfig, role: Role, **arguments: object) -> WorkerGroup:
    return WorkerGroup(
        pool,
        WORKERS[role],
        role=role,
        parallel=config.train_sizes(role),
        generate=config.actor.gen_sizes if role == "actor" else None,
        order=config.cluster.order,
        config={"run": config, **arguments},
    )


def _scorers(pool: ResourcePool, config: RunConfig, role: Role, compute: WorkerGroup) -> Scorers:
    """One group for all functions of a section, on all ranks, and one for each of its models."""
    section: RewardSection = getattr(config, role)
    groups = []
    if section.functions:
        worker, sizes = "workers.reward.RewardFunctionWorker", TrainSizes(1, 1, pool.num_ranks)
        groups.append(WorkerGroup(pool, worker, role=role, parallel=sizes, config={"run": config}))
    for term, scorer in section.models.items():
        groups.append(
            WorkerGroup(
                pool,
                "workers.reward.RewardModelWorker",
                role=f"{role}_{term}" if term else role,
                parallel=scorer.parallel or config.actor.parallel,
                order=config.cluster.order,
                config={"run": config, "folder": scorer.path, "section": role, "term": term},
            )
        )
    return Scorers(groups, compute, section.weights if section.models else {})


def _helper(pool: ResourcePool, config: RunConfig, role: str, worker: str) -> WorkerGroup:
    """A group without a model, on all ranks of the pool."""
    sizes = TrainSizes(1, 1, pool.num_ranks)
    return WorkerGroup(pool, worker, role=role, parallel=sizes, config={"run": config})
