"""Pipelined passes over micro-batches: forward only, or forward and backward, with explicit groups.

Shapes: B rows, T positions, W = padded vocabulary / t.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from megatron.core.distributed import finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.utils import get_model_config
from torch import Tensor

from hybridengine.backends.megatron.shim import device, device_shim

MicroBatch = dict[str, Tensor]
"""Columns of some rows; `tokens` [B, T] goes into the model, the rest to the output function."""

OutputFunction = Callable[[Tensor, MicroBatch], dict[str, Tensor]]
"""(model output [B, T, W], micro-batch) -> tensors by name."""

LossFunction = Callable[[Tensor, MicroBatch], tuple[Tensor, Tensor, Any]]
"""(model output [B, T, W], micro-batch) -> (loss summed over tokens, number of tokens, whatever the caller collects)."""


class PipelineRunner:
    """Runs micro-batches through one rank's part of a model and its peers' parts."""

    def __init__(self, module: torch.nn.Module, groups: ProcessGroupCollection) -> None:
        self.module = module
        self.groups = groups
        self._config = get_model_config(module)
        self._config.finalize_model_grads_func = finalize_model_grads
        self._communicator = P2PCommunicator(pp_group=groups.pp, config=self._config)

    @property
    def is_last_stage(self) -> bool:
        return self.groups.pp.rank() == self.groups.pp.size() - 1

    def forward(self, batches: Sequence[MicroBatch], output: OutputFunction) -> list[dict[str, Tensor]]:
        """Results of `output` for each micro-batch, in order; empty on all stages but the last."""
        self.module.eval()

        def collect(model_output: Tensor, batch: MicroBatch) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
            zero = model_output.new_zeros(())
            return zero, torch.zeros((), dtype=torch.int, device=zero.device), output(model_output, batch)

        with torch.no_grad():
            return self._run(batches, collect, forward_only=True)

    def forward_backward(self, batches: Sequence[MicroBatch], loss: LossFunction) -> list[Any]:
        """Accumulate the gradient of the mean loss per token over all micro-batches of all data-parallel ranks.

        Returns what `loss` gives to collect for each micro-batch; empty on all stages but the last.
        """
        self.module.train()
        return self._run(batches, loss, forward_only=False)

    def _run(self, batches: Sequence[MicroBatch], loss: LossFunction, forward_only: bool) -> list[Any]:
        def step(iterator: Iterator[MicroBatch], model: torch.nn.Module) -> tuple[Tensor, Any]:
            batch = next(iterator)
            tokens = batch["tokens"]
            positions = torch.arange(tokens.size(1), device=tokens.device).unsqueeze(0)
            # Rows are padded on the right, so the causal mask alone keeps padding out of sight.
            model_output = model(tokens, positions, None)
            return model_output, lambda logits: loss(logits, batch)

        with device_shim():
            run = get_forward_backward_func(pp_size=self.groups.pp.size(), vp_size=None)
            return run(
                forward_step_func=step,
                data_iterator=iter([_to_device(batch) for batch in batches]),
                model=[self.module],
                num_microbatches=len(batches),
                seq_length=batches[0]["tokens"].size(1),
                micro_batch_size=batches[0]["tokens"].size(0),
                forward_only=forward_only,
                p2p_communicator=self._communicator,
                pg_collection=self.groups,
            )


def _to_device(batch: MicroBatch) -> MicroBatch:
    return {name: tensor.to(device()) for name, tensor in batch.items()}
