"""Low-rank adapters in shapes, layouts, plans, configurations and budgets."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from hybridengine.checkpoints.conversion import shape_of_role
from hybridengine.config import load_config, model_holders
from hybridengine.families.adapters import MODULES, is_of_adapter
from hybridengine.families.sizes import AdapterSizes
from hybridengine.models.presets import PRESETS
from hybridengine.models.shapes import ModelShape
from hybridengine.planning.costs.dataflows import calls_of
from hybridengine.planning.costs.memory import model_memory
from hybridengine.reshard.compiler import compile_plan
from hybridengine.reshard.domains import domains
from hybridengine.reshard.megatron import megatron_layout
from hybridengine.reshard.vllm import vllm_layout
from hybridengine.topology.generation import GenerationGrid
from hybridengine.topology.grid import Grid
from hybridengine.topology.sizes import GenSizes, TrainSizes
from tests.unit.numpy_shards import small_shape
from tests.unit.plan_cases import EXPERT_CASES, FEW, Case
from tests.unit.test_config import problems_of

ADAPTERS = AdapterSizes(16, 32.0, MODULES)
ROOT = Path(__file__).parents[2]


def test_adapters_of_a_real_model_are_those_of_its_linear_layers() -> None:
    """Llama-3-70B: 80 layers of q, k, v and o (8192 to 8192, 1024, 1024, 8192) and gate, up and down (8192 and 28672)."""
    shape = PRESETS["llama3-70b"].shape().with_adapters(ADAPTERS)
    factors_a = 8192 + 8192 + 8192 + 28672  # one of q, k and v, and one of gate and up
    factors_b = (8192 + 2 * 1024) + 8192 + 2 * 28672 + 8192
    assert shape.num_trained == 80 * 16 * (factors_a + factors_b)
    assert shape.num_parameters == 70_553_706_496 + shape.num_trained
    names = set(shape.peft_tensors)
    prefix = "base_model.model.model.layers.79."
    projections = [f"self_attn.{one}_proj" for one in "qkvo"] + [
        f"mlp.{one}_proj" for one in ("gate", "up", "down")
    ]
    assert len(names) == 80 * 14
    assert {f"{prefix}{one}.lora_{factor}.weight" for one in projections for factor in "AB"} < names


@pytest.mark.parametrize("case", FEW + EXPERT_CASES, ids=str)
def test_a_switch_carries_adapters_that_engines_have(case: Case) -> None:
    """A dense engine fills all slots and gives all back; that of a mixture has none, and the trainer keeps its own."""
    shape = case.shape.with_adapters(ADAPTERS)
    grid = Grid(TrainSizes.parse(case.train), case.order)
    trained = megatron_layout(shape, grid)
    engine = vllm_layout(shape, GenerationGrid(grid, GenSizes.parse(case.gen)))
    held = {tensor for tensor in engine.holders if is_of_adapter(tensor)}
    assert held == (set() if shape.experts else set(shape.adapter_tensors))
    for ranks in domains(trained, engine):
        plan = compile_plan(trained, engine, ranks)
        for rank in ranks:
            given = {name for bucket in plan.buckets for name in bucket.sources.get(rank, ())}
            own = {one.name for one in trained.shard(rank).parameters if is_of_adapter(one.name)}
            assert own & given == (set() if shape.experts else own)


@pytest.mark.parametrize("name", PRESETS)
def test_checkpoints_describe_a_shape_with_all_of_its_parts(name: str) -> None:
    shape = PRESETS[name].shape().with_adapters(ADAPTERS)
    assert shape_of_role(json.loads(json.dumps({"shape": asdict(shape)}))) == shape


def test_adapters_adapt_the_layers_that_are_named() -> None:
    shape = ModelShape("llama", 2, 64, 96, 8, 4, 16, 131, 128)
    some = shape.with_adapters(replace(ADAPTERS, modules=("linear_proj",)))
    names = {tensor.partition("layers.")[2] for tensor in some.adapter_tensors}
    assert names == {f"{layer}.self_attn.o_proj.lora_{factor}.weight" for layer in (0, 1) for factor in "AB"}


def test_memory_of_training_is_that_of_the_adapters() -> None:
    sizes, dtype = TrainSizes(1, 2, 4), "bfloat16"
    base = ModelShape("llama", 2, 64, 96, 8, 4, 16, 131, 128)
    shape = base.with_adapters(ADAPTERS)
    whole, memory = model_memory(base, sizes, dtype), model_memory(shape, sizes, dtype)
    # A of q, k, v and of gate, up whole, B halved; A of o and of down halved, B whole. q: 128 rows, k and v: 64 each.
    a_rank = 64 + 128 // 2 + 64 + 96 // 2
    b_rank = (128 + 64 + 64) // 2 + 64 + 2 * 96 // 2 + 64
    trained = 2 * 16 * (a_rank + b_rank)
    assert memory.gradients_bytes == 4 * trained
    assert memory.optimizer_bytes == 12 * trained / 4
    assert memory.weights_bytes == whole.weights_bytes + 2 * trained
    assert (memory.trained_bytes, whole.trained_bytes) == (2 * trained, whole.weights_bytes)
    assert memory.kept_bytes == 0


def test_a_mixture_keeps_the_weights_that_it_merges() -> None:
    shape = next(case.shape for case in EXPERT_CASES)
    memory = model_memory(shape.with_adapters(ADAPTERS), TrainSizes(1, 1, 1), "float32")
    tensors = shape.tensors.items()
    matrices = sum(size[0] * size[1] for name, size in tensors if "layers" in name and len(size) == 2)
    routers = sum(size[0] * size[1] for name, size in tensors if name.endswith(".gate.weight"))
    assert memory.kept_bytes == 4 * (matrices - routers)


def test_the_actor_is_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    config = load_config("configs/lora.yaml", dry_run=True)
    assert [holder.name for holder in model_holders(config)] == ["actor"]
    assert "reference" in {holder.name for holder in model_holders(config.without_adapters())}
    calls = [str(call) for call in calls_of(config.algorithm, 4, 2, has_adapters=True)]
    assert "actor.compute_base_log_probs" in calls
    assert not [call for call in calls if call.startswith("reference.")]


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["actor.lora.rank=12"], "actor.lora.rank=12 must be 0, 1, 8, 16, 32, 64, 128, 256, 320 or 512"),
        (["actor.lora.alpha=0"], "actor.lora.alpha=0"),
        (["actor.lora.modules=[q_proj]"], 'actor.lora.modules[0]="q_proj" must be'),
        (["actor.lora.modules=[]"], "actor.lora.modules=[] must name at least one layer, and each once"),
        (
            ["actor.lora.modules=[linear_fc1, linear_fc1]"],
            "actor.lora.modules=[linear_fc1, linear_fc1] must name at least one layer, and each once",
        ),
        (
            ["actor.lora.rank=0", "actor.lora.path=adapters"],
            "actor.lora.path=adapters is not read with actor.lora.rank=0, which trains all weights",
        ),
        (["actor.lora.dropout=0.1"], "unknown key actor.lora.dropout"),
        (["actor.lora.path=/no/adapters"], "actor.lora.path: /no/adapters is not a whole PEFT folder"),
    ],
)
def test_wrong_settings_are_refused(overrides: list[str], expected: str, from_checkpoint: Path) -> None:
    problems = problems_of(from_checkpoint, "actor.lora.rank=8", *overrides)
    assert len(problems) == 1
    assert problems[0].startswith(expected)


def test_adapters_are_of_weights_that_no_warmup_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    (problem,) = problems_of(Path("configs/lora.yaml"), "actor.lora.path=adapters", dry_run=True)
    assert problem == (
        "actor.lora.path=adapters has adapters of weights that warmup would change; leave one of them out"
    )


def test_the_reference_has_no_pool_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    pool = "cluster.pools={other: {roles: [reference], ranks_per_node: [1]}}"
    problems = problems_of(Path("configs/lora.yaml"), pool, dry_run=True)
    assert any("is the actor without its adapters; leave it out" in problem for problem in problems)


def test_sharded_experts_have_no_adapters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    changes = ("actor.lora.rank=8", "actor.parallel=1-2-2", "actor.generate=1-2")
    (problem,) = problems_of(Path("configs/moe.yaml"), *changes, dry_run=True)
    assert "adapts experts, and actor.parallel=1-2-2 shards them; set etp=1" in problem
    attention = "actor.lora.modules=[linear_qkv, linear_proj]"
    assert load_config("configs/moe.yaml", [*changes, attention], dry_run=True).actor.lora.rank == 8


def test_experts_have_no_adapters_on_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    changes = ("actor.lora.rank=8", "cluster.device=cuda")
    (problem,) = problems_of(Path("configs/moe.yaml"), *changes, dry_run=True)
    assert "adapts experts, which Transformer Engine groups on GPUs" in problem
    attention = "actor.lora.modules=[linear_qkv, linear_proj]"
    assert load_config("configs/moe.yaml", [*changes, attention], dry_run=True).actor.lora.rank == 8


def test_latent_attention_has_adapters_of_its_four_projections() -> None:
    base = small_shape("deepseek_v3")
    shape = base.with_adapters(AdapterSizes(8, 16.0, ("linear_qkv",)))
    prefix, layer = "base_model.model.", "model.layers.1.self_attn."
    found = {name.removeprefix(prefix + layer) for name in shape.peft_tensors if layer in name}
    projections = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj")
    assert found == {f"{name}.lora_{factor}.weight" for name in projections for factor in "AB"}
    for name in projections:
        rows, columns = base.tensors[f"{layer}{name}.weight"]
        factors = [shape.adapter_tensors[f"{layer}{name}.lora_{factor}.weight"] for factor in "AB"]
        assert factors == [(8, columns), (rows, 8)]
