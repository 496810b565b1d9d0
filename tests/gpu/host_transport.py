"""A transport for several ranks on one GPU, where NCCL refuses to work: messages go through host memory and gloo."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from hybridengine.weights.transport import Messages, Pending, PointToPointTransport
from tests.gloo.staged_transport import StagedTransport


class HostTransport(PointToPointTransport):
    """Copies what is sent to pinned memory before, and what has been received from there after."""

    def post(self, messages: Messages) -> Pending:
        staged, received = [], list[tuple[Tensor, Tensor]]()
        for each in messages.operations:
            host = torch.empty(each.tensor.shape, dtype=torch.uint8, pin_memory=torch.cuda.is_available())
            if each.op is dist.isend:
                host.copy_(each.tensor)
            else:
                received.append((each.tensor, host))
            staged.append(dist.P2POp(each.op, host, each.peer, self.group))
        posted = super().post(replace(messages, operations=tuple(staged), are_on_device=False))
        return _HostPending(posted, received)


class _HostPending(Pending):
    def __init__(self, posted: Pending, received: list[tuple[Tensor, Tensor]]) -> None:
        self._posted, self._received = posted, received

    def wait(self) -> int:
        received_bytes = self._posted.wait()
        for destination, host in self._received:
            destination.copy_(host)
        return received_bytes

    def abandon(self) -> None:
        self._posted.abandon()


class StagedHostTransport(StagedTransport, HostTransport):
    """Also calls a function at each stage of a switch."""
