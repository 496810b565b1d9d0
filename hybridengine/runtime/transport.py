"""Moves bytes between ranks: messages point to point inside one process group, counted where they arrive."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from hybridengine.errors import TransferError

Message = tuple[int, Tensor]
"""(global rank of the peer, contiguous tensor)."""


class PointToPointTransport:
    """Sends and receives tensors between the ranks of a group; works on gloo and on NCCL.

    Every wait ends with the group's timeout.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self.received_bytes = 0
        """Bytes received since the transport was made."""

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message], what: str) -> None:
        """Carry out all messages; between two ranks, messages arrive in the order in which they were sent.

        Args:
            what: names the operation in an error.

        Raises:
            TransferError: a peer failed or did not take part before the group's timeout.
        """
        operations = [
            dist.P2POp(call, tensor.view(torch.uint8), peer, self._group)
            for call, messages in ((dist.isend, sends), (dist.irecv, receives))
            for peer, tensor in messages
        ]
        if not operations:
            return
        try:
            for request in dist.batch_isend_irecv(operations):
                request.wait()
        except RuntimeError as error:
            peers = sorted({peer for peer, _ in (*sends, *receives)})
            raise TransferError(
                f"rank {dist.get_rank()}: {what} with ranks {peers} failed: {error}; look for the first error among"
                " those ranks"
            ) from error
        self.received_bytes += sum(tensor.numel() * tensor.element_size() for _, tensor in receives)
