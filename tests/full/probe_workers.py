"""Workers that report what their rank received, fail, hang or die, and batches for them."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from ray import cloudpickle
from tensordict import NonTensorStack, TensorDict

from hybridengine.errors import ConfigError
from hybridengine.rows.protocols import (
    ALL_TO_ALL,
    DP_PROTO,
    ONE_TO_ALL,
    PROTO_3D,
    PROTO_3D_ALL_MICRO_DP,
    PROTO_3D_PP_ONLY,
    ROW_NUMBERS,
    RankContext,
    register,
)

# Rank processes do not have this folder on their path.
cloudpickle.register_pickle_by_value(sys.modules[__name__])


WIDE_BYTES = 2**17
"""Bytes of a row of `ProbeWorker.wide`: too many for Ray's messages."""


class UnpicklableError(Exception):
    def __init__(self, one: int, two: int) -> None:  # pickle calls it with one argument
        super().__init__(f"{one} and {two}")


class ProbeWorker:
    """Reports its arguments; `offset` is added to the ids of rows that pass through."""

    def __init__(self, context: RankContext, offset: int = 0) -> None:
        self.context = context
        self.offset = offset
        self.tp_group = None
        for ranks in context.topology.grid.groups("tp"):
            group = dist.new_group(list(ranks))
            if context.rank in ranks:
                self.tp_group = group

    @register(ONE_TO_ALL)
    def describe(self) -> dict[str, Any]:
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "OMP_NUM_THREADS", "PROBE")
        return {
            "context": self.context,
            "pid": os.getpid(),
            "world": (dist.get_rank(), dist.get_world_size(), dist.get_backend()),
            "env": {name: os.environ.get(name) for name in names},
        }

    @register(ONE_TO_ALL)
    def tp_sum(self, value: float) -> float:
        total = torch.tensor(float(self.context.rank) + value)
        dist.all_reduce(total, group=self.tp_group)
        return total.item()

    def _echo(self, batch: TensorDict) -> TensorDict:
        seen = TensorDict(
            {
                "row_ids": batch["row_ids"] + self.offset,
                "answers": NonTensorStack(*[f"{text}!" for text in batch["answers"]]),
                "ranks": torch.full((len(batch),), self.context.rank),
            },
            batch_size=batch.batch_size,
        )
        return seen

    @register(ONE_TO_ALL)
    def to_all(self, batch: TensorDict) -> TensorDict:
        return self._echo(batch)

    @register(PROTO_3D, returns_rows=True)
    def over_dp(self, batch: TensorDict) -> TensorDict:
        return self._echo(batch)

    @register(PROTO_3D_ALL_MICRO_DP, returns_rows=True)
    def over_replicas(self, batch: TensorDict) -> TensorDict:
        return self._echo(batch)

    @register(PROTO_3D_PP_ONLY)
    def stages(self, batch: TensorDict) -> TensorDict:
        return self._echo(batch)

    @register(DP_PROTO, returns_rows=True)
    def over_ranks(self, batch: TensorDict, unit: str, *, factor: int) -> TensorDict:
        seen = self._echo(batch)
        seen["row_ids"] *= factor
        seen["unit"] = NonTensorStack(*[unit] * len(batch))
        return seen

    @register(PROTO_3D)
    def metrics(self, batch: TensorDict) -> dict[str, int]:
        return {"rank": self.context.rank, "rows": len(batch)}

    @register(PROTO_3D, returns_rows=True)
    def half_a_batch(self, batch: TensorDict) -> TensorDict | None:
        return batch if self.context.coordinate.dp_rank == 0 else None

    @register(PROTO_3D, returns_rows=True)
    def one_row(self, batch: TensorDict) -> TensorDict:
        return batch[:1]

    @register(PROTO_3D, returns_rows=True)
    def nested(self, batch: TensorDict) -> TensorDict:
        return TensorDict({"all": batch}, batch_size=batch.batch_size)

    @register(DP_PROTO, ["row_ids"], returns_rows=True)
    def doubled(self, batch: TensorDict) -> TensorDict:
        assert set(batch.keys()) == {"row_ids"}, "only what is declared is fetched"
        return TensorDict({"doubled": 2 * batch["row_ids"]}, batch_size=batch.batch_size)

    @register(PROTO_3D, [ROW_NUMBERS], returns_rows=True)
    def numbers(self, batch: TensorDict) -> TensorDict:
        return TensorDict({"row_ids": batch[ROW_NUMBERS] + 0}, batch_size=batch.batch_size)

    @register(PROTO_3D)
    def two_batches(self, one: TensorDict, other: TensorDict) -> None: ...

    @register(PROTO_3D, [ROW_NUMBERS], returns_rows=True)
    def wide(self, batch: TensorDict) -> TensorDict:
        """Return a column whose rows are objects in Ray's store, each of `WIDE_BYTES` and filled with its number."""
        wide = batch[ROW_NUMBERS].view(-1, 1).expand(-1, WIDE_BYTES // 8)
        return TensorDict({"wide": wide}, batch_size=batch.batch_size)

    @register(DP_PROTO, ["wide"], returns_rows=True)
    def narrowed(self, batch: TensorDict) -> TensorDict:
        """Return the first and the last entry of each row."""
        return TensorDict({"narrow": batch["wide"][:, [0, -1]]}, batch_size=batch.batch_size)

    @register(DP_PROTO, ["wide", ROW_NUMBERS, "answers"], returns_rows=True)
    def write(self, batch: TensorDict) -> TensorDict:
        """Try to write into the arguments."""
        batch["wide"].zero_()
        return batch

    @register(PROTO_3D, returns_rows=True)
    def fail_on_rows(self, batch: TensorDict) -> TensorDict:
        raise ValueError("bad rows")

    @register(ALL_TO_ALL)
    def items(self, item: str) -> str:
        return f"{item}@{self.context.rank}"

    @register(ONE_TO_ALL)
    def fail(self, rank: int, picklable: bool = True) -> None:
        if self.context.rank == rank:
            raise ValueError(f"bad luck on {rank}") if picklable else UnpicklableError(1, 2)

    @register(ONE_TO_ALL)
    def leave(self, rank: int) -> None:
        if self.context.rank == rank:
            sys.exit("no more")

    @register(ONE_TO_ALL)
    def sleep(self, rank: int, seconds: float) -> None:
        if self.context.rank == rank:
            time.sleep(seconds)

    @register(ONE_TO_ALL)
    def hang(self) -> None:
        """Stop rank 2, let rank 1 sleep, and let the others wait for both."""
        if self.context.rank == 2:
            os.kill(os.getpid(), signal.SIGSTOP)
        if self.context.rank == 1:
            time.sleep(60.0)
        dist.all_reduce(torch.ones(1))

    @register(ONE_TO_ALL)
    def fail_before_collective(self, rank: int) -> None:
        self.fail(rank)
        dist.all_reduce(torch.ones(1))

    @register(ONE_TO_ALL)
    def die_before_collective(self, rank: int) -> None:
        if self.context.rank == rank:
            time.sleep(0.5)
            os.kill(os.getpid(), signal.SIGKILL)
        dist.all_reduce(torch.ones(1))

    @register(ONE_TO_ALL)
    def write_late(self, path: str, seconds: float) -> None:
        time.sleep(seconds)
        Path(path).write_text("written")


class SilentWorker:
    """A worker without registered methods."""


class ClashingWorker:
    """A worker whose method would hide an attribute of the group."""

    @register(ONE_TO_ALL)
    def topology(self) -> None: ...


class BrokenWorker:
    """A worker that cannot be created on rank 2."""

    def __init__(self, context: RankContext) -> None:
        if context.rank == 2:
            raise ConfigError("heads=3 is odd; choose 2")

    @register(ONE_TO_ALL)
    def nothing(self) -> None: ...


def batch_of(num_rows: int) -> TensorDict:
    answers = NonTensorStack(*[f"answer {row}" for row in range(num_rows)])
    return TensorDict({"row_ids": torch.arange(num_rows), "answers": answers}, batch_size=[num_rows])
