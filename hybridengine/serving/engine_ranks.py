"""The ranks of a run's actor as a server uses them: training steps in place, and samples after a switch.

Shapes: B rows, T positions, P prompt tokens, K targets of a position, k most likely tokens.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict
from tinker.types import AdamParams, LoraConfig

from hybridengine.backends.engine import SamplingSettings
from hybridengine.checkpoints.digests import check_files
from hybridengine.checkpoints.folders import FileList, read_kept
from hybridengine.checkpoints.making import ROLE_FILES
from hybridengine.config.role_sections import OptimizerSection
from hybridengine.controller.calls import Future
from hybridengine.controller.failures import is_passing
from hybridengine.controller.worker_group import WorkerGroup
from hybridengine.errors import CheckpointError, RequestError
from hybridengine.families.sizes import AdapterSizes
from hybridengine.rows.micro_batches import with_empty_rows
from hybridengine.serving.draws import DrawRow, draw_batch, draw_rows, drawn_samples
from hybridengine.serving.pool_engines import PoolEngines
from hybridengine.serving.rank_groups import RankGroups
from hybridengine.serving.rank_losses import tells_of_loss
from hybridengine.serving.ranks import (
    LossRow,
    ModelFacts,
    Passed,
    Prompt,
    Sample,
    Sampled,
    TopLogProbs,
    Weights,
)
from hybridengine.serving.scored_prompts import completed, is_scored
from hybridengine.serving.tinker_wire import TARGETS

POLL_S = 0.05
PARTS = {"linear_qkv": "attn", "linear_proj": "attn", "linear_fc1": "mlp", "linear_fc2": "mlp"}
"""Adapted layers -> part of the model, in the words of clients."""


class EngineRanks:
    """Ranks whose actor's worker is `workers.client_actor.ClientActor` (`Ranks`)."""

    def __init__(self, groups: RankGroups, facts: ModelFacts) -> None:
        self._groups, self._config = groups, groups.config
        self.facts = facts
        self._num_replicas = self._config.actor.parallel.dp_size
        self._adapters = self._config.actor.lora.adapters
        self._holds_base = True  # the actor holds the base model's weights, apart from adapters
        self.engines = PoolEngines(groups, self.holding) if self._config.engines else None

    @property
    def _actor(self) -> WorkerGroup:
        return self._groups.actor

    @tells_of_loss
    def restart(self) -> None:
        """End the ranks, whatever they do, and start new ones with the base model's weights."""
        self._groups.start()
        self._holds_base = True

    @tells_of_loss
    def hold(self, model: str, others: Sequence[str]) -> None:
        """Train another model's adapters from now on; those of the models `others` wait in host memory."""
        self._actor.hold_model(model, list(others)).wait()

    @tells_of_loss
    def begin_model(self, lora: LoraConfig | None = None) -> None:
        """Restore the base model's weights, or start adapters, drop all gradients and start a fresh optimizer."""
        part = self._adapters
        if part is not None and lora is not None:
            chosen = {"attn": lora.train_attn, "mlp": lora.train_mlp}
            modules = (name for name in part.modules if chosen[PARTS[name]])
            part = AdapterSizes(lora.rank, part.alpha, tuple(modules))
        self._actor.begin_model(part, lora.seed if lora else None).wait()
        self._holds_base = True

    @tells_of_loss
    def forward_backward(
        self, rows: Sequence[LossRow], loss: str, settings: Mapping[str, float], backward: bool
    ) -> Passed:
        """Return log-probs and metrics of the rows; add to the gradients if `backward`.

        A row with K targets for each position is passed K times, with one of them each.
        """
        wide = [{name: _wide(values) for name, values in row.columns.items()} for row in rows]
        single = [
            {"tokens": row.tokens_T} | {name: values[:, place] for name, values in columns.items()}
            for row, columns in zip(rows, wide, strict=True)
            for place in range(columns[TARGETS].shape[1])
        ]
        passed = self._actor.pass_rows(
            self._batch(single, self._num_replicas), loss, dict(settings), backward
        ).get()
        found = iter(passed["log_probs"].numpy())
        outputs = []
        for row, columns in zip(rows, wide, strict=True):
            parts = [line[: len(row.tokens_T)] for line in islice(found, columns[TARGETS].shape[1])]
            outputs.append({"logprobs": np.stack(parts, 1).reshape(row.columns[TARGETS].shape)})
        metrics = {name: float(passed[name].sum()) for name in passed.keys() if name != "log_probs"}  # noqa: SIM118
        return Passed(outputs, metrics)

    @tells_of_loss
    def optim_step(self, adam: AdamParams) -> Mapping[str, float]:
        """Apply the summed gradients, drop them, and return metrics of the step."""
        settings = OptimizerSection.model_construct(
            lr=adam.learning_rate,
            betas=(adam.beta1, adam.beta2),
            eps=adam.eps,
            weight_decay=adam.weight_decay,
            clip_grad=adam.grad_clip_norm,
        )
        self._holds_base = self._adapters is not None
        step = self._actor.step_with(settings).get()[0]
        return {"grad_norm:mean": step["grad_norm"], "skipped:sum": step["skipped"]}

    @tells_of_loss
    def save(self, folder: Path) -> None:
        """Write weights and optimizer to `folder`, which does not exist."""
        self._check_weights()
        folder.mkdir(parents=True)
        refused = self._actor.begin_save(str(folder)).get()[0]
        if refused is not None:
            raise refused
        deadline, ended = time.monotonic() + self._config.timeouts.save_s, [False]
        while not all(ended):
            time.sleep(POLL_S)
            ended = self._actor.end_save(time.monotonic() >= deadline).get()
            for one in ended:
                if isinstance(one, CheckpointError):
                    raise one

    @tells_of_loss
    def save_sampler(self, folder: Path) -> None:
        """Write the weights to `folder` as a Hugging Face checkpoint."""
        self._check_weights()
        folder.parent.mkdir(parents=True, exist_ok=True)
        self._actor.export_model(str(folder), str(self._config.companions_folder)).wait()

    def _check_weights(self) -> None:
        for name in self._actor.unsound_weight().get():
            if name is not None:
                raise RequestError(
                    f"the weight {name} has values that are not finite, so that nobody could use what is saved; load an"
                    " earlier checkpoint, and train with a lower learning rate"
                )

    @tells_of_loss
    def load(self, folder: Path, optimizer: bool) -> None:
        """Load what `save` has written, with a fresh optimizer unless `optimizer`, and drop all gradients."""
        check_files(folder, read_kept(folder / ROLE_FILES, FileList).files)
        self.begin_model()
        self._holds_base = self._adapters is not None
        self._actor.load_checkpoint(str(folder)).wait()
        if not optimizer:
            self._actor.start_training().wait()

    @tells_of_loss
    def sample(self, prompts: Sequence[Prompt], weights: Weights) -> Sequence[Sampled]:
        """Return the continuations of each prompt; gradients that wait for their optimizer step survive."""
        scored = [
            weights == "base" and self._groups.reference is not None and is_scored(each) for each in prompts
        ]
        if any(scored):
            of_reference = iter(
                self._referred([each for each, one in zip(prompts, scored, strict=True) if one])
            )
            others = [each for each, one in zip(prompts, scored, strict=True) if not one]
            drawn = iter(self._sampled(others, weights) if others else ())
            return [next(of_reference if one else drawn) for one in scored]
        return self._sampled(prompts, weights)

    # ---- sampling ----

    def _sampled(self, prompts: Sequence[Prompt], weights: Weights) -> Sequence[Sampled]:
        """Return samples of the actor, which holds `weights` for them."""
        rows = draw_rows(prompts, self._groups.end_tokens)
        with self.holding(weights):
            drawn = self._with_tops(prompts, self._draw(prompts, rows))
            asked = [prompt for prompt in prompts if prompt.log_probs_from is not None]
            scored = iter(self._scored_prompts(asked))
            return [
                completed(prompt, samples, None if prompt.log_probs_from is None else next(scored))
                for prompt, samples in zip(prompts, drawn, strict=True)
            ]

    def _referred(self, prompts: Sequence[Prompt]) -> Sequence[Sampled]:
        """Return log-probs of prompts and one token after each, all from one forward pass of the reference."""
        assert self._groups.reference is not None, "only called with a reference"
        tokens = [np.asarray(prompt.tokens, np.int64) for prompt in prompts]
        rows = [
            {
                "tokens": one,
                TARGETS: np.append(one[1:], 0),
                "draws": np.append(np.zeros(len(one) - 1, np.int64), 1 + prompt.seed % 2**31),
            }
            for one, prompt in zip(tokens, prompts, strict=True)
        ]
        num_top = max(prompt.top_prompt_log_probs for prompt in prompts)
        batch = self._batch(rows, self._config.grid("reference").sizes.dp_size)
        found = self._groups.reference.score(batch, min(num_top, self.facts.vocabulary_size)).get()
        sampled = []
        for prompt, row in zip(prompts, found, strict=False):
            last = len(prompt.tokens) - 1
            own = slice(last, last + 1)
            token = row["drawn"][own].numpy()
            ended = prompt.stop_at_end and int(token[0]) in self._groups.end_tokens
            sample = Sample(token, row["log_probs"][own].numpy(), "stop" if ended else "length")
            top = (
                row[name][:last, : prompt.top_prompt_log_probs].numpy()
                for name in ("top_ids", "top_log_probs")
            )
            scored = row["log_probs"][:last].numpy(), TopLogProbs(*top)
            sampled.append(completed(prompt, [sample], scored))
        return sampled

    @contextlib.contextmanager
    def holding(self, weights: Weights) -> Iterator[None]:
        """Have the actor hold other weights while the context is open; its own wait in host memory."""
        if weights == "live" or (weights == "base" and self._holds_base):
            yield
            return
        folder = self._config.model_folder if weights == "base" else weights
        with self._afterwards(lambda: self._actor.return_weights()):
            self._actor.borrow_weights(str(folder)).wait()
            yield

    @contextlib.contextmanager
    def _adapted(self, adapter: str) -> Iterator[None]:
        """Have the actor compute with the adapters of a folder, or without any, while the context is open."""
        if self._adapters is None:
            yield
            return
        with self._afterwards(lambda: self._actor.return_weights()):
            self._actor.borrow_weights(adapter or None).wait()
            yield

    @contextlib.contextmanager
    def _afterwards(self, call: Callable[[], Future]) -> Iterator[None]:
        """Carry a call out after the body, also if this fails, but not on ranks that are lost: they may not answer."""
        try:
            yield
        except Exception as error:
            if not is_passing(error):
                call().wait()
            raise
        call().wait()

    def _draw(self, prompts: Sequence[Prompt], rows: list[DrawRow]) -> Sequence[Sequence[Sample]]:
        """Return the samples of each prompt, all drawn after one switch."""
        # Each replica of the engine needs a row.
        num_fillers = max(0, self._config.generation_grid.num_replicas - len(rows))
        filler = DrawRow(rows[0].tokens[:1], 0, SamplingSettings(max_tokens=1))
        self._actor.switch_to_generate().wait()
        with self._afterwards(lambda: self._actor.switch_to_train()):
            answers = self._actor.sample(*draw_batch([*rows, *[filler] * num_fillers])).get()
        return drawn_samples(prompts, rows, answers)

    def _scored_prompts(self, prompts: Sequence[Prompt]) -> list[tuple[np.ndarray, TopLogProbs]]:
        """Return log-probs and most likely tokens of each prompt, all of them from one call of the ranks."""
        if not prompts:
            return []
        log_probs, tops = self._scored(
            [prompt.tokens for prompt in prompts],
            [prompt.adapter for prompt in prompts],
            max(prompt.top_prompt_log_probs for prompt in prompts),
        )
        return [
            (own, TopLogProbs(*(values[:, : prompt.top_prompt_log_probs] for values in top)))
            for prompt, own, top in zip(prompts, log_probs, tops, strict=True)
        ]

    def _with_tops(
        self, prompts: Sequence[Prompt], drawn: Sequence[Sequence[Sample]]
    ) -> Sequence[Sequence[Sample]]:
        """Return the samples with the most likely tokens at their positions, where wanted, from one call of the ranks."""
        wholes = [
            ((*prompt.tokens, *sample.tokens.tolist()), prompt.adapter)
            for prompt, samples in zip(prompts, drawn, strict=True)
            for sample in samples
            if prompt.top_log_probs
        ]
        if not wholes:
            return drawn
        tokens, adapters = zip(*wholes, strict=True)
        tops = iter(self._scored(tokens, adapters, max(one.top_log_probs for one in prompts))[1])
        return [
            [
                sample._replace(
                    top=TopLogProbs(
                        *(values[len(prompt.tokens) - 1 :, : prompt.top_log_probs] for values in next(tops))
                    )
                )
                for sample in samples
            ]
            if prompt.top_log_probs
            else samples
            for prompt, samples in zip(prompts, drawn, strict=True)
        ]

    def _scored(
        self, sequences: Sequence[Sequence[int]], adapters: Sequence[str], top: int
    ) -> tuple[Sequence[np.ndarray], Sequence[TopLogProbs]]:
        """Return log-probs [T - 1] and most likely tokens of all tokens of each sequence but its first."""
        tokens = [np.asarray(sequence, np.int64) for sequence in sequences]
        found = dict[int, Any]()
        for adapter in dict.fromkeys(adapters):
            numbers = [number for number, own in enumerate(adapters) if own == adapter]
            rows = [{"tokens": tokens[number][:-1], TARGETS: tokens[number][1:]} for number in numbers]
            batch = self._batch(rows, self._num_replicas)
            with self._adapted(adapter):
                scored = self._actor.score(batch, min(top, self.facts.vocabulary_size)).get()
            found |= zip(numbers, scored, strict=False)
        lines = [(found[number], len(one) - 1) for number, one in enumerate(tokens)]
        return (
            [row["log_probs"][:length].numpy() for row, length in lines],
            [
                TopLogProbs(row["top_ids"][:length].numpy(), row["top_log_probs"][:length].numpy())
                for row, length in lines
            ],
        )

    def _batch(self, rows: Sequence[Mapping[str, np.ndarray]], num_replicas: int) -> TensorDict:
        """Return rows of [T] columns as a batch of at least one row for each replica, padded with zeros."""
        width = max(1, *(len(row["tokens"]) for row in rows))
        columns = {
            "targets" if name == TARGETS else name: torch.from_numpy(
                np.stack([np.pad(row[name], (0, width - len(row[name]))) for row in rows])
            )
            for name in rows[0]
        }
        columns["lengths"] = torch.tensor([len(row["tokens"]) for row in rows])
        return with_empty_rows(TensorDict(columns, batch_size=[len(rows)]), num_replicas)


def _wide(values: np.ndarray) -> np.ndarray:
    """Return a column [T] as [T, 1], and one of [T, K] as it is."""
    return values.reshape(len(values), -1)
