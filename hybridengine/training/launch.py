"""Worker groups and resource pools of a run, created from its configuration."""

from __future__ import annotations

import math
import os
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from hybridengine.backends.vllm.environment import rank_environment
from hybridengine.config import ModelHolder, RunConfig, model_holders
from hybridengine.config.algorithm import Role
from hybridengine.config.reward_sections import RewardSection
from hybridengine.config.run_config import SCORERS
from hybridengine.config.sections import MAIN_POOL
from hybridengine.controller.call_log import call_log
from hybridengine.controller.cluster import node_offers, place_pools, start_ray, which_answer
from hybridengine.controller.pool import ResourcePool
from hybridengine.controller.worker_group import WorkerGroup
from hybridengine.data.rewards import score_column
from hybridengine.doctor.ranks import rank_problems
from hybridengine.drivers.roles import BaseOfActor, Roles, Scorers
from hybridengine.errors import ConfigError, raise_all
from hybridengine.planning.devices import Placed, device_problems, fp8_problems, mixed_gpu_problems
from hybridengine.report import keys
from hybridengine.rollouts.engines import Engines
from hybridengine.topology.nodes import order_pools, rooms_left
from hybridengine.topology.sizes import TrainSizes
from hybridengine.training.dry_run import budgets_of
from hybridengine.training.files import judge_stops

WORKERS = {
    "actor": "workers.actor.ActorWorker",
    "generation": "workers.generation.GenerationWorker",
    "critic": "workers.critic.CriticWorker",
    "cost_critic": "workers.critic.CriticWorker",
    "reference": "workers.reference.ReferenceWorker",
    "teacher": "workers.teacher.TeacherWorker",
    "reward": "workers.reward.RewardModelWorker",
    "cost": "workers.reward.RewardModelWorker",
}
"""Import path of each role's worker class; this package never imports them."""
TRAINED_ACTOR = "workers.policy.PolicyWorker"
"""Worker of an actor that draws no responses."""
FUNCTION_WORKER = "workers.reward.RewardFunctionWorker"
JUDGE_WORKER = "workers.judge.JudgeWorker"


