"""Transports that count weight bytes by peer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch.distributed as dist

from hybridengine.weights.transport import Message, Messages, Pending, PointToPointTransport


class CountingTransport(PointToPointTransport):
    """Counts weight bytes received from and sent to each rank; digests do not count as weights."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__(group)
        self.received_from: Counter[int] = Counter()
        self.sent_to: Counter[int] = Counter()
        self._weights: list[Messages] = []

    def prepare(
        self, sends: Sequence[Message], receives: Sequence[Message], are_weights: bool = True
    ) -> Messages:
        messages = super().prepare(sends, receives, are_weights)
        if are_weights:
            self._weights.append(messages)
        return messages

    def post(self, messages: Messages) -> Pending:
        if any(messages is known for known in self._weights):
            for each, peer in zip(messages.operations, messages.peers, strict=True):
                count = self.received_from if each.op is dist.irecv else self.sent_to
                count[peer] += each.tensor.nbytes
        return super().post(messages)
