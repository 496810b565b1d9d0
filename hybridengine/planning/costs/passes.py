"""Seconds of passes over rows under (p, t, d): forward passes, and updates with their optimizer steps.

The first of m micro-batches passes all p stages; the others follow at the rate of the slowest stage. With equal stages,
these are the pipeline's m + p - 1 slots. With v blocks of layers per stage the interleaved schedule fills in (p - 1) / v
slots, a bubble of (p - 1) / (v·m); fewer than p micro-batches are filled up with empty ones, which take as long. The
time of a stage consists of

    arithmetic   2 operations for each weight and token, at the rate that matrices of n tokens reach:
                 peak · efficiency · n / (n + half_tokens); for the experts that a token chooses, n is an expert's rows
    attention    4 · tokens · sequence length · query width operations, at a separate rate
    memory       the hidden state is read and written `activation_passes` times
    launches     for each layer, and for each micro-batch in each block
    tensor axis  two all-reduces of the hidden state for each layer and direction; one where the layer has experts
    experts      their rows are sorted in memory, and reach them and come back as `mixtures` describes
    context axis an all-gather of keys and values for each layer; the 2c parts of a row make attention equal on all ranks
    messages     the hidden state from each block to the next one, and its gradient back

A backward pass counts as two forward passes, or three with recomputation. An optimizer step reduce-scatters the gradients
over the replicas (float32), updates its part, and all-gathers the weights.

If the devices of a node share the cores of a CPU, a pass takes at least the work of the node's ranks divided by the
number of devices that can work at once. Communication is work too, because the links are memory.

Source: bubbles of the schedule as in Narayanan et al., arXiv 2104.04473, section 2.2; sharded optimizer states as in
ZeRO, arXiv 1910.02054.
"""

from __future__ import annotations

from dataclasses import dataclass

from hybridengine.models.shapes import DTYPE_BYTES, ModelShape
from hybridengine.planning.costs.clusters import Axis, Cluster, Compute, Fabric
from hybridengine.planning.costs.lengths import MicroBatches
from hybridengine.planning.costs.memory import GRADIENT_BYTES, layer_weights, training_holding
from hybridengine.planning.costs.mixtures import dispatch_s, expert_rows, replica_axes, sorted_bytes
from hybridengine.topology.sizes import TrainSizes

OPTIMIZER_TRAFFIC_BYTES = 30
"""Bytes that a step reads and writes for each weight of its part: it reads a gradient, two moments and a master weight in
float32, and writes all but the gradient, and the weight."""
GRADIENT_TRAFFIC_BYTES = 8
"""Bytes that a step reads and writes for each weight of the rank: it zeroes and inspects the gradients."""


@dataclass(frozen=True)
class PassSeconds:
    path_s: float
    """Seconds of the critical path, if ranks do not share devices."""
    work_s: float
    """Seconds that a rank computes and communicates, without bubbles; the mean of the stages."""

    def on(self, cluster: Cluster, num_ranks: int) -> float:
        """Return the seconds on a cluster, on which the ranks of a node may share its devices."""
        at_once = compute_of(cluster).devices_at_once
        if at_once is None:
            return self.path_s
        return max(self.path_s, self.work_s * min(cluster.devices_per_node, num_ranks) / at_once)


def compute_of(cluster: Cluster) -> Compute:
    """Return the cluster's section compute, whose presence `load_planned_cluster` has checked."""
    assert cluster.compute is not None, "a plan of a whole run needs the section"
    return cluster.compute


