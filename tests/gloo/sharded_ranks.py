"""Runs on each rank: the worker classes as the controller creates them, on every layout in turn, and a dataflow's own
functions on shards of the rows."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from hybridengine.algorithms.across import Across
from hybridengine.algorithms.losses.aggregation import LossStats, SummedLoss
from hybridengine.config import Role, RunConfig
from hybridengine.config.loss_sections import COVARIANCE_LOSSES, KL_COV_LOSS
from hybridengine.config.run_config import TRAINED
from hybridengine.drivers.advantages import covariant_tokens, mean_cost, rollout_metrics
from hybridengine.drivers.dataflow import COVARIANCE_COLUMNS, COVARIANT_TOKENS, ROLLOUT_METRICS
from hybridengine.drivers.online_dpo import preferences
from hybridengine.drivers.safe_rlhf import MEAN_COST, SafeRlhf
from hybridengine.errors import ConfigError, ProtocolError
from hybridengine.importing import import_object
from hybridengine.reshard.boxes import Box
from hybridengine.rows.protocols import DP_PROTO, ROW_NUMBERS, GroupTopology, RankContext, registered
from tests.gloo.megatron_training import copy_weights
from tests.gloo.row_parts import concat_rows, slice_rows
from tests.gloo.sharded_cases import ALL_ESTIMATED, CASES, NUM_ROWS, ONE_RANK, SAMPLES, judged, run_of
from workers.compute import ComputeWorker
from workers.critic import CriticWorker
from workers.model_worker import TrainedWorker
from workers.policy import PolicyWorker

SEED = 3
"""Seed of the choice among equally covariant tokens."""

Pieces = list[tuple[str, Box, Tensor]]
"""(logical tensor, box of it, its elements)."""


@dataclass(frozen=True)
class Outcome:
    """Results of a case on one rank."""

    estimates: TensorDict | None
    """Columns that the dataflow computed between its models, all rows in order; None for online DPO."""
    measured: dict[str, float]
    """Statistics of all rows."""
    metrics: dict[str, dict[str, float]] = field(default_factory=dict)
    """Role -> metrics of its update; empty on all stages but the last."""
    weights: dict[str, Pieces] = field(default_factory=dict)
    """Role -> this rank's part of the weights after the update."""


class Group:
    """A worker on this rank, reused by all cases; rows are split as the controller would."""

    def __init__(
        self, run: RunConfig, role: Role, worker: type[TrainedWorker], rank: int, folder: Path
    ) -> None:
        self._role, self._rank = role, rank
        self._topology = GroupTopology(run.grid(role))
        place = self._topology.grid.coordinate(rank)
        context = RankContext(role, rank, run.num_ranks, self._topology, place, "127.0.0.1")
        self.worker = worker(context, run, folder)
        self._initial = copy_weights(self.worker.trainer)

    def restart(self, run: RunConfig) -> None:
        """Take the checkpoint's weights, a fresh optimizer and the settings of another run."""
        worker, trainer = self.worker, self.worker.trainer
        worker.run, worker.section, worker._updates = run, getattr(run, self._role), 0
        for name, weights in self._initial.items():
            worker.model.weights[name].copy_(weights)
        trainer.enter_training()
        worker.start_optimizer()
        if self._role != "actor":  # a critic allocates its gradients' memory again by itself
            trainer.leave_training()

    def call(self, method: str, rows: TensorDict, **settings: Any) -> Any:
        """Return the method's result on this rank, given its rows and the columns that it declares."""
        _, registration = registered(type(self.worker))[method]
        mine = registration.protocol.row_ranges(len(rows), self._topology)[self._rank]
        names = [*(registration.columns or ()), *(set(registration.optional) & set(rows.keys()))]
        return getattr(self.worker, method)(slice_rows(rows.select(*names), mine), **settings)

    def collect(self, method: str, rows: TensorDict, **settings: Any) -> TensorDict:
        """Return the rows that the method returns on all ranks."""
        found = gathered(self.call(method, rows, **settings))
        _, registration = registered(type(self.worker))[method]
        return concat_rows([found[rank] for rank in registration.protocol.source_ranks(self._topology)])

    def pieces(self) -> Pieces:
        """Return this rank's weights as boxes of logical tensors."""
        model = self.worker.model
        return [
            (piece.tensor, piece.box, model.weights[parameter.name][_slices(piece.local_box)].clone())
            for parameter in model.layout.shard(model.rank).parameters
            for piece in parameter.pieces
        ]


def _slices(box: Box) -> tuple[slice, ...]:
    return tuple(slice(start, stop) for start, stop in box)


