"""Engines of verl's trainer on this project's Megatron policy: a language model (actor, reference), and a value model.

Shapes: B rows, T positions, W = padded vocabulary / t. verl passes rows without padding, as jagged tensors [B, (T)].
"""

# pyright: reportMissingImports=false
from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from einops import rearrange
from tensordict import TensorDict
from torch import Tensor
from verl.utils import tensordict_utils as tu
from verl.utils.model import extract_multi_modal_inputs
from verl.workers.engine.base import BaseEngine, BaseEngineCtx, EngineRegistry
from verl.workers.engine.utils import detach_tree, postprocess_batch_func, prepare_micro_batches

from hybridengine.backends.megatron.checkpoint import BackgroundSave, load_checkpoint, load_random
from hybridengine.backends.megatron.groups import initialize_globals
from hybridengine.backends.megatron.model import available_names
from hybridengine.backends.megatron.shim import device
from hybridengine.backends.megatron.trainer import MegatronModel, MegatronTrainer
from hybridengine.backends.megatron.weights import load_weights, save_weights
from hybridengine.backends.policy import MicroBatch
from hybridengine.backends.predictions import Predictions
from hybridengine.errors import CheckpointError, DataError
from hybridengine.integrations.verl import settings
from hybridengine.integrations.verl_platform import VENDOR
from hybridengine.models.shapes import ModelShape
from hybridengine.weights.process_groups import process_groups

COLLECTIVE_S, SAVE_S = 1800.0, 3600.0
"""Time limits of collective operations, and of writing a checkpoint."""
_NOT_SUPPORTED = (
    "distillation_use_topk",
    "distillation_only",
    "calculate_sum_pi_squared",
    "enable_routing_replay",
)
"""Requests of a batch that are refused."""


