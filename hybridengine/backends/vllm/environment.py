"""Environment variables that a rank's process needs before vLLM is imported. Imports nothing."""

ON_CPU = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "TORCHDYNAMO_DISABLE": "1",
    "PYTHONWARNINGS": "ignore::UserWarning,ignore::FutureWarning",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    "THP_MEM_ALLOC_ENABLE": "1",
    "GOMP_SPINCOUNT": "30000",
    "MALLOC_MMAP_THRESHOLD_": str(32 * 2**20),  # the largest that glibc takes
    "MALLOC_TRIM_THRESHOLD_": str(2**40),
}
"""Ranks share the cores, so that threads are not bound; compiling costs more than it saves on a CPU.

torch asks for huge pages where it takes much memory at once: weights that come and go would otherwise spend most of a
switch in page faults. The C heap keeps what is freed, up to the next switch: activations would otherwise come from the
system, page by page, in every pass (docs/decisions/0016).

Threads that wait for the next parallel piece sleep after half a millisecond, longer than most pieces are apart: the
controller has the same cores.

Megatron-core and vLLM warn on every rank that there is no GPU software; that is expected here.
"""

ON_GPU = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "CUDA_DEVICE_MAX_CONNECTIONS": "1",
}
"""Megatron-core wants one connection, so that communication is enqueued in order."""
