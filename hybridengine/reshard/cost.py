"""What a plan costs, counted from the plan itself: bytes received and sent, peak and redundant bytes of every rank.

The formulas of the paper's table 2 (HybridFlow, arXiv 2409.19256) are tests of this file, not a part of it.
"""

from __future__ import annotations

from dataclasses import dataclass

from hybridengine.reshard.plan import Bucket, Plan


@dataclass(frozen=True)
class RankCost:
    """Bytes of one rank over one execution of a plan."""

    received_bytes: int
    sent_bytes: int
    source_bytes: int
    """Storage of the shard before, padding included."""
    destination_bytes: int
    """Storage of the shard after, padding included."""
    peak_bytes: int
    """Most weight and staging bytes at any moment."""
    bucket_bytes: int
    """Destination storage of the largest bucket."""

    @property
    def peak_bound_bytes(self) -> int:
        """What zero redundancy allows: the larger shard and one bucket."""
        return max(self.source_bytes, self.destination_bytes) + self.bucket_bytes


def rank_cost(plan: Plan, rank: int, element_bytes: int) -> RankCost:
    """Cost of `plan` for one rank, for weights of `element_bytes` each.

    The peak follows the executor: in each bucket the pieces to send are packed and the pieces to come get a staging
    buffer; then the send buffers go, the destination appears, is filled, and the source of the bucket is released.
    """
    sizes = _parameter_sizes(plan, rank)
    source_total = sum(sizes["source"].values())
    held = source_total
    peak, received, sent, largest = held, 0, 0, 0
    for bucket in plan.buckets:
        incoming, outgoing = bucket_traffic(bucket, rank)
        appears = sum(sizes["destination"][name] for name in bucket.destinations.get(rank, ()))
        vanishes = sum(sizes["source"][name] for name in bucket.sources.get(rank, ()))
        peak = max(peak, held + incoming + outgoing, held + incoming + appears)
        held += appears - vanishes
        received, largest = received + incoming, max(largest, appears)
        sent += sum(pack.num_elements * len(pack.receivers) for pack in bucket.sends(rank))
    return RankCost(
        received_bytes=received * element_bytes,
        sent_bytes=sent * element_bytes,
        source_bytes=source_total * element_bytes,
        destination_bytes=sum(sizes["destination"].values()) * element_bytes,
        peak_bytes=peak * element_bytes,
        bucket_bytes=largest * element_bytes,
    )


def bucket_traffic(bucket: Bucket, rank: int) -> tuple[int, int]:
    """(elements received, elements packed to send); a box that goes to several ranks is packed once."""
    incoming = sum(pack.num_elements for pack in bucket.receives(rank))
    outgoing = sum(pack.num_elements for pack in bucket.sends(rank))
    return incoming, outgoing


def _parameter_sizes(plan: Plan, rank: int) -> dict[str, dict[str, int]]:
    return {
        side: {
            parameter.name: parameter.num_elements
            for parameter in (layout.shard(rank).parameters if rank in layout.keys else ())
        }
        for side, layout in (("source", plan.source), ("destination", plan.destination))
    }