class LanguageModelEngine(BaseEngine):
    """verl's engine for a rank's part of a language model; with `engine_config.forward_only`, a reference."""

    has_scores = False
    trained: ClassVar[LanguageModelEngine | None] = None
    """The actor of this process, whose weights its rollout takes."""

    def __init__(
        self, model_config: Any, engine_config: Any, optimizer_config: Any, checkpoint_config: Any, **_: Any
    ) -> None:
        settings.check_engine(engine_config, model_config)
        if not engine_config.forward_only:
            settings.check_checkpoint(checkpoint_config)
        self.model_config, self.engine_config = model_config, engine_config
        self.optimizer_config, self.checkpoint_config = optimizer_config, checkpoint_config
        self.grid = settings.train_grid(engine_config, dist.get_world_size())
        self.rank, self.mode = dist.get_rank(), None
        self.registry = process_groups(COLLECTIVE_S)
        self.folder = Path(model_config.local_path)
        self.shape = ModelShape.from_folder(self.folder)
        if self.has_scores:
            self.shape = self.shape.with_score_head()
        self.dtype = settings.dtype_of(engine_config)
        self.model: MegatronModel | None = None
        self._saved: list[Path] = []

    # ---- Life -------------------------------------------------------------------------------------------------------

    def initialize(self) -> None:
        """Build the model from its Hugging Face checkpoint and start the optimizer; a second call starts anew."""
        initialize_globals(self.engine_config.seed)
        self.model = (MegatronModel if self.engine_config.forward_only else MegatronTrainer)(
            self.shape,
            self.grid,
            self.rank,
            self.registry,
            dtype=self.dtype,
            names=available_names(),
            settings=settings.megatron_settings(self.engine_config),
        )
        load_weights(self.model, self.folder)
        if isinstance(self.model, MegatronTrainer):
            section, steps = settings.optimizer_of(self.optimizer_config)
            offload = "optimizer" if self.engine_config.optimizer_offload else "none"
            self.model.start_optimizer(section, steps, offload)
            if not self.has_scores:
                LanguageModelEngine.trained = self

    @property
    def trainer(self) -> MegatronTrainer:
        """The model, which is trained."""
        assert isinstance(self.model, MegatronTrainer), "forward_only engines are not trained"
        return self.model

    @property
    def _built(self) -> MegatronModel:
        assert self.model is not None, "initialize() comes first"
        return self.model

    is_param_offload_enabled = False  # weights move by the switch
    is_optimizer_offload_enabled = False  # and the optimizer's state with it

    def train_mode(self, **kwargs: Any) -> BaseEngineCtx:
        return _Training(self, mode="train", **kwargs)

    def eval_mode(self, **kwargs: Any) -> BaseEngineCtx:
        return BaseEngineCtx(self, mode="eval", **kwargs)

    def to(self, device: str, model: bool = True, optimizer: bool = True, grad: bool = True) -> None:
        """Do nothing: weights leave for the rollout by the switch, and return with it."""

    def get_per_tensor_param(self, **_: Any) -> tuple[Iterator[tuple[str, Tensor]], None]:
        """Return no tensors: the rollout on these ranks switches in place, and there is no other copy to write to."""
        return iter(()), None

    # ---- Places -----------------------------------------------------------------------------------------------------

    def get_data_parallel_size(self) -> int:
        return self.grid.sizes.dp_size

    def get_data_parallel_rank(self) -> int:
        return self.grid.coordinate(self.rank).dp_rank

    def get_data_parallel_group(self) -> dist.ProcessGroup:
        return self._built.groups.dp

    def is_mp_src_rank_with_outputs(self) -> bool:
        place, sizes = self.grid.coordinate(self.rank), self.grid.sizes
        is_first = place.tp_rank == 0 and (sizes.cp_size == 1 or place.cp_rank == 0)
        return is_first and place.pp_rank == sizes.pp_size - 1

    # ---- Passes and steps -------------------------------------------------------------------------------------------

    def forward_backward_batch(
        self, data: TensorDict, loss_function: Callable[..., Any] | None, forward_only: bool = False
    ) -> dict[str, Any]:
        """Run a batch in verl's own micro-batches; return `model_output`, `loss` and `metrics` on the last stage.

        verl's losses are divided by the tokens of all replicas and multiplied by their number, as a mean over replicas
        requires. Here gradients are summed, so that number is divided out again.
        """
        _check_supported(data)
        mask, group = data["loss_mask"], self.get_data_parallel_group()
        tokens = (mask.values() if mask.is_nested else mask).sum().to(device())
        dist.all_reduce(tokens, group=group)
        replicas = self.get_data_parallel_size()
        tu.assign_non_tensor(data, sp_size=1, batch_num_tokens=tokens.item(), dp_size=replicas)
        parts, order = prepare_micro_batches(data=data, dp_group=group, same_micro_num_in_dp=True)
        parts = [part.to(device()) for part in parts]

        def results(output: Any, columns: MicroBatch) -> tuple[Tensor, Tensor, dict[str, Any]]:
            part = parts[int(columns["number"])]
            found = self.outputs(output, columns["tokens"], part)
            loss, metrics = torch.ones((), device=device()), {}
            if loss_function is not None:
                loss, metrics = loss_function(model_output=found, data=part, dp_group=group)
            told = {"model_output": detach_tree(found), "loss": loss.detach().item(), "metrics": metrics}
            return loss / replicas, torch.ones((), dtype=torch.int, device=device()), told

        batches = [
            {
                "tokens": part["input_ids"].to_padded_tensor(0),
                "lengths": part["input_ids"].offsets().diff(),
                "number": torch.tensor(number),
            }
            for number, part in enumerate(parts)
        ]
        if forward_only:
            found = self._built.forward(batches, lambda output, columns: results(output, columns)[2])
        else:
            found = self.trainer.forward_backward(batches, results)
        if not self._built.is_last_stage:
            return {}
        return postprocess_batch_func(output_lst=found, indices=order, data=data)

    def outputs(self, predictions: Predictions, tokens_BT: Tensor, part: TensorDict) -> dict[str, Tensor]:
        """Return jagged `log_probs` of the following tokens, and `entropy` if the batch asks for it."""
        temperature = part["temperature"]
        if isinstance(temperature, Tensor):  # one for each row
            temperature = temperature.clamp(min=1e-8).view(-1, 1)
        log_probs, entropies = predictions.log_probs(tokens_BT.roll(-1, dims=1), temperature)
        found = {"log_probs": _jagged(log_probs, part["input_ids"])}
        if tu.get_non_tensor_data(part, "calculate_entropy", default=False):
            found["entropy"] = _jagged(entropies, part["input_ids"])
        return found

    def optimizer_zero_grad(self) -> None:
        self.trainer.drop_gradients()

    def optimizer_step(self) -> float:
        """Take one step; return the gradient's norm, NaN if it was not finite and the step was skipped."""
        return self.trainer.optimizer_step(summed=True, advance=False).grad_norm

    def lr_scheduler_step(self) -> float:
        """Advance the schedule; return the learning rate of the next step."""
        return self.trainer.advance_schedule()

    # ---- Checkpoints ------------------------------------------------------------------------------------------------

    def save_checkpoint(
        self,
        local_path: str,
        hdfs_path: str | None = None,
        global_step: int = 0,
        max_ckpt_to_keep: int | None = None,
        **_: Any,
    ) -> None:
        """Write a checkpoint of this project into `local_path`, readable at any parallel sizes, and remove old ones.

        With `hf_model` in the checkpoint's `save_contents`, a Hugging Face checkpoint is written to its folder
        `huggingface`.
        """
        if hdfs_path is not None:
            raise CheckpointError(f"{hdfs_path} cannot be written to; set trainer.default_hdfs_dir=null")
        folder = Path(local_path)
        if self.rank == 0:
            shutil.rmtree(folder, ignore_errors=True)  # left by a run that was interrupted in this step
            folder.mkdir(parents=True)
        dist.barrier()
        save, deadline = (
            BackgroundSave(self.trainer, folder, {"global_step": global_step}),
            time.monotonic() + SAVE_S,
        )
        while (outcome := save.end(last=time.monotonic() > deadline)) is False:
            time.sleep(0.05)
        if isinstance(outcome, CheckpointError):
            raise outcome
        if "hf_model" in self.checkpoint_config.save_contents:
            save_weights(
                self.trainer, self.registry, folder / "huggingface", str(self.folder), base=self.folder
            )
        dist.barrier()
        self._saved = [one for one in self._saved if one != folder] + [folder]
        for old in self._saved[:-max_ckpt_to_keep] if max_ckpt_to_keep else []:
            self._saved.remove(old)
            if self.rank == 0:
                shutil.rmtree(old, ignore_errors=True)

    def load_checkpoint(
        self, local_path: str, hdfs_path: str | None = None, del_local_after_load: bool = True, **_: Any
    ) -> None:
        """Restore weights, optimizer, schedule and random states from `save_checkpoint`, at any parallel sizes."""
        if local_path is None:
            return
        load_checkpoint(self.trainer, Path(local_path))
        load_random(Path(local_path), self.rank)


