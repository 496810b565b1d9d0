"""Checks that what a rank holds after a move has the bits that its source had, by digests of both."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor

from hybridengine.errors import TransferError
from hybridengine.reshard.plan import Move
from hybridengine.runtime.digests import digests
from hybridengine.runtime.transport import Messages


class Verify(str, Enum):
    """When receivers check what they have received."""

    FIRST = "first"
    """In the first switch of each direction: what is wrong with a plan is wrong every time."""
    ALWAYS = "always"
    NEVER = "never"


@dataclass(frozen=True)
class MessageChecks:
    """Checks of one step's messages. Digests are taken where boxes lie in their parameters, before they are gathered and
    after they are spread, so that a wrong offset is found as well as a changed bit."""

    sent: list[Tensor]
    """Boxes that this rank sends, message after message."""
    signed: list[Tensor]
    """Their digests for each message, [moves, 2]."""
    received: list[Tensor]
    expected: list[Tensor]
    """Digests that the senders of `received` took."""
    moves: list[Move]
    """Of `received`."""
    messages: Messages
    """Carry `signed` to `expected`."""

    def sign(self) -> None:
        """Take the digests of what is sent."""
        if self.sent:
            taken = digests(self.sent).split([len(part) for part in self.signed])
            torch._foreach_copy_(self.signed, list(taken))

    def verify(self, rank: int) -> None:
        """Compare what has arrived with what was sent.

        Raises:
            TransferError: names the tensor, interval, sender and receiver of a changed box.
        """
        if self.received:
            _compare(self.received, torch.cat(self.expected), self.moves, rank)


@dataclass(frozen=True)
class LocalChecks:
    """Checks of copies inside a rank."""

    sources: list[Tensor]
    targets: list[Tensor]
    moves: list[Move]

    def verify(self, rank: int) -> None:
        """Compare copies with their sources.

        Raises:
            TransferError: names the tensor and interval of a changed box.
        """
        _compare(self.targets, digests(self.sources), self.moves, rank)


def _compare(views: Sequence[Tensor], expected: Tensor, moves: Sequence[Move], rank: int) -> None:
    wrong = (digests(views) != expected).any(dim=1).nonzero().flatten().tolist()
    if not wrong:
        return
    move = moves[wrong[0]]
    more = f" (and {len(wrong) - 1} more boxes)" if len(wrong) > 1 else ""
    raise TransferError(
        f"{move.tensor}{[list(interval) for interval in move.box]} arrived at rank {rank} ({move.destination.parameter})"
        f" with other bits than it had at rank {move.source.rank} ({move.source.parameter}){more}; memory or network"
        " between them is at fault, or weights were written to during the switch"
    )
