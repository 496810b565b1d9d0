"""Runs to simulate, from a workload on a cluster: everything on all devices, or some devices for each of two sides.

    synchronous    the best plan with every model on all devices: generation, then all the rest
    asynchronous   engines on their own devices, which hold nothing but weights and KV cache; actor and all other models
                   train and infer on the others, with the sizes that are best there

New weights reach engines of their own over the links between nodes: each of their devices receives its shard, all at the
same time.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from hybridengine.errors import ConfigError
from hybridengine.models.shapes import DTYPE_BYTES
from hybridengine.planning.costs.clusters import Cluster
from hybridengine.planning.costs.dataflows import Work
from hybridengine.planning.costs.decoding import Engine
from hybridengine.planning.costs.lengths import Lengths
from hybridengine.planning.costs.passes import compute_of
from hybridengine.planning.costs.shards import generation_holding
from hybridengine.planning.costs.workload import Workload
from hybridengine.planning.search.constraints import Constraints
from hybridengine.planning.search.options import Options
from hybridengine.planning.search.placements import pool_sizes
from hybridengine.planning.search.plan import Plan
from hybridengine.planning.search.search import Search
from hybridengine.planning.search.shortage import shortage
from hybridengine.planning.simulation.simulation import Outcome, Setting
from hybridengine.topology.sizes import GenSizes, divisors


@dataclass(frozen=True)
class Engines:
    """Engines of one kind, and what decides how fast they are."""

    engine: Engine
    workload: Workload
    max_running: int
    """Responses that one advances at once."""
    gen_bytes: int
    """Weights of a device."""

    @property
    def num_devices(self) -> int:
        """Devices of one engine."""
        return self.engine.sizes.num_ranks

    @cached_property
    def prefill_s(self) -> float:
        """Seconds of one prompt among others."""
        return self.engine.prefill_s(self.max_running * self.workload.prompt_tokens) / self.max_running

    @cached_property
    def rates(self) -> np.ndarray:
        """Tokens a second of one engine with 1, 2, ... responses at once, in a steady state, prompts included."""
        lengths, prompt_tokens = self.workload.lengths, self.workload.prompt_tokens
        counts = range(1, self.max_running + 1)
        seconds = [
            self.engine.step_s(count, count * (prompt_tokens + lengths.mean_position)) for count in counts
        ]
        running = np.array(counts)
        return running / (seconds + running / lengths.mean * self.prefill_s)


@dataclass(frozen=True)
class Run:
    """A run to simulate, with the plan behind it."""

    setting: Setting
    plan: Plan
    """Plan of the side that trains; in a synchronous run, of everything."""
    engines: Engines
    num_training: int
    """Devices that train."""
    num_generating: int
    """Devices that generate."""
    train_s: float
    """Seconds of a step of everything but generation and the switch."""


@dataclass(frozen=True)
class SteadyState:
    """Figures of a division of devices by the analytical model."""

    running: int
    """Responses that each engine advances at once."""
    tokens_per_s: float
    """Tokens of responses, generated and trained on."""
    staleness: float
    """Most optimizer steps between a response's first token and its last; waiting for the trainer is left out."""


def steady_state(
    num_engines: int, rates: np.ndarray, train_tokens_per_s: float, lengths: Lengths, batch_size: int
) -> SteadyState:
    """Return the steady state of engines beside a trainer.

    The engines run the fewest responses with which they make what the trainer takes, N_train·thr = N_sample·B /
    latency(B), or as many as make the most where that is not enough (AReaL, arXiv 2505.24298, section 5.1).

    Args:
        rates: tokens a second of an engine with 1, 2, ... responses at once.
        train_tokens_per_s: tokens of responses that the trainer takes in.
    """
    enough = np.flatnonzero(num_engines * rates >= train_tokens_per_s)
    place = int(enough[0] if len(enough) else np.argmax(rates))
    tokens_per_s = min(train_tokens_per_s, num_engines * float(rates[place]))
    engine_step_s, train_step_s = (place + 1) / float(rates[place]), batch_size * lengths.mean / tokens_per_s
    return SteadyState(place + 1, tokens_per_s, lengths.max_tokens * engine_step_s / train_step_s)


