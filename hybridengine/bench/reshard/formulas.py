"""Expected bytes per rank of each method by formula, for weights that divide evenly.

Source: HybridFlow, arXiv 2409.19256, table 2, for micro-dp, model-parallel and full. per-tensor receives as much as
model-parallel. per-tensor and megatron-core hold training and generation weights at once; no formula covers their
buffers.
"""

from __future__ import annotations

from fractions import Fraction

from hybridengine.bench.reshard.spec import LayoutPair, MethodName

FIGURES = ("received_bytes", "peak_weight_bytes", "redundant_bytes")


def formula(method: MethodName, pair: LayoutPair, weight_bytes: int) -> dict[str, float | None]:
    """Return the bytes of one rank by formula for a model of `weight_bytes` (M); None for figures without a formula."""
    if method is MethodName.MICRO_DP and not pair.gen.nests_in(pair.train):
        return dict.fromkeys(FIGURES)
    model_parallel, ranks = pair.train.model_parallel_size, pair.train.num_ranks
    shard = Fraction(1, model_parallel)
    gen_shard = Fraction(1, pair.gen.num_ranks)
    rest_of_model = 1 - shard
    fractions: dict[MethodName, tuple[Fraction | int | None, Fraction | int, Fraction | int]] = {
        MethodName.MICRO_DP: ((Fraction(model_parallel, pair.gen.num_ranks) - 1) * shard, gen_shard, 0),
        MethodName.MODEL_PARALLEL: (rest_of_model, 1, shard),
        MethodName.FULL: (1 - Fraction(1, ranks), 1, Fraction(1, ranks)),
        MethodName.PER_TENSOR: (rest_of_model, shard + gen_shard, shard),
        MethodName.MEGATRON_CORE: (None, shard + gen_shard, shard),
    }
    values = (None if part is None else float(part * weight_bytes) for part in fractions[method])
    return dict(zip(FIGURES, values, strict=True))


def ratio(measured: float, expected: float | None) -> float | None:
    """Return measured / expected; 1 if both are 0, None if the ratio is undefined."""
    if expected is None:
        return None
    if expected == 0:
        return 1.0 if measured == 0 else None
    return measured / expected
