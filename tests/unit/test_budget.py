"""Memory of a rank by phase, against shards that are counted parameter by parameter, and devices that are too small."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from hybridengine.backends.megatron.checkpoint import HELD_BYTES
from hybridengine.backends.megatron.offload import PART_BYTES
from hybridengine.config import RunConfig, holder_shape, load_config, model_holders, model_shape
from hybridengine.families.family import NameSet
from hybridengine.planning.budget import (
    GPU_BYTES,
    GRAPH_BYTES,
    Budget,
    budget_of,
)
from hybridengine.planning.engine_memory import engine_activations
from hybridengine.planning.switch.switch_cost import SwitchPricer
from hybridengine.rehearsal.planned import planned_peaks
from hybridengine.reshard.megatron import megatron_layout
from hybridengine.reshard.vllm import vllm_layout
from hybridengine.topology.links import NodeMap
from hybridengine.topology.sizes import GenSizes
from hybridengine.training.dry_run import cost_of

ROOT = Path(__file__).parents[2]
GIB = 2**30
SHIPPED = ["qwen2.5-7b-8gpu", "llama3-70b-16nodes", "async-70b"]
SEVEN_B = ROOT / "configs/qwen2.5-7b-8gpu.yaml"


def budgets(config: RunConfig, *, on_gpus: bool = True) -> dict[str, Budget]:
    cost = cost_of(config)
    return {pool: budget_of(config, pool, cost, on_gpus=on_gpus) for pool in config.pools}


def loaded(*overrides: str) -> RunConfig:
    return load_config(SEVEN_B, overrides, dry_run=True)


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_configurations_fit_80_gb(name: str) -> None:
    config = load_config(ROOT / f"configs/{name}.yaml", dry_run=True)
    assert config.captures_graphs
    for budget in budgets(config).values():
        assert 40 * 10**9 < budget.device_bytes[budget.peak] < 80 * 10**9


def test_a_server_has_room_for_the_adapters_of_its_clients(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the device those that an engine has loaded, in host memory the models that wait for the next request."""
    # The checkpoint that the configuration names may be in the folder of the repository.
    monkeypatch.chdir(tmp_path)

    def served(*overrides: str) -> RunConfig:
        shape = ["model.hf_config=llama3-70b", "cluster.ranks_per_node=[8]", "model.dtype=bfloat16"]
        own = ["actor.parallel=1-8-1", "actor.generate=1-4", *overrides]
        return load_config(ROOT / "configs/serve.yaml", [*shape, *own], dry_run=True, serves=True)

    full = served("actor.lora.rank=16")
    few, many = (budgets(served("actor.lora.rank=16", f"serve.max_adapters={n}"))["main"] for n in (1, 5))
    engine = vllm_layout(model_shape(full), full.generation_grid).shard(0).parameters
    own = sum(one.num_elements for one in engine if ".lora_" in one.name)
    trained = megatron_layout(model_shape(full), full.grid("actor"), NameSet.LOCAL).shard(0).parameters
    changing = sum(one.num_elements for one in trained if ".lora_" in one.name)
    for phase, num_bytes in few.device_bytes.items():
        assert many.device_bytes[phase] - num_bytes == 4 * 2 * own
    assert many.host_bytes - few.host_bytes == 4 * (2 + 4 + 12) * changing


def counted(config: RunConfig) -> tuple[dict[str, int], int]:
    """Return the weight bytes of the fullest rank by model, and of the engine, summed over all parameters."""
    train = {}
    for holder in model_holders(config):
        layout = megatron_layout(holder_shape(config, holder), holder.grid, NameSet.LOCAL)
        train[holder.name] = 2 * max(layout.shard(rank).num_elements for rank in range(holder.grid.num_ranks))
    engine = vllm_layout(model_shape(config), config.generation_grid)
    return train, 2 * max(engine.shard(rank).num_elements for rank in range(config.num_ranks))


