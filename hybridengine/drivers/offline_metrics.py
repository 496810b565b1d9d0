"""Functions of offline algorithms that run on the ranks that hold rows: metrics of a batch, and of held-out rows.

They receive the rows of one rank, `across` for sums over all ranks, and for held-out rows the number of those that count.
"""

from __future__ import annotations

import math

import torch
from tensordict import TensorDictBase

from hybridengine.algorithms.across import Across
from hybridengine.algorithms.losses.aggregation import PER_TOKEN
from hybridengine.algorithms.masking import masked_sum
from hybridengine.config.algorithm import Algorithm
from hybridengine.config.role_sections import ActorSection
from hybridengine.importing import import_object
from hybridengine.report import keys
from hybridengine.rows.micro_batches import loss_mask
from hybridengine.rows.protocols import ROW_NUMBERS


def batch_metrics(rows: TensorDictBase, across: Across) -> dict[str, float]:
    """Return the numbers of tokens of a batch, of those that are trained, and their mean per sequence."""
    lengths = rows["response_lengths"]
    trained = loss_mask(rows, int(lengths.max())).sum()
    sums = torch.stack([torch.tensor(len(rows)), rows["prompt_lengths"].sum(), lengths.sum(), trained])
    num_rows, prompts, responses, num_trained = across.sum(sums.double()).tolist()
    return {
        keys.TOKENS: prompts + responses,
        keys.TRAINED_TOKENS: num_trained,
        keys.RESPONSE_TOKENS_MEAN: responses / num_rows,
    }


def held_out_loss(rows: TensorDictBase, across: Across, num_counted: int) -> dict[str, float]:
    """Return the mean negative log-probability of the tokens that count, and its exponential, the perplexity."""
    log_probs, counted = rows["log_probs"], rows[ROW_NUMBERS] < num_counted
    mask = loss_mask(rows, log_probs.size(1)) & counted[:, None]
    total, count = across.sum(torch.stack([masked_sum(-log_probs.double(), mask), mask.sum()])).tolist()
    loss = total / max(1.0, count)
    return {keys.HELD_OUT_LOSS: loss, keys.PERPLEXITY: math.exp(min(loss, 700.0))}


def held_out_preferences(
    rows: TensorDictBase, across: Across, algorithm: Algorithm, num_counted: int
) -> dict[str, float]:
    """Return the metrics of the algorithm's loss over the pairs that count: `eval/loss`, `eval/accuracy`, ..."""
    log_probs, counted = rows["log_probs"], rows[ROW_NUMBERS] < num_counted
    columns = {
        "mask": loss_mask(rows, log_probs.size(1)),
        "ref_log_probs": rows["ref_log_probs"],
        "told": counted[:, None].expand_as(log_probs),
    }
    loss = import_object(algorithm.loss)(log_probs, columns, algorithm, ActorSection(), PER_TOKEN)
    metrics = loss.stats.over_ranks(across).metrics(1)
    return {name.replace("actor/dpo_", "eval/"): value for name, value in metrics.items()}
