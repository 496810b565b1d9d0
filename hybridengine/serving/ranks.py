"""Protocol of the ranks that train and sample, and the values that they exchange with the server."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple, Protocol

import numpy as np
from tinker.types import AdamParams, LoraConfig

# T tokens of one row, K target tokens per position, k most likely tokens per position

Weights = Literal["live", "base"] | Path
"""Weights to sample from: those that are trained, those of the base model, or a folder of saved weights."""


@dataclass(frozen=True)
class ModelFacts:
    """Facts of the served model that clients see and requests are checked against."""

    name: str
    """Name that clients give as `base_model`."""
    tokenizer: str
    """Name or folder of the tokenizer, which clients load themselves."""
    vocabulary_size: int
    """Number of token ids, without padding."""
    context_tokens: int
    """Largest number of tokens of a row, or of a prompt with its response."""
    architecture: str | None = None
    max_lora_rank: int = 0
    """Largest rank of the adapters that each model trains on the frozen base model; 0 if models train all weights."""
    lora_parts: tuple[str, ...] = ()
    """Parts of the model with adapters: "attn", "mlp"."""


@dataclass(frozen=True)
class LossRow:
    """One row of a forward pass: tokens and the columns that its loss reads."""

    tokens_T: np.ndarray
    """int64 token ids; `target_tokens` are given and not these shifted by one."""
    columns: Mapping[str, np.ndarray]
    """float32 or int64 columns by name, all of shape [T] or all of shape [T, K]."""


class Passed(NamedTuple):
    """Results of a forward pass, with or without its backward pass."""

    outputs: Sequence[Mapping[str, np.ndarray]]
    """Columns of each row in the order of the request; `logprobs` has the shape of `target_tokens`."""
    metrics: Mapping[str, float]
    """Metrics named `name:reduction`, such as `loss:sum`, by which a client combines the parts of a long request."""


class TopLogProbs(NamedTuple):
    """The k most likely tokens of each position; a position without any has id 0 and log-prob -99999."""

    ids_Tk: np.ndarray
    log_probs_Tk: np.ndarray


@dataclass(frozen=True)
class Prompt:
    """One sampling request: a prompt and how often and how to continue it."""

    tokens: tuple[int, ...]
    num_samples: int
    seed: int
    """Seed of the first sample; the next samples use the following integers."""
    max_tokens: int
    temperature: float = 1.0
    top_k: int = -1
    """Number of most likely tokens to draw from; -1 for all."""
    top_p: float = 1.0
    stop_ids: tuple[int, ...] = ()
    stop_texts: tuple[str, ...] = ()
    stop_at_end: bool = True
    """True if the tokenizer's end of sequence stops a sample too."""
    log_probs_from: int | None = None
    """First position of the prompt whose log-probs are wanted; None for none."""
    top_prompt_log_probs: int = 0
    top_log_probs: int = 0
    adapter: str = ""
    """PEFT folder of the adapters to sample with on the base model; empty for none."""


class Sample(NamedTuple):
    """One continuation of a prompt; a stop token belongs to its tokens."""

    tokens: np.ndarray
    log_probs: np.ndarray
    stop_reason: Literal["stop", "length"]
    top: TopLogProbs | None = None


class Sampled(NamedTuple):
    """Results of one sampling request."""

    samples: Sequence[Sample]
    prompt_log_probs: np.ndarray | None = None
    """float32 [T] with NaN where there is none, as at the first position."""
    top_prompt: TopLogProbs | None = None


class Engines(Protocol):
    """Engines that sample on ranks of their own; one thread calls `push` and `sample`. Errors are those of `Ranks`."""

    @property
    def held(self) -> str | None:
        """Return the name of the weights that all engines hold; None before the first `push`, and on new ranks."""
        ...

    def push(self, weights: Weights, name: str) -> None:
        """Give the engines weights of the actor, which is not called meanwhile; gradients that wait must survive."""
        ...

    def sample(self, prompts: Sequence[Prompt]) -> Sequence[Sampled]:
        """Return the continuations of prompts that ask for no log-probs of theirs and no most likely tokens."""
        ...


class Ranks(Protocol):
    """A group of ranks that holds one model; its methods are called one at a time.

    Raises: `RequestError` for what the client can change, and `RanksLostError` if the ranks need a `restart`; any other
    error is the server's. An error of a method that changes weights or gradients stops the model that asked for it.
    """

    @property
    def facts(self) -> ModelFacts:
        """Return the facts of the served model."""
        ...

    @property
    def engines(self) -> Engines | None:
        """Return the engines on ranks of their own, if there are any; they are started again with the ranks."""
        ...

    def restart(self) -> None:
        """End the ranks, whatever they do, and start new ones with the base model's weights."""
        ...

    def hold(self, model: str, others: Sequence[str]) -> None:
        """Train another model's adapters from now on; those of the models `others` wait, and the rest are forgotten.

        Only called if models have adapters of their own.
        """
        ...

    def begin_model(self, lora: LoraConfig | None = None) -> None:
        """Restore the base model's weights, or start adapters, drop all gradients and start a fresh optimizer."""
        ...

    def forward_backward(
        self, rows: Sequence[LossRow], loss: str, settings: Mapping[str, float], backward: bool
    ) -> Passed:
        """Return log-probs and metrics of the rows; add to the gradients if `backward`."""
        ...

    def optim_step(self, adam: AdamParams) -> Mapping[str, float]:
        """Apply the summed gradients, drop them, and return metrics of the step."""
        ...

    def sample(self, prompts: Sequence[Prompt], weights: Weights) -> Sequence[Sampled]:
        """Return the continuations of each prompt; gradients that wait for their optimizer step must survive."""
        ...

    def save(self, folder: Path) -> None:
        """Write weights and optimizer to `folder`, which does not exist."""
        ...

    def save_sampler(self, folder: Path) -> None:
        """Write the weights alone to `folder`, which does not exist."""
        ...

    def load(self, folder: Path, optimizer: bool) -> None:
        """Load what `save` has written, with a fresh optimizer unless `optimizer`, and drop all gradients."""
        ...
