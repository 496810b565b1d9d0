"""Keeps rows that this process has produced until nobody wants them any more, and hands them to other processes.

Readers of the same host copy rows out of this process's memory by themselves; for others there is a server.
"""

from __future__ import annotations

import json
import logging
import os
import pickle
import secrets
import threading
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from multiprocessing.connection import Connection, Listener, answer_challenge, deliver_challenge

import torch
from tensordict import TensorDictBase
from torch import Tensor

from hybridengine.errors import StorageError
from hybridengine.runtime import process_memory, row_connection
from hybridengine.runtime.batch import columns_of, is_tensor_column
from hybridengine.runtime.stored_rows import Owner, StoredArray, StoredColumn, StoredRows

NUM_SLOTS = 2**16
"""Most batches that are kept at once."""
MAPPED_BYTES = 2**20
"""Columns from this size on lie in memory that readers of the same host map, so that many ranks need no copies."""

ACCEPT_AGAIN_S = 0.1
"""Before the next attempt, where e.g. all descriptors of the process are taken."""

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Kept:
    stored: StoredRows
    arrays: dict[tuple[str, str], Tensor]
    """(column, "values" or "bounds") -> its memory."""
    descriptors: list[int]
    """Of files that others may map."""
    slot: int
    """Where its key is written for readers to see."""


class RowStore:
    """Rows of this process.

    Args:
        node: address of this machine, at which other machines reach it.
        secret: what readers on other machines must know.
    """

    def __init__(self, node: str, secret: bytes) -> None:
        self._secret = secret
        self._kept: dict[int, _Kept] = {}
        self._lock = threading.Lock()
        self._closed = False
        self._token = torch.tensor([secrets.randbits(62)])
        self._slots = torch.full((NUM_SLOTS,), -1, dtype=torch.int64)
        self._free = deque(range(NUM_SLOTS))
        self._listener = Listener((node, 0), backlog=128)
        process_memory.admit_siblings()
        self.owner = Owner(
            host=process_memory.host(),
            pid=os.getpid(),
            token_address=self._token.data_ptr(),
            token=int(self._token.item()),
            node=node,
            port=int(self._listener.address[1]),
        )
        threading.Thread(target=self._accept, name="rows", daemon=True).start()

    def keep(self, key: int, batch: TensorDictBase) -> StoredRows:
        """Keep a batch under `key`, as it is now.

        Raises:
            StorageError: `NUM_SLOTS` batches are kept.
        """
        if not self._free:
            raise StorageError(
                f"{NUM_SLOTS} batches of rows are kept on this rank, and no more can be; let go of references to rows"
                " that nobody will read"
            )
        arrays: dict[tuple[str, str], Tensor] = {}
        descriptors, columns = [], {}
        for name in columns_of(batch):
            if is_tensor_column(batch, name):
                values, descriptor = batch[name].detach().to("cpu"), None
                if values.nbytes >= MAPPED_BYTES and self.owner.host:
                    values, descriptor = process_memory.shared_copy(values.contiguous())
                    descriptors.append(descriptor)
                else:  # whoever has made it may go on writing to it
                    values = values.clone(memory_format=torch.contiguous_format)
                arrays[name, "values"] = values
                columns[name] = StoredColumn(_described(values, descriptor))
            else:
                arrays[name, "values"], arrays[name, "bounds"] = _pickled(batch.get(name).tolist())
                columns[name] = StoredColumn(
                    _described(arrays[name, "values"]), _described(arrays[name, "bounds"])
                )
        slot = self._free.popleft()  # now that nothing can fail any more
        address = self._slots.data_ptr() + slot * self._slots.element_size()
        stored = StoredRows(self.owner, key, address, batch.batch_size[0], columns)
        with self._lock:
            self._kept[key] = _Kept(stored, arrays, descriptors, slot)
        self._slots[slot] = key
        return stored

    def find(self, key: int) -> StoredRows | None:
        """What is kept under `key`."""
        with self._lock:
            kept = self._kept.get(key)
        return kept.stored if kept else None

    def drop(self, keys: Iterable[int]) -> None:
        """Give up the batches of `keys`; those that are not kept are none of this store's."""
        for key in keys:
            with self._lock:
                kept = self._kept.pop(key, None)
            if kept is not None:
                self._slots[kept.slot] = -1  # before the memory goes: readers look at it last
                self._free.append(kept.slot)
                for descriptor in kept.descriptors:
                    os.close(descriptor)

    @property
    def num_bytes(self) -> int:
        """Bytes that are kept."""
        with self._lock:
            return sum(array.nbytes for kept in self._kept.values() for array in kept.arrays.values())

    def close(self) -> None:
        """Hand out nothing more."""
        self._closed = True
        self._listener.close()
        self.drop(list(self._kept))

    def _accept(self) -> None:
        while True:
            try:
                connection = self._listener.accept()
            except OSError as error:
                if self._closed:
                    return
                _logger.warning("a reader of rows was not let in: %s", error)
                time.sleep(ACCEPT_AGAIN_S)
                continue
            threading.Thread(target=self._serve, args=(connection,), name="rows", daemon=True).start()

    def _serve(self, connection: Connection) -> None:
        """Answer one reader until it hangs up."""
        try:
            row_connection.configure(connection)
            deliver_challenge(connection, self._secret)
            answer_challenge(connection, self._secret)
            while True:
                self._answer(connection, json.loads(connection.recv_bytes()))
        except EOFError:
            pass
        except Exception as error:
            _logger.warning("a reader of rows was given up: %s: %s", type(error).__name__, error)
        finally:
            connection.close()

    def _answer(self, connection: Connection, request: dict) -> None:
        with self._lock:
            kept = self._kept.get(request["key"])
        array = kept.arrays.get((request["column"], request["part"])) if kept else None
        if array is None:
            connection.send_bytes(json.dumps({"error": "these rows are not kept any more"}).encode())
            return
        parts = [array[first : first + count] for first, count in request["runs"]]
        whole = parts[0] if len(parts) == 1 else torch.cat(parts)
        connection.send_bytes(json.dumps({"bytes": whole.nbytes}).encode())
        if whole.nbytes:
            connection.send_bytes(whole.reshape(-1).view(torch.uint8).numpy().data)


def _described(array: Tensor, descriptor: int | None = None) -> StoredArray:
    return StoredArray(str(array.dtype), tuple(array.shape[1:]), array.shape[0], array.data_ptr(), descriptor)


def _pickled(values: list[object]) -> tuple[Tensor, Tensor]:
    """(bytes of all values, where each begins and the last ends)."""
    texts = [pickle.dumps(value) for value in values]
    ends = torch.tensor([0, *map(len, texts)]).cumsum(0)
    content = (
        torch.frombuffer(bytearray(b"".join(texts)), dtype=torch.uint8)
        if texts
        else torch.empty(0, dtype=torch.uint8)
    )
    return content, ends