def gathered(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Return the values of all ranks of a group."""
    everyone: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, value, group=group)
    return everyone


def run_one_process(
    rank: int, policy: Path, scorer: Path, rows: TensorDict
) -> tuple[TensorDict, dict[str, Outcome]]:
    """Return (rows for all dataflows, made from the models' log-probabilities and values; case -> outcome)."""
    layout = {ONE_RANK: tuple(CASES)}
    run = run_of("ppo", ONE_RANK, policy, scorer)
    forward = forward_of(groups_of(run, rank, policy, scorer, ("actor", "critic")), rows)
    rows = judged(rows, forward["log_probs"], forward["values"], forward["squared_probs"])
    outcomes = run_layouts(rank, layout, policy, scorer, rows)
    return rows, {case: outcome for (_, case), outcome in outcomes.items()}


def run_all(
    rank: int, layouts: Mapping[str, Sequence[str]], policy: Path, scorer: Path, rows: TensorDict
) -> dict[tuple[str, str], Outcome]:
    """Return the results of `run_layouts`, and ("compute workers", case) -> outcome of a run's own workers."""
    runs = {case: run_of(case, "1-1-8", policy, scorer) for case in CASES if case != "online_dpo"}
    computed = estimate_in_compute_workers(rank, runs, slice_rows(rows, range(NUM_ROWS)))
    return run_layouts(rank, layouts, policy, scorer, rows) | {
        ("compute workers", case): outcome for case, outcome in computed.items()
    }


def run_layouts(
    rank: int, layouts: Mapping[str, Sequence[str]], policy: Path, scorer: Path, rows: TensorDict
) -> dict[tuple[str, str], Outcome]:
    """Return (layout, case) -> outcome of this rank; the case "forward" has log-probabilities, entropies and values.

    Args:
        layouts: layout -> the cases whose updates run on it.
    """
    outcomes = {}
    for layout, updated in layouts.items():
        estimated = CASES if layout in ALL_ESTIMATED else updated
        runs = {case: run_of(case, layout, policy, scorer) for case in estimated}
        roles: tuple[Role, ...] = TRAINED if "safe_rlhf" in updated else ("actor", "critic")
        groups = groups_of(runs[updated[0]], rank, policy, scorer, roles)
        some = slice_rows(rows, range(NUM_ROWS))
        outcomes[layout, "forward"] = Outcome(forward_of(groups, some), {})
        replicas = groups["actor"].worker.model.groups.dp
        for case, run in runs.items():
            if case == "online_dpo":
                found, batch = Outcome(None, {}), rows[pairs_of(rows)]
            else:
                found = estimate_on_shards(run, some, replicas)
                batch = some.copy().update(cast(TensorDict, found.estimates))
            outcomes[layout, case] = found
            if case in updated:
                update(run, groups, cast(TensorDict, batch), found)
    return outcomes


def groups_of(
    run: RunConfig, rank: int, policy: Path, scorer: Path, roles: Sequence[Role]
) -> dict[Role, Group]:
    """Return the workers of the roles, with the checkpoints' weights."""
    return {
        role: Group(run, role, PolicyWorker, rank, policy)
        if role == "actor"
        else Group(run, role, CriticWorker, rank, scorer)
        for role in roles
    }


def forward_of(groups: Mapping[Role, Group], rows: TensorDict) -> TensorDict:
    """Return `log_probs`, `entropies`, `squared_probs` and `values` of all rows."""
    log_probs = groups["actor"].collect("compute_log_probs", rows, squares=True)
    return log_probs.update(groups["critic"].collect("compute_values", rows))


def update(run: RunConfig, groups: Mapping[Role, Group], batch: TensorDict, found: Outcome) -> None:
    """Run the updates of a run's dataflow, each from the checkpoint's weights."""
    method = "update_preferences" if run.algorithm.name == "online_dpo" else "update"
    for role, group in groups.items():
        if role not in run.algorithm.roles:
            continue
        group.restart(run)
        found.metrics[role] = group.call(method, rows_for(role, batch))
        found.weights[role] = group.pieces()


def rows_for(role: str, batch: TensorDictBase) -> TensorDict:
    """Return rows as the dataflow passes them to a role: a cost critic's columns have the names of the other critic's."""
    rows = cast(TensorDict, batch.copy())
    if role == "cost_critic":
        rows.update({"values": batch["cost_values"], "returns": batch["cost_returns"]})
    return rows


def estimate_on_shards(run: RunConfig, rows: TensorDict, group: dist.ProcessGroup) -> Outcome:
    """Run the dataflow's functions on this rank's share of the rows, and join the results."""
    owned = shards(len(rows), group.size())
    found, measured = estimate(run, numbered(rows)[owned[group.rank()]], Across(group))
    order = torch.tensor([row for part in owned for row in part])
    return Outcome(cast(TensorDict, concat_rows(gathered(found, group))[order.argsort()]), measured)


def estimate(run: RunConfig, rows: TensorDictBase, across: Across) -> tuple[TensorDict, dict[str, float]]:
    """Return (columns for the updates, statistics) as the driver of the run requests them."""
    measured = rollout_metrics(rows.clone(), across, run.algorithm)
    if isinstance(run.algorithm, SafeRlhf):
        measured |= mean_cost(rows.clone(), across)
    advantages = import_object(getattr(run.algorithm, "advantages"))  # noqa: B009
    found = advantages(rows.clone(), across, *step_arguments(run, measured))
    if run.algorithm.loss in COVARIANCE_LOSSES:
        inputs = covariance_inputs(rows, found)
        found.update(covariant_tokens(inputs, across, run.algorithm, SEED))
    return found, measured


def covariance_inputs(rows: TensorDictBase, found: TensorDictBase) -> TensorDict:
    """Return the columns that the choice of covariant tokens reads, and the row numbers."""
    every = cast(TensorDict, rows.clone().update(found))
    return every.select(*COVARIANCE_COLUMNS, ROW_NUMBERS, strict=False)


def step_arguments(run: RunConfig, measured: Mapping[str, float]) -> list[Any]:
    """Return the arguments that the step passes to the advantage function in addition to the rows."""
    algorithm = run.algorithm
    if isinstance(algorithm, SafeRlhf):
        return [algorithm, SAMPLES, math.exp(algorithm.updated_log_multiplier(0.0, measured["cost/mean"]))]
    return [algorithm, SAMPLES]


def pairs_of(rows: TensorDictBase) -> list[int]:
    """Return the rows that belong to the preferences among `rows`."""
    return preferences(rows["scores"].tolist(), rows["dropped"].tolist(), SAMPLES)


def estimate_in_compute_workers(
    rank: int, runs: Mapping[str, RunConfig], rows: TensorDict
) -> dict[str, Outcome]:
    """Return the outcomes of `estimate` for each run, from the worker that a run calls and the rows of its protocol."""
    topology = GroupTopology.parse("1-1-8")
    place = topology.grid.coordinate(rank)
    context = RankContext("compute", rank, topology.num_ranks, topology, place, "127.0.0.1")
    part = slice_rows(numbered(rows), DP_PROTO.row_ranges(len(rows), topology)[rank])
    outcomes = {}
    for case, run in runs.items():
        worker = ComputeWorker(context, run)
        measured = worker.measure(part.clone(), ROLLOUT_METRICS, run.algorithm)
        if isinstance(run.algorithm, SafeRlhf):
            measured |= worker.measure(part.clone(), MEAN_COST)
        path = getattr(run.algorithm, "advantages")  # noqa: B009
        found = worker.map(part.clone(), path, *step_arguments(run, measured))
        if run.algorithm.loss in COVARIANCE_LOSSES:
            inputs = covariance_inputs(part, found)
            found.update(worker.map(inputs, COVARIANT_TOKENS, run.algorithm, SEED))
        outcomes[case] = Outcome(concat_rows(gathered(found)), measured)
    return outcomes


def with_loss(run: RunConfig, path: str) -> RunConfig:
    return run.model_copy(update={"algorithm": run.algorithm.model_copy(update={"loss": path})})


def loss_as_a_number(*_: object) -> float:
    return 0.0


def loss_without_gradient(log_probs: Tensor, *_: object) -> SummedLoss:
    return SummedLoss(log_probs.detach().sum(), LossStats())


def update_in_mini_batches(
    rank: int, run: RunConfig, policy: Path, batch: TensorDict
) -> tuple[list[str], dict[str, float], Pieces]:
    """Return (errors, metrics, weights) of an actor whose replicas have unequal numbers of rows.

    Errors come from 3 rows for each of two replicas, from wrong losses, and from a loss whose column nobody produced.
    """
    actor = Group(run, "actor", PolicyWorker, rank, policy)
    errors = []
    for method in ("update", "update_preferences"):
        try:
            actor.call(method, slice_rows(batch, range(6)))
        except ProtocolError as error:
            errors.append(str(error))
    for function in (loss_as_a_number, loss_without_gradient):
        actor.restart(with_loss(run, f"{__name__}:{function.__name__}"))
        try:
            actor.call("update", batch)
        except ConfigError as error:
            errors.append(str(error))
    actor.restart(with_loss(run, KL_COV_LOSS))
    try:
        actor.call("update", batch)
    except ProtocolError as error:
        errors.append(str(error))
    actor.restart(run)
    return errors, actor.call("update", batch), actor.pieces()


def numbered(rows: TensorDict) -> TensorDict:
    """Return the rows with their numbers, as in every call of the controller."""
    return rows.copy().update({ROW_NUMBERS: torch.arange(len(rows))})


def shards(num_rows: int, num_ranks: int) -> list[list[int]]:
    """Return the rows of each rank: scattered and uneven; of 8 ranks one has none."""
    owners = torch.randint(num_ranks, (num_rows,), generator=torch.Generator().manual_seed(5)).tolist()
    return [[row for row in range(num_rows) if owners[row] == rank] for rank in range(num_ranks)]
