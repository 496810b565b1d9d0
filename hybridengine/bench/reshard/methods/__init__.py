"""Compared methods, each implemented as efficiently as its design allows."""

from __future__ import annotations

from hybridengine.bench.reshard.methods.gather_all import Full, ModelParallel
from hybridengine.bench.reshard.methods.megatron_core import MegatronCore
from hybridengine.bench.reshard.methods.method import Method
from hybridengine.bench.reshard.methods.micro_dp import MicroDp
from hybridengine.bench.reshard.methods.per_tensor import PerTensor
from hybridengine.bench.reshard.spec import MethodName

METHODS: dict[MethodName, type[Method]] = {
    MethodName.MICRO_DP: MicroDp,
    MethodName.MODEL_PARALLEL: ModelParallel,
    MethodName.FULL: Full,
    MethodName.PER_TENSOR: PerTensor,
    MethodName.MEGATRON_CORE: MegatronCore,
}
