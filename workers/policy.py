"""The policy: trained with Megatron-core, on its own in a run that draws no responses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from hybridengine.algorithms.losses.aggregation import PER_TOKEN, Aggregation, SummedLoss
from hybridengine.algorithms.losses.distillation import teacher_loss
from hybridengine.algorithms.losses.policy import entropy_bonus, kl_loss
from hybridengine.backends.megatron.weights import save_weights
from hybridengine.backends.predictions import Predictions
from hybridengine.config import RunConfig
from hybridengine.config.algorithm import Algorithm
from hybridengine.config.loss_sections import COVARIANCE_LOSSES
from hybridengine.drivers.sft import Sft
from hybridengine.errors import ConfigError, ProtocolError
from hybridengine.importing import import_object
from hybridengine.rows.batch import columns_of
from hybridengine.rows.images import IMAGES
from hybridengine.rows.micro_batches import RESPONSE_MASK, ROUTES, SEQUENCE_COLUMNS, TEACHER_COLUMNS
from hybridengine.rows.protocols import ONE_TO_ALL, PROTO_3D, ROW_NUMBERS, RankContext, register
from hybridengine.rows.supports import SUPPORTS
from workers.model_worker import TrainedWorker

LOSS_COLUMNS = ("weights", "ref_log_probs", "covariant")
"""Columns of the actor's losses that only some batches have."""


