"""Runs to simulate, from a workload on a cluster: everything on all devices, or some devices for each of two sides.

    synchronous    the best plan with every model on all devices: generation, then all the rest
    asynchronous   engines on their own devices, which hold nothing but weights and KV cache; actor and all other models
                   train and infer on the others, with the sizes that are best there

New weights reach engines of their own over the links between nodes: each of their devices receives its shard, all at the
same time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from hybridengine.errors import ConfigError
from hybridengine.model_shapes import DTYPE_BYTES
from hybridengine.planning.clusters import Cluster
from hybridengine.planning.constraints import Constraints
from hybridengine.planning.dataflows import Work
from hybridengine.planning.decoding import Engine
from hybridengine.planning.lengths import Lengths
from hybridengine.planning.options import Options
from hybridengine.planning.passes import compute_of
from hybridengine.planning.placements import Placement, pool_sizes
from hybridengine.planning.plan import Plan
from hybridengine.planning.search import Search
from hybridengine.planning.shards import generation_holding
from hybridengine.planning.shortage import shortage
from hybridengine.planning.simulation import Outcome, Setting
from hybridengine.planning.workload import Workload
from hybridengine.topology.sizes import GenSizes, TrainSizes, divisors


@dataclass(frozen=True)
class Engines:
    """Engines of one kind, and what decides how fast they are."""

    engine: Engine
    max_running: int
    """Responses that one advances at once."""
    gen_bytes: int
    """Weights of a device."""

    @property
    def num_devices(self) -> int:
        """Of each."""
        return self.engine.sizes.num_ranks

    def step_s(self, workload: Workload, running: float) -> float:
        """Seconds of a step in a steady state, prompts included."""
        held = running * (workload.prompt_tokens + workload.lengths.mean_position)
        prompts = running / workload.lengths.mean * self.prefill_s(workload)
        return self.engine.step_s(running, held) + prompts

    def prefill_s(self, workload: Workload) -> float:
        """Of one prompt, among others."""
        batch = max(1, self.max_running)
        return self.engine.prefill_s(batch * workload.prompt_tokens) / batch


@dataclass(frozen=True)
class Run:
    """What a simulation needs of the two sides."""

    setting: Setting
    plan: Plan
    """Of the side that trains; of a synchronous run, of everything."""
    engines: Engines
    num_training: int
    """Devices."""
    num_generating: int
    train_s: float
    """Seconds of a step of everything but generation and the switch, while the engines work if they do."""


@dataclass(frozen=True)
class Split:
    """A division of devices between training and generation, in its steady state."""

    num_training: int
    num_generating: int
    running: float
    """Responses that each engine advances at once."""
    tokens_per_s: float
    """Tokens of responses, generated and trained on."""
    staleness: float
    """Most optimizer steps between a response's first token and its last; waiting for the trainer is left out."""


def steady_splits(
    num_devices: int,
    engine_devices: int,
    step_s: Callable[[float], float],
    train_tokens_per_s: Mapping[int, float],
    max_running: int,
    lengths: Lengths,
    batch_size: int,
) -> list[Split]:
    """Return every division of the devices, in its steady state.

    The engines run the fewest responses with which they make what the trainers take, N_train·thr = N_sample·B /
    latency(B), or as many as make the most where that is not enough (AReaL, arXiv 2505.24298, section 5.1).

    Args:
        engine_devices: devices of an engine.
        step_s: seconds of an engine's step with so many responses.
        train_tokens_per_s: number of training devices -> tokens of responses that they take in.
        max_running: responses that the KV cache holds.
    """
    counts = np.arange(1, max_running + 1)
    rates = counts / np.array([step_s(float(count)) for count in counts])
    found = []
    for num_training, wanted in train_tokens_per_s.items():
        engines = (num_devices - num_training) // engine_devices
        enough = np.flatnonzero(engines * rates >= wanted)
        running = int(counts[enough[0]] if len(enough) else counts[int(np.argmax(rates))])
        made = engines * running / step_s(float(running))
        tokens_per_s = min(wanted, made)
        step_duration = batch_size * lengths.mean / tokens_per_s
        staleness = lengths.max_tokens * step_s(float(running)) / step_duration
        found.append(Split(num_training, num_devices - num_training, float(running), tokens_per_s, staleness))
    return found


