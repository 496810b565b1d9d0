"""Constants of vLLM that are needed before it is imported, such as environment variables. Has no imports of its own."""

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
"""Ranks share the cores, so threads are not pinned; compilation costs more than it saves on a CPU.

Megatron-core and vLLM warn on every rank about missing GPU software, which is expected here.
"""
CACHE_BLOCK_TOKENS = 128
"""Tokens of a block of vLLM's KV cache on a CPU."""
ON_GPU = _EVERYWHERE | {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}
"""Megatron-core requires one connection, so that communication is enqueued in order."""


def rank_environment(*, use_gpus: bool, own_logs: bool = True) -> dict[str, str]:
    """Return the environment variables of a rank on a GPU or on a CPU; unless `own_logs`, vLLM logs as ranks do."""
    return (ON_GPU if use_gpus else ON_CPU) | ({} if own_logs else {"VLLM_CONFIGURE_LOGGING": "0"})
