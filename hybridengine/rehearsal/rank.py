"""One rank of a run's actor pool, whose workers make the calls of one iteration without values and without peers."""

from __future__ import annotations

import gc
import resource
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hybridengine.backends.megatron import offload
from hybridengine.backends.megatron.checkpoint import BackgroundSave
from hybridengine.backends.megatron.groups import embedding_groups
from hybridengine.backends.megatron.offload import HostBuffer
from hybridengine.checkpoints import hf_files
from hybridengine.config import ModelHolder, RunConfig, model_holders
from hybridengine.config.run_config import SCORERS
from hybridengine.config.sections import MAIN_POOL
from hybridengine.importing import import_object
from hybridengine.planning.costs.dataflows import Call, Work, calls_of
from hybridengine.rehearsal.counting import StorageCounter, TrafficCounter
from hybridengine.rehearsal.engine import engine_without_values
from hybridengine.rehearsal.figures import Held, Phase, RankRehearsal
from hybridengine.rehearsal.fused_layers import fused_layers
from hybridengine.rehearsal.planned import for_cpu
from hybridengine.rehearsal.replacing import all_replaced, replaced
from hybridengine.rehearsal.routing import even_routes
from hybridengine.rehearsal.shapes_only import ShapesOnly
from hybridengine.rehearsal.stand_ins import WeightsWithoutValues, longest_rows, write_model_config
from hybridengine.rehearsal.world import rehearsed_world
from hybridengine.rows.protocols import PROTO_3D_ALL_MICRO_DP, GroupTopology, RankContext, registered
from hybridengine.topology.experts import named_expert_groups
from hybridengine.topology.generation import GenerationGrid
from hybridengine.topology.grid import named_groups
from hybridengine.topology.links import NodeMap
from hybridengine.topology.sizes import TrainSizes
from hybridengine.training.launch import WORKERS

DRAWN_TOKENS = 2
"""Tokens of a rehearsed response: one step fills the KV cache with the prompts, the next one decodes."""
MOST_REQUESTS = 64
"""Largest number of responses that are drawn; their prompts fill several steps."""


def rehearse(config: RunConfig, rank: int) -> RankRehearsal:
    """Rehearse one rank of the actor's pool; raises what a run would raise. Once in a process.

    It is the first iteration after a resume: the optimizers have moments from the start. Rows have the longest prompts
    and responses. Of an update, one optimizer step is rehearsed, and of all passes as many micro-batches as fill the
    pipeline and one more.
    """
    config = for_cpu(config)
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        one = _Rank(config, rank, Path(folder), stack)
        one.build()
        one.iterate()
        one.save()
        return one.result()