def role_idle_shares(run: Run, outcome: Outcome) -> dict[str, float]:
    """Of a run's time, how long each model that computes has nothing to do, and the engines.

    The models of the training side take turns on its devices, for as long as the plan gives them of a step.
    """
    training_s, busy = 0.0, dict[str, float]()
    for bar in run.plan.bars:
        if bar.call.work in (Work.SWITCH, Work.GENERATE):
            continue
        training_s += bar.seconds
        if bar.call.work in (Work.INFER, Work.UPDATE):
            busy[bar.call.role] = busy.get(bar.call.role, 0.0) + bar.seconds
    at_work = 1.0 - outcome.train_idle_share
    shares = {role: 1.0 - at_work * seconds / training_s for role, seconds in busy.items()}
    return {"generation": outcome.generate_idle_share, **shares}


class Scenarios:
    """Runs of a workload on `num_devices` devices of a cluster.

    Args:
        num_steps: of every simulated run.
        max_staleness: batches that may be begun ahead of the trainer.
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
        drains: bool,
        seed: int,
    ) -> None:
        if sum(call.work is Work.GENERATE for call in workload.calls) > 1:
            raise ConfigError(
                f"algorithm.name={workload.algorithm} generates twice in an iteration, which the simulation does not"
                " model; simulate one that generates once"
            )
        self.workload, self.cluster, self.num_devices = workload, cluster, num_devices
        self._constraints = constraints
        self._num_steps, self._max_staleness = num_steps, max_staleness
        self._drains, self._seed = drains, seed
        self._everything: list[Placement] = [(tuple(workload.roles),)]
        self._training = Options(workload.without_generation(), cluster, constraints.sizes)

    @property
    def fixed(self) -> Mapping[str, TrainSizes]:
        """Sizes that models must have."""
        return self._constraints.sizes

    def synchronous(self) -> Run:
        """The best colocated plan.

        Raises:
            ConfigError: it does not fit.
        """
        options = Options(self.workload, self.cluster, self._constraints.sizes, self._constraints.gen_sizes)
        search = Search(options, self.num_devices, self._everything)
        plan = next(iter(search.run().plans), None)
        if plan is None:
            raise ConfigError(shortage(search))
        pool, actor = plan.pools[0], plan.option("actor")
        assert actor.engine is not None, "an actor generates"
        gen = actor.engine.sizes
        engine = self._engine(gen, actor.sizes.pp_size, pool.num_ranks)
        engines = Engines(engine, self._num_running(engine, pool.kv_bytes), actor.engine.gen_bytes)
        switch_s = sum(bar.seconds for bar in plan.bars if bar.call.work is Work.SWITCH)
        generate_s = sum(bar.seconds for bar in plan.bars if bar.call.work is Work.GENERATE)
        others_s = plan.step_s - switch_s - generate_s
        num_engines = pool.num_ranks // gen.num_ranks
        setting = self._setting(engines, num_engines, others_s, switch_s, synchronous=True)
        return Run(setting, plan, engines, pool.num_ranks, pool.num_ranks, others_s)

    def asynchronous(self, num_training: int) -> Run | None:
        """A division of the devices; None where what trains does not fit.

        Raises:
            ConfigError: no engine fits.
        """
        search = Search(self._training, num_training, self._everything)
        plan = next(iter(search.run().plans), None)
        if plan is None:
            return None
        num_generating = self.num_devices - num_training
        engines, train_s = self.engines, plan.step_s
        setting = self._setting(
            engines, num_generating // engines.num_devices, train_s, self.update_s(engines)
        )
        return Run(setting, plan, engines, num_training, num_generating, train_s)

    def divisions(self) -> Iterator[int]:
        """Numbers of training devices that leave whole engines on the others."""
        unit = self.engines.num_devices
        for num_training in pool_sizes(self.cluster, self.num_devices):
            rest = self.num_devices - num_training
            if rest and rest % unit == 0:
                yield num_training

    def steady_states(self, runs: Sequence[Run]) -> list[Split]:
        """What the analytical model says of the same divisions."""
        if self._max_staleness < 1:
            return [self._alternating(run) for run in runs]
        rate = {run.num_training: self.train_tokens_per_s(run) for run in runs}
        engines = self.engines
        return steady_splits(
            self.num_devices,
            engines.num_devices,
            lambda running: engines.step_s(self.workload, running),
            rate,
            engines.max_running,
            self.workload.lengths,
            self.workload.rows_per_step,
        )

    def _alternating(self, run: Run) -> Split:
        """Of a run that begins no batch ahead: engines and trainers wait for each other in turns."""
        workload, engines = self.workload, run.engines
        rows = workload.rows_per_step
        each = math.ceil(rows / run.setting.num_engines)
        generate_s = engines.engine.generate_s(
            each, workload.prompt_tokens, workload.lengths, engines.max_running
        )
        iteration_s = generate_s + run.train_s + run.setting.update_s
        running = float(min(each, engines.max_running))
        tokens = rows * workload.lengths.mean
        return Split(run.num_training, run.num_generating, running, tokens / iteration_s, 0.0)

    def train_tokens_per_s(self, run: Run) -> float:
        """Tokens of responses that the trainer takes in."""
        return self.workload.rows_per_step * self.workload.lengths.mean / run.train_s

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
        found, shape = [], self.workload.model("actor").shape
        for gen in choices:
            if shape.gen_tp_problems(gen.tp_size, gen.tp_size) or shape.gen_pp_problems(gen.pp_size):
                continue
            engine = self._engine(gen, gen.pp_size, self.num_devices)
            elements = generation_holding(shape, gen.pp_size, gen.pp_size, gen.tp_size).num_elements
            weights = elements * DTYPE_BYTES[self.workload.dtype]
            room = capacity - weights
            if room >= engine.kv_token_bytes * self.workload.max_tokens and gen.num_ranks < self.num_devices:
                found.append(Engines(engine, self._num_running(engine, room), weights))
        if not found:
            raise ConfigError(
                f"no engine of {', '.join(map(str, choices))} (p_g-t_g) fits on fewer than {self.num_devices} devices"
                f" with {capacity / 2**30:.1f} GiB for weights and one response; take more devices, or others"
            )
        return max(found, key=self._tokens_per_device)

    def _tokens_per_device(self, engines: Engines) -> float:
        running = float(engines.max_running)
        return running / engines.step_s(self.workload, running) / engines.num_devices

    def _engine(self, gen: GenSizes, train_pp_size: int, num_ranks: int) -> Engine:
        shape = self.workload.model("actor").shape
        return Engine(shape, gen, train_pp_size, self.workload.dtype, self.cluster, num_ranks)

    def _num_running(self, engine: Engine, kv_bytes: int) -> int:
        workload = self.workload
        return engine.num_running(workload.lengths, workload.prompt_tokens, workload.max_num_seqs, kv_bytes)

    def update_s(self, engines: Engines) -> float:
        """Return the seconds in which every device of the engines receives its shard from the trainers."""
        links, node = self.cluster.links, self.cluster.devices_per_node
        link = links.between_nodes if self.num_devices > node and links.between_nodes else links.same_node
        node_bytes = engines.gen_bytes * min(node, self.num_devices)
        return link.seconds(engines.gen_bytes, node_bytes) + link.latency_s

    def _setting(
        self,
        engines: Engines,
        num_engines: int,
        train_s: float,
        update_s: float,
        *,
        synchronous: bool = False,
    ) -> Setting:
        workload = self.workload
        rows = workload.rows_per_step
        return Setting(
            num_steps=self._num_steps,
            batch_size=rows,
            num_engines=num_engines,
            max_running=engines.max_running,
            prompt_tokens=workload.prompt_tokens,
            lengths=workload.lengths,
            step_s=engines.engine.step_s,
            prefill_s=engines.prefill_s(workload),
            train_s=_in_proportion(train_s, workload.num_tokens),
            update_s=update_s,
            max_staleness=self._max_staleness,
            drains=self._drains,
            synchronous=synchronous,
            seed=self._seed,
        )


def _in_proportion(seconds: float, tokens: float) -> Callable[[float], float]:
    return lambda batch_tokens: seconds * batch_tokens / tokens
