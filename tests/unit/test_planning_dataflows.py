"""The calls that the planner finds by tracing algorithms, compared with iterations written by hand."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from hybridengine.config import load_config
from hybridengine.config.algorithm import ALGORITHMS, Algorithm, algorithm_class
from hybridengine.drivers.async_grpo import AsyncGrpo
from hybridengine.errors import ConfigError
from hybridengine.planning.costs.dataflows import HELPERS, PHASES, calls_of
from hybridengine.planning.costs.lengths import Lengths
from hybridengine.planning.costs.workload import workload_of

BEGIN = """
0 prompts.training_prompts    -        prompts
1 actor.switch_to_generate    -        rows
2 actor.generate_sequences    0        rows
"""
EXPECTED = {
    "ppo": """
3 actor.switch_to_train       -        rows
4 actor.compute_log_probs     0,2      rows
5 reference.compute_log_probs 0,2      rows
6 critic.compute_values       0,2      rows
7 reward.compute_scores       0,2      rows
8 compute.map                 0,2,4-7  rows
9 critic.update               0,2,4-8  rows
10 actor.update               0,2,4-8  rows
11 compute.measure            0,2,4-8  rows
""",
    "rloo": """
3 actor.switch_to_train       -        rows
4 actor.compute_log_probs     0,2      rows
5 reference.compute_log_probs 0,2      rows
6 reward.compute_scores       0,2      rows
7 compute.map                 0,2,4-6  rows
8 actor.update                0,2,4-7  rows
9 compute.measure             0,2,4-7  rows
""",
    "grpo_from_engine": """
3 actor.switch_to_train       -        rows
4 reference.compute_log_probs 0,2      rows
5 reward.compute_scores       0,2      rows
6 compute.map                 0,2,4,5  rows
7 actor.update                0,2,4-6  rows
8 compute.measure             0,2,4-6  rows
""",
    "remax": """
3 actor.generate_sequences    0        prompts
4 actor.switch_to_train       -        rows
5 actor.compute_log_probs     0,2      rows
6 reference.compute_log_probs 0,2      rows
7 reward.compute_scores       0,2      rows
8 reward.compute_scores       0,3      prompts
9 compute.map                 0,2,5-8  rows
10 actor.update               0,2,5-9  rows
11 compute.measure            0,2,5-9  rows
""",
    # The controller waits for the mean cost, call 10, before the advantages and all that follows.
    "safe_rlhf": """
3 actor.switch_to_train         -        rows
4 cost.compute_scores           0,2      rows
5 actor.compute_log_probs       0,2      rows
6 reference.compute_log_probs   0,2      rows
7 critic.compute_values         0,2      rows
8 cost_critic.compute_values    0,2      rows
9 reward.compute_scores         0,2      rows
10 compute.measure              0,2,4-9  rows
11 compute.map                  0,2,4-10 rows
12 critic.update                0,2,4-11 rows
13 cost_critic.update           0,2,4-11 rows
14 actor.update                 0,2,4-11 rows
15 compute.measure              0,2,4-11 rows
""",
    "online_dpo": """
3 actor.switch_to_train       -        rows
4 actor.compute_log_probs     0,2      rows
5 reference.compute_log_probs 0,2      rows
6 reward.compute_scores       0,2      rows
7 actor.update_preferences    0,2,4-6  pairs
8 compute.measure             0,2,4-6  rows
""",
}
ASYNCHRONOUS = """
0 generation.take             -        rows
1 reward.compute_scores       0        rows
2 actor.compute_log_probs     0        rows
3 reference.compute_log_probs 0        rows
4 compute.map                 0-3      rows
5 actor.update                0-4      rows
6 compute.measure             0-4      rows
7 generation.update_weights   5,6      rows
"""
"""Engines generate meanwhile; they receive new weights after the update and the statistics."""
ROWS = {"rows": 15, "prompts": 5, "pairs": 10}
EXPECTED |= dict.fromkeys(("grpo", "reinforce_plus_plus"), EXPECTED["rloo"])
EXPECTED["distill"] = EXPECTED["rloo"].replace("reference", "teacher")
ASYNCHRONOUS_PPO = """
0 generation.take             -        rows
1 reward.compute_scores       0        rows
2 actor.compute_log_probs     0        rows
3 reference.compute_log_probs 0        rows
4 critic.compute_values       0        rows
5 compute.map                 0-4      rows
6 critic.update               0-5      rows
7 actor.update                0-5      rows
8 compute.measure             0-5      rows
9 generation.update_weights   6-8      rows
"""
EXPECTED = {name: BEGIN.rstrip() + text for name, text in EXPECTED.items()}
OFFLINE = {
    "sft": """
0 prompts.training_prompts    -        prompts
1 actor.update_supervised     0        prompts
2 compute.measure             0        prompts
""",
    "dpo": """