class _Rank:
    """Workers of one rank, and what their calls have needed; `stack` holds what stands for devices and peers."""

    def __init__(self, config: RunConfig, rank: int, folder: Path, stack: ExitStack) -> None:
        self._started = time.perf_counter()
        self._config, self._rank, self._folder = config, rank, folder
        self._holders = [one for one in model_holders(config) if config.pool_of(one.role) == MAIN_POOL]
        self._actor = next(one for one in self._holders if one.role == "actor")
        self._coordinate = self._actor.grid.coordinate(rank)
        self._workers: dict[str, Any] = {}
        self._phases: list[Phase] = []
        self._storages, self._traffic = StorageCounter(), TrafficCounter(_group_names(config, self._holders))
        self._mode = ShapesOnly([self._storages.observe, self._traffic.observe])
        nodes = NodeMap(config.pools[MAIN_POOL].ranks_per_node)
        local = nodes.ranks_per_node[nodes.node_of(rank)]
        stack.enter_context(rehearsed_world(rank, nodes.num_ranks, local, self._traffic.count))
        stack.enter_context(self._storages.resizes_counted())
        if config.cluster.device != "cpu":
            stack.enter_context(fused_layers())
        stack.enter_context(even_routes())
        stack.enter_context(engine_without_values(self._mode, nodes))
        stack.enter_context(replaced(hf_files, "SafetensorsFolder", WeightsWithoutValues))
        stack.enter_context(self._host_memory_counted())

    @contextmanager
    def phase(self, name: str, num_rows: int = 0, num_rehearsed: int = 0) -> Iterator[None]:
        """Count the block as a phase."""
        gc.collect()
        self._storages.restart_peak()
        begin_bytes, started = self._storages.live_bytes, time.perf_counter()
        with self._mode.active():
            yield
        gc.collect()
        self._phases.append(
            Phase(
                name,
                begin_bytes,
                self._storages.peak_bytes,
                self._storages.live_bytes,
                tuple(self._traffic.take()),
                time.perf_counter() - started,
                num_rows,
                num_rehearsed,
            )
        )

    def build(self) -> None:
        """Build the workers, load the weights and start the optimizers, in a run's order."""
        for holder in self._holders:
            with self.phase(f"build {holder.name}"):
                self._workers[holder.name] = self._worker(holder)
        with self.phase("start optimizers"):
            self._workers["actor"].start_training()
            for worker in self._trained.values():
                self._storages.move(
                    _own_state(worker.trainer),
                    to_host=worker.trainer._offload is not None and worker.trainer._offload.is_on_host,
                )

    @property
    def _trained(self) -> dict[str, Any]:
        return {name: worker for name, worker in self._workers.items() if hasattr(worker, "trainer")}

    def _worker(self, holder: ModelHolder) -> Any:
        folder = self._folder / holder.name
        write_model_config(self._config, holder, folder)
        generate = self._config.actor.generate if holder.role == "actor" else None
        topology = GroupTopology(
            holder.grid, None if generate is None else GenerationGrid(holder.grid, generate)
        )
        context = RankContext(
            holder.name,
            self._rank,
            holder.grid.num_ranks,
            topology,
            holder.grid.coordinate(self._rank),
            "rehearsal",
        )
        more = {"section": holder.role, "term": holder.term} if holder.role in SCORERS else {}
        return import_object(WORKERS[holder.role])(context, self._config, folder, **more)

    def iterate(self) -> None:
        """Make the calls of the algorithm's iteration that have a model on this rank, in order."""
        config = self._config
        samples, lora = config.rollout.samples_per_prompt, bool(config.actor.lora.rank)
        for call in calls_of(config.algorithm, config.data.batch_size, samples, has_adapters=lora):
            for name, worker in self._workers.items():
                if call.role in (name, name.partition("_")[0]) and hasattr(worker, call.method):
                    self._call(call, name, worker)

    def _call(self, call: Call, name: str, worker: Any) -> None:
        config, holder = self._config, next(one for one in self._holders if one.name == name)
        label = f"{name}.{call.method}"
        if call.work is Work.SWITCH:
            with self.phase(label):
                getattr(worker, call.method)()
            return
        _, registration = registered(type(worker))[call.method]
        columns = list(registration.columns or ())
        unit = 2 if call.method == "update_preferences" else 1
        if registration.protocol is PROTO_3D_ALL_MICRO_DP:
            num_rows = -(-call.num_rows // GenerationGrid(holder.grid, config.actor.generate).num_replicas)
            num_rehearsed = min(num_rows, MOST_REQUESTS, config.rollout.max_num_seqs)
            rollout = config.rollout.model_copy(update={"max_response_tokens": DRAWN_TOKENS})
            worker.run = config.model_copy(update={"rollout": rollout})
        else:
            num_rows = -(-call.num_rows // holder.sizes.dp_size)
            num_rehearsed = self._num_rehearsed(num_rows, worker, call.work, holder.sizes, unit)
        if call.method == "update" and getattr(worker.section, "kl_loss_coef", 0):
            columns.append("ref_log_probs")
        rows = longest_rows(config, num_rehearsed, columns, worker.shape.vocab_size)
        arguments = [config.algorithm] if call.work is Work.UPDATE and holder.role == "actor" else []
        with self.phase(label, num_rows, num_rehearsed):
            if call.work is Work.UPDATE:
                once = {"mini_batches": 1, "ppo_epochs": 1}
                worker.section = worker.section.model_copy(update=once)
            getattr(worker, call.method)(rows, *arguments)
        worker.run = config

    def _num_rehearsed(self, num_rows: int, worker: Any, work: Work, sizes: TrainSizes, unit: int) -> int:
        """Return the rows of the fewest micro-batches with as many in flight as in the call, and with one more pass."""
        if work is Work.UPDATE:
            num_rows = -(-num_rows // unit // worker.section.mini_batches) * unit
        at_once = max(1, worker.max_tokens // (self._config.max_tokens * unit)) * unit
        count = -(-num_rows // at_once)
        most = sizes.passes_in_flight(count, 0)
        enough = (
            fewer
            for fewer in range(sizes.pp_size + 1, count)
            if sizes.passes_in_flight(fewer, 0) == most < fewer * sizes.virtual_stages
        )
        return min(num_rows, next(enough, count) * at_once)

    def save(self) -> None:
        """Copy all trained models as a checkpoint does."""
        copied: list[int] = []

        def count(save: BackgroundSave, planner: Any) -> None:
            parts = [item.tensor_data for item in planner.create_local_plan().items]
            copied.append(sum(part.chunk.sizes.numel() * part.properties.dtype.itemsize for part in parts))
            planner.end()
            save._outcome = True
            dist.destroy_process_group(save._own_group)

        with replaced(BackgroundSave, "_write", count):
            for name, worker in self._trained.items():
                folder = self._folder / f"save-{name}"
                folder.mkdir()
                with self.phase(f"{name}.begin_save"):
                    refused = worker.begin_save(str(folder))
                    if refused is not None:
                        raise refused
                    worker._save._thread.join()
                last = self._phases[-1]
                self._phases[-1] = replace(last, peak_bytes=last.begin_bytes, copied_bytes=copied[-1])

    @contextmanager
    def _host_memory_counted(self) -> Iterator[None]:
        """Count what is copied to host memory there: without a device, both are the same."""
        take, host_copy = HostBuffer.take, HostBuffer.host_copy

        def taken(buffer: HostBuffer, tensors: Sequence[Tensor]) -> list[Tensor]:
            with self._storages.on_host():
                return take(buffer, tensors)

        def copied(buffer: HostBuffer, tensor: Tensor) -> Tensor:
            with self._storages.on_host():
                return host_copy(buffer, tensor)

        def without_values(num_bytes: int) -> Tensor:
            return torch.empty(num_bytes, dtype=torch.uint8)

        with all_replaced(
            (HostBuffer, "take", taken),
            (HostBuffer, "host_copy", copied),
            (offload, "own_pages", without_values),
        ):
            yield

    def result(self) -> RankRehearsal:
        """Return the figures of all phases."""
        held = {}
        for name, worker in self._workers.items():
            trained = name in self._trained
            held[name] = Held(
                worker.model.weights.total_bytes,
                sum(worker.trainer._gradient_bytes) if trained else 0,
                sum(tensor.nbytes for tensor in _own_state(worker.trainer)) if trained else 0,
            )
        engine = self._workers["actor"]._engine
        return RankRehearsal(
            self._rank,
            str(self._coordinate),
            held,
            engine.weights.total_bytes,
            self._config.rollout.kv_cache_bytes,
            tuple(self._phases),
            resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
            time.perf_counter() - self._started,
        )


def _own_state(trainer: Any) -> list[Any]:
    """Return Adam's moments, and master weights that are not parts of the model's weights."""
    if trainer._optimizer is None:
        return []
    parts = trainer.optimizer_parts().values()
    masters = [part.master for part in parts] if trainer.dtype != "float32" else []
    return [*masters, *(moment for part in parts for moment in part.moments.values())]


def _group_names(config: RunConfig, holders: list[ModelHolder]) -> Callable[[tuple[int, ...]], str]:
    """Return a function that names a group by its ranks, after the first grid that has it."""
    names: dict[tuple[int, ...], str] = {}
    for holder in holders:
        for axis, groups in [*named_groups(holder.grid), *named_expert_groups(holder.grid)]:
            for ranks in groups:
                names.setdefault(ranks, axis if holder.role == "actor" else f"{axis} of {holder.name}")
        everyone = tuple(range(holder.grid.num_ranks))
        names.setdefault(everyone, "all ranks")
        for ranks in holder.grid.groups("pp", "tp"):
            names.setdefault(ranks, "replica" if holder.role == "actor" else f"replica of {holder.name}")
        for ranks in embedding_groups(holder.grid):
            names.setdefault(ranks, "first and last stage")
    for axis, groups in named_groups(GenerationGrid(holders[0].grid, config.actor.generate)):
        for ranks in groups:
            names.setdefault(ranks, f"{axis} of the engine")
    return lambda ranks: "itself" if len(ranks) == 1 else names.get(ranks, "switch")
