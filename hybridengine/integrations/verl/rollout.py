"""The rollout of verl's workers: a vLLM engine on the ranks of the actor, which takes over its weights by the switch."""

# pyright: reportMissingImports=false
from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import ray
from verl.workers.rollout.base import BaseRollout

from hybridengine.backends.engine import Request, Response
from hybridengine.backends.vllm.engine import VllmEngine
from hybridengine.backends.vllm.requests import position_seed
from hybridengine.errors import ConfigError, StorageError
from hybridengine.formatting import format_bytes
from hybridengine.integrations.verl.engine import LanguageModelEngine
from hybridengine.integrations.verl.settings import rollout_plan
from hybridengine.models.shapes import DTYPE_BYTES
from hybridengine.reshard.compiler import compile_plan
from hybridengine.reshard.domains import domains
from hybridengine.topology.grid import group_with
from hybridengine.weights.hybrid_engine import HybridEngine, Mode
from hybridengine.weights.ledger import SwitchReport
from hybridengine.weights.transport import PointToPointTransport

logger = logging.getLogger(__name__)
logger.setLevel(os.getenv("VERL_LOGGING_LEVEL", "INFO"))


@dataclass(frozen=True)
class Place:
    """Where a rank is in the generation, and what its engine needs to know of requests."""

    replica: int
    position: int
    """Position among the ranks of its engine."""
    node_id: str
    stop_token_ids: tuple[int, ...]
    max_model_tokens: int
    vocab_size: int


class HybridRollout(BaseRollout):
    """A rank's part of the generation. All ranks of the actor construct it together, after the actor."""

    here: ClassVar[HybridRollout | None] = None
    """The rollout of this process, for the functions that servers call in it."""

    def __init__(self, config: Any, model_config: Any, device_mesh: Any, **_: Any) -> None:
        super().__init__(config, model_config, device_mesh)
        actor = LanguageModelEngine.trained
        if actor is None:
            raise ConfigError(
                "actor_rollout_ref.rollout.name=hybridengine needs an actor of this project on the same ranks; export"
                " VERL_ENGINE_VENDOR=hybridengine in the shell that starts Ray, and set model_engine=megatron"
            )
        plan = rollout_plan(self.config, actor.grid, actor.shape, actor.dtype)
        self._plan, self._rank, self.global_steps = plan, actor.rank, 0
        self._vocab_size = actor.shape.vocab_size
        if actor.rank == 0 and not plan.generation.nests:
            logger.warning(
                "hybridengine: generation at %s does not nest in training at %s, so some weights are held twice while"
                " generating; choose p_g from the divisors of p and t_g from those of t",
                plan.generation.sizes,
                actor.grid.sizes,
            )
        actor.trainer.leave_training()  # until HybridEngine has emptied the engine
        self.engine = VllmEngine(
            actor.folder,
            actor.shape,
            plan.generation,
            plan.engine,
            identity=f"verl-{os.environ['MASTER_PORT']}-{ray.get_runtime_context().get_node_id()[:8]}",
        )
        groups = domains(actor.trainer.layout, self.engine.layout)
        elements = max(1, plan.bucket_bytes // DTYPE_BYTES[actor.dtype])
        self.hybrid = HybridEngine(
            compile_plan(actor.trainer.layout, self.engine.layout, group_with(actor.rank, groups), elements),
            actor.rank,
            actor.trainer,
            self.engine,
            PointToPointTransport(actor.registry.new(groups)),
        )
        HybridRollout.here = self

    @property
    def place(self) -> Place:
        """Where this rank is in the generation."""
        replica = self._plan.generation.coordinate(self._rank)["replica"]
        engine = [
            rank
            for rank, place in enumerate(self._plan.generation.coordinates())
            if place["replica"] == replica
        ]
        return Place(
            replica,
            engine.index(self._rank),
            ray.get_runtime_context().get_node_id(),
            () if self.config.ignore_eos else stop_token_ids(self.model_config),
            self._plan.engine.max_model_tokens,
            self._vocab_size,
        )

    async def resume(self, tags: list[str]) -> None:
        """Do nothing: `update_weights` switches."""

    async def update_weights(self, weights: Any, global_steps: int | None = None, **_: Any) -> None:
        """Switch to generation, in place of writing weights into a copy; `weights` has none."""
        if self.hybrid.mode is Mode.TRAINING:
            self._tell(self.hybrid.to_generate())
        self.global_steps = global_steps or 0

    async def release(self) -> None:
        """Switch back to training."""
        self.to_train()

    def to_train(self) -> None:
        """Switch back to training, unless it is the mode already."""
        if self.hybrid.mode is Mode.GENERATING:
            self._tell(self.hybrid.to_train())

    def _tell(self, report: SwitchReport) -> None:
        if self._rank == 0:
            logger.warning(
                "hybridengine %s: received %s, peak %s of weights, redundant %d bytes, %.3f s",
                report.direction,
                format_bytes(report.received_bytes),
                format_bytes(report.peak_weight_bytes),
                report.redundant_bytes,
                report.seconds,
            )

    def advance(self, requests: Sequence[Request], num_steps: int) -> tuple[list[Response], int]:
        """Add requests and take up to `num_steps` steps; return (ended responses, the trainer's step of the weights).

        A response's seed is that of its request and of the step, so that a resumed run draws what it would have drawn.
        """
        if self.hybrid.mode is not Mode.GENERATING:
            raise StorageError(
                "a request has come while the ranks train; verl's trainer.v1.trainer_mode must be sync, in which"
                " generation and training take turns"
            )
        step = self.global_steps
        self.engine.add([replace(one, seed=position_seed(one.seed, step)) for one in requests])
        return self.engine.advance(num_steps), step


def stop_token_ids(model_config: Any) -> tuple[int, ...]:
    """Return the tokens that end a response: those of the generation configuration, or else the tokenizer's."""
    found = getattr(model_config.generation_config, "eos_token_id", None)
    if found is None:
        found = model_config.tokenizer.eos_token_id
    return tuple(found) if isinstance(found, list | tuple) else () if found is None else (found,)


# ---- Called by servers in the process of a worker, through Ray's `__ray_call__` -------------------------------------


def place_here(worker: Any) -> Place:
    return _here().place


def advance_here(worker: Any, requests: Sequence[Request], num_steps: int) -> tuple[list[Response], int]:
    return _here().advance(requests, num_steps)


def to_train_here(worker: Any) -> None:
    _here().to_train()


def _here() -> HybridRollout:
    assert HybridRollout.here is not None, "init_model comes first"
    return HybridRollout.here
