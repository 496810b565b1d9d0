"""verl's configuration in this project's terms: what it becomes, and the refusal of everything that is not supported."""

# pyright: reportMissingImports=false
from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from verl.trainer.config import CheckpointConfig
from verl.workers.config import HFModelConfig, McoreEngineConfig, McoreOptimizerConfig, RolloutConfig
from verl.workers.config.engine import EngineRouterReplayConfig, QATEngineConfig
from verl.workers.config.model import MtpConfig

from hybridengine.config.role_sections import MegatronSettings
from hybridengine.errors import CheckpointError, ConfigError, DataError, StorageError, TopologyError
from hybridengine.integrations.verl import settings
from hybridengine.integrations.verl.engine import LanguageModelEngine
from hybridengine.integrations.verl.replica import HybridReplica
from hybridengine.integrations.verl.rollout import HybridRollout, stop_token_ids
from hybridengine.models.shapes import ModelShape
from hybridengine.topology.grid import Grid
from hybridengine.topology.sizes import TrainSizes
from hybridengine.weights.hybrid_engine import Mode
from tests.gloo.tiny_models import write_model
from tests.verl import rows

ENGINE_REFUSALS: dict[str, tuple[dict[str, Any], str]] = {
    "experts": ({"expert_model_parallel_size": 2}, "expert_model_parallel_size=2 is not supported; set 1"),
    "dynamic context": (
        {"dynamic_context_parallel": True, "max_seqlen_per_dp_cp_rank": 8},
        "dynamic_context_parallel=True is not supported; set False",
    ),
    "offload": ({"param_offload": True}, "param_offload=True is not supported; set False"),
    "checkpoints": (
        {"use_dist_checkpointing": True},
        "use_dist_checkpointing=True is not supported; set False",
    ),
    "fsdp": ({"use_megatron_fsdp": True}, "use_megatron_fsdp=True is not supported; set False"),
    "fused": ({"use_fused_kernels": True}, "use_fused_kernels=True is not supported; set False"),
    "ddp": (
        {"override_ddp_config": {"overlap_grad_reduce": True}},
        "override_ddp_config={'overlap_grad_reduce': True} is not supported; set {}",
    ),
    "selective": (
        {
            "override_transformer_config": {
                "recompute_granularity": "selective",
                "recompute_modules": ["layernorm"],
            }
        },
        "override_transformer_config.recompute_modules=['layernorm'] is not supported; choose mlp, or",
    ),
    "dropout": (
        {"override_transformer_config": {"attention_dropout": 0.1}},
        "override_transformer_config.attention_dropout is not supported; remove it, or choose of recompute_granul",
    ),
    "model config": (
        {"override_mcore_model_config": {"num_layers": 1}},
        "override_mcore_model_config.num_layers is not supported; remove it, or choose of dtype",
    ),
    "qat": ({"qat": QATEngineConfig(enable=True)}, "qat.enable=True is not supported; set False"),
    "replay": (
        {"router_replay": EngineRouterReplayConfig(mode="R2")},
        "router_replay.mode=R2 is for mixtures of experts; set disabled",
    ),
    "half": ({"dtype": "float16"}, "dtype=float16 is not supported; choose one of float32, bfloat16"),
    "double": (
        {"override_mcore_model_config": {"dtype": "float64"}},
        "dtype=float64 is not supported; choose one of float32, bfloat16",
    ),
}
MODEL_REFUSALS: dict[str, tuple[dict[str, Any], str]] = {
    "lora": ({"lora_rank": 8}, "model.lora_rank is not supported; set 0, which trains all weights"),
    "megatron's lora": ({"lora": {"rank": 8}}, "model.lora_rank is not supported; set 0"),
    "adapter": (
        {"lora_adapter_path": "adapter"},
        "model.lora_adapter_path=adapter is not supported; merge the adapter into the model",
    ),
    "config": (
        {"override_config": {"rope_theta": 1e6}},
        "model.override_config.rope_theta is not supported; remove it, or choose of attn_implementation",
    ),
    "switched off": (
        {"override_config": {"tie_word_embeddings": False}},
        "model.override_config.tie_word_embeddings is not supported; remove it, or choose of attn_implementation",
    ),
    "mtp": ({"mtp": MtpConfig(enable=True)}, "model.mtp.enable=True is not supported; set False"),
}
OPTIMIZER_REFUSALS: dict[str, tuple[dict[str, Any], str]] = {
    "sgd": ({"optimizer": "sgd"}, "optim.optimizer=sgd is not supported; set adam"),
    "first rate": ({"lr_warmup_init": 1e-6}, "optim.lr_warmup_init=1e-06 is not supported; set 0.0"),
    "decay": (
        {"weight_decay_incr_style": "cosine"},
        "optim.weight_decay_incr_style=cosine is not supported; set constant",
    ),
    "precision": (
        {"use_precision_aware_optimizer": True},
        "optim.use_precision_aware_optimizer=True is not supported; set False",
    ),
    "override": (
        {"override_optimizer_config": {"eps": 1e-6}},
        "optim.override_optimizer_config={'eps': 1e-06} is not supported; set None",
    ),
    "schedule": (
        {"lr_decay_style": "inverse_square_root"},
        "optim.lr_decay_style=inverse_square_root is not supported; choose one of constant, linear, cosine",
    ),
}
ROLLOUT_REFUSALS: dict[str, tuple[dict[str, Any], str]] = {
    "replicas": ({"data_parallel_size": 2}, "rollout.data_parallel_size=2 is not supported; set 1"),
    "experts": ({"expert_parallel_size": 2}, "rollout.expert_parallel_size=2 is not supported; set 1"),
    "penalty": ({"repetition_penalty": 1.1}, "rollout.repetition_penalty=1.1 is not supported; set 1.0"),
    "quantization": ({"quantization": "fp8"}, "rollout.quantization=fp8 is not supported; set None"),
    "replay": (
        {"enable_rollout_routing_replay": True},
        "rollout.enable_rollout_routing_replay=True is not supported; set False",
    ),
    "log-probs": (
        {"logprobs_mode": "raw_logprobs"},
        "rollout.logprobs_mode=raw_logprobs is not supported; set processed_logprobs",
    ),
    "type": (
        {"dtype": "bfloat16"},
        "rollout.dtype=bfloat16 differs from the actor's float32, whose weights it generates with; set"
        " rollout.dtype=float32",
    ),
    "key": (
        {"engine_kwargs": {"hybridengine": {"kv_bytes": 1}}},
        "rollout.engine_kwargs.hybridengine.kv_bytes is not supported; remove it, or choose of kv_cache_bytes",
    ),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    write_model(folder, "qwen3", num_hidden_layers=2)
    return folder


def model_config(folder: Path, **given: Any) -> HFModelConfig:
    return HFModelConfig(path=str(folder), load_tokenizer=False, **given)


def rollout_config(**given: Any) -> RolloutConfig:
    defaults = {"name": "hybridengine", "dtype": "float32", "prompt_length": 12, "response_length": 8}
    return RolloutConfig(**defaults | given)


def plan_of(folder: Path, sizes: str = "1-2-1", **given: Any) -> settings.RolloutPlan:
    shape = ModelShape.from_folder(folder)
    return settings.rollout_plan(rollout_config(**given), Grid(TrainSizes.parse(sizes)), shape, "float32")


def test_verls_defaults_are_supported(folder: Path):
    transformer = {
        "recompute_granularity": None,
        "recompute_modules": ["core_attn"],
        "attention_backend": "flash",
    }
    engine = McoreEngineConfig(override_transformer_config=transformer)
    override = {"attn_implementation": "eager", "model_config": {}}
    settings.check_engine(engine, model_config(folder, override_config=override))
    assert settings.dtype_of(engine) == "bfloat16"
    assert not engine.sequence_parallel, "verl turns it off at t = 1"
    assert settings.megatron_settings(engine) == MegatronSettings(sequence_parallel=False)
    wide = McoreEngineConfig(tensor_model_parallel_size=2)
    assert settings.megatron_settings(wide) == MegatronSettings()
    for modules, recompute in ((["core_attn"], "none"), (["core_attn", "mlp"], "selective")):
        given = {"recompute_granularity": "selective", "recompute_modules": modules}
        selective = McoreEngineConfig(override_transformer_config=given)
        assert settings.megatron_settings(selective).recompute == recompute
    full = McoreEngineConfig(
        override_transformer_config={"recompute_granularity": "full"}, sequence_parallel=False
    )
    assert settings.megatron_settings(full) == MegatronSettings(recompute="full", sequence_parallel=False)


def test_context_ranks_and_virtual_stages_are_verls():
    engine = McoreEngineConfig(
        pipeline_model_parallel_size=2, context_parallel_size=2, virtual_pipeline_model_parallel_size=3
    )
    assert str(settings.train_grid(engine, 8).sizes) == "2-1-2 c=2 v=3"
    with pytest.raises(ConfigError, match="6 ranks are not a multiple of pipeline_model_parallel_size=2 x"):
        settings.train_grid(engine, 6)


@pytest.mark.parametrize("case", ENGINE_REFUSALS)
def test_engine_settings_that_would_change_results_are_refused(case: str, folder: Path):
    given, message = ENGINE_REFUSALS[case]
    with pytest.raises(ConfigError) as raised:
        settings.check_engine(McoreEngineConfig(**given), model_config(folder))
    assert str(raised.value).startswith(f"megatron.{message}")


@pytest.mark.parametrize("case", MODEL_REFUSALS)
def test_model_settings_that_would_change_results_are_refused(case: str, folder: Path):
    given, message = MODEL_REFUSALS[case]
    with pytest.raises(ConfigError) as raised:
        settings.check_engine(McoreEngineConfig(), model_config(folder, **given))
    assert str(raised.value).startswith(message)


def test_all_refusals_are_reported_at_once(folder: Path):
    with pytest.raises(ConfigError) as raised:
        settings.check_engine(
            McoreEngineConfig(param_offload=True, expert_model_parallel_size=2),
            model_config(folder, lora_rank=4),
        )
    assert [problem.split(" ")[0] for problem in raised.value.problems] == [
        "megatron.expert_model_parallel_size=2",
        "megatron.param_offload=True",
        "model.lora_rank",
    ]


def test_the_replicas_follow_from_the_number_of_ranks():
    engine = McoreEngineConfig(pipeline_model_parallel_size=2, tensor_model_parallel_size=3)
    assert settings.train_grid(engine, 24).sizes == TrainSizes(2, 3, 4)
    for ranks in (3, 8):
        with pytest.raises(ConfigError) as raised:
            settings.train_grid(engine, ranks)
        assert str(raised.value) == (
            f"{ranks} ranks are not a multiple of pipeline_model_parallel_size=2 x tensor_model_parallel_size=3"
            " x context_parallel_size=1; choose sizes whose product divides the number of ranks"
        )


@pytest.mark.parametrize("case", OPTIMIZER_REFUSALS)
def test_optimizer_settings_that_would_change_results_are_refused(case: str):
    given, message = OPTIMIZER_REFUSALS[case]
    with pytest.raises(ConfigError) as raised:
        settings.optimizer_of(McoreOptimizerConfig(**given))
    assert str(raised.value) == message


@pytest.mark.parametrize(
    ("given", "warmup", "steps"),
    [
        ({"total_training_steps": 40}, 0, 40),
        ({"total_training_steps": 40, "lr_warmup_steps_ratio": 0.15}, 6, 40),
        ({"total_training_steps": 40, "lr_warmup_steps_ratio": 0.15, "lr_decay_steps": 20}, 3, 20),
        ({"total_training_steps": 40, "lr_warmup_steps_ratio": 0.15, "lr_warmup_steps": 5}, 5, 40),
        # As in verl, where 0 steps leave the choice to the ratio.
        ({"total_training_steps": 40, "lr_warmup_steps_ratio": 0.15, "lr_warmup_steps": 0}, 6, 40),
        ({"total_training_steps": 40, "lr_warmup_steps_ratio": 0.15, "lr_warmup_steps": None}, 6, 40),
    ],
)
def test_the_schedule_of_verls_optimizer(given: dict[str, Any], warmup: int, steps: int):
    config = McoreOptimizerConfig(
        lr=3e-4,
        min_lr=1e-5,
        weight_decay=0.03,
        clip_grad=0.5,
        betas=(0.8, 0.97),
        lr_decay_style="cosine",
        **given,
    )
    section, found = settings.optimizer_of(config)
    assert (section.warmup_steps, found) == (warmup, steps)
    assert (section.lr, section.min_lr, section.schedule) == (3e-4, 1e-5, "cosine")
    assert (section.weight_decay, section.clip_grad, section.betas) == (0.03, 0.5, (0.8, 0.97))
    assert section.eps == 1e-8


@pytest.mark.parametrize("case", ROLLOUT_REFUSALS)
def test_rollout_settings_that_would_change_results_are_refused(case: str, folder: Path):
    given, message = ROLLOUT_REFUSALS[case]
    with pytest.raises(ConfigError) as raised:
        plan_of(folder, **given)
    assert str(raised.value) == message


def test_an_engine_of_a_size_that_does_not_divide_the_ranks_is_refused(folder: Path):
    with pytest.raises(TopologyError) as raised:
        plan_of(folder, "1-2-2", tensor_model_parallel_size=3)
    assert "= 3 ranks do not divide the 4 ranks of training 1-2-2; choose" in str(raised.value)


def test_the_plan_of_a_rollout(folder: Path):
    plan = plan_of(folder, tensor_model_parallel_size=1, max_num_seqs=9, seed=5)
    assert (plan.generation.num_replicas, plan.bucket_bytes % 2**20) == (2, 0)
    assert (plan.engine.max_model_tokens, plan.engine.max_sequences, plan.engine.seed) == (12 + 8, 9, 5)
    assert plan.engine.kv_cache_bytes == settings.CPU_KV_CACHE_BYTES
    own = {"engine_kwargs": {"hybridengine": {"kv_cache_bytes": 2**20}}, "max_model_len": 64}
    plan = plan_of(folder, **own)
    assert (plan.engine.kv_cache_bytes, plan.engine.max_model_tokens) == (2**20, 64)


def test_the_cache_gets_what_weights_leave_of_a_gpu(folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (0, 2**30))
    num_bytes = (folder / "model.safetensors").stat().st_size  # its header is a few KiB
    plan = plan_of(folder, tensor_model_parallel_size=2, gpu_memory_utilization=0.5)
    assert plan.engine.kv_cache_bytes == pytest.approx(2**29 - num_bytes / 2, abs=8192)
    with pytest.raises(ConfigError) as raised:
        plan_of(folder, tensor_model_parallel_size=2, gpu_memory_utilization=1e-6)
    assert str(raised.value) == (
        "rollout.gpu_memory_utilization=1e-06 of 1 GiB is less than a rank's weights, 0.0 GiB; raise it, or choose a"
        " larger tensor_model_parallel_size"
    )


def test_a_checkpoint_without_weights_or_optimizer_is_refused():
    settings.check_checkpoint(CheckpointConfig(save_contents=["model", "optimizer", "hf_model"]))
    with pytest.raises(ConfigError) as raised:
        settings.check_checkpoint(CheckpointConfig(load_contents=["model"]))
    assert str(raised.value) == (
        "checkpoint.load_contents=['model'] is not supported; name model and optimizer"
    )


def test_a_rollout_without_an_actor_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(LanguageModelEngine, "trained", None)
    with pytest.raises(ConfigError) as raised:
        HybridRollout(rollout_config(), SimpleNamespace(), None)
    assert str(raised.value) == (
        "actor_rollout_ref.rollout.name=hybridengine needs an actor of this project on the same ranks; export"
        " VERL_ENGINE_VENDOR=hybridengine in the shell that starts Ray, and set model_engine=megatron"
    )


def test_requests_are_refused_while_the_ranks_train():
    training: Any = SimpleNamespace(hybrid=SimpleNamespace(mode=Mode.TRAINING))
    with pytest.raises(StorageError) as raised:
        HybridRollout.advance(training, [], 1)
    assert str(raised.value) == (
        "a request has come while the ranks train; verl's trainer.v1.trainer_mode must be sync, in which generation"
        " and training take turns"
    )


def test_tokens_that_end_a_response():
    def of(generation: Any, tokenizer: Any) -> tuple[int, ...]:
        return stop_token_ids(
            SimpleNamespace(
                generation_config=generation and SimpleNamespace(eos_token_id=generation),
                tokenizer=SimpleNamespace(eos_token_id=tokenizer),
            )
        )

    assert of([3, 5], 4) == (3, 5)
    assert of(3, 4) == (3,)
    assert of(None, 4) == (4,)
    assert of(None, None) == ()


def test_ranks_of_their_own_are_refused():
    replica: Any = None
    with pytest.raises(ConfigError) as raised:
        asyncio.run(HybridReplica.launch_servers(replica))
    assert str(raised.value) == (
        "rollout.name=hybridengine generates on the ranks of the actor alone, not on ranks of its own, such as those of"
        " a reward model, a teacher, or an asynchronous trainer; choose another rollout for these"
    )


@pytest.mark.parametrize(
    "name",
    ["distillation_use_topk", "distillation_only", "calculate_sum_pi_squared", "enable_routing_replay"],
)
def test_requests_of_a_batch_that_are_refused(name: str):
    engine: Any = None
    batch = rows.batch_of(rows.columns_of(0), **{name: True})
    with pytest.raises(DataError) as raised:
        LanguageModelEngine.forward_backward_batch(engine, batch, None)
    assert str(raised.value) == f"{name} is not supported by this engine; turn it off"


def test_checkpoints_elsewhere_are_refused():
    engine: Any = None
    with pytest.raises(CheckpointError) as raised:
        LanguageModelEngine.save_checkpoint(engine, "folder", "hdfs://folder")
    assert str(raised.value) == "hdfs://folder cannot be written to; set trainer.default_hdfs_dir=null"
