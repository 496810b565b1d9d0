"""Specification of `hybridengine reshard bench`: model, pairs of layouts and methods."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

from hybridengine.errors import ConfigError, TopologyError, raise_all
from hybridengine.machine import PROCESS_BYTES
from hybridengine.models.shapes import ModelShape
from hybridengine.planning.search.layouts import check_generates, check_layouts
from hybridengine.topology.links import NodeMap
from hybridengine.topology.sizes import GenSizes, TrainSizes


class MethodName(str, Enum):
    """Methods that can be compared, in the order in which they run."""

    MICRO_DP = "micro-dp"
    MODEL_PARALLEL = "model-parallel"
    FULL = "full"
    PER_TENSOR = "per-tensor"
    MEGATRON_CORE = "megatron-core"


OF_MIXTURES = (MethodName.MICRO_DP, MethodName.MEGATRON_CORE)
"""Methods that know experts, whose shards are divided otherwise than those of other weights."""


def methods_for(shape: ModelShape) -> tuple[MethodName, ...]:
    """Return all methods that can move the weights of a model."""
    return tuple(MethodName) if shape.experts is None else OF_MIXTURES


VERIFYING = "micro-dp (verify: {})"
"""Label of micro-dp if its receivers check received data always, or never, to measure the cost of verification."""

DEFAULT_MODEL = ModelShape(
    family="llama",
    num_layers=8,
    hidden_size=512,
    ffn_hidden_size=1536,
    num_heads=8,
    num_kv_heads=4,
    head_dim=64,
    vocab_size=8192,
    max_positions=2048,
)
"""Llama model of 33.6 million parameters, 134 MB in float32, for up to t = 4 and 2, 4 or 8 stages."""


@dataclass(frozen=True)
class LayoutPair:
    """Training sizes (p, t, d) and generation sizes (p_g, t_g)."""

    train: TrainSizes
    gen: GenSizes

    @classmethod
    def parse(cls, text: str) -> LayoutPair:
        """Return the pair written as TRAIN:GEN, e.g. "2-4-1:1-2"; raise TopologyError for another form."""
        train, separator, gen = text.partition(":")
        if not separator:
            raise TopologyError(f'{text!r} is not a pair of layouts; write TRAIN:GEN such as "2-4-1:1-2"')
        return cls(TrainSizes.parse(train), GenSizes.parse(gen))

    def __str__(self) -> str:
        return f"{self.train} -> {self.gen}"


@dataclass(frozen=True)
class BenchSpec:
    """Settings of one benchmark.

    Raises ConfigError for a model that does not generate, or methods that cannot move it; TopologyError for impossible
    layouts.
    """

    shape: ModelShape
    pairs: tuple[LayoutPair, ...]
    methods: tuple[MethodName, ...] = tuple(MethodName)
    dtype: str = "float32"
    repetitions: int = 7
    """Number of counted repetitions, after an uncounted one for warm-up."""
    bucket_bytes: int = 16 * 2**20
    timeout_s: float = 120.0
    """Time limit for one switch to generation and back."""
    num_nodes: int = 1
    """Number of nodes, each with equally many ranks."""

    def __post_init__(self) -> None:
        check_generates(self.shape)
        if others := [method.value for method in self.methods if method not in methods_for(self.shape)]:
            raise ConfigError(
                f"methods {', '.join(others)} gather weights that have the same parts on all ranks of a group, and the"
                f" experts of {self.shape.family} have others; choose from"
                f" {', '.join(method.value for method in OF_MIXTURES)}"
            )
        raise_all(self._layout_problems(), TopologyError)

    @property
    def weight_bytes(self) -> int:
        return self.shape.weight_bytes(self.dtype)

    @property
    def contestants(self) -> dict[str, tuple[MethodName, str]]:
        """Method and verification time of each contestant, by label, in the order of a repetition."""
        named = {method.value: (method, "first") for method in self.methods}
        if MethodName.MICRO_DP in self.methods:
            named |= {
                VERIFYING.format(verify): (MethodName.MICRO_DP, verify) for verify in ("always", "never")
            }
        return named

    def nodes(self, pair: LayoutPair) -> NodeMap:
        return NodeMap.uniform(pair.train.num_ranks, pair.train.num_ranks // self.num_nodes)

    def needed_bytes(self, pair: LayoutPair) -> int:
        """Return the approximate peak memory of a node's ranks: permanent weights and buffers, and the largest method."""
        whole, shards = self.weight_bytes, pair.train.model_parallel_size
        if self.shape.experts is not None:  # as if other weights had as many shards as experts
            shards = pair.train.pp_size * pair.train.expert_parts * pair.train.expert_shards
        train, gen = whole / shards, whole / pair.gen.num_ranks
        domain = max(1, shards // pair.gen.num_ranks)
        resident = train * (2 + domain) + (gen if MethodName.MEGATRON_CORE in self.methods else 0)
        # gloo's all-gather keeps a copy of the gathered data.
        moving = gen + max(train * domain, 4 * min(self.bucket_bytes, whole))
        return int(max(self.nodes(pair).ranks_per_node) * (resident + moving + PROCESS_BYTES))

    def _layout_problems(self) -> Iterable[str]:
        for pair in self.pairs:
            try:
                check_layouts(self.shape, pair.train, pair.gen)
            except TopologyError as error:
                yield f"{pair}: {error}"
                continue
            if pair.train.virtual_stages > 1:
                yield f"{pair}: methods are compared with one block of layers per stage; leave v out"
            if (num_ranks := pair.train.num_ranks) % self.num_nodes:
                yield (
                    f"{pair}: --nodes {self.num_nodes} does not divide its {num_ranks} ranks, and nodes have equally"
                    " many; choose a divisor"
                )
            if MethodName.MEGATRON_CORE in self.methods:
                # Its target is a Megatron model of the generation sizes.
                yield from (
                    f"{pair}: megatron-core: {problem}, or leave this method out with --methods"
                    for problem in self.shape.tp_problems(pair.gen.tp_size, "t_g")
                )