def test_phases_are_sums_of_what_is_there() -> None:
    config = loaded()
    weights, engine = counted(config)
    actor, critic, reference = (weights[name] for name in ("actor", "critic", "reference"))
    fixed = GPU_BYTES + GRAPH_BYTES
    computing = 24 * GIB + engine_activations(config, model_shape(config), GenSizes(1, 2))
    found = {phase: num_bytes - fixed for phase, num_bytes in budgets(config)["main"].device_bytes.items()}
    assert list(found) == ["start", "load", "training step", "switch", "generation", "save"]
    assert found["start"] == actor + engine + computing
    assert found["generation"] == critic + reference + engine + computing  # the optimizers are in host memory
    # In bfloat16 a gradient has 4 bytes for each weight of 2, and d = 2 replicas share 12 bytes of state.
    assert found["save"] == pytest.approx(actor + critic + reference, rel=1e-6)
    # While the critic is built, its weights are there twice, and its gradients.
    assert found["load"] == pytest.approx(6 * actor + 2 * critic + 2 * critic, rel=1e-6)
    activations = found["training step"] - found["save"] - 5 * max(actor, critic)  # those of an update
    assert 0 < activations < 8 * GIB
    one_copy = critic + reference + max(actor, engine)
    assert one_copy <= found["switch"] <= one_copy + 2 * config.actor.bucket_bytes


def test_graphs_cost_what_they_hold_alone() -> None:
    """With graphs, the engine's weights come and go bucket by bucket, as those of an eager engine do."""
    graphs, eager = (
        budgets(loaded(f"rollout.cuda_graphs={value}"))["main"].device_bytes for value in ("true", "false")
    )
    for phase in graphs:
        assert graphs[phase] - eager[phase] == GRAPH_BYTES, phase


def test_a_save_counts_in_host_memory() -> None:
    with_saves, without = (
        budgets(loaded(f"checkpoint.every={every}"))["main"].host_bytes for every in (10, 0)
    )
    weights, _ = counted(loaded())
    copies = HELD_BYTES // 2 * (weights["actor"] + weights["critic"])  # 4 bytes a parameter, of 7
    assert with_saves - without == copies + 2 * PART_BYTES
    assert without - GIB == pytest.approx(3 * (weights["actor"] + weights["critic"]), rel=1e-6)


@pytest.mark.parametrize("phase", ["start", "load", "training step", "switch", "generation", "save"])
def test_a_budget_that_does_not_fit_says_what_would_help(phase: str) -> None:
    """Three changes, and settings among them lower the phase, the first one most."""
    overrides = ["actor.offload=none", "critic.offload=none", "actor.recompute=none", "actor.parallel=1-4-2"]
    budget = budgets(loaded(*overrides))["main"]
    needed = budget.device_bytes[phase]
    what, remedies = (
        budget.shortage(phase, needed, "rank 3", needed - 3 * 10**9, "the GPU"),
        budget.remedies(phase),
    )
    assert what.startswith(f"phase {phase!r} of pool main needs ")
    assert "on rank 3, and the GPU has" in what and what.endswith(": 3.0 GB are missing")
    assert len(remedies.split(", ")) == 3, remedies
    settings = re.findall(r"set (\S+=\S+?)(?:,|$)", remedies)
    settings += [f"{key}={int(value) // 2}" for key, value in re.findall(r"lower (\S+)=(\d+)", remedies)]
    for setting in settings:
        changed = budgets(loaded(*overrides, setting))["main"].device_bytes
        assert changed[phase] < needed, setting
    assert settings or phase == "load"


def test_remedies_name_the_model_that_needs_most() -> None:
    """With micro-batches of the critic alone that are large, those of others are of no use."""
    config = loaded("critic.micro_batch_tokens=65536", "cluster.device=cuda")
    remedies = budgets(config)["main"].remedies("training step")
    assert "critic.micro_batch_tokens" in remedies
    assert "actor.micro_batch_tokens" not in remedies and "reference.micro_batch_tokens" not in remedies


def test_weights_in_fp8_are_there_while_the_model_trains() -> None:
    plain, used = (budgets(loaded(f"actor.fp8={fp8}"))["main"].device_bytes for fp8 in ("none", "blockwise"))
    shape = model_shape(loaded())
    attention = 2 * shape.hidden_size * (shape.q_size + shape.kv_size)
    matrices = shape.num_layers * (attention + 3 * shape.hidden_size * shape.ffn_hidden_size) // 4
    more = {phase: used[phase] - plain[phase] for phase in used}
    assert more["training step"] == more["save"] == pytest.approx(2 * matrices, rel=1e-3)
    assert more["start"] == more["load"] == more["switch"] == more["generation"] == 0


