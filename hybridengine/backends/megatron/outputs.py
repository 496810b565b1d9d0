"""Log-probs, entropies, values and scores of a micro-batch's responses, computed from a model's output.

Shapes: B (b) rows, T (t) positions, r response tokens.
"""

from __future__ import annotations

from einops import rearrange
from torch import Tensor

from hybridengine.backends.predictions import Predictions


def response_log_probs(
    predictions_br: Predictions, columns: dict[str, Tensor], temperature: float
) -> tuple[Tensor, Tensor]:
    """Return (log-probability of each response token, entropy of its distribution), both [b, r] float32.

    The predictions are those of `columns["positions"]` [b, r]. Entries beyond a response are undefined;
    `columns["mask"]` marks the valid ones.
    """
    # Response token j directly follows the position that predicts it.
    following = (columns["positions"] + 1).clamp(max=columns["tokens"].size(1) - 1)
    return predictions_br.log_probs(columns["tokens"].gather(1, following), temperature)


def response_values(scores_bt1: Tensor, columns: dict[str, Tensor]) -> Tensor:
    """Return the value of the state before each response token, [b, r] float32."""
    return rearrange(scores_bt1, "b t 1 -> b t").float().gather(1, columns["positions"])


def last_token_scores(scores_bt1: Tensor, columns: dict[str, Tensor]) -> Tensor:
    """Return the score of each sequence, [b] float32: the head's output at its last token."""
    last = columns["positions"][:, 0] + columns["mask"].sum(dim=1)
    scores_bt = rearrange(scores_bt1, "b t 1 -> b t").float()
    return rearrange(scores_bt.gather(1, rearrange(last, "b -> b 1")), "b 1 -> b")
