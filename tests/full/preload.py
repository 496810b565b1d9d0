"""Imported once by the process that forks ranks: imports of the gloo lane's ranks, and vLLM."""

from __future__ import annotations

import contextlib
import importlib
import io
import warnings

from hybridengine.importing import nothing_collected

with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()), nothing_collected():
    warnings.simplefilter("ignore")

    import pydantic.v1  # noqa: F401  # imported by Ray in every worker otherwise
    import vllm.entrypoints.launchers.cli_args
    import vllm.model_executor.layers.quantization.online.base
    import vllm.v1.attention.backends.cpu_attn
    import vllm.v1.core.sched.scheduler
    import vllm.v1.engine.llm_engine
    import vllm.v1.worker.cpu_worker  # noqa: F401
    from vllm import LLM, SamplingParams  # noqa: F401
    from vllm.engine.arg_utils import EngineArgs
    from vllm.logger import configure_logging_if_needed
    from vllm.platforms import current_platform

    import hybridengine.drivers.advantages  # noqa: F401
    import workers.actor
    import workers.compute
    import workers.critic
    import workers.prompts
    import workers.reference
    import workers.reward  # noqa: F401
    from hybridengine.families.registry import FAMILIES

    for family in FAMILIES:
        importlib.import_module(f"vllm.model_executor.models.{family}")

    # An engine configures all loggers, which takes a while where there are thousands: once, for all.
    configure_logging_if_needed(EngineArgs().create_logging_config())

    # An engine replaces Triton's kernels where there is no Triton, which takes it longer than all else: once, for all.
    current_platform.register_triton_kernel_overrides()
    type(current_platform).register_triton_kernel_overrides = lambda platform: None  # type: ignore
