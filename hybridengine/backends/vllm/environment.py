"""Environment variables that a rank's process needs before vLLM is imported. Imports nothing."""

_EVERYWHERE = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}
ON_CPU = _EVERYWHERE | {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "TORCHDYNAMO_DISABLE": "1",
    "PYTHONWARNINGS": "ignore::UserWarning,ignore::FutureWarning",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
}
"""Ranks share the cores, so threads are not bound; compiling costs more than it saves on a CPU.

Megatron-core and vLLM warn on every rank that there is no GPU software; that is expected here.
"""

ON_GPU = _EVERYWHERE | {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}
"""Megatron-core wants one connection, so that communication is enqueued in order."""


def rank_environment(*, use_gpus: bool) -> dict[str, str]:
    """Return the variables of a rank on a GPU, or of one on a CPU."""
    return dict(ON_GPU if use_gpus else ON_CPU)
