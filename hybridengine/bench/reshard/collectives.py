"""Collectives of a process group that count received bytes; for gloo and NCCL."""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor


class CollectiveTransport:
    """All-gathers and broadcasts among the ranks of a group. Every wait is limited by the group's timeout."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self.ranks = tuple(dist.get_process_group_ranks(group))
        self.size, self.rank = len(self.ranks), dist.get_rank(group)
        self.received_bytes = 0
        """Bytes received since construction."""

    def all_gather(self, gathered: Tensor) -> None:
        """Fill `gathered`, [ranks of the group, elements], in which this rank has written its own row.

        Raises:
            RuntimeError: a peer failed or did not take part in time.
        """
        if self.size == 1:
            return
        own = gathered[self.rank]
        dist.all_gather_into_tensor(gathered.view(-1), own, group=self._group)
        self.received_bytes += (self.size - 1) * own.nbytes

    def broadcast(self, tensor: Tensor, root: int) -> None:
        """Fill `tensor` on all ranks with its values on the global rank `root`.

        Raises:
            RuntimeError: a peer failed or did not take part in time.
        """
        if self.size == 1:
            return
        dist.broadcast(tensor, root, group=self._group)
        if dist.get_rank() != root:
            self.received_bytes += tensor.nbytes
