"""Workers of `hybridengine bench dispatch`: a producer and a consumer of rows."""

from __future__ import annotations

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from hybridengine.rows.protocols import ONE_TO_ALL, PROTO_3D, ROW_NUMBERS, RankContext, register

COLUMN = "tokens"
STRIDE = 1_000_003
"""Entry j of row i is i · STRIDE + j, so that all rows differ."""


class MakeRowsWorker:
    """Producer of rows whose contents are a function of their numbers."""

    def __init__(self, context: RankContext) -> None:
        pass

    @register(PROTO_3D, [ROW_NUMBERS], returns_rows=True)
    def make_rows(self, rows: TensorDictBase, num_tokens: int) -> TensorDict:
        """Return the rows: `tokens` [B, T] int64."""
        return TensorDict({COLUMN: expected_tokens(rows[ROW_NUMBERS], num_tokens)}, batch_size=[len(rows)])

    @register(ONE_TO_ALL)
    def answer(self) -> None:
        """Do nothing; serves as an empty call."""


class TakeRowsWorker:
    """Consumer that reads all of its rows."""

    def __init__(self, context: RankContext) -> None:
        pass

    @register(PROTO_3D, [COLUMN, ROW_NUMBERS])
    def take_rows(self, rows: TensorDictBase, checks: bool) -> bool:
        """Read the rows; with `checks`, return True if their values are correct."""
        if not checks:
            return bool(rows[COLUMN].max() > 0)
        return torch.equal(rows[COLUMN], expected_tokens(rows[ROW_NUMBERS], rows[COLUMN].size(1)))


def expected_tokens(numbers_B: Tensor, num_tokens: int) -> Tensor:
    """Return the `tokens` of the rows with the given numbers. Shapes: [B] -> [B, T]."""
    return numbers_B[:, None] * STRIDE + torch.arange(num_tokens)
