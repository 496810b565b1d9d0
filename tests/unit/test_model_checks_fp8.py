"""FP8 is refused before ranks start, where no rank could compute with it."""

from __future__ import annotations

import pytest

from hybridengine.config import load_config
from hybridengine.errors import ConfigError


def test_fp8_needs_gpus_and_bfloat16() -> None:
    with pytest.raises(ConfigError) as caught:
        load_config("configs/arithmetic.yaml", ["actor.fp8=blockwise", "cluster.device=cpu"], dry_run=True)
    assert "actor.fp8=blockwise needs GPUs, and cluster.device=cpu; set actor.fp8=none" in str(caught.value)
    assert "needs weights in bfloat16, and model.dtype=float32; set model.dtype=bfloat16" in str(caught.value)
    config = load_config("configs/qwen2.5-7b-8gpu.yaml", ["actor.fp8=blockwise"], dry_run=True)
    assert config.actor.fp8 == "blockwise"
