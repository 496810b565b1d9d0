"""Rows by which ranks sample prompts, one for each sample.

Shapes: B rows, P prompt tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice
from typing import NamedTuple

import torch
from tensordict import TensorDict, TensorDictBase

from hybridengine.backends.engine import SamplingSettings
from hybridengine.errors import DataError, RequestError
from hybridengine.rows.protocols import ROW_NUMBERS
from hybridengine.serving.ranks import Prompt, Sample


class DrawRow(NamedTuple):
    """One sample of a prompt."""

    tokens: tuple[int, ...]
    seed: int
    settings: SamplingSettings


def draw_rows(prompts: Sequence[Prompt], end_tokens: Sequence[int]) -> list[DrawRow]:
    """Return a row for each sample of each prompt; raise RequestError for settings that the engine does not have."""
    return [
        DrawRow(prompt.tokens, (prompt.seed + place) % 2**31, settings)
        for prompt in prompts
        for settings in [_settings(prompt, end_tokens)]
        for place in range(prompt.num_samples)
    ]


def _settings(prompt: Prompt, end_tokens: Sequence[int]) -> SamplingSettings:
    ends = end_tokens if prompt.stop_at_end else ()
    try:
        return SamplingSettings(
            max_tokens=prompt.max_tokens,
            temperature=float(prompt.temperature),
            top_p=float(prompt.top_p),
            top_k=max(0, prompt.top_k),
            stop_token_ids=tuple(dict.fromkeys((*prompt.stop_ids, *ends))),
            stop_strings=prompt.stop_texts,
            adapter=prompt.adapter,
        )
    except DataError as error:
        raise RequestError(str(error)) from None


def draw_batch(rows: Sequence[DrawRow]) -> tuple[TensorDict, list[SamplingSettings]]:
    """Return the arguments of a worker's `sample`: `prompt_tokens` [B, P], `prompt_lengths` and `seeds` [B]; settings."""
    width = max(len(row.tokens) for row in rows)
    columns = {
        "prompt_tokens": torch.tensor([[*row.tokens, *[0] * (width - len(row.tokens))] for row in rows]),
        "prompt_lengths": torch.tensor([len(row.tokens) for row in rows]),
        "seeds": torch.tensor([row.seed for row in rows]),
        ROW_NUMBERS: torch.arange(len(rows)),
    }
    return TensorDict(columns, batch_size=[len(rows)]), [row.settings for row in rows]  # pyright: ignore


def drawn_samples(
    prompts: Sequence[Prompt], rows: Sequence[DrawRow], answers: Iterable[TensorDictBase]
) -> list[list[Sample]]:
    """Return the samples of each prompt from the rows that `sample` has returned."""
    samples = []
    for row, answer in zip(rows, answers, strict=False):
        begin, length = len(row.tokens), int(answer["response_lengths"])
        samples.append(
            Sample(
                answer["tokens"][begin : begin + length].numpy(),
                answer["rollout_log_probs"][:length].numpy(),
                "stop" if answer["stopped"] else "length",
            )
        )
    following = iter(samples)
    return [[*islice(following, prompt.num_samples)] for prompt in prompts]
