"""Pipelined passes over micro-batches, with or without backward; shapes as in `backends/policy.py`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import finalize_model_grads
from megatron.core.fp8_utils import get_fp8_align_size
from megatron.core.models.gpt import GPTModel
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.utils import get_model_config
from torch import Tensor

from hybridengine.backends.megatron import compat
from hybridengine.backends.megatron.packing import Pack, Packing
from hybridengine.backends.megatron.routing import RoutingTotals
from hybridengine.backends.megatron.shim import device, device_shim
from hybridengine.backends.megatron.sight import show
from hybridengine.backends.policy import LossFunction, MicroBatch, OutputFunction
from hybridengine.backends.vision import VisionTower
from hybridengine.models.shapes import ModelShape
from hybridengine.topology.sizes import TrainSizes


class PipelineRunner:
    """Runs micro-batches through this rank's and its peers' virtual stages `chunks`, which `modules` may wrap."""

    def __init__(
        self,
        modules: Sequence[torch.nn.Module],
        chunks: Sequence[GPTModel],
        shape: ModelShape,
        sizes: TrainSizes,
        groups: ProcessGroupCollection,
        routing: RoutingTotals | None = None,
    ) -> None:
        self.groups, self._sizes = groups, sizes
        self._modules, self._chunks = list(modules), dict(zip(modules, chunks, strict=True))
        self._config = get_model_config(chunks[0])
        self._config.finalize_model_grads_func = self._note_tokens
        self.num_tokens: Tensor | None = None
        """Tokens of all passes whose gradients are not finished; None without any."""
        tp_size = groups.tp.size() if self._config.sequence_parallel else 1
        multiple = get_fp8_align_size(self._config.fp8_recipe) if self._config.fp8 else 1
        self._packing = Packing(groups.cp, tp_size, groups.tp.rank() % tp_size, multiple, shape.vision)
        self.routing = routing
        self.tower: VisionTower | None = None
        """Tower of the images in micro-batches."""
        self._communicator = P2PCommunicator(pp_group=groups.pp, config=self._config)
        self._connect_stages()

    def _connect_stages(self) -> None:
        """Connect each stage with its neighbours, as NCCL would in their first messages (`weights/process_groups.py`)."""
        if self.groups.pp.size() == 1:
            return
        one = torch.zeros(1, 1, 1, dtype=self._config.pipeline_dtype, device=device())
        with device_shim():
            self._communicator._communicate(
                tensor_send_next=one,
                tensor_send_prev=one,
                recv_prev=True,
                recv_next=True,
                tensor_shape=[1, 1, 1],
            )

    @property
    def is_last_stage(self) -> bool:
        return self.groups.pp.rank() == self.groups.pp.size() - 1

    def forward(self, batches: Sequence[MicroBatch], output: OutputFunction) -> list[dict[str, Tensor]]:
        """Return the results of `output` for each micro-batch, in order; empty on all stages but the last."""
        self._set_training(False)

        def collect(model_output: Any, batch: MicroBatch) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
            zero = torch.zeros((), device=device())
            return zero, zero.int(), output(model_output, batch)

        with torch.no_grad():
            return self._run(batches, collect, forward_only=True)

    def forward_backward(self, batches: Sequence[MicroBatch], loss: LossFunction, last: bool) -> list[Any]:
        """Add the gradients of some micro-batches to those of earlier calls on this rank (`Policy`).

        The `last` call before `finish_gradients` may reduce them during its own backward pass.
        """
        self._set_training(True)
        hold: list[Any] = [module.no_sync for module in self._modules]  # type: ignore[union-attr]
        self._config.no_sync_func = (hold if len(hold) > 1 else hold[0]) if last else None
        try:
            with contextlib.ExitStack() as stack:
                for no_sync in [] if last else hold:
                    stack.enter_context(no_sync())
                return self._run(batches, loss, forward_only=False)
        except BaseException:  # the gradients contain a partial pass, whose tokens are not counted
            self.drop_gradients()
            raise

    @property
    def has_gradients(self) -> bool:
        """True if passes have left gradients that are not finished."""
        return self.num_tokens is not None

    def finish_gradients(self, summed: bool = False) -> None:
        """Reduce the gradients of all passes over replicas and stages; unless `summed`, divide them by the tokens."""
        with device_shim():
            compat.start_reductions(self._modules)
            finalize_model_grads(
                self._modules, None if summed else self.num_tokens, pg_collection=self.groups
            )
        self.num_tokens = None

    def drop_gradients(self) -> None:
        """Forget the gradients of all passes that are not finished."""
        self.num_tokens = None

    def _note_tokens(self, model: object, num_tokens: Tensor, **_: object) -> None:
        """Count tokens in place of Megatron's hook that finishes gradients after each pass."""
        self.num_tokens = num_tokens if self.num_tokens is None else self.num_tokens + num_tokens

    def _set_training(self, mode: bool) -> None:
        for module in self._modules:
            module.train(mode)

    def _num_passes(self, num_packs: int) -> int:
        """Return the number of passes: at least p for the interleaved schedule, and as many as in replicas that share
        experts. Collective over the replicas."""
        least = num_packs if len(self._modules) == 1 else max(num_packs, self.groups.pp.size())
        if not self._sizes.shares_experts:
            return least
        most = torch.tensor(least, device=device())
        dist.all_reduce(most, op=dist.ReduceOp.MAX, group=self.groups.dp)
        return int(most)

    def _run(self, batches: Sequence[MicroBatch], loss: LossFunction, forward_only: bool) -> list[Any]:
        def step(iterator: Iterator[Pack], module: torch.nn.Module) -> tuple[Tensor, Any]:
            pack, chunk = next(iterator), self._chunks[module]
            head: Any = chunk.output_layer if chunk.post_process else None
            if head is not None:
                head.wanted_N = pack.wanted_N
            if pack.sight is not None:
                show(chunk, pack.sight, self.tower)
            output = module(pack.tokens_1S, pack.offsets_1S, None, packed_seq_params=pack.params)

            def loss_of(output: Tensor) -> tuple[Tensor, Tensor, Any]:
                assert head is not None, "only the last stage computes a loss"
                if not pack.columns:  # it only fills the schedule
                    return output.sum() * 0.0, torch.zeros((), dtype=torch.int, device=device()), None
                total, num_tokens, collected = loss(head.outputs(output, pack.places, chunk), pack.columns)
                # Context-parallel ranks all compute the same loss: one counts its tokens.
                counts = self.groups.cp.rank() == 0
                return total, num_tokens if counts else torch.zeros_like(num_tokens), collected

            return output, loss_of

        with device_shim():
            num_stages, num_chunks = self.groups.pp.size(), len(self._modules)
            packs = self._packing.packs(batches, same_size=num_stages > 1)
            # The last one has a loss, which gives every parameter a gradient: reductions wait for them.
            packs = [self._packing.empty_like(packs[0])] * (self._num_passes(len(packs)) - len(packs)) + packs
            if num_chunks > 1:
                self._config.microbatch_group_size_per_vp_stage = self._sizes.passes_per_block(len(packs))
            run = get_forward_backward_func(
                pp_size=num_stages, vp_size=num_chunks if num_chunks > 1 else None
            )
            results = run(
                forward_step_func=step,
                data_iterator=[iter(packs) for _ in self._modules],
                model=self._modules,
                num_microbatches=len(packs),
                seq_length=packs[0].tokens_1S.size(1) * self.groups.cp.size(),
                micro_batch_size=1,
                forward_only=forward_only,
                p2p_communicator=self._communicator,
                pg_collection=self.groups,
            )
            for chunk in self._chunks.values():
                # Otherwise it keeps the last activation that it has received.
                chunk.set_input_tensor(None)  # pyright: ignore[reportArgumentType]
            if self.routing is not None and not forward_only:
                self.routing.add([pack.params for pack in packs if pack.columns])
            return results[len(results) - len(batches) :] if results else []
