"""Log-probs, entropies, values and scores of a micro-batch's responses, computed from a model's output.

Shapes: b rows, r response tokens.
"""

from __future__ import annotations

from einops import rearrange
from torch import Tensor

from hybridengine.backends.predictions import Predictions
from hybridengine.backends.supports import Supports


def response_log_probs(
    predictions_br: Predictions, columns: dict[str, Tensor], temperature: float
) -> tuple[Tensor, Tensor]:
    """Return (log-probability of each response token, entropy of its distribution), both [b, r] float32.

    The predictions are those of `columns["positions"]` [b, r]. Both are of the distribution that the token was drawn
    from: among the tokens of its support, if the rows have supports. Entries beyond a response are zero.
    """
    # Response token j directly follows the position that predicts it.
    tokens = columns["tokens"].gather(1, columns["positions"] + 1)
    return predictions_br.log_probs(tokens, temperature, Supports.of_columns(columns))


def response_values(scores_br1: Tensor) -> Tensor:
    """Return the value of the state before each response token, [b, r] float32."""
    return rearrange(scores_br1, "b r 1 -> b r").float()
