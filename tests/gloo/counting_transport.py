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
            for count, moved in ((self.received_from, messages.receives), (self.sent_to, messages.sends)):
                for peer, tensor in moved:
                    count[peer] += tensor.nbytes
        return super().post(messages)
