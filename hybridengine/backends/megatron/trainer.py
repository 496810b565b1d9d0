"""A Megatron-core model on one rank: forward passes, and training with the distributed optimizer."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor
from torch.nn import Parameter

from hybridengine.backends.megatron import compat
from hybridengine.backends.megatron.adapters import KeptBase, adapters_off
from hybridengine.backends.megatron.groups import build_groups
from hybridengine.backends.megatron.model import DTYPES, build_chunks
from hybridengine.backends.megatron.offload import OptimizerOffload
from hybridengine.backends.megatron.routing import RoutingTotals
from hybridengine.backends.megatron.shim import device_shim
from hybridengine.backends.megatron.step import PipelineRunner
from hybridengine.backends.policy import LossFunction, MicroBatch, OutputFunction, StepResult
from hybridengine.backends.vision import VisionTower
from hybridengine.config.role_sections import MegatronSettings, OptimizerSection
from hybridengine.errors import DataError, StorageError
from hybridengine.families.family import NameSet, is_float32
from hybridengine.models.shapes import ModelShape
from hybridengine.reshard.layout import Layout
from hybridengine.reshard.megatron import megatron_layout
from hybridengine.topology.grid import Grid
from hybridengine.weights.process_groups import ProcessGroups
from hybridengine.weights.storage import WeightStorage


class MegatronModel:
    """One rank's part of a model for forward passes only, such as a reference or reward model."""

    def __init__(
        self,
        shape: ModelShape,
        grid: Grid,
        rank: int,
        registry: ProcessGroups,
        dtype: str = "float32",
        names: NameSet = NameSet.LOCAL,
        settings: MegatronSettings = MegatronSettings(),
    ) -> None:
        self.shape, self.grid, self.rank, self.dtype, self.names = shape, grid, rank, dtype, names
        self.groups: ProcessGroupCollection = build_groups(grid, registry)
        self.layout: Layout = megatron_layout(shape, grid, names)
        self._chunks = build_chunks(shape, grid.sizes, self.groups, dtype, names, settings)
        self.weights = WeightStorage(self._weights(), current=self._weights)
        self._runner = PipelineRunner(self._chunks, self._chunks, shape, grid.sizes, self.groups)

    def see(self, tower: VisionTower | None) -> None:
        """Read the images of micro-batches with this tower."""
        self._runner.tower = tower

    def _parameters(self) -> dict[str, Parameter]:
        """Return the parameters by their names in the layout."""
        return {
            start + name: parameter
            for start, chunk in self._named_chunks()
            for name, parameter in chunk.named_parameters()
        }

    def _weights(self) -> dict[str, Tensor]:
        """Return parameters, and buffers of the layout, by their names there."""
        kept = {
            start + name: buffer
            for start, chunk in self._named_chunks()
            for name, buffer in chunk.named_buffers()
            if is_float32(name)
        }
        return {**self._parameters(), **kept}

    def _named_chunks(self) -> Iterator[tuple[str, GPTModel]]:
        """Yield (beginning of names in the layout, virtual stage)."""
        for number, chunk in enumerate(self._chunks):
            yield f"{number}." if len(self._chunks) > 1 else "", chunk

    def expect_weights(self) -> None:
        """Raise StorageError if the weights have released their memory: computing with them would crash the process."""
        if self.weights.live_bytes < self.weights.total_bytes:
            raise StorageError("the trainer has no weights in generation mode; switch to training first")

    @property
    def is_last_stage(self) -> bool:
        """True on the stage that computes outputs and losses."""
        return self._runner.is_last_stage

    def forward(self, batches: Sequence[MicroBatch], output: OutputFunction) -> list[dict[str, Tensor]]:
        """Return the results of `output` for each micro-batch, in order (`Policy`)."""
        self.expect_weights()
        return self._runner.forward(batches, output)

    def forward_base(self, batches: Sequence[MicroBatch], output: OutputFunction) -> list[dict[str, Tensor]]:
        """Return the results of `forward` for the model without its adapters."""
        with adapters_off(self._chunks):
            return self.forward(batches, output)


