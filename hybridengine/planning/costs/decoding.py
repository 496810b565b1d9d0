"""Seconds of generation by one engine of (p_g, t_g): prompts first, then one token per step of every running response.

A step reads the weights and the keys and values of all running responses from memory, and does 2 operations for each
weight and response. The two overlap: the step takes (memory^k + arithmetic^k)^(1/k), whose slope over the number of
responses is a sigmoid from 0 (memory-bound) to 1 (compute-bound). Launches, all-reduces and scheduling are added.

Of experts, a step reads those that any response chooses, as many as are expected of even choices, and a response computes
with those that it chooses. Whether ranks have whole experts or shards of each, they do equally much.

A response starts as soon as there is a free slot; the number of slots is limited by the engine and by its KV cache. The
last, long responses run almost alone.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import numpy as np

from hybridengine.models.shapes import DTYPE_BYTES, ModelShape
from hybridengine.planning.costs.clusters import Axis, Cluster, Fabric
from hybridengine.planning.costs.lengths import GOLDEN, Lengths
from hybridengine.planning.costs.memory import Holding, generation_holding, layer_weights
from hybridengine.planning.costs.mixtures import touched_share
from hybridengine.planning.costs.passes import compute_of
from hybridengine.topology.sizes import GenSizes


@dataclass(frozen=True)
class Engine:
    """One generation engine."""

    shape: ModelShape
    sizes: GenSizes
    train_pp_size: int
    """Number of training stages, which determine the stages of generation."""
    dtype: str
    cluster: Cluster
    num_ranks: int
    """Number of ranks of all engines together, which share the links."""
    tensor_axes: tuple[Axis, ...] = ()
    """Axes of an engine's tensor ranks; by default they are consecutive."""

    @cached_property
    def kv_token_bytes(self) -> int:
        """Largest bytes of KV cache per token on any rank."""
        return self.shape.kv_token_bytes(
            self.train_pp_size, self.sizes.pp_size, self.sizes.tp_size, self.dtype
        )

    @cached_property
    def _num_layers(self) -> int:
        return max(map(len, self.shape.gen_stage_layers(self.train_pp_size, self.sizes.pp_size)))

    def step_s(self, num_rows: Any, context_tokens: Any) -> Any:
        """Return the seconds of a step (for arrays, of each) with `context_tokens` tokens in all, including prompts."""
        compute = compute_of(self.cluster)
        read = self._read_bytes + context_tokens * self.kv_token_bytes
        if self.shape.experts:
            read = read - self._expert_bytes * (1 - touched_share(self.shape, num_rows))
        read_s = self.cluster.links.same_device.seconds(read, read * self._working_ranks)
        all_reduce_s, send_s = self._exchanges_s(num_rows)
        beside_s = self._num_layers * (compute.decode_layer_s + 2 * all_reduce_s) + send_s
        beside_s += (compute.decode_step_s + num_rows * compute.decode_row_s) / self.sizes.pp_size
        waiting = compute.waiting(self._working_ranks)
        own_s = knee(read_s, num_rows * self._row_s * waiting, compute.knee)
        return self.sizes.pp_size * (own_s + beside_s * waiting)

    @cached_property
    def _held(self) -> Holding:
        return generation_holding(self.shape, self.train_pp_size, self.sizes)

    @cached_property
    def weight_bytes(self) -> int:
        """Bytes of weights on the fullest rank."""
        return self._held.num_elements * DTYPE_BYTES[self.dtype]

    @cached_property
    def _expert_bytes(self) -> int:
        return self._held.num_of_experts * DTYPE_BYTES[self.dtype]

    @cached_property
    def _read_bytes(self) -> int:
        """Bytes of weights that a step reads: all but the embedding, of which it looks up rows."""
        looked_up = self.shape.vocab_size * self.shape.hidden_size // self.sizes.tp_size
        return self.weight_bytes - looked_up * DTYPE_BYTES[self.dtype]

    @cached_property
    def _row_s(self) -> float:
        compute, shape = compute_of(self.cluster), self.shape
        stages = shape.gen_stage_layers(self.train_pp_size, self.sizes.pp_size)
        weights = max(layer_weights(shape, layers).of_token for layers in stages)
        weights += shape.vocab_size * shape.hidden_size
        return 2 * weights / self.sizes.tp_size / (compute.rate(self.dtype) * compute.decode_efficiency)

    @cached_property
    def _working_ranks(self) -> float:
        """Number of ranks of a node that work at the same time: stages take turns."""
        return min(self.cluster.devices_per_node, self.num_ranks) / self.sizes.pp_size

    def prefill_s(self, num_tokens: float) -> float:
        """Return the seconds of the prefill of `num_tokens` prompt tokens."""
        compute, shape = compute_of(self.cluster), self.shape
        weights = layer_weights(shape, range(shape.num_layers))
        rate = compute.rate(self.dtype) * compute.efficiency * self.sizes.tp_size
        chunks = max(1.0, num_tokens / PREFILL_TOKENS)
        starts = compute.half_tokens * chunks / max(num_tokens, 1.0)
        operations = weights.every * (1 + starts)
        if experts := shape.experts:
            operations += weights.active * (1 + starts * experts.num_experts / experts.num_active)
        own = 2 * num_tokens * operations / rate
        launches = chunks * (shape.num_layers * compute.layer_s + compute.decode_step_s)
        all_reduce_s, send_s = self._exchanges_s(num_tokens / chunks)
        exchanged = chunks * (2 * shape.num_layers * all_reduce_s + self.sizes.pp_size * send_s)
        return (own + launches) * compute.waiting(self._working_ranks) + exchanged

    @property
    def block_bytes(self) -> int:
        return self.kv_token_bytes * compute_of(self.cluster).kv_block_tokens

    def row_bytes(self, lengths: Lengths, prompt_tokens: float) -> float:
        """Return the bytes of KV cache of a running response on a rank, averaged over time."""
        block = compute_of(self.cluster).kv_block_tokens
        return self.kv_token_bytes * (prompt_tokens + lengths.mean_position + (block - 1) / 2)

    def num_running(self, lengths: Lengths, prompt_tokens: float, max_num_seqs: int, kv_bytes: float) -> int:
        """Return the number of responses that can run at once, limited by the cache without its reserved first block."""
        room = kv_bytes - self.block_bytes
        return max(1, min(max_num_seqs, int(room / self.row_bytes(lengths, prompt_tokens) + 1e-9)))

    def generate_s(self, num_rows: int, prompt_tokens: float, lengths: Lengths, num_running: int) -> float:
        """Return the seconds to complete `num_rows` responses, with at most `num_running` at once."""
        steps = running_steps(lengths, num_rows, num_running)
        counts, contexts, spans = steps[:, 0], steps[:, 1], steps[:, 2]
        seconds = spans @ self.step_s(counts, counts * prompt_tokens + contexts)
        return float(seconds + self.prefill_s(num_rows * prompt_tokens))

    def _exchanges_s(self, num_tokens: Any) -> tuple[Any, Any]:
        """Return the seconds of an all-reduce of the tokens' hidden state, and of sending it to the next stage."""
        num_bytes = num_tokens * self.shape.hidden_size * DTYPE_BYTES[self.dtype]
        fabric, t = Fabric(self.cluster, self.num_ranks), self.sizes.tp_size
        return (
            fabric.all_reduce_s(num_bytes, *(self.tensor_axes or (Axis(t, 1),))),
            fabric.sends_s(num_bytes, Axis(self.sizes.pp_size, t)),
        )


PREFILL_TOKENS = 8192
"""Number of tokens in a chunk of prompts."""


def knee(one: Any, other: Any, sharpness: float) -> Any:
    """Return the seconds of two overlapping operations: about the larger; 2^(1/sharpness) times either if equal."""
    largest = np.maximum(np.maximum(one, other), 1e-300)
    return largest * ((one / largest) ** sharpness + (other / largest) ** sharpness) ** (1 / sharpness)


@lru_cache(maxsize=512)
def running_steps(lengths: Lengths, num_rows: int, num_running: int) -> np.ndarray:
    """Return, for each span of steps, the running responses, their total tokens at its middle and its steps, [spans, 3].

    The lengths of the responses are quantiles of the distribution, in an order that alternates long and short ones.
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
