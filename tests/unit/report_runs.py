"""Invented folders of runs as training writes them: `python -m tests.unit.report_runs FOLDER` writes one to look at."""

from __future__ import annotations

import json
import math
import random
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

from hybridengine.report.timeline import Reading, Span, TimelineWriter

CALLS = {
    "actor.switch_to_generate": ("switch", 0.06),
    "actor.generate_sequences": ("generate", 1.9),
    "actor.switch_to_train": ("switch", 0.02),
    "actor.compute_log_probs": ("log-probs", 0.45),
    "reference.compute_log_probs": ("log-probs", 0.4),
    "critic.compute_values": ("values", 0.35),
    "reward.compute_scores": ("scores", 0.2),
    "critic.update": ("updates", 0.9),
    "actor.update": ("updates", 1.2),
}
"""Call -> phase and seconds, in the order of an iteration."""
TIME_KEYS = (
    "switch_to_generate", "generate", "switch_to_train", "log_probs", "ref_log_probs", "values", "scores",
    "update_critic", "update_actor",
)  # fmt: skip
EDGES = {
    "transfer/actor.generate_sequences->actor.compute_log_probs_bytes": 153_600,
    "transfer/actor.generate_sequences->reference.compute_log_probs_bytes": 153_600,
    "transfer/actor.generate_sequences->critic.compute_values_bytes": 51_200,
    "transfer/prompts.training_prompts->actor.generate_sequences_bytes": 6_144,
    "transfer/critic.compute_values->critic.update_bytes": 4_096,
    "transfer/actor.generate_sequences->reward.compute_scores_bytes": 0,
}
ASYNCHRONOUS: dict[str, float | int | None] = {
    "queue/complete": 96.0,
    "queue/unfinished": 40.0,
    "staleness/age_mean": 0.8125,
    "staleness/age_max": 2.0,
    "staleness/older_share": 0.0119,
    "idle/main_share": 0.121,
    "idle/engines.0_share": 0.2,
    "idle/engines.1_share": 0.4,
}
"""Metrics of an asynchronous step with two engines."""
CONFIG = "run: {name: made-up, steps: 60}\nactor: {parallel: 1-2-2, generate: 1-1}\ndata: {task: {}}\n"
HOSTILE = '<script>document.title = "taken"</script><img src=x onerror="document.title=1"> & $$x^2$$ \n \u202e </td>'
"""Text that a model may write and that a page must show unchanged."""