@dataclass(frozen=True)
class KeptState:
    """A copy in host memory of everything on a rank that training changes."""

    tensors: Sequence[Tensor]
    counters: Mapping[str, int]
    num_tokens: Tensor | None
    """Tokens of the pending gradients; None without any."""


class MegatronTrainer(MegatronModel):
    """One rank's part of a model that is trained."""

    def __init__(
        self,
        shape: ModelShape,
        grid: Grid,
        rank: int,
        registry: ProcessGroups,
        dtype: str = "float32",
        names: NameSet = NameSet.LOCAL,
        settings: MegatronSettings = MegatronSettings(),
    ) -> None:
        # The base gives each parameter a storage of its own: it returns to the system when Megatron's buffers replace it.
        super().__init__(shape, grid, rank, registry, dtype, names, settings)
        self._settings: tuple[OptimizerSection, int, str] | None = None
        self._optimizer: Any = None
        self._offload: OptimizerOffload | None = None
        self.version = 0
        """Number of optimizer steps that have been applied to the weights."""
        ddp_config = DistributedDataParallelConfig(
            grad_reduce_in_fp32=True,
            overlap_grad_reduce=settings.overlap_reduction and self.groups.intra_dp_cp.size() > 1,
            use_distributed_optimizer=True,
        )
        with device_shim(), compat.one_bucket_per_parameter(self._chunks):
            self._replicated: list[Any] = [
                DistributedDataParallel(
                    chunk.config, ddp_config, chunk, disable_bucketing=True, pg_collection=self.groups
                )
                for chunk in self._chunks
            ]
        compat.group_buckets(self._replicated)
        compat.skip_exchange_with_oneself(self._replicated)
        owners = compat.split_parameter_buffers(self._replicated)
        trained = {name: one for name, one in self._parameters().items() if one.requires_grad}
        by_owner = {name: owners[parameter] for name, parameter in trained.items()}
        self.weights = WeightStorage(self._weights(), by_owner, current=self._weights)
        merges = shape.adapters is not None and shape.merges_adapters
        self._kept = KeptBase(self.weights, shape.adapters.scale) if merges else None  # type: ignore[union-attr]
        self._gradients: list[Tensor] = [buffer.grad_data for buffer in compat.buffers(self._replicated)]
        self._gradient_bytes = [buffer.untyped_storage().nbytes() for buffer in self._gradients]
        routing = shape.experts and RoutingTotals(shape.experts, shape.num_layers, self.groups)
        self._runner = PipelineRunner(self._replicated, self._chunks, shape, grid.sizes, self.groups, routing)

    def start_optimizer(
        self, settings: OptimizerSection, decay_steps: int = 1_000_000, offload: str = "none"
    ) -> None:
        """Create the optimizer with fresh state, after loading the weights: its master weights are copies of them.

        Args:
            decay_steps: optimizer steps until `min_lr`; ignored by constant schedules.
            offload: `none`, or `optimizer` to keep optimizer state in host memory between updates.
        """
        self._settings = settings, decay_steps, offload
        config = OptimizerConfig(
            optimizer="adam",
            lr=settings.lr,
            min_lr=settings.min_lr,
            weight_decay=settings.weight_decay,
            adam_beta1=settings.betas[0],
            adam_beta2=settings.betas[1],
            adam_eps=settings.eps,
            clip_grad=settings.clip_grad,
            bf16=self.dtype == "bfloat16",
            params_dtype=DTYPES[self.dtype],
            use_distributed_optimizer=True,
        )
        with device_shim():
            self._optimizer = get_megatron_optimizer(
                config, self._replicated, use_gloo_process_groups=False, pg_collection=self.groups
            )
            compat.fuse_steps(self._optimizer)
            self._offload = (
                OptimizerOffload(self._optimizer, torch.nn.ModuleList(self._chunks))
                if offload == "optimizer"
                else None
            )
            self._schedule = OptimizerParamScheduler(
                self._optimizer,
                init_lr=0.0,
                max_lr=settings.lr,
                min_lr=settings.min_lr,
                lr_warmup_steps=settings.warmup_steps,
                lr_decay_steps=max(decay_steps, settings.warmup_steps + 1),
                lr_decay_style=settings.schedule,
                start_wd=settings.weight_decay,
                end_wd=settings.weight_decay,
                wd_incr_steps=0,
                wd_incr_style="constant",
            )

    def restart_optimizer(self) -> None:
        """Replace the optimizer by one with the same settings, after the weights have changed."""
        assert self._settings is not None, "start_optimizer comes first"
        self.start_optimizer(*self._settings)
        self.version = 0

    def optimizer_parts(self) -> dict[str, compat.OptimizerPart]:
        """Return parameter name -> this rank's part of the optimizer's state, for parameters of which it has one."""
        assert self._optimizer is not None, "start_optimizer comes first"
        trained = {name: one for name, one in self._parameters().items() if one.requires_grad}
        return compat.optimizer_parts(self._optimizer, trained)

    def counters(self) -> dict[str, int]:
        """Return the counters of optimizer and schedule, and the weights' version; the same on all ranks."""
        return {
            "adam_steps": compat.adam_steps(self._optimizer),
            "schedule_steps": self._schedule.num_steps,
            "version": self.version,
        }

    def set_counters(self, counters: Mapping[str, int]) -> None:
        """Restore the counters of optimizer and schedule."""
        compat.set_adam_steps(self._optimizer, counters["adam_steps"])
        self._schedule.num_steps = 0
        self._schedule.step(increment=counters["schedule_steps"])
        self.version = counters["version"]

    def keep_state(self) -> KeptState:
        """Return copies in host memory of all that training changes, such as the adapters of one of several clients."""
        tensors = [tensor.detach().to("cpu", copy=True) for tensor in self._changing()]
        return KeptState(tensors, self.counters(), self._runner.num_tokens)

    def restore_state(self, kept: KeptState) -> None:
        """Put back what `keep_state` has returned, bit by bit, pending gradients included."""
        self._runner.num_tokens = kept.num_tokens
        if self._runner.has_gradients:
            self.enter_training()
        with torch.no_grad():
            for tensor, copy in zip(self._changing(), kept.tensors, strict=True):
                tensor.copy_(copy)
        self.set_counters(kept.counters)

    def _changing(self) -> Iterator[Tensor]:
        """Yield trained weights, optimizer state and pending gradients."""
        yield from (parameter for parameter in self._parameters().values() if parameter.requires_grad)
        for part in self.optimizer_parts().values():
            yield from (part.master, *part.moments.values())
        yield from self._gradients if self._runner.has_gradients else ()

    def forward_backward(self, batches: Sequence[MicroBatch], loss: LossFunction) -> list[Any]:
        """Add the gradients of some micro-batches to the pending ones (`Policy`)."""
        return self._forward_backward(batches, loss, last=False)

    def _forward_backward(self, batches: Sequence[MicroBatch], loss: LossFunction, last: bool) -> list[Any]:
        self.expect_weights()
        if not batches:
            raise DataError("forward_backward was given no micro-batches; give every replica at least one")
        self.enter_training()
        if not self._runner.has_gradients:
            compat.drop_reductions(self._replicated)  # of a pass that raised
            with device_shim():
                for chunk in self._replicated:
                    chunk.zero_grad_buffer()
        return self._runner.forward_backward(batches, loss, last)

    def drop_gradients(self) -> None:
        """Forget the pending gradients (`Policy`)."""
        self._runner.drop_gradients()

    def optimizer_step(
        self, settings: OptimizerSection | None = None, *, summed: bool = False, advance: bool = True
    ) -> StepResult:
        """Take one step along the mean gradient per token since the last step, or their sum, or skip it (`Policy`).

        Without `advance`, the schedule waits for `advance_schedule`.
        """
        assert self._optimizer is not None, "start_optimizer comes before the first step"
        self.expect_weights()
        if not self._runner.has_gradients:
            raise StorageError(
                "no gradients wait for an optimizer step; call forward_backward before optimizer_step"
            )
        self.enter_training()
        self._runner.finish_gradients(summed)
        with contextlib.ExitStack() as stack:
            if settings is not None:
                stack.enter_context(compat.settings_of_a_step(self._optimizer, settings))
            lr = self._optimizer.param_groups[0]["lr"]
            if not self._gradients_are_finite():
                return StepResult(math.nan, lr, skipped=True)
            stack.enter_context(device_shim())
            _, grad_norm, _ = self._optimizer.step()
            self._optimizer.zero_grad()
        if settings is None and advance:
            self.advance_schedule()
        self.version += 1
        return StepResult(float(grad_norm), lr)

    def take_routing(self) -> dict[str, float]:
        """Return metrics of the routers in all training passes since the last call; empty for a dense model.

        Collective over all ranks of the model.
        """
        return self._runner.routing.take() if self._runner.routing is not None else {}

    def drop_routing(self) -> None:
        """Forget what routers have counted."""
        if self._runner.routing is not None:
            self._runner.routing.drop()

    def advance_schedule(self) -> float:
        """Advance the learning-rate schedule by a step; return the new rate."""
        self._schedule.step(increment=1)
        return self._optimizer.param_groups[0]["lr"]

    def train_step(self, batches: Sequence[MicroBatch], loss: LossFunction) -> StepResult:
        """Take one optimizer step over the micro-batches of one pass; the result includes those of the loss function."""
        collected = self._forward_backward(batches, loss, last=True)
        return replace(self.optimizer_step(), collected=collected)

    def _gradients_are_finite(self) -> bool:
        """Return True on all ranks if no rank has an infinite or NaN gradient, which a step would apply."""
        bad = [~torch.isfinite(torch.stack(torch.aminmax(buffer))).all() for buffer in self._gradients]
        found = torch.stack(bad).any().float()
        if self.groups.intra_dist_opt.size() > 1:
            dist.all_reduce(found, op=dist.ReduceOp.MAX, group=self.groups.intra_dist_opt)
        return not found.item()

    @property
    def retained(self) -> WeightStorage:
        """Weights that stay while the engine has others in their place: those that it has with adapters merged in."""
        return self._kept.storage if self._kept is not None else WeightStorage({})

    def leave_training(self) -> None:
        """Release gradients that are not pending and weights in FP8; move offloaded optimizer state to host memory."""
        compat.drop_fp8_weights(self._chunks)
        if not self._runner.has_gradients:
            for buffer in self._gradients:
                buffer.untyped_storage().resize_(0)
        if self._offload is not None:
            self._offload.to_host()

    def lend(self, *, regathers: bool = False) -> None:
        """Merge adapters into the weights, for an engine without adapters of its own.

        Raises StorageError if `take_back` is to gather weights of which the optimizer has no master weights.
        """
        if regathers:
            self._expect_masters()
        if self._kept is not None:
            self._kept.merge()

    def _expect_masters(self) -> None:
        if self._optimizer is None:
            reason = "its optimizer has not started"
        elif self.dtype == "float32":
            reason = "its weights are in float32"
        elif self.shape.adapters:
            reason = "all but its adapters are frozen"
        else:
            return
        raise StorageError(
            f"the trainer has no master weights to gather again, since {reason}; keep its weights (Return.KEPT), or start"
            " the optimizer of a model in bfloat16 without adapters first"
        )

    def take_back(self, *, regathers: bool = False) -> int:
        """Take adapters out of the weights again, or gather weights from the optimizer's; return the bytes received."""
        if self._kept is not None:
            self._kept.restore()
        if not regathers:
            return 0
        if self._offload is not None:
            self._offload.to_device()
        self.weights.materialise()
        with device_shim():
            received = compat.weights_from_masters(self._optimizer, self._replicated)
        self.leave_training()
        return received

    def enter_training(self) -> None:
        """Reallocate gradient buffers, and move optimizer state back; passes and steps begin with it."""
        for buffer, num_bytes in zip(self._gradients, self._gradient_bytes, strict=True):
            buffer.untyped_storage().resize_(num_bytes)
        if self._offload is not None:
            self._offload.to_device()

    @property
    def gradient_bytes(self) -> int:
        """Bytes currently owned by the gradient buffers."""
        return sum(buffer.untyped_storage().nbytes() for buffer in self._gradients)
