"""Base of every worker with a Megatron model: its construction, and running rows through it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from hybridengine.algorithms.across import Across
from hybridengine.algorithms.losses.aggregation import LossStats, merge_stats
from hybridengine.algorithms.staleness import check_ages
from hybridengine.backends.megatron.checkpoint import BackgroundSave, load_checkpoint, load_random
from hybridengine.backends.megatron.groups import initialize_globals
from hybridengine.backends.megatron.model import available_names
from hybridengine.backends.megatron.outputs import response_log_probs
from hybridengine.backends.megatron.shim import device
from hybridengine.backends.megatron.trainer import MegatronModel, MegatronTrainer
from hybridengine.backends.megatron.weights import fingerprint_of, load_weights, start_adapters
from hybridengine.backends.policy import LossFunction, MicroBatch, OutputFunction, StepResult
from hybridengine.backends.predictions import Predictions
from hybridengine.backends.supports import Supports
from hybridengine.backends.vision import tower_of
from hybridengine.checkpoints.conversion import read_role
from hybridengine.config import RunConfig
from hybridengine.config.role_sections import MegatronSettings, TrainedSection
from hybridengine.errors import CheckpointError, DataError, ProtocolError
from hybridengine.models.shapes import ModelShape
from hybridengine.rows.micro_batches import cut_rows, draw_mini_batches, gather_rows
from hybridengine.rows.protocols import ONE_TO_ALL, ROW_NUMBERS, RankContext, register
from hybridengine.weights.process_groups import process_groups

BASE = "base_fingerprint"
"""Entry of role.json: the frozen weights beneath adapters."""


class ModelWorker:
    """A model on this rank, loaded from a Hugging Face checkpoint folder.

    `score_head` gives one score per token instead of a vocabulary (a critic); `trains` builds a trainer.
    """

    def __init__(
        self, context: RankContext, run: RunConfig, folder: str | Path, *, score_head: bool, trains: bool
    ) -> None:
        self.context, self.run, self.folder = context, run, folder
        self.registry = process_groups(run.timeouts.collective_s)
        initialize_globals(run.run.seed)
        shape = ModelShape.from_folder(folder)
        if score_head:
            shape = shape.with_score_head()
        if context.role == "actor":
            shape = shape.with_adapters(run.actor.lora.adapters)
        self.shape = shape
        section: Any = getattr(run, context.role)
        self.max_tokens: int = section.micro_batch_tokens
        build = MegatronTrainer if trains else MegatronModel
        self.model = build(
            shape,
            context.topology.grid,
            context.rank,
            self.registry,
            dtype=run.model.dtype,
            names=available_names(),
            settings=section if isinstance(section, MegatronSettings) else MegatronSettings(),
        )
        load_weights(self.model, folder)
        # Its weights never change: roles of other folders with the same ones share it.
        own = run.model_folder if Path(folder) == run.start_folder else folder
        self.tower = tower_of(own, shape, run.model.dtype)
        self.model.see(self.tower)
        start_adapters(self.model, run.run.seed, run.actor.lora.path)

    def forward_rows(
        self, batch: TensorDictBase, output: OutputFunction, *, adapted: bool = True
    ) -> TensorDict | None:
        """Return the response-aligned results of `output` for all rows, [B, R] each; None on all stages but the last.

        Unless `adapted`, the model computes without its adapters.
        """
        micro = cut_rows(batch, self.max_tokens)
        forward = self.model.forward if adapted else self.model.forward_base
        results = forward([part.columns for part in micro], output)
        if not self.model.is_last_stage:
            return None
        width = self.run.max_response_tokens
        columns: dict[str, Any] = {}
        for name in results[0]:
            parts = [(part, result[name]) for part, result in zip(micro, results, strict=True)]
            columns[name] = gather_rows(parts, len(batch), width)
        return TensorDict(columns, batch_size=[len(batch)])

    def log_probs_of(
        self, predictions: Predictions, columns: MicroBatch, temperature: float | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return log-probs and entropies of response tokens, [b, r] each, by default at the rollout's temperature."""
        temperature = self.run.temperature if temperature is None else temperature
        return response_log_probs(predictions, columns, temperature)

    def squared_probs_of(self, predictions: Predictions, columns: MicroBatch) -> Tensor:
        """Return the sum of squared probabilities of each response token's distribution, [b, r], at its temperature."""
        return predictions.squared_probs(self.run.temperature, Supports.of_columns(columns))