def write_run(
    folder: Path,
    num_steps: int = 60,
    num_ranks: int = 4,
    ranks_per_node: int = 2,
    extra: dict[str, float] | None = None,
) -> Path:
    """Write the folder of a run of PPO with evaluations; `extra` are more metrics of every step. Returns the folder."""
    chance = random.Random(7)
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "metrics.jsonl").open("w") as file:
        for row in metric_rows(chance, num_steps, extra or {}):
            file.write(json.dumps(row) + "\n")
    with closing(TimelineWriter(folder / "timeline.json")) as writer:
        for step in range(1, num_steps + 1):
            spans, readings = step_records(chance, step, num_ranks, ranks_per_node)
            writer.write(spans, readings)
    (folder / "samples").mkdir(exist_ok=True)
    for step in range(0, num_steps + 1, max(1, num_steps // 8)):
        samples = list(sample_rows(chance, step, num_steps))
        (folder / "samples" / f"step-{step}.jsonl").write_text(
            "".join(json.dumps(sample) + "\n" for sample in samples)
        )
    (folder / "config.yaml").write_text(CONFIG)
    return folder


def metric_rows(chance: random.Random, num_steps: int, extra: dict[str, float]) -> Iterator[dict[str, Any]]:
    """Yield the rows of metrics.jsonl, with an evaluation before training and at every tenth step."""
    yield {"step": 0, "eval/exact_match": 0.0625, "eval/score_mean": 0.0625}
    for step in range(1, num_steps + 1):
        learnt = 1 - math.exp(-3 * step / num_steps)
        seconds = {
            f"time/{key}_s": wanted * chance.uniform(0.9, 1.2)
            for key, (_, wanted) in zip(TIME_KEYS, CALLS.values(), strict=True)
        }
        whole = sum(seconds.values()) * 1.04
        row: dict[str, Any] = {
            "step": step,
            "reward/mean": 0.06 + 0.85 * learnt + chance.gauss(0, 0.03),
            "kl/mean": 0.04 * learnt + abs(chance.gauss(0, 0.002)),
            "rollout/log_prob_abs_diff_max": 2e-6 * chance.uniform(0.5, 2),
            "rollout/response_tokens_mean": 3.5 + 2 * learnt + chance.gauss(0, 0.1),
            "rollout/entropy_mean": 1.9 - 1.3 * learnt + chance.gauss(0, 0.02),
            "rollout/tokens": 4998 + step,
            "switch/received_bytes": 933_376,
            "switch/peak_weight_bytes": 1_296_384,
            "switch/redundant_bytes": 0,
            "critic/value_loss": 0.02 * (1 - 0.6 * learnt) + abs(chance.gauss(0, 0.001)),
            "critic/grad_norm": None if step == num_steps // 2 else chance.uniform(0.2, 0.5),
            "actor/policy_loss": chance.gauss(-0.003, 0.004),
            "actor/clip_fraction": abs(chance.gauss(0.05, 0.02)),
            "actor/lr": 1e-4,
            **seconds,
            **{edge: num_bytes * chance.choice([1, 1, 2]) for edge, num_bytes in EDGES.items()},
            "transfer/bytes": sum(EDGES.values()),
            "controller/payload_bytes": chance.randint(800, 1600),
            "controller/overhead_s": whole * 0.02,
            "time/step_s": whole,
            "throughput/tokens_per_s": 4998 / whole,
            **extra,
        }
        if step % 10 == 0 or step == num_steps:
            row |= {"eval/exact_match": 0.06 + 0.85 * learnt, "eval/score_mean": 0.06 + 0.85 * learnt}
        yield row


def step_records(
    chance: random.Random, step: int, num_ranks: int, ranks_per_node: int
) -> tuple[list[Span], list[Reading]]:
    """Return every rank's calls in a step, with a fetch of rows at the beginning of each, and its memory after each."""
    spans, readings = [], []
    start_s = 1_760_000_000 + 6.0 * step
    for call, (phase, seconds) in CALLS.items():
        role, slowest = call.split(".")[0], 0.0
        for rank in range(num_ranks):
            node, took = f"node-{rank // ranks_per_node}", seconds * chance.uniform(0.85, 1.05)
            spans.append(Span(call, phase, rank, node, role, start_s, start_s + took, step=step))
            fetched = start_s + 0.04 * took
            spans.append(Span("fetch rows", "transfers", rank, node, role, start_s, fetched, step=step))
            held = 1.6e9 if phase == "generate" else 1.1e9 + 1e8 * rank
            readings.append(
                Reading("memory/held_bytes", rank, node, start_s + took, held * chance.uniform(0.97, 1))
            )
            slowest = max(slowest, took)
        start_s += slowest + 0.01
    return spans, readings


def sample_rows(chance: random.Random, step: int, num_steps: int) -> Iterator[dict[str, Any]]:
    """Yield the rows of a file of samples; the second one is hostile."""
    for number in range(16):
        first, second = chance.randint(2, 99), chance.randint(2, 99)
        is_right = chance.random() < 0.1 + 0.85 * step / num_steps
        said = first + second if is_right else chance.randint(2, 199)
        prompt = f"What is {first} + {second}?\nAnswer with the number."
        yield {
            "step": step,
            "prompt": HOSTILE if number == 1 else prompt,
            "response": HOSTILE
            if number == 1
            else f"{first} + {second} = {said}" + " so it is" * (40 * (number == 2)),
            "answer": str(first + second),
            "score": float(is_right),
        }


if __name__ == "__main__":
    print(write_run(Path(sys.argv[1])))
