"""Runs to simulate for a workload on a cluster.

synchronous    the best plan with every model on all devices: generation, then all other calls
asynchronous   engines on separate devices, with weights and KV cache only; all models train and infer on the others
configured     the asynchronous run whose pools and sizes a configuration gives
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from hybridengine.config import RunConfig
from hybridengine.errors import ConfigError
from hybridengine.planning.costs.clusters import Cluster
from hybridengine.planning.costs.dataflows import Work
from hybridengine.planning.costs.decoding import Engine
from hybridengine.planning.costs.lengths import Lengths
from hybridengine.planning.costs.passes import compute_of
from hybridengine.planning.costs.workload import GENERATING, Workload
from hybridengine.planning.search.options import Options
from hybridengine.planning.search.placements import Constraints, pool_sizes
from hybridengine.planning.search.plan import Plan, given_plan
from hybridengine.planning.search.search import Search
from hybridengine.planning.search.shortage import shortage
from hybridengine.planning.simulation.simulation import Bound, Outcome, Setting
from hybridengine.topology.fitting import gen_problems
from hybridengine.topology.sizes import GenSizes, divisors


@dataclass(frozen=True)
class Engines:
    """Identical engines, with the inputs of their speed."""

    engine: Engine
    workload: Workload
    max_running: int
    kv_bytes: int

    @property
    def num_devices(self) -> int:
        return self.engine.sizes.num_ranks

    @cached_property
    def prefill_s(self) -> float:
        """Seconds of the prefill of one prompt in a batch."""
        return self.engine.prefill_s(self.max_running * self.workload.prompt_tokens) / self.max_running

    @cached_property
    def rates(self) -> np.ndarray:
        """Tokens per second of one engine with 1, 2, ... responses at once, in a steady state, prefill included."""
        lengths, prompt_tokens = self.workload.lengths, self.workload.prompt_tokens
        running = np.arange(1, self.max_running + 1)
        seconds = self.engine.step_s(running, running * (prompt_tokens + lengths.mean_position))
        return running / (seconds + running / lengths.mean * self.prefill_s)


@dataclass(frozen=True)
class Run:
    setting: Setting
    plan: Plan
    """Plan of the training side; in a synchronous run, of all calls."""
    engines: Engines
    num_training: int
    """Number of devices that train; in a synchronous run, they also generate."""
    num_generating: int
    train_s: float
    """Seconds of a step without generation and the switch."""


@dataclass(frozen=True)
class SteadyState:
    """Figures of a division of devices by the analytical model."""

    running: int
    tokens_per_s: float
    staleness: float
    """Most optimizer steps between the first and the last token of a response; excludes waiting for the trainer."""


def steady_state(
    num_engines: int, rates: np.ndarray, train_tokens_per_s: float, lengths: Lengths, batch_size: int
) -> SteadyState:
    """Return the steady state of engines and of a trainer that can consume `train_tokens_per_s` response tokens.

    The engines run the fewest responses with which they keep up with the trainer, N_train·thr = N_sample·B / latency(B),
    or the number with the highest rate if none keeps up (AReaL, arXiv 2505.24298, section 5.1). `rates` are the tokens
    per second of an engine with 1, 2, ... responses at once.
    """
    enough = np.flatnonzero(num_engines * rates >= train_tokens_per_s)
    place = int(enough[0] if len(enough) else np.argmax(rates))
    tokens_per_s = min(train_tokens_per_s, num_engines * float(rates[place]))
    engine_step_s, train_step_s = (place + 1) / float(rates[place]), batch_size * lengths.mean / tokens_per_s
    return SteadyState(place + 1, tokens_per_s, lengths.max_tokens * engine_step_s / train_step_s)


def role_idle_shares(run: Run, outcome: Outcome) -> dict[str, float]:
    """Return the idle share of the run for the engines and for each model, whose calls take its share of a step."""
    trained = [bar for bar in run.plan.bars if bar.call.work not in GENERATING]
    share_of_s = (1.0 - outcome.train_idle_share) / run.train_s
    shares = {"generation": outcome.generate_idle_share}
    for bar in trained:
        if bar.call.work in (Work.INFER, Work.UPDATE):
            shares[bar.call.role] = shares.get(bar.call.role, 1.0) - share_of_s * bar.seconds
    return shares


@dataclass(frozen=True)
class Scenarios:
    """Runs of a workload on `num_devices` devices; a ConfigError if the algorithm generates twice in an iteration."""

    workload: Workload
    cluster: Cluster
    num_devices: int
    constraints: Constraints
    num_steps: int
    max_staleness: float
    bound: Bound
    seed: int

    def __post_init__(self) -> None:
        if sum(call.work is Work.GENERATE for call in self.workload.calls) > 1:
            raise ConfigError(
                f"algorithm.name={self.workload.algorithm} generates twice in an iteration, which the simulation does"
                " not model; simulate one that generates once"
            )

    @cached_property
    def _training(self) -> Options:
        return Options(self.workload.without_generation(), self.cluster, self.constraints.sizes)

    def synchronous(self) -> Run:
        """Return the run of the best colocated plan; a ConfigError says why none fits."""
        options = Options(
            self.workload.synchronous(), self.cluster, self.constraints.sizes, self.constraints.gen_sizes
        )
        search, plan = self._best_plan(options, self.num_devices)
        if plan is None:
            raise ConfigError(shortage(search))
        pool, actor = plan.pools[0], plan.option("actor")
        assert actor.engine is not None, "an actor generates"
        engines = self._engines(actor.engine.sizes, actor.sizes.pp_size, pool.num_ranks, pool.kv_bytes)
        switch_s = sum(bar.seconds for bar in plan.bars if bar.call.work is Work.SWITCH)
        others_s = plan.step_s - switch_s - plan.phases_s["generate"]
        setting = self._setting(engines, pool.num_ranks, others_s, switch_s)
        return Run(setting, plan, engines, pool.num_ranks, pool.num_ranks, others_s)

    def asynchronous(self, num_training: int) -> Run | None:
        """Return the run with `num_training` training devices; None if the training side does not fit."""
        _, plan = self._best_plan(self._training, num_training)
        if plan is None:
            return None
        rest = self.num_devices - num_training
        setting = self._setting(self.engines, rest, plan.step_s, self._update_s(self.engines, rest))
        return Run(setting, plan, self.engines, num_training, rest, plan.step_s)

    def configured(self, config: RunConfig) -> Run:
        """Return the asynchronous run whose pools and sizes `config` gives; a ConfigError if a rank cannot hold it."""
        plan = given_plan(config, self.workload.without_generation(), self.cluster)
        rest = sum(map(sum, config.engines))
        gen = config.generation.parallel
        engines = self._engines(gen, gen.pp_size, rest, config.rollout.kv_cache_bytes)
        needed, room = engines.engine.weight_bytes + engines.kv_bytes, self.cluster.model_memory_bytes
        if needed > room:
            raise ConfigError(
                f"engines of generation.parallel={gen} with rollout.kv_cache_bytes={engines.kv_bytes} take"
                f" {needed / 2**30:.1f} GiB on a device, which has {room / 2**30:.1f} GiB for models; take more ranks for"
                " an engine, or a smaller cache"
            )
        steps, limit_s = config.generation.steps_per_call, config.timeouts.call_s
        running, work = engines.max_running, self.workload
        context_tokens = running * (work.prompt_tokens + work.lengths.mean_position)
        call_s = steps * engines.engine.step_s(running, context_tokens)
        if call_s >= limit_s:
            raise ConfigError(
                f"generation.steps_per_call={steps} engine steps with {running} responses take {call_s:.3g} s, and a call"
                f" must take less than timeouts.call_s={limit_s:g}; lower the one or raise the other"
            )
        setting = replace(
            self._setting(engines, rest, plan.step_s, self._update_s(engines, rest)),
            steps_per_call=config.generation.steps_per_call,
            call_s=compute_of(self.cluster).call_s,
        )
        return Run(setting, plan, engines, config.num_ranks - rest, rest, plan.step_s)

    def divisions(self) -> Iterator[int]:
        """Yield the numbers of training devices that leave whole engines on the other devices."""
        for num_training in pool_sizes(self.cluster, self.num_devices):
            rest = self.num_devices - num_training
            if rest and rest % self.engines.num_devices == 0:
                yield num_training

    def steady_state(self, run: Run) -> SteadyState:
        """Return the steady state of an asynchronous run by the analytical model."""
        setting, lengths, engines = run.setting, self.workload.lengths, run.engines
        tokens = setting.batch_size * lengths.mean
        if self.max_staleness >= 1:
            rate = tokens / run.train_s
            return steady_state(setting.num_engines, engines.rates, rate, lengths, setting.batch_size)
        # Nothing is begun ahead: engines and trainer work in turns.
        each = math.ceil(setting.batch_size / setting.num_engines)
        generate_s = engines.engine.generate_s(each, setting.prompt_tokens, lengths, setting.max_running)
        iteration_s = generate_s + run.train_s + setting.update_s
        return SteadyState(min(each, setting.max_running), tokens / iteration_s, 0.0)

    @cached_property
    def engines(self) -> Engines:
        """Separate engines with the most tokens per second and device; a ConfigError if none holds one response."""
        wanted, shape = self.constraints.gen_sizes, self.workload.model("actor").shape
        choices = (
            [wanted] if wanted else [GenSizes(1, size) for size in divisors(self.cluster.devices_per_node)]
        )
        possible = [
            self._engines(gen, gen.pp_size, self.num_devices)
            for gen in choices
            if gen.num_ranks < self.num_devices and not gen_problems(shape, gen, gen.tp_size)
        ]
        tokens = self.workload.max_tokens
        found = [
            engines for engines in possible if engines.kv_bytes >= engines.engine.kv_token_bytes * tokens
        ]
        if not found:
            raise ConfigError(
                f"no engine of {', '.join(map(str, choices))} (p_g-t_g) fits on fewer than {self.num_devices} devices"
                f" with {self.cluster.model_memory_bytes / 2**30:.1f} GiB for weights and one response; take more"
                " devices, or others"
            )
        return max(found, key=lambda engines: engines.rates[-1] / engines.num_devices)

    def _update_s(self, engines: Engines, num_generating: int) -> float:
        """Seconds for the `num_generating` devices of all engines to receive their shards from the trainers."""
        links, node = self.cluster.links, self.cluster.devices_per_node
        link = links.network if self.num_devices > node else links.same_node
        num_bytes = engines.engine.weight_bytes
        return link.seconds(num_bytes, num_bytes * min(node, num_generating)) + link.latency_s

    def _best_plan(self, options: Options, num_devices: int) -> tuple[Search, Plan | None]:
        search = Search(options, num_devices, [(tuple(self.workload.roles),)])
        return search, next(iter(search.run().plans), None)

    def _engines(
        self, gen: GenSizes, train_pp_size: int, num_ranks: int, kv_bytes: int | None = None
    ) -> Engines:
        """Return engines with `kv_bytes` of KV cache on a device; by default all that the weights leave."""
        work, shape = self.workload, self.workload.model("actor").shape
        engine = Engine(shape, gen, train_pp_size, work.dtype, self.cluster, num_ranks)
        room = self.cluster.model_memory_bytes - engine.weight_bytes if kv_bytes is None else kv_bytes
        running = engine.num_running(work.lengths, work.prompt_tokens, work.max_num_seqs, room)
        return Engines(engine, work, running, room)

    def _setting(self, engines: Engines, num_generating: int, train_s: float, update_s: float) -> Setting:
        return Setting(
            num_steps=self.num_steps,
            batch_size=self.workload.rows_per_step,
            num_engines=num_generating // engines.num_devices,
            max_running=engines.max_running,
            prompt_tokens=self.workload.prompt_tokens,
            lengths=self.workload.lengths,
            step_s=engines.engine.step_s,
            prefill_s=engines.prefill_s,
            train_token_s=train_s / self.workload.num_tokens,
            update_s=update_s,
            max_staleness=self.max_staleness,
            bound=self.bound,
            samples_per_prompt=self.workload.samples_per_prompt,
            seed=self.seed,
        )
