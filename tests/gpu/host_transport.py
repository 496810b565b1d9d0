"""Messages between several ranks on one GPU, where NCCL refuses to work: through host memory and gloo."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from hybridengine.weights.transport import Messages, Pending, PointToPointTransport
from tests.gloo.staged_transport import StagedTransport


class HostTransport(PointToPointTransport):
    """Copies tensors to pinned memory before they are sent, and from there after they have been received."""

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
    """Calls a function at each stage of a switch, too."""


class _Receive:
    """Request of a message into host memory; waiting for it fills the tensor on the device."""

    def __init__(self, request: Any, tensor: Tensor, host: Tensor) -> None:
        self._request, self._tensor, self._host = request, tensor, host

    def wait(self) -> None:
        self._request.wait()
        self._tensor.copy_(self._host)


@contextlib.contextmanager
def messages_through_host() -> Iterator[None]:
    """Let pipeline stages and context ranks exchange tensors of a GPU through host memory while the context is open.

    gloo's collectives copy such tensors themselves; its messages between two ranks would read a GPU's addresses.
    """
    isend, irecv = distributed_c10d.isend, distributed_c10d.irecv

    def send(tensor: Tensor, *to: Any, **also: Any) -> Any:
        return isend(tensor.detach().to("cpu", copy=True), *to, **also)

    def receive(tensor: Tensor, *of: Any, **also: Any) -> _Receive:
        host = torch.empty(tensor.shape, dtype=tensor.dtype)
        return _Receive(irecv(host, *of, **also), tensor.detach(), host)

    with contextlib.ExitStack() as stack:
        # Megatron-core and Transformer Engine call the former by name.
        for module in (dist, distributed_c10d):
            stack.enter_context(mock.patch.multiple(module, isend=send, irecv=receive))
        yield
