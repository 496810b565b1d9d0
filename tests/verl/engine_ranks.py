"""Runs on each rank of the engine's tests: engines from verl's registry and verl's configuration, and their steps."""

# pyright: reportMissingImports=false
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from verl.trainer.config import CheckpointConfig
from verl.workers.config import (
    ActorConfig,
    CriticConfig,
    HFModelConfig,
    McoreEngineConfig,
    McoreOptimizerConfig,
)
from verl.workers.engine.base import EngineRegistry
from verl.workers.utils import losses

import hybridengine.integrations.verl  # noqa: F401  # registers the engines
from hybridengine.backends.megatron.weights import save_weights
from tests.verl import rows

LR, WEIGHT_DECAY, CLIP_GRAD, BETAS, EPS = 1e-3, 0.01, 1.0, (0.9, 0.999), 1e-8


@dataclass(frozen=True)
class Case:
    """A loss of verl's, and how its batches are cut."""

    loss: str
    """`ppo`, `sft` or `value`."""
    batch: dict[str, Any]
    """Entries that verl's workers add to a batch."""
    config: dict[str, Any] = field(default_factory=dict)
    """Entries of verl's configuration of the actor or critic."""

    @property
    def is_language(self) -> bool:
        return self.loss != "value"

    def columns(self, seed: int) -> dict[str, list[Tensor]]:
        columns = rows.columns_of(seed, self.is_language)
        return rows.with_masks_of_whole_rows(columns) if self.loss == "sft" else columns

    def loss_function(self) -> Callable[..., Any]:
        if self.loss == "value":
            config: Any = CriticConfig(strategy="megatron", ppo_micro_batch_size_per_gpu=1, **self.config)
        else:
            config = ActorConfig(
                strategy="megatron", rollout_n=1, ppo_micro_batch_size_per_gpu=1, **self.config
            )
        return partial(getattr(losses, f"{self.loss}_loss"), config)


@dataclass(frozen=True)
class Step:
    """Values that an engine gives to verl on a rank."""

    replica: int
    is_source: bool
    """True on the one rank of each replica from which verl takes the results."""
    grad_norm: float
    losses: list[float]
    metrics: dict[str, float]


def make_engine(
    model_type: str,
    folder: Path,
    sizes: str,
    optimizer: dict[str, Any] | None = None,
    save_contents: tuple[str, ...] = ("model", "optimizer", "extra"),
    **engine: Any,
) -> Any:
    """Return an initialised engine at parallel sizes "p-t-d", made as verl's worker makes it."""
    pp_size, tp_size, dp_size = map(int, sizes.split("-"))
    settings = {"lr": LR, "weight_decay": WEIGHT_DECAY, "clip_grad": CLIP_GRAD, "betas": BETAS}
    made = EngineRegistry.new(
        model_type=model_type,
        backend="megatron",
        model_config=HFModelConfig(
            path=str(folder), load_tokenizer=False, override_config={"attn_implementation": "eager"}
        ),
        engine_config=McoreEngineConfig(
            pipeline_model_parallel_size=pp_size,
            tensor_model_parallel_size=tp_size,
            override_mcore_model_config={"dtype": "float32"},
            **engine,
        ),
        optimizer_config=McoreOptimizerConfig(
            **settings | {"lr_decay_style": "constant"} | (optimizer or {}), total_training_steps=10
        ),
        checkpoint_config=CheckpointConfig(save_contents=list(save_contents)),
    )
    assert made.get_data_parallel_size() == dp_size
    made.initialize()
    return made


def batch_of(engine: Any, columns: dict[str, list[Tensor]], **settings: Any) -> Any:
    """Return the rows of this rank's replica."""
    place = engine.get_data_parallel_rank(), engine.get_data_parallel_size()
    return rows.batch_of(columns, *place, **settings)


def take_step(engine: Any, case: Case, seed: int) -> Step:
    """Take one step on the rows of `seed`."""
    batch = batch_of(engine, case.columns(seed), **case.batch)
    with engine.train_mode():
        output = engine.train_batch(batch, case.loss_function())
    is_source = engine.is_mp_src_rank_with_outputs()
    metrics = output["metrics"] if is_source else {}
    return Step(
        engine.get_data_parallel_rank(),
        is_source,
        metrics.get("grad_norm", 0.0),
        output["loss"] if is_source else [],
        {name: metric.aggregate() for name, metric in metrics.items() if hasattr(metric, "aggregate")},
    )


def export(engine: Any, folder: Path) -> None:
    save_weights(engine.trainer, engine.registry, folder)


