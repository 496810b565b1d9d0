"""Point-to-point messages between ranks of one process group, counted at the receiver."""

from __future__ import annotations

import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hybridengine.errors import TransferError
from hybridengine.weights.process_groups import store_of

Message = tuple[int, Tensor]
"""(global rank of the peer, contiguous tensor)."""

DEVICE_SHARE = 0.9
"""Fraction of the group's timeout after which a message on a device is abandoned: at the full timeout, NCCL's watchdog
ends the process, and all weights with it."""
DEVICE_POLL_S = 2e-5


class PeerError(TransferError):
    """Failure of messages with some peers, and the transport's first error."""

    def __init__(self, peers: tuple[int, ...], reason: str) -> None:
        super().__init__(peers, reason)
        self.peers, self.reason = peers, reason

    def __str__(self) -> str:
        return f"messages with ranks {list(self.peers)} failed: {self.reason}"


@dataclass(frozen=True)
class Messages:
    """Sends and receives of one rank that start together; created once and posted many times."""

    operations: tuple[dist.P2POp, ...]
    peers: tuple[int, ...]
    """Peer of each operation."""
    received_bytes: int
    are_on_device: bool
    """True if requests only order a device's stream, so that waiting for them returns before any data has arrived."""


class Pending:
    """Messages in flight."""

    def __init__(self, transport: PointToPointTransport, messages: Messages, requests: list[Any]) -> None:
        self._transport, self._messages, self._requests = transport, messages, requests
        self._deadline = time.monotonic() + DEVICE_SHARE * transport.timeout_s

    def wait(self) -> int:
        """Return the weight bytes received, after all messages; PeerError if a peer failed or came too late."""
        failed: dict[int, RuntimeError] = {}
        one_each = len(self._requests) == len(self._messages.peers)  # NCCL and `meet` have one for all
        for index, request in enumerate(self._requests):
            try:
                if self._messages.are_on_device:
                    self._wait_for_device(request)
                request.wait()
            except RuntimeError as error:  # wait for the other peers too: those that answered are not missing
                for peer in self._messages.peers[index : index + 1] if one_each else self._messages.peers:
                    failed.setdefault(peer, error)
        self._requests.clear()
        if failed:
            first = next(iter(failed.values()))
            raise PeerError(tuple(sorted(failed)), str(first)) from first
        self._transport.received_bytes += self._messages.received_bytes
        return self._messages.received_bytes

    def _wait_for_device(self, request: Any) -> None:
        """Wait on the host: data that has not arrived must not be counted, nor its source released."""
        while not request.is_completed():
            if time.monotonic() > self._deadline:
                raise RuntimeError(f"nothing has come for {DEVICE_SHARE * self._transport.timeout_s:g} s")
            time.sleep(DEVICE_POLL_S)

    def abandon(self) -> None:
        """Write nothing more into the buffers."""
        self._requests.clear()


class PointToPointTransport:
    """Sends and receives tensors in order between ranks, over gloo or NCCL; every wait ends with the group's timeout."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.received_bytes = 0
        """Weight bytes received since the transport was created."""
        self.has_given_up = False
        """True after a failure, after which messages may have been lost."""
        kinds = {device.type for device in group._device_types}
        self._meets_on = torch.device("cpu" if "cpu" in kinds else "cuda")
        self.timeout_s = group._get_backend(self._meets_on).options._timeout.total_seconds()
        """Longest time that the group waits for a rank."""
        self._is_on_device = False

    @property
    def store(self) -> dist.Store:
        """Store that the ranks of the group share."""
        return store_of(self.group)

    @property
    def is_closed(self) -> bool:
        """True if the group has been destroyed."""
        try:
            dist.get_process_group_ranks(self.group)
        except (KeyError, ValueError):  # this group, or all groups, have been destroyed
            return True
        return False

    def prepare(
        self, sends: Sequence[Message], receives: Sequence[Message], are_weights: bool = True
    ) -> Messages:
        """Return messages whose memory may move until they are posted; received bytes count if they are weights."""
        operations = [
            dist.P2POp(call, tensor.view(-1).view(torch.uint8), peer, self.group)
            for call, messages in ((dist.irecv, receives), (dist.isend, sends))
            for peer, tensor in messages
        ]
        return Messages(
            tuple(operations),
            tuple(peer for messages in (receives, sends) for peer, _ in messages),
            sum(tensor.nbytes for _, tensor in receives) if are_weights else 0,
            any(operation.tensor.is_cuda for operation in operations),
        )

    def post(self, messages: Messages) -> Pending:
        """Start all of `messages`."""
        self._is_on_device |= messages.are_on_device
        try:
            requests = dist.batch_isend_irecv(list(messages.operations)) if messages.operations else []
        except RuntimeError as error:
            # Its frames hold pending receives into memory that will be released.
            traceback.clear_frames(error.__traceback__)
            raise PeerError(tuple(sorted(set(messages.peers))), str(error)) from error
        return Pending(self, messages, requests)

    def meet(self) -> None:
        """Wait for all ranks of the group; PeerError with all others, any of which may be at fault, if one is missing."""
        # dist.get_rank(group) looks for the rank in the default world, to which a joined group does not belong
        ranks, own = dist.get_process_group_ranks(self.group), self.group.rank()
        others = tuple(rank for place, rank in enumerate(ranks) if place != own)
        token = torch.zeros(1, device=self._meets_on)
        self._is_on_device |= token.is_cuda
        try:
            request = dist.all_reduce(token, group=self.group, async_op=True)
        except RuntimeError as error:
            raise PeerError(others, str(error)) from error
        Pending(self, Messages((), others, 0, token.is_cuda), [request]).wait()

    def give_up(self) -> None:
        """Stop sending and receiving; on a device, peers are notified at once and nothing more is written into memory."""
        if self._is_on_device and not self.has_given_up and not self.is_closed:
            self.group.abort()
        self.has_given_up = True
