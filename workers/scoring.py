"""Log-probs of given tokens, without gradients: what the actor of a server and its reference have in common.

Shapes: B rows, T positions, b and t those of a micro-batch.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from hybridengine.backends.policy import MicroBatch
from hybridengine.backends.predictions import Predictions, most_likely
from hybridengine.errors import DataError
from hybridengine.rows.batch import columns_of
from hybridengine.rows.micro_batches import cut_whole_rows, gather_rows
from workers.model_worker import ModelWorker


def score_rows(worker: ModelWorker, batch: TensorDictBase, num_top: int) -> TensorDict | None:
    """Return `log_probs` [B, T] of the targets, and the `num_top` most likely tokens of each position.

    The latter are `top_ids` (int64) and `top_log_probs`, [B, T, num_top], likeliest first. With `draws` [B, T] int64,
    the target of a position that has a seed there, and not 0, is drawn at temperature 1: `drawn` [B, T] has it.
    """
    check_tokens(batch, worker.shape.vocab_size)

    def output(predictions: Predictions, columns: MicroBatch) -> dict[str, Tensor]:
        targets, found = columns["targets"], {}
        if "draws" in columns:
            targets = found["drawn"] = _drawn(predictions, targets, columns["draws"])
        found["log_probs"], _ = predictions.log_probs(targets)
        found["top_ids"], found["top_log_probs"] = predictions.most_likely(num_top)
        return found

    names = ["tokens", "targets", *(["draws"] if "draws" in columns_of(batch) else [])]
    micro = cut_whole_rows(batch, worker.max_tokens, names)
    found = worker.model.forward([part.columns for part in micro], output)
    if not worker.model.is_last_stage:
        return None
    size = len(batch), batch["tokens"].size(1)
    gathered = {
        name: gather_rows([(part, one[name]) for part, one in zip(micro, found, strict=True)], *size)
        for name in found[0]
    }
    for name in {"top_ids", "drawn"} & gathered.keys():
        gathered[name] = gathered[name].long()  # ids below 2^24 are exact in float32
    return TensorDict(gathered, batch_size=[len(batch)])  # type: ignore[arg-type]


def _drawn(predictions_bt: Predictions, targets_bt: Tensor, seeds_bt: Tensor) -> Tensor:
    """Return the targets, with a draw in place of each that has a seed."""
    # The largest of the logits with Gumbel noise is a draw; each rank has noise for its part of the vocabulary.
    drawn, group = targets_bt.clone(), predictions_bt.group
    for row, position in (seeds_bt > 0).nonzero().tolist():
        logits_1W = predictions_bt[row : row + 1, position].logits()
        width = logits_1W.size(-1)
        generator = torch.Generator().manual_seed(int(seeds_bt[row, position]))
        noise = torch.empty(width * group.size()).exponential_(generator=generator).log().neg()
        own = noise[group.rank() * width :][:width].to(logits_1W.device)
        drawn[row, position] = most_likely(logits_1W + own, 1, predictions_bt.vocab_size, group)[0].item()
    return drawn


def check_tokens(
    batch: TensorDictBase, vocab_size: int, columns: Sequence[str] = ("tokens", "targets")
) -> None:
    """Raise DataError for tokens in these columns that the model does not have."""
    for name in columns:
        low, high = (int(bound) for bound in batch[name].aminmax())
        if low < 0 or high >= vocab_size:
            raise DataError(
                f"column {name!r} has the token {low if low < 0 else high}, and the model knows tokens from 0 to"
                f" {vocab_size - 1}; take tokens of the model's own tokenizer"
            )