class TrainedWorker(ModelWorker):
    """A model that is trained on this rank."""

    def __init__(
        self, context: RankContext, run: RunConfig, folder: str | Path, *, score_head: bool = False
    ) -> None:
        super().__init__(context, run, folder, score_head=score_head, trains=True)
        assert isinstance(self.model, MegatronTrainer), "trains=True builds a trainer"
        self.trainer = self.model
        self.section: TrainedSection = getattr(run, context.role)
        self._updates = 0
        self._skipped_in_a_row = 0
        self._save: BackgroundSave | None = None

    def start_optimizer(self) -> None:
        """Start the run's optimizer with fresh state; its updates are counted from now on."""
        section, self._updates = self.section, 0
        iterations = self.run.run.steps + 1 - self.run.algorithm.first_update(self.context.role)
        steps = iterations * section.ppo_epochs * section.mini_batches
        self.trainer.start_optimizer(section.optimizer, steps, section.offload)

    @register(ONE_TO_ALL)
    def begin_save(self, folder: str) -> CheckpointError | None:
        """Start copying weights, optimizer and counters to host memory, and writing them into an empty folder.

        Return None, or on all ranks the error of a rank that cannot write or is still writing an earlier save.
        """
        if self._save is not None and self._save.some_rank_writes():  # a second copy needs more memory
            return CheckpointError(
                f"an earlier save of {self.context.role} is still being written; see whether the disk hangs"
            )
        more: dict[str, Any] = {"updates": self._updates, "skipped_in_a_row": self._skipped_in_a_row}
        if self.shape.adapters:
            more |= {"base": str(self.folder), BASE: fingerprint_of(self.folder)}
        try:
            self._save = BackgroundSave(self.trainer, Path(folder), more)
        except CheckpointError as error:
            return error
        return None

    @register(ONE_TO_ALL)
    def copy_save(self) -> bool:
        """Copy what there is room for; return True if all is copied, so that training may continue."""
        assert self._save is not None, "begin_save comes first"
        return self._save.copy_more()

    @register(ONE_TO_ALL)
    def end_save(self, last: bool) -> bool | CheckpointError:
        """Return whether the save's folder is complete, or why it will not be (`BackgroundSave.end`)."""
        assert self._save is not None, "begin_save comes first"
        return self._save.end(last)

    @register(ONE_TO_ALL)
    def load_checkpoint(self, folder: str) -> bool:
        """Restore a checkpoint (`load_checkpoint`); return True if it has states of this rank's random generators."""
        base = read_role(Path(folder)).get(BASE) if self.shape.adapters else None
        if base not in (None, fingerprint_of(self.folder)):
            raise CheckpointError(
                f"{folder} has adapters of other weights than those of {self.folder}; set model.path to the model"
                " that they were trained on"
            )
        role = load_checkpoint(self.trainer, Path(folder))
        self._updates, self._skipped_in_a_row = role.get("updates", 0), role.get("skipped_in_a_row", 0)
        return load_random(Path(folder), self.context.rank)

    def update_rows(
        self,
        batch: TensorDictBase,
        columns: list[str],
        loss: LossFunction,
        unit: int = 1,
        version: int | None = None,
        count: Callable[[MicroBatch], Tensor] = lambda columns: columns["mask"].sum(),
        once: bool = False,
    ) -> dict[str, float]:
        """Train for several epochs over this replica's rows; return metrics over all replicas, equal on the last stage.

        `loss` collects a `LossStats` and the number of tokens of each micro-batch. Rows that are not kept have an empty
        mask. `unit` is the number of consecutive rows that stay together (see `check_units`). `version` is that of the
        weights that are trained, in an asynchronous dataflow; raises StalenessError for rows that it may not train.
        Between updates, gradients and (if configured) optimizer state release their memory.
        `count` returns a micro-batch's part of the divisor, as `loss` does: routers need it on all stages. If it is all
        done `once`, the rows are one mini-batch of one epoch, as those of a warm-up.
        """
        epochs, mini_batches = (1, 1) if once else (self.section.ppo_epochs, self.section.mini_batches)
        self.check_units(len(batch), unit, mini_batches)
        check_ages(batch, version, self.run.staleness.max_versions)
        self._updates += 1
        self.trainer.drop_routing()  # of passes for other purposes
        collected, steps = list[tuple[LossStats, int]](), list[StepResult]()
        numbers = batch[ROW_NUMBERS] if ROW_NUMBERS in batch.keys() else torch.arange(len(batch))  # noqa: SIM118
        try:
            for epoch in range(epochs):
                seed = (self.run.run.seed * 1_000_003 + self._updates) * 1_009 + epoch
                # Each mini-batch is a collective: all replicas have as many, even if their numbers of rows differ.
                for rows in draw_mini_batches(numbers, mini_batches, unit, seed):
                    micro = cut_rows(batch[rows], self.max_tokens, columns, unit)
                    batches = [part.columns | {"weight": count(part.columns)} for part in micro]
                    steps.append(self.train_step(batches, loss))
                    collected += steps[-1].collected
        finally:
            self.trainer.leave_training()
        routing = self.trainer.take_routing()
        if not self.model.is_last_stage:
            return {}
        role, norms = self.context.role, [step.grad_norm for step in steps if not step.skipped]
        return self.reduce_stats(collected) | {
            f"{role}/grad_norm": sum(norms) / len(norms) if norms else math.nan,
            f"{role}/lr": steps[-1].lr,
            f"{role}/skipped_steps": float(len(steps) - len(norms)),
            **{f"{role}/{name}": value for name, value in routing.items()},
        }

    def train_step(self, batches: Sequence[MicroBatch], loss: LossFunction) -> StepResult:
        """Take one optimizer step, or none for a gradient that is not finite; raise DataError after too many of those."""
        result, role = self.trainer.train_step(batches, loss), self.context.role
        self._skipped_in_a_row = self._skipped_in_a_row + 1 if result.skipped else 0
        most = self.run.guards.skipped_steps
        if self._skipped_in_a_row > most:
            raise DataError(
                f"the gradient of {role} has not been finite for {self._skipped_in_a_row} steps on end, and"
                f" guards.skipped_steps={most}; lower {role}.optimizer.lr, or look for bad rows in the data"
            )
        return result

    def check_units(self, num_rows: int, unit: int, mini_batches: int | None = None) -> None:
        """Raise ProtocolError unless a replica's rows are complete units, and enough of them for its mini-batches."""
        role, mini_batches = self.context.role, mini_batches or self.section.mini_batches
        if num_rows % unit:
            raise ProtocolError(
                f"{num_rows} rows of one replica of {role} must be a multiple of {unit}, which stay together; pass a"
                f" multiple of {unit} rows for each of the d = {self.context.topology.grid.sizes.dp_size} replicas"
            )
        if num_rows // unit < mini_batches:
            raise ProtocolError(
                f"{num_rows} rows of one replica of {role} must be at least {unit} for each of {role}.mini_batches="
                f"{mini_batches}; pass more rows, or lower mini_batches"
            )

    def reduce_stats(self, collected: list[tuple[LossStats, int]]) -> dict[str, float]:
        """Return the statistics of all micro-batches of all data-parallel replicas."""
        across = Across(self.model.groups.dp)
        stats = merge_stats([part for part, _ in collected]).over_ranks(across)
        tokens = torch.tensor(sum(count for _, count in collected), device=device())
        return stats.metrics(across.sum(tokens))
