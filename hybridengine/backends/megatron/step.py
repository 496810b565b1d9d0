"""Pipelined passes over micro-batches, with or without backward; shapes as in `backends/policy.py`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from megatron.core.distributed import finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.utils import get_model_config
from torch import Tensor

from hybridengine.backends.megatron.shim import device, device_shim
from hybridengine.backends.policy import LossFunction, MicroBatch, OutputFunction


class WantedPositions:
    """Restricts an output layer to requested positions: it receives hidden states [T, B, H] as [B·R, 1, H]."""

    def __init__(self, output_layer: torch.nn.Module) -> None:
        self.positions_BR: Tensor | None = None
        """Requested positions; None for all."""
        output_layer.register_forward_pre_hook(self._choose)

    def _choose(self, layer: torch.nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...] | None:
        if self.positions_BR is None:
            return None
        hidden_TBH, *others = inputs
        num_rows = hidden_TBH.size(1)
        rows = torch.arange(num_rows, device=hidden_TBH.device).unsqueeze(1)
        places = (self.positions_BR * num_rows + rows).flatten()
        return hidden_TBH.flatten(0, 1).index_select(0, places).unsqueeze(1), *others

    def as_rows(self, logits: Tensor) -> Tensor:
        """Return the layer's output [1, B·R, W] as [B, R, W]; logits of all positions unchanged."""
        return logits if self.positions_BR is None else logits.view(*self.positions_BR.shape, -1)


class PipelineRunner:
    """Runs micro-batches through a rank's and its peers' parts of a model; `wanted` restricts the rank's output layer."""

    def __init__(
        self, module: torch.nn.Module, groups: ProcessGroupCollection, wanted: WantedPositions | None = None
    ) -> None:
        self.module = module
        self.groups = groups
        self._wanted = wanted
        self._config = get_model_config(module)
        self._config.finalize_model_grads_func = self._note_tokens
        self._num_tokens: Tensor | None = None
        self._communicator = P2PCommunicator(pp_group=groups.pp, config=self._config)

    @property
    def is_last_stage(self) -> bool:
        return self.groups.pp.rank() == self.groups.pp.size() - 1

    def forward(self, batches: Sequence[MicroBatch], output: OutputFunction) -> list[dict[str, Tensor]]:
        """Return the results of `output` for each micro-batch, in order; empty on all stages but the last."""
        self.module.eval()

        def collect(model_output: Tensor, batch: MicroBatch) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
            zero = model_output.new_zeros(())
            return zero, torch.zeros((), dtype=torch.int, device=zero.device), output(model_output, batch)

        with torch.no_grad():
            return self._run(batches, collect, forward_only=True)

    def forward_backward(self, batches: Sequence[MicroBatch], loss: LossFunction) -> list[Any]:
        """Add the gradients of some micro-batches to those of earlier calls on this rank (`Policy`)."""
        self.module.train()
        try:
            return self._run(batches, loss, forward_only=False)
        except BaseException:  # the gradients contain a partial pass, whose tokens are not counted
            self.drop_gradients()
            raise

    @property
    def has_gradients(self) -> bool:
        """True if passes have left gradients that are not finished."""
        return self._num_tokens is not None

    def finish_gradients(self, summed: bool = False) -> None:
        """Reduce the gradients of all passes over replicas and stages; unless `summed`, divide them by the tokens."""
        with device_shim():
            finalize_model_grads(
                [self.module], None if summed else self._num_tokens, pg_collection=self.groups
            )
        self._num_tokens = None

    def drop_gradients(self) -> None:
        """Forget the gradients of all passes that are not finished."""
        self._num_tokens = None

    def _note_tokens(self, model: object, num_tokens: Tensor, **_: object) -> None:
        """Count tokens in place of Megatron's hook that finishes gradients after each pass."""
        self._num_tokens = num_tokens if self._num_tokens is None else self._num_tokens + num_tokens

    def _run(self, batches: Sequence[MicroBatch], loss: LossFunction, forward_only: bool) -> list[Any]:
        def step(iterator: Iterator[MicroBatch], model: torch.nn.Module) -> tuple[Tensor, Any]:
            batch = next(iterator)
            tokens = batch["tokens"]
            positions = torch.arange(tokens.size(1), device=tokens.device).unsqueeze(0)
            if self._wanted is not None:
                self._wanted.positions_BR = batch.get("positions")
            # Rows are padded on the right, so the causal mask alone hides the padding.
            model_output = model(tokens, positions, None)
            if self._wanted is not None:
                model_output = self._wanted.as_rows(model_output)
            return model_output, lambda output: loss(output, batch)

        with device_shim():
            run = get_forward_backward_func(pp_size=self.groups.pp.size(), vp_size=None)
            return run(
                forward_step_func=step,
                data_iterator=iter(
                    [{name: tensor.to(device()) for name, tensor in batch.items()} for batch in batches]
                ),
                model=[self.module],
                num_microbatches=len(batches),
                seq_length=batches[0]["tokens"].size(1),
                micro_batch_size=batches[0]["tokens"].size(0),
                forward_only=forward_only,
                p2p_communicator=self._communicator,
                pg_collection=self.groups,
            )
