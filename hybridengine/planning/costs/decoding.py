"""Seconds of generation by one engine of (p_g, t_g): prompts first, then a token of every running response a step.

A step reads the weights and the keys and values of all running responses from memory, and does 2 operations for each
weight and response. The two overlap: the step takes (memory^k + arithmetic^k)^(1/k), whose slope over the number of
responses is a sigmoid between 0, where memory binds, and 1, where arithmetic does. Beside that it pays for launches,
all-reduces and scheduling.

Responses start as soon as there is a place: no more run at once than the engine takes, and than its KV cache holds. The
last, long ones run almost alone.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import numpy as np

from hybridengine.models.shapes import DTYPE_BYTES, ModelShape
from hybridengine.planning.costs.clusters import Cluster
from hybridengine.planning.costs.fabric import Axis, Fabric
from hybridengine.planning.costs.lengths import Lengths
from hybridengine.planning.costs.passes import GOLDEN, compute_of, layer_weights
from hybridengine.planning.costs.shards import generation_holding
from hybridengine.topology.sizes import GenSizes


@dataclass(frozen=True)
class Engine:
    """One generation engine."""

    shape: ModelShape
    sizes: GenSizes
    train_pp_size: int
    """Stages of training, which decide those of generation."""
    dtype: str
    cluster: Cluster
    num_ranks: int
    """Ranks of all engines together, which share the links."""

    @cached_property
    def kv_token_bytes(self) -> int:
        """KV cache of one token on the rank with the most."""
        heads = max(1, self.shape.num_kv_heads // self.sizes.tp_size)
        return 2 * self._num_layers * heads * self.shape.head_dim * DTYPE_BYTES[self.dtype]

    @cached_property
    def _num_layers(self) -> int:
        """Layers of the stage with the most."""
        return max(map(len, self.shape.gen_stage_layers(self.train_pp_size, self.sizes.pp_size)))

    def step_s(self, num_rows: Any, context_tokens: Any) -> Any:
        """Return the seconds of a step of `num_rows` responses with `context_tokens` tokens, prompts included.

        Args:
            num_rows: a number, or an array for as many steps.
        """
        compute = compute_of(self.cluster)
        memory = self._read_bytes + context_tokens * self.kv_token_bytes
        arithmetic_s = num_rows * self._row_s
        all_reduce_s, send_s = self._exchanges_s(num_rows)
        beside_s = self._num_layers * (compute.decode_layer_s + 2 * all_reduce_s) + send_s
        beside_s += (compute.decode_step_s + num_rows * compute.decode_row_s) / self.sizes.pp_size
        waiting = self._waiting
        read_s = knee(self._read_s(memory), arithmetic_s * waiting, compute.knee)
        return self.sizes.pp_size * (read_s + beside_s * waiting)

    @cached_property
    def _read_bytes(self) -> int:
        """Weights that a step reads."""
        shape, t = self.shape, self.sizes.tp_size
        held = generation_holding(shape, self.train_pp_size, self.sizes.pp_size, t)
        looked_up = shape.vocab_size * shape.hidden_size // t  # rows of the embedding
        return (held.num_elements - looked_up) * DTYPE_BYTES[self.dtype]

    @cached_property
    def _row_s(self) -> float:
        """Seconds of a row's arithmetic."""
        compute, shape = compute_of(self.cluster), self.shape
        weights = self._num_layers * layer_weights(shape) + shape.vocab_size * shape.hidden_size
        return 2 * weights / self.sizes.tp_size / (compute.rate(self.dtype) * compute.decode_efficiency)

    def _read_s(self, num_bytes: Any) -> Any:
        """Return the seconds in which every rank reads bytes from memory, while all stages but one of an engine wait."""
        ranks = min(self.cluster.devices_per_node, self.num_ranks) / self.sizes.pp_size
        return self.cluster.links.same_device.seconds(num_bytes, num_bytes * ranks)

    @cached_property
    def _waiting(self) -> float:
        """Factor by which work takes longer where the ranks of a node share its devices."""
        ranks = min(self.cluster.devices_per_node, self.num_ranks)
        return compute_of(self.cluster).waiting(ranks / self.sizes.pp_size)  # stages take turns

    def prefill_s(self, num_tokens: float) -> float:
        """Return the seconds of `num_tokens` tokens of prompts."""
        compute, shape = compute_of(self.cluster), self.shape
        operations = 2 * num_tokens * shape.num_layers * layer_weights(shape)
        rate = compute.rate(self.dtype) * compute.efficiency * self.sizes.tp_size
        chunks = max(1.0, num_tokens / PREFILL_TOKENS)
        own = operations / rate * (1 + compute.half_tokens * chunks / max(num_tokens, 1.0))
        launches = chunks * (shape.num_layers * compute.layer_s + compute.decode_step_s)
        all_reduce_s, send_s = self._exchanges_s(num_tokens / chunks)
        exchanged = chunks * (2 * shape.num_layers * all_reduce_s + self.sizes.pp_size * send_s)
        return (own + launches) * self._waiting + exchanged

    @property
    def block_bytes(self) -> int:
        """Bytes of a block of KV cache on a rank."""
        return self.kv_token_bytes * compute_of(self.cluster).kv_block_tokens

    def row_bytes(self, lengths: Lengths, prompt_tokens: float) -> float:
        """Return the bytes of KV cache that a running response takes of a rank, as a mean over time."""
        block = compute_of(self.cluster).kv_block_tokens
        return self.kv_token_bytes * (prompt_tokens + lengths.mean_position + (block - 1) / 2)

    def num_running(self, lengths: Lengths, prompt_tokens: float, max_num_seqs: int, kv_bytes: float) -> int:
        """Return how many responses can run at once: as the cache holds beside its first block, which is for none."""
        room = kv_bytes - self.block_bytes
        return max(1, min(max_num_seqs, int(room / self.row_bytes(lengths, prompt_tokens) + 1e-9)))

    def generate_s(self, num_rows: int, prompt_tokens: float, lengths: Lengths, num_running: int) -> float:
        """Return the seconds until `num_rows` responses are complete, at most `num_running` at once."""
        steps = running_steps(lengths, num_rows, num_running)
        counts, contexts, spans = steps[:, 0], steps[:, 1], steps[:, 2]
        seconds = spans @ self.step_s(counts, counts * prompt_tokens + contexts)
        return float(seconds + self.prefill_s(num_rows * prompt_tokens))

    def _exchanges_s(self, num_tokens: Any) -> tuple[Any, Any]:
        """Return the seconds of an all-reduce of the hidden state of tokens, and of sending it to the next stage."""
        num_bytes = num_tokens * self.shape.hidden_size * DTYPE_BYTES[self.dtype]
        fabric, t = Fabric(self.cluster, self.num_ranks), self.sizes.tp_size
        return (
            fabric.all_reduce_s(num_bytes, Axis(t, 1)),
            fabric.sends_s(num_bytes, Axis(self.sizes.pp_size, t)),
        )


