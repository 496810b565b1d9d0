"""Memory of generative judges by phase, against parameters counted one by one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from hybridengine.config import RunConfig, load_config
from hybridengine.models.presets import resolve_model
from hybridengine.planning.budget import GRAPH_BYTES, Budget, budget_of
from hybridengine.planning.engine_memory import forward_bytes
from hybridengine.reshard.vllm import vllm_layout
from hybridengine.topology.generation import GenerationGrid
from hybridengine.topology.grid import Grid
from hybridengine.topology.sizes import GenSizes, TrainSizes
from hybridengine.training.dry_run import cost_of, memory_lines

SEVEN_B = Path(__file__).parents[2] / "configs/qwen2.5-7b-8gpu.yaml"
GIB = 2**30
CACHE = 8 * GIB
JUDGE = (
    "reward.kind=judge",
    "reward.path=/models/judge",
    "reward.hf_config=qwen2.5-7b",
    "reward.judge.text='{response}'",
    "reward.judge.regex='([0-9])'",
    "reward.judge.engine=1-2",
    f"reward.judge.kv_cache_bytes={CACHE}",
)
OWN_POOL = ("cluster.pools.scoring={roles: [reward], ranks_per_node: [2]}",)


def loaded(overrides: Sequence[str]) -> RunConfig:
    return load_config(SEVEN_B, overrides, dry_run=True)


def budget(overrides: Sequence[str], pool: str = "main", *, on_gpus: bool = True) -> Budget:
    config = loaded(overrides)
    return budget_of(config, pool, cost_of(config), on_gpus=on_gpus)


def counted_weights() -> int:
    """Return the bytes of the judge's fuller rank at 1-2 in bfloat16."""
    grid = GenerationGrid(Grid(TrainSizes(1, 2, 1)), GenSizes(1, 2))
    layout = vllm_layout(resolve_model("qwen2.5-7b"), grid)
    return 2 * max(layout.shard(rank).num_elements for rank in range(2))


def computing() -> int:
    return forward_bytes(resolve_model("qwen2.5-7b"), GenSizes(1, 2), "bfloat16", 4096 + 256, 64)


def test_a_judge_beside_the_actor_holds_its_weights_and_wakes_with_a_cache() -> None:
    plain, judged = budget(()).device_bytes, budget(JUDGE).device_bytes
    weights = counted_weights()
    for phase in ("training step", "switch", "generation", "save"):
        assert judged[phase] - plain[phase] == weights
    assert judged["start"] == plain["start"]  # the actor's engine is built before it
    assert judged["judging"] == plain["save"] + weights + CACHE + computing()
    assert judged["load"] == max(plain["load"] + weights, judged["judging"])


def test_an_offloaded_judge_waits_in_host_memory() -> None:
    plain, judged = budget(()), budget((*JUDGE, "reward.judge.offload=true"))
    for phase in ("training step", "switch", "generation", "save"):
        assert judged.device_bytes[phase] == plain.device_bytes[phase]
    assert judged.device_bytes["judging"] == budget(JUDGE).device_bytes["judging"]
    assert judged.host_bytes - plain.host_bytes == counted_weights()
    assert judged.offloaded_bytes - plain.offloaded_bytes == counted_weights()


def test_a_judge_alone_keeps_its_cache_and_captures_graphs() -> None:
    on_gpus, on_cpu = (
        budget((*JUDGE, *OWN_POOL), "scoring", on_gpus=device).device_bytes for device in (True, False)
    )
    held = counted_weights() + CACHE
    assert on_cpu == {
        "load": held + computing(),
        "training step": held,
        "save": held,
        "judging": held + computing(),
    }
    fixed = budget((*JUDGE, *OWN_POOL, "rollout.cuda_graphs=false"), "scoring").device_bytes
    assert {on_gpus[phase] - fixed[phase] for phase in on_gpus} == {GRAPH_BYTES}


def test_of_two_judges_one_is_awake_at_a_time() -> None:
    def terms(*names: str) -> list[str]:
        judges = []
        for name, size in zip(names, (CACHE, 2 * CACHE), strict=True):
            judge = f"{{text: '{{response}}', regex: '([0-9])', engine: 1-2, kv_cache_bytes: {size}}}"
            scorer = f"{{kind: judge, path: /models/{name}, hf_config: qwen2.5-7b, judge: {judge}}}"
            judges.append(f"reward.terms.{name}={scorer}")
        return judges

    plain, two = budget(()).device_bytes, budget(terms("helpful", "brief")).device_bytes
    assert two["judging"] == plain["save"] + 2 * counted_weights() + 2 * CACHE + computing()
    assert two["generation"] - plain["generation"] == 2 * counted_weights()
    # The second one's cache is what makes its phase the fullest; both weights are held in any phase.
    remedies = budget(terms("helpful", "brief")).remedies("judging")
    assert "reward.terms.helpful.judge.offload=true" in remedies


@pytest.mark.parametrize("phase", ["judging", "generation"])
def test_remedies_of_a_judge_lower_the_phase(phase: str) -> None:
    """The judge's cache matters while it draws, its weights while others compute."""
    before = budget(JUDGE)
    setting = {
        "judging": f"reward.judge.kv_cache_bytes={CACHE // 2}",
        "generation": "reward.judge.offload=true",
    }[phase]
    remedies = before.remedies(phase)
    assert setting.split("=")[0] in remedies
    assert budget((*JUDGE, setting)).device_bytes[phase] < before.device_bytes[phase]


def test_a_dry_run_shows_each_judge() -> None:
    config = loaded((*JUDGE, *OWN_POOL))
    text = "\n".join(memory_lines(config, cost_of(config)))
    own = text[text.index("memory per rank of pool scoring") :]
    assert "reward.judge" in own and "KV cache 8.0 GiB" in own
    assert "judging" in own and "engine" not in own.split("\n")[1]