class RunPools:
    """Pools of a run; a context manager that ends their processes."""

    def __init__(self, config: RunConfig) -> None:
        """Join or start the cluster; raise a ConfigError if it lacks what the configuration needs."""
        self._config = config
        call_log()  # created before the pools, which start concurrently and share it
        if config.cluster.address is not None:
            os.environ["RAY_ADDRESS"] = config.cluster.address
        json_logs = config.run.log_format == "json"
        start_ray(num_cpus=config.num_ranks, json_logs=json_logs)
        offers = node_offers()
        has_gpus = any(offer.num_gpus for offer in offers)
        use_gpus = config.cluster.device == "cuda" or (config.cluster.device == "auto" and has_gpus)
        if config.rollout.cuda_graphs and not use_gpus:
            raise ConfigError("rollout.cuda_graphs=true needs GPUs, and the run has none; leave it false")
        self._use_gpus, self._is_reserved = use_gpus, False
        self._addresses = {offer.address for offer in offers}
        self._rooms = [offer.num_ranks(1, use_gpus) for offer in offers]
        raise_all(place_pools(config.started_pools, offers, use_gpus)[1])
        self._pools = {
            name: ResourcePool(
                ranks_per_node=ranks_per_node,
                name=name,
                run=config.run.name,
                json_logs=json_logs,
                use_gpus=use_gpus,
                env=rank_environment(use_gpus=use_gpus, own_logs=not json_logs),
                start_timeout_s=config.timeouts.start_s,
                timeout_s=config.timeouts.call_s,
            )
            for name, ranks_per_node in config.started_pools.items()
        }

    @property
    def nodes(self) -> dict[str, tuple[str, ...]]:
        """Address of each rank's node, by pool, without engines that have ended."""
        return {name: pool.nodes for name, pool in self._pools.items() if not pool.is_closed}

    @property
    def used_nodes(self) -> list[str]:
        """Addresses of the nodes on which the pools have started ranks, also if these have ended; else of all nodes."""
        used = {node for pool in self._pools.values() for node in pool.nodes}
        return sorted(used or self._addresses)

    def reserve(self) -> None:
        """Reserve nodes for all pools, in the order of the pools if they fit that way; idempotent.

        Other jobs may use a part of the cluster, and hosts may have disappeared, which Ray notices later: what counts is
        the room that is left, if the pools fit there.
        """
        if self._is_reserved:
            return
        pools, wanted = list(self._pools.values()), [pool.ranks_per_node for pool in self._pools.values()]
        offers = node_offers(free=True)
        left = [
            one.num_ranks(1, self._use_gpus) * there
            for one, there in zip(offers, which_answer(offers), strict=True)
        ]
        for rooms in (left, self._rooms):
            order = order_pools(wanted, rooms)
            if rooms_left(wanted, rooms, order) is not None:
                break
        for place in order:
            pools[place].reserve()
        self._is_reserved = True

    def start(self) -> None:
        """Start the processes of all pools concurrently on their nodes; a ConfigError if models do not fit there."""
        self.reserve()
        with ThreadPoolExecutor(len(self._pools)) as threads:
            started = [threads.submit(pool.start) for pool in self._pools.values()]
            budgets = budgets_of(self._config, on_gpus=self._use_gpus)
            for one in started:
                one.result()
        ranks = defaultdict[str, list[Placed]](list)
        for name, pool in self._pools.items():  # every engine has a pool of its own
            ranks[name.partition(".")[0]] += map(Placed, pool.nodes, pool.devices)
        raise_all(
            [
                *rank_problems([*self._pools.values()], self._config.run_folder, self._config.paths_to_read),
                *mixed_gpu_problems(ranks),
                *map("; ".join, fp8_problems(budgets, ranks)),
                *map(str, device_problems(budgets, ranks)),
            ]
        )

    def wait(self) -> None:
        """Wait for every call made so far, but for those of engines, which are always at work."""
        for name, pool in self._pools.items():
            if name in self._config.pools:
                pool.wait()

    def settle(self) -> None:
        """Record the times of the calls that have ended so far."""
        for pool in self._pools.values():
            pool.settle()

    def start_model(self, role: Role, worker: str | None = None, **arguments: object) -> WorkerGroup:
        """Return the group of a role; `arguments` are passed to its worker, which may be another than the role's own."""
        (holder,) = (holder for holder in model_holders(self._config) if holder.role == role)
        return self._model(holder, worker or WORKERS[role], **arguments)

    def start_actor(self, folder: Path, stop_token_ids: Sequence[int]) -> WorkerGroup:
        """Return the actor's group, with engines if the algorithm generates."""
        if not self._config.algorithm.generates:
            return self.start_model("actor", TRAINED_ACTOR, folder=folder)
        return self.start_model("actor", folder=folder, stop_token_ids=stop_token_ids)

    def start_engines(self, worker: str | None = None, **arguments: object) -> list[WorkerGroup]:
        """Return the engines of the role generation, each on a pool of its own; arguments are those of `start_model`."""
        config = self._config
        sizes = config.generation.parallel
        arguments = {"run": config, "folder": config.model_folder, **arguments}
        with ThreadPoolExecutor(max(1, len(config.engines))) as threads:
            started = [
                threads.submit(
                    WorkerGroup,
                    self._pools[name],
                    worker or WORKERS["generation"],
                    role="generation",
                    parallel=TrainSizes(sizes.pp_size, sizes.tp_size, 1),
                    config=arguments,
                )
                for name in self._pools
                if name not in config.pools
            ]
            return [one.result() for one in started]

    def start_roles(
        self,
        actor: WorkerGroup,
        engines: Sequence[WorkerGroup] = (),
        say: Callable[[str], None] = print,
    ) -> Roles:
        """Return all groups of the run's dataflow; prompts and compute share the ranks of the actor's pool.

        `say` is called with what happens to engines on ranks of their own.
        """
        config = self._config
        main = self._pools[MAIN_POOL]
        compute = self._helper(main, "compute", "workers.compute.ComputeWorker")
        # The most readers that share the prompts evenly: there may be more ranks than prompts.
        num_readers = math.gcd(main.num_ranks, config.data.batch_size)
        prompts = self._helper(main, "prompts", "workers.prompts.PromptWorker", num_readers)
        models = {
            holder.role: self._model(holder, WORKERS[holder.role], folder=holder.folder)
            for holder in model_holders(config)
            if holder.role not in ("actor", *SCORERS)
        }
        others: dict[str, Scorers | Engines | BaseOfActor] = {
            role: self._scorers(role, compute) for role in SCORERS if role in config.algorithm.roles
        }
        if config.actor.lora.rank and "reference" in config.algorithm.roles:
            others["reference"] = BaseOfActor(actor)
        if engines:
            others["generation"] = Engines(config, engines, actor, prompts, say)
        groups = {"actor": actor, "prompts": prompts, "compute": compute, **models, **others}
        if config.rollout.episode is None:
            return Roles(**groups)
        names = map(keys.episode_key, config.rollout.episode.metrics)
        return Roles(episode_columns=(*keys.EPISODE_COLUMNS, *names), **groups)

    def _model(self, holder: ModelHolder, worker: str, **arguments: object) -> WorkerGroup:
        config = self._config
        return WorkerGroup(
            self._pools[config.pool_of(holder.role)],
            worker,
            role=holder.name,
            parallel=holder.sizes,
            generate=config.actor.generate if holder.role == "actor" and config.algorithm.generates else None,
            order=config.cluster.order,
            config={"run": config, **arguments},
        )

    def _scorers(self, role: Role, compute: WorkerGroup) -> Scorers:
        """Return the groups of a reward section: one for functions and services, one for each model and judge."""
        config, pool = self._config, self._pools[self._config.pool_of(role)]
        section: RewardSection = getattr(config, role)
        groups = [self._helper(pool, role, FUNCTION_WORKER)] if section.are_called else []
        groups += [
            self._model(holder, WORKERS[role], folder=holder.folder, section=role, term=holder.term)
            for holder in model_holders(config)
            if holder.role == role
        ]
        groups += [self._judge(role, term, pool) for term in section.judges]
        weights = {score_column(role, term): weight for term, weight in section.weights.items()}
        own = tuple(score_column(role, term) for term in section.episodes)
        summed = weights if section.models or section.judges or (weights and own) else {}
        episodes = config.rollout.episode is not None
        return Scorers(groups, compute, summed, tuple(weights), own, episodes, "" in section.functions)

    def _judge(self, role: Role, term: str, pool: ResourcePool) -> WorkerGroup:
        """Return the group of a judge: its engines divide the pool's ranks."""
        config, section = self._config, getattr(self._config, role)
        folder, engine = Path(section.scorers[term].path), section.judges[term].engine
        arguments = {"folder": folder, "section": role, "term": term, "stop_token_ids": judge_stops(folder)}
        return WorkerGroup(
            pool,
            JUDGE_WORKER,
            role=f"{role}_{term}" if term else role,
            parallel=TrainSizes(engine.pp_size, engine.tp_size, pool.num_ranks // engine.num_ranks),
            order=config.cluster.order,
            config={"run": config, **arguments},
        )

    def _helper(
        self, pool: ResourcePool, role: str, worker: str, num_replicas: int | None = None
    ) -> WorkerGroup:
        """Return a group without a model on all ranks of a pool, with one replica per rank by default."""
        num_replicas = num_replicas or pool.num_ranks
        sizes = TrainSizes(1, pool.num_ranks // num_replicas, num_replicas)
        return WorkerGroup(pool, worker, role=role, parallel=sizes, config={"run": self._config})

    def close(self) -> None:
        """End all processes without waiting for their calls."""
        for pool in self._pools.values():
            pool.close()

    def __enter__(self) -> RunPools:
        return self

    def __exit__(self, *failure: Any) -> None:
        with ExitStack() as ends:
            for pool in self._pools.values():
                ends.push(pool)
            ends.pop_all().__exit__(*failure)
