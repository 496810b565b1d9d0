"""The methods that are compared, each as a fair engineer would write it."""

from __future__ import annotations

from hybridengine.bench.methods.gather_all import Full, ModelParallel
from hybridengine.bench.methods.megatron_core import MegatronCore
from hybridengine.bench.methods.method import Method
from hybridengine.bench.methods.micro_dp import MicroDp
from hybridengine.bench.methods.per_tensor import PerTensor
from hybridengine.bench.spec import MethodName

METHODS: dict[MethodName, type[Method]] = {
    MethodName.MICRO_DP: MicroDp,
    MethodName.MODEL_PARALLEL: ModelParallel,
    MethodName.FULL: Full,
    MethodName.PER_TENSOR: PerTensor,
    MethodName.MEGATRON_CORE: MegatronCore,
}