class PolicyWorker(TrainedWorker):
    """One rank of the policy, which starts from the checkpoint `folder`."""

    def __init__(self, context: RankContext, run: RunConfig, folder: str | Path) -> None:
        super().__init__(context, run, folder)
        self._divisor = float(run.max_response_tokens)

    @register(ONE_TO_ALL)
    def start_training(self) -> None:
        """Start the run's optimizer on the current weights."""
        self.start_optimizer()
        self.trainer.leave_training()

    @register(ONE_TO_ALL)
    def start_supervised(self, lr: float, steps: int) -> None:
        """Start the optimizer of the supervised warm-up: the rate rises over a thirtieth of `steps`, then falls."""
        course = {"lr": lr, "min_lr": 0.0, "schedule": "cosine", "warmup_steps": steps // 30}
        self.trainer.start_optimizer(
            self.section.optimizer.model_copy(update=course), steps, self.section.offload
        )

    @register(
        PROTO_3D,
        SEQUENCE_COLUMNS,
        optional=["rollout_log_probs", "versions", RESPONSE_MASK, ROUTES, SUPPORTS, IMAGES],
        returns_rows=True,
    )
    def compute_log_probs(self, rollout: TensorDictBase, squares: bool = False) -> TensorDict | None:
        """Return `log_probs` and `entropies` [B, R] of the response tokens under the training model, of the distributions
        that they were drawn from.

        With `squares`, also `squared_probs` [B, R], the sum over the vocabulary of each token's squared probabilities.
        """

        def outputs(output: Predictions, columns: dict[str, Tensor]) -> dict[str, Tensor]:
            log_probs, entropies = self.log_probs_of(output, columns)
            found = {"log_probs": log_probs, "entropies": entropies}
            return found | ({"squared_probs": self.squared_probs_of(output, columns)} if squares else {})

        return self.forward_rows(rollout, outputs)

    @register(PROTO_3D, SEQUENCE_COLUMNS, optional=[SUPPORTS, IMAGES], returns_rows=True)
    def compute_base_log_probs(self, rollout: TensorDictBase) -> TensorDict | None:
        """Return `ref_log_probs` [B, R] of the response tokens, under the frozen weights without adapters."""
        return self.forward_rows(
            rollout,
            lambda output, columns: {"ref_log_probs": self.log_probs_of(output, columns)[0]},
            adapted=False,
        )

    @register(PROTO_3D, SEQUENCE_COLUMNS, optional=[RESPONSE_MASK, IMAGES, ROW_NUMBERS])
    def warm_up(self, batch: TensorDictBase) -> dict[str, float]:
        """Take one optimizer step of the warm-up on the mean over tokens; return metrics on the last stage."""
        return self._supervise(batch, Sft(), PER_TOKEN, once=True)

    @register(PROTO_3D, SEQUENCE_COLUMNS, optional=[RESPONSE_MASK, IMAGES, ROW_NUMBERS])
    def update_supervised(self, batch: TensorDictBase, algorithm: Algorithm) -> dict[str, float]:
        """Update the policy with the supervised loss of the response tokens; return metrics on the last stage.

        `response_mask` [B, R], if present, excludes tokens from the loss.
        """
        return self._supervise(batch, algorithm, Aggregation(self.run.actor.loss_aggregation, self._divisor))

    def _supervise(
        self, batch: TensorDictBase, algorithm: Algorithm, aggregation: Aggregation, *, once: bool = False
    ) -> dict[str, float]:
        section, supervised_loss = self.run.actor, import_object(algorithm.loss)

        def loss(output: Predictions, columns: dict[str, Tensor]) -> tuple[Tensor, Tensor, Any]:
            log_probs, _ = self.log_probs_of(output, columns, temperature=1.0)
            mask = columns["mask"]
            found = supervised_loss(log_probs, columns, algorithm, section, aggregation)
            total = _checked(found, algorithm.loss)
            return total.loss_sum, aggregation.count(mask).int(), (total.stats, int(mask.sum()))

        return self.update_rows(
            batch, [], loss, count=lambda columns: aggregation.count(columns["mask"]), once=once
        )

    @register(
        PROTO_3D,
        [*SEQUENCE_COLUMNS, "log_probs", "advantages"],
        optional=[
            *("keep", "trained", "versions", *LOSS_COLUMNS),
            *(RESPONSE_MASK, ROUTES, SUPPORTS, IMAGES, ROW_NUMBERS, *TEACHER_COLUMNS),
        ],
    )
    def update(
        self, batch: TensorDictBase, algorithm: Algorithm | None = None, version: int | None = None
    ) -> dict[str, float]:
        """Update the policy with the algorithm's loss, entropy bonus and KL loss; return metrics on the last stage.

        Reads a rollout with `log_probs` and `advantages` [B, R], and optionally rows to `keep` [B], tokens that are
        `trained` [B, R], `weights` [B, R] of the rollout correction, `ref_log_probs` and `covariant` [B, R]. With
        `TEACHER_COLUMNS` [B, R, K], the divergence from the teacher is a loss as well.

        Args:
            version: version of the weights before the update, for rows with the `versions` [B, R] that drew them.

        Raises:
            ProtocolError: a KL loss without `ref_log_probs`, a loss without `covariant`, or fewer rows than mini-batches.
            StalenessError: a token in the loss is older than `staleness.max_versions`, or newer than the weights.
        """
        section = self.run.actor
        algorithm = algorithm or self.run.algorithm
        produced = set(LOSS_COLUMNS) & set(batch.keys())
        if algorithm.loss in COVARIANCE_LOSSES and "covariant" not in produced:
            raise ProtocolError(
                f"actor.update: columns ['covariant'] are needed with algorithm.loss={algorithm.loss}, and nobody has"
                " produced them; compute the advantages by with_advantages, or choose another loss"
            )
        if section.kl_loss_coef and "ref_log_probs" not in produced:
            raise ProtocolError(
                f"actor.update: columns ['ref_log_probs'] are needed with actor.kl_loss_coef={section.kl_loss_coef}, and"
                " nobody has produced them; let the reference compute them, or set 0"
            )
        policy_loss = import_object(algorithm.loss)
        aggregation = Aggregation(section.loss_aggregation, self._divisor)
        columns_of = ["log_probs", "advantages", *produced]

        def loss(output: Predictions, columns: dict[str, Tensor]) -> tuple[Tensor, Tensor, Any]:
            log_probs, entropies = self.log_probs_of(output, columns)
            mask = columns["mask"]
            total = _checked(policy_loss(log_probs, columns, algorithm, section, aggregation), algorithm.loss)
            total = total + entropy_bonus(entropies, mask, section.entropy_coef, aggregation)
            if section.kl_loss_coef:
                settings = section.kl_loss_coef, section.kl_loss_estimator, aggregation
                total = total + kl_loss(log_probs, columns["ref_log_probs"], mask, *settings)
            if {*TEACHER_COLUMNS} <= columns.keys():
                ids, teacher = (columns[name] for name in TEACHER_COLUMNS)
                own = output.log_probs_of(ids, self.run.temperature)
                total = total + teacher_loss(own, teacher, mask, aggregation)
            return total.loss_sum, aggregation.count(mask).int(), (total.stats, int(mask.sum()))

        return self.update_rows(
            batch, columns_of, loss, version=version, count=lambda columns: aggregation.count(columns["mask"])
        )

    @register(
        PROTO_3D,
        [*SEQUENCE_COLUMNS, "ref_log_probs"],
        optional=["scores", "dropped", RESPONSE_MASK, ROUTES, SUPPORTS, IMAGES, ROW_NUMBERS],
    )
    def update_preferences(
        self, batch: TensorDictBase, algorithm: Algorithm | None = None
    ) -> dict[str, float]:
        """Update the policy with the preference loss; rows are pairs, better response first.

        Of pairs with `scores` and `dropped` [B], ties and those without a score are ignored.
        """
        self.check_units(len(batch), unit=2)
        algorithm = algorithm or self.run.algorithm
        preference_loss = import_object(algorithm.loss)
        aggregation = Aggregation(self.run.actor.loss_aggregation, self._divisor)
        told = torch.ones(len(batch) // 2, dtype=torch.bool)
        if "scores" in columns_of(batch):
            told = batch["scores"][0::2] > batch["scores"][1::2]
            told = told & ~batch["dropped"][0::2] & ~batch["dropped"][1::2]
        batch["told"] = told.repeat_interleave(2)[:, None].expand_as(batch["ref_log_probs"]).clone()

        def count(columns: dict[str, Tensor]) -> Tensor:
            return columns["told"][0::2, 0].sum()

        def loss(output: Predictions, columns: dict[str, Tensor]) -> tuple[Tensor, Tensor, Any]:
            log_probs, _ = self.log_probs_of(output, columns)
            found = preference_loss(log_probs, columns, algorithm, self.run.actor, aggregation)
            total = _checked(found, algorithm.loss)
            return total.loss_sum, count(columns).int(), (total.stats, int(columns["mask"].sum()))

        return self.update_rows(batch, ["ref_log_probs", "told"], loss, unit=2, count=count)

    @register(ONE_TO_ALL)
    def export_model(self, folder: str, companions: str) -> None:
        """Write the policy as a Hugging Face checkpoint, with the config and tokenizer files of `companions`; if it has
        adapters, write these alone as a PEFT folder."""
        save_weights(self.trainer, self.registry, folder, companions, base=self.folder)


def _checked(loss: Any, path: str) -> SummedLoss:
    """Return the result of a loss function; raise ConfigError if it is not a `SummedLoss`, or has no gradient."""
    if not isinstance(loss, SummedLoss):
        raise ConfigError(
            f"algorithm.loss={path} returned a {type(loss).__name__}; return a hybridengine.SummedLoss, as"
            " hybridengine.algorithms.losses.policy:clipped_loss does"
        )
    if not loss.loss_sum.requires_grad:
        raise ConfigError(
            f"algorithm.loss={path} returned a loss without a gradient; compute it from log_probs, not from"
            " log_probs.detach()"
        )
    return loss