class ValueModelEngine(LanguageModelEngine):
    """verl's engine for a rank's part of a value model, whose head is zero at first."""

    has_scores = True

    def outputs(self, scores_BT1: Tensor, tokens_BT: Tensor, part: TensorDict) -> dict[str, Tensor]:
        """Return jagged `values`: that of the state after each token."""
        return {"values": _jagged(rearrange(scores_BT1, "b t 1 -> b t").float(), part["input_ids"])}

    def initialize(self) -> None:
        super().initialize()
        if isinstance(self.model, MegatronTrainer):
            self.model.leave_training()

    def train_mode(self, **kwargs: Any) -> BaseEngineCtx:
        return _ValueTraining(self, mode="train", **kwargs)


class _Training(BaseEngineCtx):
    """The engine in training; gradients that nobody has stepped with are forgotten at its end."""

    def __enter__(self) -> None:
        self._outer_mode = self.engine.mode
        super().__enter__()

    def __exit__(self, *failure: Any) -> None:
        if self.zero_grad_on_exit or failure[0] is not None:
            self.engine.optimizer_zero_grad()
        super().__exit__(*failure)
        self.engine.mode = self._outer_mode  # verl trains each mini-batch in a context inside that of all


class _ValueTraining(_Training):
    """A value model in training, which has memory for gradients only then; nested contexts are one."""

    def __exit__(self, *failure: Any) -> None:
        super().__exit__(*failure)
        if self.engine.mode is None:
            self.engine.trainer.leave_training()


def _check_supported(data: TensorDict) -> None:
    asked = [name for name in _NOT_SUPPORTED if tu.get_non_tensor_data(data, name, default=False)]
    if asked:
        raise DataError(f"{asked[0]} is not supported by this engine; turn it off")
    if extract_multi_modal_inputs(data.get("multi_modal_inputs", [])):  # verl adds empty ones to texts
        raise DataError("images and videos are not supported by this engine; take a text dataset")


def _jagged(values_BT: Tensor, like: Any) -> Tensor:
    """Return [B, (T)] with the row lengths of the jagged tensor `like`."""
    lengths_B = like.offsets().diff()
    mask_BT = torch.arange(values_BT.size(1), device=values_BT.device) < lengths_B.unsqueeze(1)
    return torch.nested.nested_tensor_from_jagged(values_BT[mask_BT], offsets=like.offsets())


def register() -> None:
    """Register both engines with verl, for CPUs and for GPUs."""
    for model_type, engine in (("language_model", LanguageModelEngine), ("value_model", ValueModelEngine)):
        EngineRegistry.register(
            model_type=model_type, backend="megatron", device=["cpu", "cuda"], vendor=VENDOR
        )(engine)