def test_a_cpu_has_no_context_and_no_graphs() -> None:
    config = loaded("cluster.device=cpu")
    on_cpu, on_gpu = budgets(config, on_gpus=False)["main"], budgets(config)["main"]
    assert on_gpu.device_bytes["save"] - on_cpu.device_bytes["save"] == GPU_BYTES
    assert "offload" in on_gpu.remedies("save")
    assert not any("offload" in on_cpu.remedies(phase) for phase in on_cpu.device_bytes)


def test_an_offloaded_reference_is_in_host_memory() -> None:
    kept, offloaded = (budgets(loaded(f"reference.offload={where}"))["main"] for where in ("none", "weights"))
    reference = counted(loaded())[0]["reference"]
    assert offloaded.host_bytes - kept.host_bytes == reference
    lower = {phase: kept.device_bytes[phase] - offloaded.device_bytes[phase] for phase in kept.device_bytes}
    assert lower == {"start": 0, "load": 0} | dict.fromkeys(
        ("training step", "switch", "generation", "save"), reference
    )
    before, after = (planned_peaks(loaded(f"reference.offload={where}")) for where in ("none", "weights"))
    passes = {call: num_bytes - after[call] for call, num_bytes in before.items()}
    assert passes == dict.fromkeys(before, reference) | {"reference.compute_log_probs": 0}


def test_deepseek_v3_fits_80_gb() -> None:
    """On 64 nodes of 8: 256 experts of three matrices in the last 58 of 61 layers, shared among 16·32 ranks."""
    config = load_config(ROOT / "configs/deepseek-v3.yaml", dry_run=True)
    shape = model_shape(config)
    pricer = SwitchPricer(shape, config.model.dtype, config.actor.bucket_bytes, groups_experts=True)
    cost = pricer.price(config.generation_grid, NodeMap(tuple(config.cluster.ranks_per_node)))
    budget = budget_of(config, "main", cost, on_gpus=True)
    assert max(budget.device_bytes.values()) < 80 * 10**9
    layer = 256 * 3 * 7168 * 2048 / 32
    assert 4 * layer < cost.train_shard_bytes_max / 2 < 5 * layer  # a stage has at most four layers
    assert cost.gen_shard_bytes_max == pytest.approx(2 * shape.num_parameters / 32, rel=0.05)


def test_a_mixture_of_235b_fits_80_gb() -> None:
    """Its switch is priced with grouped experts, which have the same bytes: the run's own plan takes half a minute."""
    config = load_config(ROOT / "configs/qwen3-235b.yaml", dry_run=True)
    pricer = SwitchPricer(
        model_shape(config), config.model.dtype, config.actor.bucket_bytes, groups_experts=True
    )
    cost = pricer.price(config.generation_grid, NodeMap(tuple(config.cluster.ranks_per_node)))
    budget = budget_of(config, "main", cost, on_gpus=True)
    assert max(budget.device_bytes.values()) < 80 * 10**9
    shape = model_shape(config)
    experts = 94 * 128 * 3 * 4096 * 1536
    others = shape.num_parameters - experts
    # The first stage has 12 of the layers, with a quarter of attention and embedding and an eighth of the experts.
    layer = experts / 94 / 8 + 2 * 4096 * (8192 + 512) / 4 + 128 * 4096
    assert cost.train_shard_bytes_max == pytest.approx(2 * (12 * layer + 151_936 * 4096 / 4), rel=0.002)
    assert cost.gen_shard_bytes_max == pytest.approx(2 * (experts + others) / 8, rel=0.01)
    workspace = (
        8192 * 2 * 8 * (4096 + 4096)
    )  # of vLLM's experts: two buffers with a row for each expert of a token
    assert engine_activations(config, shape, GenSizes(1, 8, 8)) > workspace
    assert budget.device_bytes["generation"] - cost.gen_shard_bytes_max - 5 * GIB > workspace
    replayed = config.model_copy(
        update={
            "rollout": config.rollout.model_copy(update={"routing_replay": not config.rollout.routing_replay})
        }
    )
    # A token has 94 layers of a key and a value of 128 in bfloat16 at t_g = 8, and of eight experts in a byte each.
    tokens = config.rollout.kv_cache_bytes // (94 * 2 * 128 * 2)
    other = budget_of(replayed, "main", cost, on_gpus=True).device_bytes
    for phase, added in {"start": 1, "generation": 1, "switch": 0, "training step": 0}.items():
        found = abs(other[phase] - budget.device_bytes[phase])
        assert found == added * tokens * 94 * 8, phase
