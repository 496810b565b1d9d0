"""Imported once by the processes that fork ranks and test workers: Megatron-core, vLLM, and what ranks import of the
tests. Test modules are left to pytest, which rewrites their assertions."""

from __future__ import annotations

import contextlib
import importlib
import io
import warnings
from pathlib import Path

from hybridengine.importing import nothing_collected

# Without collection, ranks neither search the objects imported here nor copy their pages.
with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()), nothing_collected():
    warnings.simplefilter("ignore")  # Megatron-core warns six times that there is no GPU

    import pydantic.v1  # noqa: F401  # imported by Ray in every worker otherwise
    import pytest  # noqa: F401  # a rank imports the module of the function that it runs, and that imports pytest
    import safetensors.torch  # noqa: F401
    import transformers
    import vllm.entrypoints.launchers.cli_args
    import vllm.model_executor.layers.quantization.online.base
    import vllm.v1.attention.backends.cpu_attn
    import vllm.v1.core.sched.scheduler
    import vllm.v1.engine.llm_engine
    import vllm.v1.worker.cpu_worker  # noqa: F401
    from vllm import LLM, SamplingParams  # noqa: F401
    from vllm.engine.arg_utils import EngineArgs
    from vllm.logger import configure_logging_if_needed
    from vllm.model_executor.models.registry import _TEXT_GENERATION_MODELS
    from vllm.platforms import current_platform

    import hybridengine.drivers.advantages  # noqa: F401
    import workers.actor
    import workers.compute
    import workers.critic
    import workers.prompts
    import workers.reference
    import workers.reward  # noqa: F401
    from hybridengine.families.registry import FAMILIES

    for family in FAMILIES.values():
        getattr(transformers, family.architectures[0])  # which imports its module
        if family.has_vision:  # its module needs torchvision
            importlib.import_module("hybridengine.backends.vllm.seeing")
            continue
        module, _ = _TEXT_GENERATION_MODELS[family.architectures[0]]
        importlib.import_module(f"vllm.model_executor.models.{module}")

    for folder in ("tests.gloo", "tests.full.engines"):
        for file in Path(__file__).parents[1].joinpath(*folder.split(".")).glob("*.py"):
            if not file.stem.startswith(("test_", "conftest")):
                importlib.import_module(f"{folder}.{file.stem}")

    # An engine configures all loggers, which takes a while where there are thousands: once, for all.
    configure_logging_if_needed(EngineArgs().create_logging_config())

    # An engine replaces Triton's kernels where there is no Triton, which takes it longer than all else: once, for all.
    current_platform.register_triton_kernel_overrides()
    type(current_platform).register_triton_kernel_overrides = lambda platform: None  # type: ignore