def outputs_of(
    engine: Any, columns: dict[str, list[Tensor]], settings: dict[str, Any]
) -> tuple[int, dict[str, list[Tensor]]] | None:
    """Return (replica, its rows' outputs); None on a rank whose results verl does not take."""
    with engine.eval_mode():
        output = engine.infer_batch(batch_of(engine, columns, **settings))
    if not engine.is_mp_src_rank_with_outputs():
        return None
    values = {name: list(value.unbind()) for name, value in output["model_output"].items()}
    return engine.get_data_parallel_rank(), values


def infer(
    rank: int, folder: Path, model_type: str, sizes: list[str], batches: list[dict[str, Any]]
) -> list[list[tuple[int, dict[str, list[Tensor]]] | None]]:
    """Return `outputs_of` new engines, for each of the sizes and batches."""
    outcomes = []
    for one in sizes:
        engine = make_engine(model_type, folder, one, forward_only=True)
        columns = rows.columns_of(0, model_type == "language_model")
        outcomes.append([outputs_of(engine, columns, settings) for settings in batches])
    return outcomes


def train(
    rank: int, folder: Path, sizes: list[str], cases: dict[str, Case], num_steps: int, exports: Path
) -> dict[tuple[str, str], list[Step]]:
    """Return (sizes, case) -> steps of a new engine, whose weights are exported into a folder of both names."""
    outcomes = {}
    for one in sizes:
        for name, case in cases.items():
            engine = make_engine("language_model" if case.is_language else "value_model", folder, one)
            outcomes[one, name] = [take_step(engine, case, seed) for seed in range(num_steps)]
            export(engine, exports / f"{one}-{name}")
    return outcomes


def gradient_bytes_in_contexts(rank: int, folder: Path, case: Case) -> list[int]:
    """Return the gradients' bytes before, inside (after each of two mini-batches) and after the training of a batch."""
    engine = make_engine("value_model", folder, "1-1-1", optimizer_offload=True)
    found = [engine.trainer.gradient_bytes]
    with engine.train_mode():
        for seed in range(2):
            take_step(engine, case, seed)  # in a context of its own
            found.append(engine.trainer.gradient_bytes)
    return [*found, engine.trainer.gradient_bytes]


def learning_rates(
    rank: int, folder: Path, case: Case, optimizer: dict[str, Any], num_rates: int
) -> tuple[list[float], list[bool]]:
    """Return (the rates after each pair of steps, whether each pair has changed the weights)."""
    engine = make_engine("language_model", folder, "1-1-1", optimizer)
    rates, changed = [], []
    for _ in range(num_rates):
        before = {name: engine.model.weights[name].clone() for name in engine.model.weights.names}
        for seed in range(2):
            take_step(engine, case, seed)
        changed.append(
            any(not torch.equal(value, engine.model.weights[name]) for name, value in before.items())
        )
        rates.append(engine.lr_scheduler_step())
    return rates, changed


@dataclass(frozen=True)
class Resumption:
    """What a rank saw of a run, and of another one that was resumed from its last checkpoint."""

    rates: list[float]
    """Learning rates after the last step of both runs."""
    left: list[str]
    """Folders of checkpoints that are not removed."""
    loaded: tuple[int, dict[str, list[Tensor]]] | None
    """Outputs of the weights that were loaded, as `infer` returns them."""


def resume(
    rank: int, folder: Path, case: Case, before: str, after: str, schedule: dict[str, Any], files: Path
) -> Resumption:
    """Save three checkpoints and step on; load the last one at the sizes `after` and take the same step."""
    contents = ("model", "optimizer", "extra", "hf_model")
    engine = make_engine("language_model", folder, before, schedule, contents)
    for step in range(1, 4):
        take_step(engine, case, step)
        engine.lr_scheduler_step()
        checkpoint = files / "checkpoints" / f"global_step_{step}" / "actor"
        engine.save_checkpoint(str(checkpoint), global_step=step, max_ckpt_to_keep=2)
    export(engine, files / "saved")
    take_step(engine, case, 4)
    export(engine, files / "uninterrupted")
    rates = [engine.lr_scheduler_step()]
    engine = make_engine("language_model", folder, after, schedule)
    engine.load_checkpoint(str(checkpoint))
    export(engine, files / "loaded")
    loaded = outputs_of(engine, rows.columns_of(0), {**case.batch, "calculate_entropy": False})
    take_step(engine, case, 4)
    export(engine, files / "resumed")
    left = sorted(str(path.relative_to(files)) for path in files.glob("checkpoints/*/actor"))
    return Resumption([*rates, engine.lr_scheduler_step()], left, loaded)
