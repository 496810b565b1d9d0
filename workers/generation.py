"""An engine on ranks of its own: it generates all the time, with weights that the actor pushes between two calls."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from tensordict import TensorDictBase

from hybridengine.backends.vision import tower_of
from hybridengine.backends.vllm.construction import EngineSettings
from hybridengine.backends.vllm.engine import VllmEngine
from hybridengine.config import RunConfig
from hybridengine.models.shapes import ModelShape
from hybridengine.rollouts.drawn import Drawn
from hybridengine.rows.protocols import ONE_TO_ALL, PROTO_3D, RankContext, register
from hybridengine.topology.generation import GenerationGrid
from hybridengine.weights.hybrid_engine import WeightPush
from hybridengine.weights.link import Link
from hybridengine.weights.storage import WeightStorage
from workers.episodes import TOKEN_COLUMNS
from workers.rollouts import ROLLOUT_COLUMNS, rollouts_of


class EngineWorker:
    """One rank of an engine for the model of the checkpoint `folder`, of which only the configuration is read.

    `tokenizer` is the folder of the engine's tokenizer, for stop strings.
    """

    def __init__(
        self, context: RankContext, run: RunConfig, folder: str | Path, *, tokenizer: str | None = None
    ) -> None:
        self._run, self._context = run, context
        self._shape = ModelShape.from_folder(folder).with_adapters(run.actor.lora.adapters)
        self._generation = GenerationGrid(context.topology.grid, run.generation.parallel)
        self._engine = VllmEngine(
            folder,
            self._shape,
            self._generation,
            EngineSettings.of(run, tokenizer),
            identity=f"hybridengine-{os.environ['MASTER_PORT']}-{context.node}",
            tower=tower_of(run.model_folder, self._shape, run.model.dtype),
        )
        self._push: WeightPush | None = None

    @register(ONE_TO_ALL)
    def join_link(self, link: Link, engine: int) -> None:
        """Join a link as its engine of this number, in place of any earlier link. Collective over the link."""
        rank = link.first_rank(engine) + self._context.rank
        timeout_s = self._run.timeouts.collective_s
        if self._push is not None:
            self._push.close()
        self._push = link.join(self._shape, rank, timeout_s, WeightStorage({}), self._engine.weights)

    @register(ONE_TO_ALL)
    def receive_weights(self, version: int) -> dict[str, str | int | float]:
        """Receive the weights of `version` from the actor, and go on with them; return the report of this rank."""
        assert self._push is not None, "join_link comes first"
        self._engine.settle()
        report = self._push.push()
        self._engine.weights_changed(version, keep_kv=self._run.generation.kv == "keep")
        return report.as_dict()


class GenerationWorker(EngineWorker):
    """One rank of an engine of an asynchronous run."""

    def __init__(
        self, context: RankContext, run: RunConfig, folder: str | Path, stop_token_ids: tuple[int, ...] = ()
    ) -> None:
        super().__init__(context, run, folder)
        self._rollouts = rollouts_of(run, self._engine, self._generation, context.rank, stop_token_ids)

    @register(PROTO_3D, ROLLOUT_COLUMNS, optional=TOKEN_COLUMNS)
    def begin(self, rows: TensorDictBase) -> None:
        """Queue responses (`EngineRollouts.begin`)."""
        self._rollouts.begin(rows)

    @register(PROTO_3D)
    def advance(self, num_steps: int) -> Drawn:
        """Take up to `num_steps` engine steps (`EngineRollouts.advance`)."""
        return self._rollouts.advance(num_steps)

    @register(PROTO_3D)
    def withdraw(self, numbers: Sequence[int] | None = None) -> None:
        """Drop some responses or all (`EngineRollouts.withdraw`)."""
        self._rollouts.withdraw(numbers)

    def close(self) -> None:
        """End the processes of functions."""
        self._rollouts.close()