def role_idle_shares(run: Run, outcome: Outcome) -> dict[str, float]:
    """Return the idle share of a run's time for the engines and for each model that computes.

    The models of the training side take turns on its devices, for as long as the plan gives them of a step.
    """
    trained = [bar for bar in run.plan.bars if bar.call.work not in (Work.SWITCH, Work.GENERATE)]
    share_of_s = (1.0 - outcome.train_idle_share) / sum(bar.seconds for bar in trained)
    shares = {"generation": outcome.generate_idle_share}
    for bar in trained:
        if bar.call.work in (Work.INFER, Work.UPDATE):
            shares[bar.call.role] = shares.get(bar.call.role, 1.0) - share_of_s * bar.seconds
    return shares


class Scenarios:
    """Runs of a workload on `num_devices` devices of a cluster.

    Args:
        num_steps: optimizer steps of every simulated run.
        max_staleness: batches that may be begun ahead of the trainer.
        seed: seed of the lengths.

    Raises:
        ConfigError: the algorithm generates twice in an iteration.
    """

    def __init__(
        self,
        workload: Workload,
        cluster: Cluster,
        num_devices: int,
        constraints: Constraints,
        *,
        num_steps: int,
        max_staleness: float,
        seed: int,
    ) -> None:
        if sum(call.work is Work.GENERATE for call in workload.calls) > 1:
            raise ConfigError(
                f"algorithm.name={workload.algorithm} generates twice in an iteration, which the simulation does not"
                " model; simulate one that generates once"
            )
        self.workload, self.cluster, self.num_devices = workload, cluster, num_devices
        self._constraints = constraints
        self._num_steps, self._max_staleness, self._seed = num_steps, max_staleness, seed
        self._batch_size = workload.num_prompts * workload.samples_per_prompt
        self._training = Options(workload.without_generation(), cluster, constraints.sizes)

    def synchronous(self) -> Run:
        """Return the best colocated plan as a run.

        Raises:
            ConfigError: it does not fit.
        """
        options = Options(self.workload, self.cluster, self._constraints.sizes, self._constraints.gen_sizes)
        search, plan = self._best_plan(options, self.num_devices)
        if plan is None:
            raise ConfigError(shortage(search))
        pool, actor = plan.pools[0], plan.option("actor")
        assert actor.engine is not None, "an actor generates"
        engine = self._engine(actor.engine.sizes, actor.sizes.pp_size, pool.num_ranks)
        engines = self._engines(engine, actor.engine.gen_bytes, pool.kv_bytes)
        switch_s = sum(bar.seconds for bar in plan.bars if bar.call.work is Work.SWITCH)
        generate_s = sum(bar.seconds for bar in plan.bars if bar.call.work is Work.GENERATE)
        others_s = plan.step_s - switch_s - generate_s
        setting = self._setting(engines, pool.num_ranks, others_s, switch_s)
        return Run(setting, plan, engines, pool.num_ranks, pool.num_ranks, others_s)

    def asynchronous(self, num_training: int) -> Run | None:
        """Return the run of a division of the devices; None if the side that trains does not fit.

        Raises:
            ConfigError: no engine fits.
        """
        _, plan = self._best_plan(self._training, num_training)
        if plan is None:
            return None
        num_generating = self.num_devices - num_training
        setting = self._setting(self.engines, num_generating, plan.step_s, self.update_s)
        return Run(setting, plan, self.engines, num_training, num_generating, plan.step_s)

    def divisions(self) -> Iterator[int]:
        """Yield the numbers of training devices that leave whole engines on the others."""
        for num_training in pool_sizes(self.cluster, self.num_devices):
            rest = self.num_devices - num_training
            if rest and rest % self.engines.num_devices == 0:
                yield num_training

    def steady_state(self, run: Run) -> SteadyState:
        """Return the figures of an asynchronous run by the analytical model."""
        workload, setting = self.workload, run.setting
        tokens = self._batch_size * workload.lengths.mean
        if self._max_staleness >= 1:
            rates, train_tokens_per_s = run.engines.rates, tokens / run.train_s
            return steady_state(
                setting.num_engines, rates, train_tokens_per_s, workload.lengths, self._batch_size
            )
        # Nothing is begun ahead: engines and trainer wait for each other in turns.
        each = math.ceil(self._batch_size / setting.num_engines)
        generate_s = run.engines.engine.generate_s(
            each, workload.prompt_tokens, workload.lengths, setting.max_running
        )
        iteration_s = generate_s + run.train_s + setting.update_s
        return SteadyState(min(each, setting.max_running), tokens / iteration_s, 0.0)

    @cached_property
    def engines(self) -> Engines:
        """Engines of their own, of the sizes that make the most tokens for each device.

        Raises:
            ConfigError: none holds the weights and one response.
        """
        wanted = self._constraints.gen_sizes
        choices = (
            [wanted] if wanted else [GenSizes(1, size) for size in divisors(self.cluster.devices_per_node)]
        )
        capacity = self.cluster.device_memory_bytes - (compute_of(self.cluster).process_bytes or 0)
        found, shape = list[Engines](), self.workload.model("actor").shape
        for gen in choices:
            if shape.gen_tp_problems(gen.tp_size, gen.tp_size) or shape.gen_pp_problems(gen.pp_size):
                continue
            engine = self._engine(gen, gen.pp_size, self.num_devices)
            elements = generation_holding(shape, gen.pp_size, gen.pp_size, gen.tp_size).num_elements
            gen_bytes = elements * DTYPE_BYTES[self.workload.dtype]
            room = capacity - gen_bytes
            if room >= engine.kv_token_bytes * self.workload.max_tokens and gen.num_ranks < self.num_devices:
                found.append(self._engines(engine, gen_bytes, room))
        if not found:
            raise ConfigError(
                f"no engine of {', '.join(map(str, choices))} (p_g-t_g) fits on fewer than {self.num_devices} devices"
                f" with {capacity / 2**30:.1f} GiB for weights and one response; take more devices, or others"
            )
        return max(found, key=lambda engines: engines.rates[-1] / engines.num_devices)

    @property
    def update_s(self) -> float:
        """Seconds in which every device of the engines receives its shard from the trainers."""
        links, node = self.cluster.links, self.cluster.devices_per_node
        link = links.between_nodes if self.num_devices > node and links.between_nodes else links.same_node
        node_bytes = self.engines.gen_bytes * min(node, self.num_devices)
        return link.seconds(self.engines.gen_bytes, node_bytes) + link.latency_s

    def _best_plan(self, options: Options, num_devices: int) -> tuple[Search, Plan | None]:
        """Search for the best plan with all models on the same devices."""
        search = Search(options, num_devices, [(tuple(self.workload.roles),)])
        return search, next(iter(search.run().plans), None)

    def _engine(self, gen: GenSizes, train_pp_size: int, num_ranks: int) -> Engine:
        shape = self.workload.model("actor").shape
        return Engine(shape, gen, train_pp_size, self.workload.dtype, self.cluster, num_ranks)

    def _engines(self, engine: Engine, gen_bytes: int, kv_bytes: int) -> Engines:
        work = self.workload
        running = engine.num_running(work.lengths, work.prompt_tokens, work.max_num_seqs, kv_bytes)
        return Engines(engine, work, running, gen_bytes)

    def _setting(self, engines: Engines, num_generating: int, train_s: float, update_s: float) -> Setting:
        return Setting(
            num_steps=self._num_steps,
            batch_size=self._batch_size,
            num_engines=num_generating // engines.num_devices,
            max_running=engines.max_running,
            prompt_tokens=self.workload.prompt_tokens,
            lengths=self.workload.lengths,
            step_s=engines.engine.step_s,
            prefill_s=engines.prefill_s,
            train_token_s=train_s / self.workload.num_tokens,
            update_s=update_s,
            max_staleness=self._max_staleness,
            seed=self._seed,
        )
