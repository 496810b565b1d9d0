"""Pipelined passes over micro-batches, with or without backward; shapes as in `backends/policy.py`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from megatron.core.distributed import finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.utils import get_model_config
from torch import Tensor

from hybridengine.backends.megatron.model import VocabularyHead
from hybridengine.backends.megatron.shim import device, device_shim
from hybridengine.backends.policy import LossFunction, MicroBatch, OutputFunction


class PipelineRunner:
    """Runs micro-batches through a rank's and its peers' parts of `model`, which `module` may wrap."""

    def __init__(self, module: torch.nn.Module, model: GPTModel, groups: ProcessGroupCollection) -> None:
        self.module = module
        self.groups = groups
        self._model = model
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

        def collect(model_output: Any, batch: MicroBatch) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
            zero = torch.zeros((), device=device())
            return zero, zero.int(), output(model_output, batch)

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
            head = self._model.output_layer if self.is_last_stage else None
            if not isinstance(head, VocabularyHead):  # scores, or hidden states for the next stage
                return model(tokens, positions, None), lambda output: loss(output, batch)
            head.positions_BR = batch.get("positions")
            # Rows are padded on the right, so the causal mask alone hides the padding.
            output = model(tokens, positions, None)
            weight = self._model.shared_embedding_or_output_weight() if head.weight is None else head.weight
            return output, lambda output: loss(head.predictions(output, weight), batch)

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
