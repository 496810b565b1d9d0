"""Ranks in memory: a table of next-token logits, trained by plain gradient descent: every value can be computed."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from tinker.types import AdamParams, LoraConfig

from hybridengine.errors import RanksLostError, RequestError
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

VOCABULARY = 8


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """Return log-probs over the last dimension."""
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


class TableRanks:
    """The `Ranks` of unit tests."""

    def __init__(self, texts: Sequence[str] = ("",) * VOCABULARY) -> None:
        self._texts = texts  # of each token, for stop texts
        self.facts = ModelFacts("tiny", "tiny", VOCABULARY, 32, "table")
        self.calls: list[str] = []
        """Methods in the order of their calls; `sample` with the number of prompts and the weights."""
        self.asked: list[str] = []
        """Methods whose calls have begun."""
        self.error: Exception | None = None
        """Raised by the next call."""
        self.errors: dict[str, list[Exception]] = {}
        """Raised by the next calls of a method, by its name in `calls`, before `error`."""
        self.free = threading.Event()
        """Calls wait for it."""
        self.free.set()
        self.engines: TableEngines | None = None
        """Set before a room gets these ranks."""
        self._model = ""
        self._waiting: dict[str, tuple[np.ndarray, np.ndarray]] = {}
        """Tables and gradients of other models, if models have their own (`max_lora_rank`)."""
        self.begin_model()
        self.calls.clear()

    def restart(self) -> None:
        self._called("restart")
        self._reset()
        self._model, self._waiting = "", {}
        if self.engines is not None:
            self.engines.held = None

    def hold(self, model: str, others: Sequence[str]) -> None:
        self._called(f"hold {model[-1]}")
        if self._model in others:
            self._waiting[self._model] = self.table, self.gradient
        self._waiting = {key: kept for key, kept in self._waiting.items() if key in (model, *others)}
        self._model = model
        if model in self._waiting:
            self.table, self.gradient = self._waiting.pop(model)

    def begin_model(self, lora: LoraConfig | None = None) -> None:
        self._called("begin_model" if lora is None else f"begin_model rank={lora.rank}")
        self._reset()

    def _reset(self) -> None:
        self.table = np.zeros((VOCABULARY, VOCABULARY))
        self.gradient = np.zeros_like(self.table)

    def forward_backward(
        self, rows: Sequence[LossRow], loss: str, settings: Mapping[str, float], backward: bool
    ) -> Passed:
        self._called("forward_backward" if backward else "forward")
        outputs, total = [], 0.0
        for row in rows:
            log_probs = log_softmax(self.table[row.tokens_T])
            targets = row.columns["target_tokens"]
            picked = np.take_along_axis(log_probs, targets[:, None], 1)[:, 0]
            weights = row.columns["weights"]
            outputs.append({"logprobs": picked.astype(np.float32)})
            total -= float((picked * weights).sum())
            if backward:
                np.add.at(self.gradient, row.tokens_T, weights[:, None] * np.exp(log_probs))
                np.add.at(self.gradient, (row.tokens_T, targets), -weights)
        return Passed(outputs, {"loss:sum": total})

    def optim_step(self, adam: AdamParams) -> Mapping[str, float]:
        self._called("optim_step")
        norm = float(np.linalg.norm(self.gradient))
        self.table -= adam.learning_rate * self.gradient
        self.gradient[:] = 0
        return {"grad_norm:mean": norm}

    def sample(self, prompts: Sequence[Prompt], weights: Weights) -> Sequence[Sampled]:
        self._called(f"sample {len(prompts)} {_shown(weights)}")
        return self.sampled(prompts, self.table_of(weights))

    def sampled(self, prompts: Sequence[Prompt], table: np.ndarray) -> Sequence[Sampled]:
        """Return samples of a table of logits."""
        if any(prompt.top_p < 1 for prompt in prompts):
            raise RequestError("top_p is not served by a table")
        return [
            self._sampled(prompt, self.table_of(Path(prompt.adapter)) if prompt.adapter else table)
            for prompt in prompts
        ]

    def save(self, folder: Path) -> None:
        self._called("save")
        folder.mkdir()
        np.save(folder / "table.npy", self.table)

    def save_sampler(self, folder: Path) -> None:
        self._called("save_sampler")
        folder.mkdir()
        np.save(folder / "table.npy", self.table)

    def load(self, folder: Path, optimizer: bool) -> None:
        self._called(f"load optimizer={optimizer}")
        self.table = np.load(folder / "table.npy")
        self.gradient[:] = 0

    def _called(self, name: str) -> None:
        self.asked.append(name)
        assert self.free.wait(20)
        self.noted(name)

    def noted(self, name: str) -> None:
        """Note a call, and raise the error that it is to have."""
        self.calls.append(name)
        if errors := self.errors.get(name):
            raise errors.pop(0)
        error, self.error = self.error, None
        if error is not None:
            raise error

    def table_of(self, weights: Weights) -> np.ndarray:
        if isinstance(weights, Path):
            return np.load(weights / "table.npy")
        return self.table if weights == "live" else np.zeros_like(self.table)

    def _sampled(self, prompt: Prompt, table: np.ndarray) -> Sampled:
        samples = [
            self._continue(prompt, table, prompt.seed + number) for number in range(prompt.num_samples)
        ]
        if prompt.log_probs_from is None:
            return Sampled(samples)
        log_probs = log_softmax(table[list(prompt.tokens[:-1])])
        picked = np.take_along_axis(log_probs, np.array(prompt.tokens[1:])[:, None], 1)[:, 0]
        scored = np.concatenate([[np.nan], picked])
        scored[: prompt.log_probs_from] = np.nan
        if not prompt.top_prompt_log_probs:
            return Sampled(samples, scored)
        ids, values = _top(log_probs, prompt.top_prompt_log_probs)
        top = TopLogProbs(
            np.pad(ids, ((1, 0), (0, 0))), np.pad(values, ((1, 0), (0, 0)), constant_values=-99999.0)
        )
        return Sampled(samples, scored, top)

    def _continue(self, prompt: Prompt, table: np.ndarray, seed: int) -> Sample:
        random = np.random.default_rng(seed)
        tokens, log_probs, reason = [prompt.tokens[-1]], [], "length"
        for _ in range(prompt.max_tokens):
            row = log_softmax(table[tokens[-1]])
            token = (
                int(row.argmax())
                if prompt.temperature == 0
                else int(random.choice(VOCABULARY, p=np.exp(row)))
            )
            tokens.append(token)
            log_probs.append(row[token])
            text = "".join(self._texts[each] for each in tokens[1:])
            if token in prompt.stop_ids or any(stop in text for stop in prompt.stop_texts):
                reason = "stop"
                break
        drawn = np.array(tokens[1:])
        rows = log_softmax(table[tokens[:-1]])
        top = _top(rows, prompt.top_log_probs) if prompt.top_log_probs else None
        return Sample(drawn, np.array(log_probs), reason, top)


def _top(log_probs: np.ndarray, number: int) -> TopLogProbs:
    """Return the most likely tokens of each row; of equally likely ones, the first."""
    ids = np.argsort(-log_probs, axis=-1, kind="stable")[:, :number]
    return TopLogProbs(ids, np.take_along_axis(log_probs, ids, -1))


class TableEngines:
    """The `Engines` of unit tests: a copy of the ranks' table. Its calls are noted with theirs."""

    def __init__(self, ranks: TableRanks) -> None:
        self._ranks, ranks.engines = ranks, self
        self.held: str | None = None
        self.free = threading.Event()
        """Samples wait for it."""
        self.free.set()

    def push(self, weights: Weights, name: str) -> None:
        self._ranks._called(f"push {_shown(weights)}")
        self.held, self._table = name, self._ranks.table_of(weights).copy()

    def sample(self, prompts: Sequence[Prompt]) -> Sequence[Sampled]:
        self._ranks.asked.append(f"draw {len(prompts)}")
        assert self.free.wait(20)
        self._ranks.noted(f"draw {len(prompts)}")
        if self.held is None:
            raise RanksLostError("generation.sample died on rank 0 (tp=0): its pool has ended", "gone")
        return self._ranks.sampled(prompts, self._table)


def _shown(weights: Weights) -> str:
    return weights.name if isinstance(weights, Path) else weights
