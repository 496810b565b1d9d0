"""Collectives of one process group, counted where bytes arrive; works on gloo and on NCCL."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import Tensor

from hybridengine.errors import TransferError


class CollectiveTransport:
    """All-gathers and broadcasts of the ranks of a group. Every wait ends with the group's timeout."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self.ranks = tuple(dist.get_process_group_ranks(group))
        self.received_bytes = 0
        """Bytes received since the transport was made."""

    @property
    def size(self) -> int:
        return len(self.ranks)

    @property
    def rank(self) -> int:
        """This rank's place in the group."""
        return dist.get_rank(self._group)

    def all_gather(self, gathered: Tensor) -> None:
        """Fill `gathered`, [ranks of the group, elements], of which this rank has written its own row.

        Raises:
            TransferError: a peer failed or did not take part in time.
        """
        if self.size == 1:
            return
        own = gathered[self.rank]
        self._run(
            f"all-gather among ranks {list(self.ranks)}", dist.all_gather_into_tensor, gathered.view(-1), own
        )
        self.received_bytes += (self.size - 1) * own.numel() * own.element_size()

    def broadcast(self, tensor: Tensor, root: int) -> None:
        """Fill `tensor` on all ranks with what it is on the global rank `root`.

        Raises:
            TransferError: a peer failed or did not take part in time.
        """
        if self.size == 1:
            return
        self._run(f"broadcast of rank {root} to ranks {list(self.ranks)}", dist.broadcast, tensor, root)
        if dist.get_rank() != root:
            self.received_bytes += tensor.numel() * tensor.element_size()

    def _run(self, what: str, collective: Callable[..., Any], *arguments: Any) -> None:
        try:
            collective(*arguments, group=self._group)
        except RuntimeError as error:
            raise TransferError(
                f"rank {dist.get_rank()}: {what} failed: {error}; look for the first error among those ranks"
            ) from error
