"""Rules, defaults and bytes of engines in FP8."""

from __future__ import annotations

from pathlib import Path

import pytest

from hybridengine.config import RunConfig, load_config, model_shape
from hybridengine.config.algorithm import CorrectionSection
from hybridengine.errors import ConfigError
from hybridengine.planning.budget import budget_of, switched_weights
from hybridengine.reshard.vllm import vllm_layout
from hybridengine.training.dry_run import cost_of, layout_lines

CONFIGS = Path(__file__).parents[2] / "configs"
FP8 = "rollout.quantization=fp8"


def loaded(name: str, *overrides: str) -> RunConfig:
    return load_config(CONFIGS / f"{name}.yaml", overrides, dry_run=True)


@pytest.mark.parametrize(
    ("name", "overrides", "parts"),
    [
        (
            "moe",
            [FP8],
            ["fp8 is for dense models, and qwen3_moe has experts", "set rollout.quantization=none"],
        ),
        (
            "fp8-rollouts",
            ["actor.lora.rank=8"],
            ["fp8 with actor.lora.rank=8 is not supported", "set rollout.quantization=none"],
        ),
        ("fp8-rollouts", ["model.dtype=float32"], ["needs a model in bfloat16", "model.dtype=float32; set"]),
        (
            "fp8-rollouts",
            ["actor.generate=1-2"],
            [
                "128 rows, and actor.generate with t_g=2 leaves 64 of num_kv_heads·head_dim",
                "choose another t_g",
            ],
        ),
        (
            "grpo",
            ["rollout.training_weights=regathered"],
            ["regathered is not read with rollout.quantization=none", "leave it out"],
        ),
        (
            "async-grpo",
            [
                FP8,
                "model.dtype=bfloat16",
                "model.build.family=qwen3",
                "model.build.head_dim=64",
                "model.build.ffn_hidden_size=384",
                "generation.actor=true",
                "actor.parallel=1-2-1",
                "reference.parallel=1-2-1",
                "actor.generate=1-2",
            ],
            ["actor.generate with t_g=2 leaves 192 of ffn_hidden_size on a rank"],
        ),
        ("fp8-rollouts", ["rollout.quantization=int8"], ["rollout.quantization", "fp8"]),
    ],
)
def test_what_an_engine_in_fp8_cannot_be(name: str, overrides: list[str], parts: list[str]) -> None:
    with pytest.raises(ConfigError) as found:
        loaded(name, *overrides)
    for part in parts:
        assert part in str(found.value)


def test_a_server_keeps_training_weights_and_no_routes() -> None:
    """It samples before its optimizer has master weights, and its clients' rows have no routes."""
    served = ["model.path=absent", "model.hf_config=llama3-70b", "model.dtype=bfloat16", FP8]
    load_config(CONFIGS / "serve.yaml", served, dry_run=True, serves=True)
    for more, expected in {
        "rollout.training_weights=regathered": "a server samples before it has one; leave it out",
        "rollout.routing_replay=true": "is not read by a server, whose rows have no routes",
    }.items():
        with pytest.raises(ConfigError, match=expected):
            load_config(CONFIGS / "serve.yaml", [*served, more], dry_run=True, serves=True)


def test_rollouts_are_corrected_unless_the_algorithm_says_otherwise() -> None:
    assert loaded("fp8-rollouts").algorithm.correction == CorrectionSection()
    assert CorrectionSection().name == "token_tis"
    assert (
        loaded(
            "fp8-rollouts", "rollout.quantization=none", "rollout.training_weights=kept"
        ).algorithm.correction
        is None
    )
    assert loaded("fp8-rollouts", "algorithm.correction=null").algorithm.correction is None
    icepop = loaded("fp8-rollouts", "algorithm.correction.name=icepop", "algorithm.correction.high=5")
    assert icepop.algorithm.correction == CorrectionSection(name="icepop", high=5)
    large = load_config(
        CONFIGS / "llama3-70b-16nodes.yaml",
        [FP8, "algorithm.name=online_dpo", "rollout.samples_per_prompt=2"],
        dry_run=True,
    )
    assert large.algorithm.uncorrected and large.algorithm.correction is None


@pytest.mark.parametrize("training_weights", ["kept", "regathered"])
def test_bytes_of_70b(training_weights: str) -> None:
    """A byte for each element of a layer's matrices, and four for each block of 128 x 128; the rest as it was."""
    plain = loaded("llama3-70b-16nodes")
    config = loaded("llama3-70b-16nodes", FP8, f"rollout.training_weights={training_weights}")
    shape = model_shape(config)
    layer = (
        2 * shape.hidden_size * (shape.q_size + shape.kv_size) + 3 * shape.hidden_size * shape.ffn_hidden_size
    )
    matrices = shape.num_layers * layer // config.actor.generate.tp_size
    engine = 2 * vllm_layout(shape, config.generation_grid).shard(0).num_elements
    cost = cost_of(config)
    found = switched_weights(config, cost)
    assert found.gen_shard == engine - matrices + 4 * matrices // 128**2
    train = cost.train_shard_bytes_max
    if training_weights == "kept":
        assert found.redundant == train and found.received_back == 0
    else:
        assert found.redundant == 0 and found.received_back == train * 3 // 4  # d = 4 replicas
    before, after = (
        budget_of(one, "main", cost, on_gpus=True).device_bytes["generation"] for one in (plain, config)
    )
    assert before - after == engine - found.gen_shard - found.redundant
    (line,) = (line for line in layout_lines(config, cost) if line.startswith("switch: "))
    assert "8.5 GiB in fp8)" in line
