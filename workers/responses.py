"""Responses that a rank's engine draws for rows of prompts, each with a seed and settings of its own.

Shapes: B rows, P prompt tokens, R response tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from tensordict import NonTensorStack, TensorDict, TensorDictBase

from hybridengine.backends.engine import Request, Response, SamplingSettings, generate
from hybridengine.backends.levelling import Peers, respond_together
from hybridengine.backends.vllm.engine import VllmEngine
from hybridengine.rows.images import images_of_rows
from hybridengine.rows.micro_batches import ROUTES, padded_routes
from hybridengine.rows.protocols import ROW_NUMBERS
from hybridengine.rows.supports import SUPPORTS, support_row

SAMPLE_COLUMNS = ("prompt_tokens", "prompt_lengths", "seeds", ROW_NUMBERS)
"""Columns of rows to sample."""


def respond(
    engine: VllmEngine,
    prompts: TensorDictBase,
    seeds: Sequence[int],
    sampling: Sequence[SamplingSettings],
    width: int,
    padding: int,
    peers: Peers | None = None,
) -> tuple[TensorDict, list[Response]]:
    """Return a response to each prompt as rows and as they are; lists have one entry per row.

    Reads `prompt_tokens` [B, P] and `prompt_lengths` [B], and the column `IMAGES` if there is one. Rows have
    `tokens` [B, P + R], `response_lengths` [B] and
    `rollout_log_probs` [B, R], with R = `width`; `padding` is the token after a response.
    An engine that keeps its experts adds `routes` [B, P + R, L, K] of all tokens but each row's last, and one that keeps
    supports the column `SUPPORTS`. With `peers`, the engines of all replicas share their rows (`respond_together`).
    """
    lengths, padded = prompts["prompt_lengths"].tolist(), prompts["prompt_tokens"]
    rows = [row[:length] for row, length in zip(padded.tolist(), lengths, strict=True)]
    images = images_of_rows(prompts)
    if peers is None or peers.count == 1:
        outputs = generate(engine, rows, seeds, sampling, images)
    else:
        given = zip(rows, seeds, sampling, images, strict=True)
        requests = [
            Request(f"{peers.place}/{row}", tuple(prompt), seed, settings, images=seen)
            for row, (prompt, seed, settings, seen) in enumerate(given)
        ]
        outputs = respond_together(engine, requests, peers)
    tokens = torch.full((len(rows), padded.size(1) + width), padding)
    log_probs = torch.zeros(len(rows), width)
    for row, (prompt, output) in enumerate(zip(rows, outputs, strict=True)):
        sequence = prompt + output.token_ids
        tokens[row, : len(sequence)] = torch.tensor(sequence)
        log_probs[row, : len(output.log_probs)] = torch.tensor(output.log_probs)
    columns: dict[str, Any] = {
        "tokens": tokens,
        "response_lengths": torch.tensor([len(output.token_ids) for output in outputs]),
        "rollout_log_probs": log_probs,
    }
    routes = [output.routes for output in outputs]
    if rows and routes[0] is not None:
        columns[ROUTES] = padded_routes([one for one in routes if one is not None], tokens.size(1))
    supports = [support_row(output.supports) for output in outputs if output.supports is not None]
    if supports:
        columns[SUPPORTS] = NonTensorStack(*supports)
    return TensorDict(columns, batch_size=[len(rows)]), outputs


def sample_rows(
    engine: VllmEngine, prompts: TensorDictBase, sampling: Sequence[SamplingSettings]
) -> TensorDict:
    """Return a response to each prompt: the columns of `respond`, and `stopped`; R is the largest `max_tokens`.

    Reads `SAMPLE_COLUMNS`, with `seeds` [B] int64. `stopped` [B] is True where a stop token or string has ended the
    response, which is its end, and False at `max_tokens`.

    Args:
        sampling: settings of each row of the call, in order, on all ranks.
    """
    own = [sampling[number] for number in prompts[ROW_NUMBERS].tolist()]
    width = max(settings.max_tokens for settings in sampling)
    rows, responses = respond(engine, prompts, prompts["seeds"].tolist(), own, width, padding=0)
    rows["stopped"] = torch.tensor([response.finish_reason == "stop" for response in responses])
    return rows