0 prompts.training_prompts    -        pairs
1 reference.compute_log_probs 0        pairs
2 actor.update_preferences    0,1      pairs
3 compute.measure             0,1      pairs
""",
}
"""Responses of the data: nothing is generated, scored or switched."""
EXPECTED |= {"async_grpo": ASYNCHRONOUS, "async_ppo": ASYNCHRONOUS_PPO} | OFFLINE


def parsed(text: str) -> list[tuple[str, tuple[int, ...], int]]:
    found = []
    for number, line in enumerate(text.split("\n\n")[0].strip().splitlines()):
        place, call, reads, count = line.split()
        assert int(place) == number
        spans = [span.split("-") for span in reads.split(",") if reads != "-"]
        numbers = [place for span in spans for place in range(int(span[0]), int(span[-1]) + 1)]
        found.append((call, tuple(numbers), ROWS[count]))
    return found


@pytest.mark.parametrize("name", ALGORITHMS)
def test_the_calls_of_an_algorithm(name: str) -> None:
    algorithm = algorithm_class(name)()
    calls = calls_of(algorithm, 5, 3)
    expected = parsed(EXPECTED[name].rstrip())
    assert [(str(call), call.reads, call.num_rows) for call in calls] == expected
    assert {str(call) for call in calls} <= set(PHASES)
    assert {call.role for call in calls} - set(HELPERS) == set(algorithm.roles)


def test_engines_on_ranks_of_their_own_are_asked_for_rows_and_given_weights() -> None:
    calls = calls_of(AsyncGrpo(), 5, 3)
    assert [call.phase for call in (calls[0], calls[-1])] == ["generate", "update_weights"]


def test_the_workloads_of_an_asynchronous_run(tmp_path: Path) -> None:
    """The trainers make all calls but the first and the last; a synchronous run of the same models begins with three."""
    file = tmp_path / "run.yaml"
    file.write_text(
        """
model: {build: {num_layers: 4, num_heads: 4, num_kv_heads: 2}}
cluster: {pools: {engines: {roles: [generation]}}}
data: {batch_size: 5, task: {}}
rollout: {samples_per_prompt: 3}
algorithm: {name: "async_grpo"}
"""
    )
    work = workload_of(load_config(file), Lengths.of("constant:8", 64))
    found, trained, synchronous = (
        [(str(call), call.reads, call.num_rows) for call in one.calls]
        for one in (work, work.without_generation(), work.synchronous())
    )
    assert found[0][0] == "generation.take"
    assert [call for call, _, _ in trained] == [call for call, _, _ in found[1:-1]]
    assert [reads for _, reads, _ in trained] == [(), (), (), (0, 1, 2), (0, 1, 2, 3), (0, 1, 2, 3)]
    assert [call for call, _, _ in synchronous] == [
        "actor.switch_to_generate",
        "actor.generate_sequences",
        "actor.switch_to_train",
        *(call for call, _, _ in trained),
    ]
    assert [reads for _, reads, _ in synchronous[3:]] == [
        (1, *(read + 3 for read in reads)) for _, reads, _ in trained
    ]


class Waiting(Algorithm):
    """Waits for columns and for metrics, and computes with both."""

    roles = ("actor", "reward")

    def step(self, roles, sampling, state):
        prompts = roles.prompts.training_prompts(sampling.prompts, sampling.step)
        scores = roles.reward.compute_scores(prompts).get("scores", "dropped")
        mean = scores["scores"][~scores["dropped"]].mean()
        metrics = roles.compute.measure(prompts, "a.b:c").get()[0]
        state["mean"] = mean + metrics["any"]
        roles.actor.update(prompts[: len(prompts)])
        return {}


def test_what_the_controller_waits_for_comes_before_its_next_calls() -> None:
    *_, measure, update = calls_of(Waiting(), 5, 3)
    assert (measure.reads, update.reads) == ((0, 1), (0, 1, 2))


class Unplanned(Algorithm):
    """Makes a call that the planner does not know."""

    roles = ("actor",)

    def step(self, roles, sampling, state):
        return roles.actor.dream()


class Mistaken(Unplanned):
    """Calls a role that it does not have."""

    def step(self, roles, sampling, state):
        return roles.critic.update(sampling.prompts)


@pytest.mark.parametrize(("kind", "words"), [(Unplanned, "actor.dream is not one of"), (Mistaken, "critic")])
def test_a_step_that_cannot_be_traced(kind: type[Algorithm], words: str) -> None:
    with pytest.raises(ConfigError, match="the planner cannot trace its step") as error:
        calls_of(kind(), 5, 3)
    assert words in str(error.value)


def test_algorithms_are_traced_without_torch_and_ray() -> None:
    code = """
import sys
sys.modules.update(dict.fromkeys(("torch", "tensordict", "ray", "vllm", "megatron"), None))
from hybridengine.config.algorithm import ALGORITHMS, algorithm_class
from hybridengine.planning.costs.dataflows import calls_of
print(sum(len(calls_of(algorithm_class(name)(), 5, 3)) for name in ALGORITHMS))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(done.stdout) == sum(len(parsed(text.rstrip())) for text in EXPECTED.values())