@dataclass(frozen=True)
class ModelPasses:
    """Passes of one model at (p, t, d) on a cluster."""

    shape: ModelShape
    sizes: TrainSizes
    dtype: str
    cluster: Cluster

    def forward(self, micro: MicroBatches) -> PassSeconds:
        """Return the seconds of a forward pass over all micro-batches."""
        return self._pipeline(micro, passes=1.0, num_attention=1, num_mlp=1)

    def update(
        self, micro: MicroBatches, num_steps: int, *, recompute: str = "none", num_passes: int = 1
    ) -> PassSeconds:
        """Return the seconds of `num_passes` over the rows, each of `num_steps` optimizer steps over `micro`."""
        weights = layer_weights(self.shape, range(self.shape.num_layers))
        mlp = 1 - weights.attention / weights.of_token
        passes, num_attention, num_mlp = {
            "none": (3.0, 2, 2),
            "selective": (3.0 + mlp, 2, 3),
            "full": (4.0, 3, 3),
        }[recompute]
        one, step_s = self._pipeline(micro, passes, num_attention, num_mlp), self._optimizer_step_s()
        times = num_steps * num_passes
        return PassSeconds((one.path_s + step_s) * times, (one.work_s + step_s) * times)

    def _pipeline(self, micro: MicroBatches, passes: float, num_attention: int, num_mlp: int) -> PassSeconds:
        """Return the seconds of `passes` forward passes, which exchange rows so often behind attention and MLPs.

        A backward pass counts as two, and what is recomputed as more.
        """
        p, t, c, v = (
            self.sizes.pp_size,
            self.sizes.tp_size,
            self.sizes.cp_size,
            self.sizes.virtual_stages,
        )
        num_sends = 1 if passes == 1 else 2  # to the next stage and back
        layers = [self._kinds(stage) for stage in self.shape.split_layers(p)]  # whatever v is
        inner = {kinds: self._stage(micro, *kinds, last=False) for kinds in set(layers)}
        work = [*(inner[kinds] for kinds in layers[:-1]), self._stage(micro, *layers[-1], last=True)]
        hidden_bytes = self._hidden_bytes(micro)
        fabric = Fabric(self.cluster, self.sizes.num_ranks)
        # A reduce-scatter and an all-gather of the hidden state, of which each rank holds a part between them.
        all_reduce_s = fabric.all_reduce_s(hidden_bytes, Axis(t, 1))
        sends_s = fabric.sends_s(hidden_bytes / t, Axis(p, t * c), num_sends, v)
        kv_bytes = micro.tokens * 2 * self.shape.kv_size / t * DTYPE_BYTES[self.dtype]
        # Keys and values in each forward pass; in the backward pass once more, and their gradients.
        attention_s = num_attention * all_reduce_s + int(passes) * fabric.all_gather_s(kv_bytes, Axis(c, t))
        experts_s = 0.0
        if self.shape.experts:
            experts_s = dispatch_s(fabric, self.shape, self.sizes, micro.tokens / c, self.dtype)
            if self.shape.experts.shared_size:  # an MLP sharded as that of a dense layer
                experts_s += all_reduce_s
        slots = [
            passes * own
            + (dense + mixed) * attention_s
            + num_mlp * (dense * all_reduce_s + mixed * experts_s)
            + sends_s
            for own, (dense, mixed) in zip(work, layers, strict=True)
        ]
        # With virtual stages the pipeline fills after a block of layers, a v-th of the stage.
        filling_s, count = (sum(slots) - max(slots)) / v, self.sizes.num_passes(micro.count)
        return PassSeconds(count * max(slots) + filling_s, count * sum(slots) / p)

    def _kinds(self, stage: range) -> tuple[int, int]:
        """Return the numbers of a stage's layers with an MLP and with experts."""
        mixed = sum(self.shape.expert_layer(layer) is not None for layer in stage)
        return len(stage) - mixed, mixed

    def _stage(self, micro: MicroBatches, dense: int, mixed: int, *, last: bool) -> float:
        """Return the seconds of a forward pass of one micro-batch over a stage, without collectives."""
        compute, shape, t, layers = compute_of(self.cluster), self.shape, self.sizes.tp_size, dense + mixed
        peak, tokens = compute.rate(self.dtype), micro.tokens / self.sizes.cp_size
        first, final = (
            layer_weights(shape),
            layer_weights(shape, range(shape.num_layers - 1, shape.num_layers)),
        )
        matmul = 2 * tokens * (dense * first.every + mixed * final.every) / t
        if last and not shape.num_labels:
            matmul += (
                2 * micro.response_tokens / self.sizes.cp_size * shape.hidden_size * shape.vocab_size / t
            )
        arithmetic = matmul / (peak * compute.efficiency) * (1 + compute.half_tokens / max(tokens, 1.0))
        memory = compute.activation_passes * self._hidden_bytes(micro) * layers
        if mixed:
            rows = expert_rows(shape, self.sizes, tokens)
            routed = 2 * tokens * mixed * final.active / t
            arithmetic += routed / (peak * compute.efficiency) * (1 + compute.half_tokens / max(rows, 1.0))
            memory += mixed * sorted_bytes(shape, self.sizes, tokens, self.dtype)
        attention = 4 * tokens * micro.length * shape.q_size * layers / t
        attention_s = attention / (peak * compute.attention_efficiency)
        memory_s = memory / self.cluster.links.same_device.bytes_per_s
        launches_s = layers * compute.layer_s + self.sizes.virtual_stages * compute.micro_batch_s
        return arithmetic + attention_s + memory_s + launches_s

    def _hidden_bytes(self, micro: MicroBatches) -> float:
        """Return the bytes of this rank's hidden states of all tensor-parallel ranks."""
        return micro.tokens / self.sizes.cp_size * self.shape.hidden_size * DTYPE_BYTES[self.dtype]

    def _optimizer_step_s(self) -> float:
        compute, p, t, c = (
            compute_of(self.cluster),
            self.sizes.pp_size,
            self.sizes.tp_size,
            self.sizes.cp_size,
        )
        d = self.sizes.dp_size * c
        held = training_holding(self.shape, self.sizes)
        shares = [
            (
                held.num_trained - held.num_trained_of_experts,
                d,
                (Axis(c, t), Axis(self.sizes.dp_size, p * t * c)),
            ),
            (held.num_trained_of_experts, self.sizes.expert_replicas, replica_axes(self.sizes)),
        ]
        memory = sum(
            count * (OPTIMIZER_TRAFFIC_BYTES / replicas + GRADIENT_TRAFFIC_BYTES)
            for count, replicas, _ in shares
        )
        own = (
            memory / self.cluster.links.same_device.bytes_per_s
            + held.num_parameters * compute.parameter_s
            + compute.optimizer_step_s
        )
        # Gradients are scattered, weights gathered.
        fabric = Fabric(self.cluster, self.sizes.num_ranks)
        gathers_s = [
            fabric.all_gather_s(count * num_bytes, *axes)
            for count, _, axes in shares
            if count
            for num_bytes in (GRADIENT_BYTES, DTYPE_BYTES[self.dtype])
        ]
        exchanged = (1 - compute.overlap) * sum(gathers_s)
        if d > 1:
            exchanged += held.num_parameters * compute.exchange_s
        return own + exchanged