PREFILL_TOKENS = 8192
"""Tokens of a chunk of prompts."""


def knee(one: Any, other: Any, sharpness: float) -> Any:
    """Return the seconds of two things that overlap: about the larger, 2^(1/sharpness) times either if they are equal."""
    largest = np.maximum(np.maximum(one, other), 1e-300)
    return largest * ((one / largest) ** sharpness + (other / largest) ** sharpness) ** (1 / sharpness)


@lru_cache(maxsize=512)
def running_steps(lengths: Lengths, num_rows: int, num_running: int) -> np.ndarray:
    """Return responses that run, their tokens altogether at the middle of the span, and its steps, as [spans, 3].

    The responses have the distribution's quantiles for lengths, in an order in which long and short ones alternate.
    """
    order = np.argsort(np.arange(num_rows) * GOLDEN % 1.0)
    waiting = lengths.spread(num_rows)[order].tolist()
    waiting.reverse()
    ends: list[tuple[int, int]] = []  # step at which a response ends, step at which it began
    begun_sum, now, spans = 0, 0, []
    while waiting or ends:
        while waiting and len(ends) < num_running:
            heapq.heappush(ends, (now + waiting.pop(), now))
            begun_sum += now
        end = ends[0][0]
        middle = (now + end) / 2
        spans.append((len(ends), len(ends) * middle - begun_sum, end - now))
        now = end
        while ends and ends[0][0] == now:
            begun_sum -= heapq.heappop(ends)[1]
    return np.array(spans, dtype=np.float64).reshape(-1, 3)
