"""An actor that a client drives with its own rows, losses and steps (the Tinker API), in place of an algorithm of a run.

Shapes: B rows, T positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from hybridengine.algorithms.losses.client import client_loss
from hybridengine.algorithms.losses.client_inputs import LOSS_COLUMNS, check_client_loss
from hybridengine.backends.engine import SamplingSettings
from hybridengine.backends.megatron.trainer import KeptState
from hybridengine.backends.megatron.weights import load_weights, start_adapters
from hybridengine.backends.policy import MicroBatch
from hybridengine.backends.predictions import Predictions
from hybridengine.config import RunConfig
from hybridengine.config.role_sections import OptimizerSection
from hybridengine.families.adapters import is_of_adapter
from hybridengine.families.sizes import AdapterSizes
from hybridengine.rows.batch import columns_of
from hybridengine.rows.micro_batches import CLIENT_COLUMNS, cut_whole_rows, gather_rows
from hybridengine.rows.protocols import (
    ONE_TO_ALL,
    PROTO_3D,
    PROTO_3D_ALL_MICRO_DP,
    RankContext,
    register,
)
from workers.actor import ActorWorker
from workers.responses import SAMPLE_COLUMNS, sample_rows
from workers.scoring import check_tokens, score_rows


class ClientActor(ActorWorker):
    """One rank of an actor that a client drives; its engine has the run's tokenizer, for stop strings."""

    def __init__(
        self, context: RankContext, run: RunConfig, folder: str | Path, stop_token_ids: tuple[int, ...] = ()
    ) -> None:
        super().__init__(context, run, folder, stop_token_ids, tokenizer=str(run.tokenizer_folder))
        self._folder = folder
        self._own_weights: dict[str, Tensor] = {}
        self._model = ""
        """Client's model whose adapters this rank trains now."""
        self._waiting: dict[str, KeptState] = {}
        """Adapters, gradients and optimizer of the other clients' models."""

    @register(ONE_TO_ALL)
    def hold_model(self, model: str, others: Sequence[str]) -> None:
        """Train another client's adapters from now on; those of the models `others` wait, and the rest are forgotten.

        A model that has none yet needs `begin_model`.
        """
        if self._model in others:
            self._waiting[self._model] = self.trainer.keep_state()
        self._waiting = {name: kept for name, kept in self._waiting.items() if name in (model, *others)}
        if model in self._waiting:
            self.trainer.restore_state(self._waiting.pop(model))
        self._model = model

    @register(ONE_TO_ALL)
    def begin_model(self, part: AdapterSizes | None = None, seed: int | None = None) -> None:
        """Start a client's model on the base model's weights: version 0, a fresh optimizer and no pending gradients.

        Of adapters, it trains `part` from random values of `seed`, by default the run's.
        """
        self.trainer.drop_gradients()
        if self.shape.adapters:
            start_adapters(self.trainer, self.run.run.seed if seed is None else seed, part=part)
        else:
            load_weights(self.trainer, self._folder)
        steady = self.section.optimizer.model_copy(update={"schedule": "constant", "warmup_steps": 0})
        self.trainer.start_optimizer(steady, offload=self.section.offload)
        self.trainer.version = 0

    @register(ONE_TO_ALL)
    def borrow_weights(self, folder: str | None) -> None:
        """Hold the weights of a Hugging Face checkpoint until `return_weights`, and the own ones in host memory.

        A model with adapters borrows those of a PEFT folder, or with None does without. Gradients and optimizer stay as
        they are.
        """
        weights, names = self.trainer.weights, self.trained_names()
        self._own_weights = {name: weights[name].detach().to("cpu", copy=True) for name in names}
        if not self.shape.adapters:
            assert folder is not None, "a model without adapters has no base to do with"
            load_weights(self.trainer, folder)
        elif folder is not None:
            start_adapters(self.trainer, 0, folder)
        else:
            for name in names:
                weights[name].zero_()

    @register(ONE_TO_ALL)
    def return_weights(self) -> None:
        """Restore the weights from before `borrow_weights`, bit by bit."""
        for name, own in self._own_weights.items():
            self.trainer.weights[name].copy_(own)
        self._own_weights = {}

    @register(ONE_TO_ALL)
    def unsound_weight(self) -> str | None:
        """Return the name of a trained weight of this rank that has an infinite value or NaN, None if there is none."""
        weights, names = self.trainer.weights, self.trained_names()
        sound = {name: torch.isfinite(torch.stack(torch.aminmax(weights[name]))).all() for name in names}
        return next((name for name in names if not sound[name]), None)

    def trained_names(self) -> list[str]:
        """Return the names of this rank's weights that are trained: adapters, if there are any."""
        names = self.trainer.weights.names
        return [name for name in names if is_of_adapter(name) or not self.shape.adapters]

    @register(PROTO_3D, CLIENT_COLUMNS, optional=[*LOSS_COLUMNS], returns_rows=True)
    def pass_rows(
        self, batch: TensorDictBase, loss: str, settings: dict[str, float], backward: bool
    ) -> TensorDict | None:
        """Return `log_probs` [B, T] of the targets, and the loss's metrics [B]; add gradients to the pending ones.

        Reads `tokens` and `targets` [B, T] int64, `lengths` [B], and the columns of `loss` [B, T] (`CLIENT_LOSSES`).
        Log-probs are those at temperature 1, and 0 beyond a row's length. A metric of all rows is the column's sum. A
        batch smaller than the number of replicas needs empty rows (`with_empty_rows`).

        Args:
            settings: settings of the loss that differ from its defaults.
            backward: False for a forward pass, which adds no gradients.

        Raises:
            ConfigError, DataError: see `check_client_loss`; a token is unknown to the model; or one row alone exceeds
                `micro_batch_tokens`.
        """
        needed = [name for name in columns_of(batch) if name in LOSS_COLUMNS]
        settings = check_client_loss(loss, needed, settings)
        check_tokens(batch, self.shape.vocab_size)

        def output(predictions: Predictions, columns: MicroBatch) -> tuple[Tensor, dict[str, Tensor]]:
            log_probs, _ = predictions.log_probs(columns["targets"])
            losses, metrics = client_loss(loss, log_probs, columns, columns["mask"], settings)
            return losses.sum(), {"log_probs": log_probs.detach()} | metrics

        def summed(predictions: Predictions, columns: MicroBatch) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
            total, found = output(predictions, columns)
            return total, columns["mask"].sum().int(), found

        micro = cut_whole_rows(batch, self.max_tokens, ["tokens", "targets", *needed])
        columns = [part.columns for part in micro]
        if backward:
            found = self.trainer.forward_backward(columns, summed)
        else:
            found = self.trainer.forward(columns, lambda predictions, batch: output(predictions, batch)[1])
        if not self.model.is_last_stage:
            return None
        log_probs = [(part, one.pop("log_probs")) for part, one in zip(micro, found, strict=True)]
        result = {"log_probs": gather_rows(log_probs, len(batch), batch["tokens"].size(1))}
        for name in found[0]:
            result[name] = torch.zeros(len(batch))
            for part, one in zip(micro, found, strict=True):
                result[name][part.rows] = one[name].float().cpu()
        return TensorDict(result, batch_size=[len(batch)])  # type: ignore[arg-type]

    @register(PROTO_3D, CLIENT_COLUMNS, returns_rows=True)
    def score(self, batch: TensorDictBase, num_top: int) -> TensorDict | None:
        """Return `log_probs` [B, T] of the targets, and the `num_top` most likely tokens of each position.

        The latter are `top_ids` (int64) and `top_log_probs`, [B, T, num_top], likeliest first. Everything else is as in
        `pass_rows`.
        """
        return score_rows(self, batch, num_top)

    @register(ONE_TO_ALL)
    def step_with(self, settings: OptimizerSection) -> dict[str, float]:
        """Take one optimizer step along the sum of the pending gradients; return `lr`, `grad_norm` and `skipped` (0, 1).

        A gradient that is not finite is skipped, as in `Policy.optimizer_step`, and dropped.
        """
        result = self.trainer.optimizer_step(settings, summed=True)
        return {"lr": result.lr, "grad_norm": result.grad_norm, "skipped": float(result.skipped)}

    @register(PROTO_3D_ALL_MICRO_DP, SAMPLE_COLUMNS, returns_rows=True)
    def sample(self, prompts: TensorDictBase, sampling: Sequence[SamplingSettings]) -> TensorDict:
        """Return a response to each prompt (`sample_rows`), after a switch."""
        return sample_rows(self._engine, prompts, sampling)
