"""A rehearsed rank of a small model: bytes and messages against sums made from the model's shape alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from hybridengine.cli.main import main
from hybridengine.config import load_config
from hybridengine.errors import TopologyError
from hybridengine.rehearsal.figures import Phase, RankRehearsal
from hybridengine.rehearsal.planned import planned_peaks
from hybridengine.rehearsal.processes import rehearse_ranks

VOCAB, HIDDEN, FFN, LAYERS, QUERIES, KEYS = 1024, 256, 1024, 4, 256, 128
"""The last two are the widths of all query heads, and of all key heads."""
P, T, D = 2, 2, 2
PROMPT, RESPONSE, ROWS = 48, 16, 32
MICRO_ROWS = 2
LAST_RANK = P * T * D - 1
SECTIONS: dict[str, Any] = {
    "cluster": {"ranks_per_node": [LAST_RANK + 1]},
    "model": {
        "dtype": "bfloat16",
        "build": {
            "family": "llama",
            "num_layers": LAYERS,
            "hidden_size": HIDDEN,
            "ffn_hidden_size": FFN,
            "num_heads": QUERIES // 32,
            "num_kv_heads": KEYS // 32,
            "head_dim": 32,
            "vocab_size": VOCAB,
            "max_positions": PROMPT + RESPONSE,
            "tied_embeddings": False,
        },
    },
    "data": {"batch_size": 8, "task": {"name": "arithmetic", "train_rows": 64, "eval_rows": 8}},
    "actor": {
        "parallel": f"{P}-{T}-{D}",
        "generate": "1-1",
        "verify": "never",
        "offload": "optimizer",
        "micro_batch_tokens": MICRO_ROWS * (PROMPT + RESPONSE),
        "mini_batches": 2,
        "bucket_bytes": "64KiB",
    },
    "reference": {"micro_batch_tokens": MICRO_ROWS * (PROMPT + RESPONSE)},
    "reward": {"function": "hybridengine.data.tasks:arithmetic_reward"},
    "rollout": {
        "samples_per_prompt": ROWS // 8,
        "max_prompt_tokens": PROMPT,
        "max_response_tokens": RESPONSE,
        "kv_cache_bytes": "16MiB",
    },
    "algorithm": {"name": "grpo"},
}


def layer_elements(t: int) -> int:
    matrices = (QUERIES + 2 * KEYS) * HIDDEN + QUERIES * HIDDEN + 3 * FFN * HIDDEN
    return matrices // t + 2 * HIDDEN


OWN = LAYERS // P * layer_elements(T) + HIDDEN + VOCAB * HIDDEN // T
"""Elements of a rank of the last stage: layers, the last norm, and the head."""
ALL = LAYERS * layer_elements(1) + HIDDEN + 2 * VOCAB * HIDDEN
"""Elements of the engine, which has the whole model."""
SHARE = 12 * OWN // D
"""Bytes of its part of the optimizer: master weights and two moments in float32."""
KV_BYTES = 16 * 2**20


def write(folder: Path, sections: dict[str, Any]) -> Path:
    place = folder / "small.yaml"
    place.write_text(yaml.safe_dump(sections))
    return place


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("rehearse"), SECTIONS)


@pytest.fixture(scope="module")
def found(file: Path) -> RankRehearsal:
    (one,) = rehearse_ranks(load_config(file, dry_run=True), [LAST_RANK])
    return one


def phase(found: RankRehearsal, name: str) -> Phase:
    return next(one for one in found.phases if one.name == name)


def sent(found: RankRehearsal, name: str, *operations: str, group: str | None = None) -> int:
    """Return the bytes of some operations in a phase, in one group or in all."""
    parts = phase(found, name).traffic
    return sum(
        part.num_bytes for part in parts if part.operation in operations and group in (None, part.group)
    )


def test_every_call_of_the_iteration_is_made(found: RankRehearsal):
    assert found.coordinate == "pp=1 dp=1 tp=1"
    assert [one.name for one in found.phases] == [
        "build actor",
        "build reference",
        "start optimizers",
        "actor.switch_to_generate",
        "actor.generate_sequences",
        "actor.switch_to_train",
        "actor.compute_log_probs",
        "reference.compute_log_probs",
        "actor.update",
        "actor.begin_save",
    ]
    assert phase(found, "actor.generate_sequences").num_rehearsed == ROWS // (P * T * D)
    assert phase(found, "actor.update").num_rows == ROWS // D


def test_what_the_models_hold(found: RankRehearsal):
    held = found.held["actor"]
    assert (held.weights_bytes, held.gradients_bytes, held.optimizer_bytes) == (2 * OWN, 4 * OWN, SHARE)
    assert found.held["reference"].weights_bytes == 2 * OWN
    assert found.engine_weights_bytes == 2 * ALL


def test_memory_by_phase(found: RankRehearsal):
    training, generating = 6 * OWN + SHARE + 2 * OWN, 2 * ALL + KV_BYTES + 2 * OWN
    small = 2**20  # positions, angles, the inputs of a stage, and buffers of the engine
    waiting = 2 * OWN + 2 * OWN
    for name in ("start optimizers", "actor.switch_to_train", "actor.update"):
        end = phase(found, name).end_bytes
        assert waiting <= end <= waiting + small, "gradients and optimizer state are there in updates alone"
    there = phase(found, "actor.switch_to_generate").end_bytes
    assert generating <= there <= generating + small, "optimizer state has gone to the host"
    building = phase(found, "build actor")
    assert building.peak_bytes >= 2 * OWN + 2 * ALL + KV_BYTES, (
        "the engine is built beside the trainer's weights"
    )
    micro_tokens = MICRO_ROWS * (PROMPT + RESPONSE)
    least = training + 2 * micro_tokens // T * HIDDEN * 2 * LAYERS // P
    assert phase(found, "actor.update").peak_bytes > least, "it keeps at least the inputs of both norms"
    norms = (2 * LAYERS // P + 1) * HIDDEN  # which the other tensor-parallel rank saves
    assert phase(found, "actor.begin_save").copied_bytes == (2 + 12) * (OWN - norms) // D


def test_the_switch_receives_what_the_rank_does_not_hold(found: RankRehearsal):
    assert sent(found, "actor.switch_to_generate", "recv") == 2 * (ALL - OWN)
    assert sent(found, "actor.switch_to_train", "recv", "send") == 0


def test_messages_of_an_update(found: RankRehearsal):
    assert sent(found, "actor.update", "reduce_scatter_tensor_coalesced", group="data") == 4 * OWN
    assert sent(found, "actor.update", "allgather_into_tensor_coalesced", group="data") == 2 * OWN
    micro_batches = phase(found, "actor.update").num_rehearsed // MICRO_ROWS
    assert micro_batches == P + 1, "the pipeline is filled"
    part = (
        MICRO_ROWS * (PROMPT + RESPONSE) // T * HIDDEN * 2
    )  # each tensor-parallel rank has one of the sequence
    # Megatron-core sends in one direction through the default group, where there are two stages.
    assert sent(found, "actor.update", "recv", group="pipeline") == micro_batches * part
    assert sent(found, "actor.update", "send", group="all ranks") == micro_batches * part


def test_messages_of_a_forward_pass(found: RankRehearsal):
    micro_batches = phase(found, "actor.compute_log_probs").num_rehearsed // MICRO_ROWS
    assert micro_batches == P + 1
    hidden = MICRO_ROWS * (PROMPT + RESPONSE) * HIDDEN * 2
    log_probs = 4 * 4 * MICRO_ROWS * RESPONSE  # the largest logit, two sums and the target's, in float32
    matrices = (
        2 * LAYERS // P
    )  # before attention and MLP tokens are gathered, and behind them summed and divided
    for operation, count, num_bytes in (
        ("allgather_base", matrices + 1, hidden),  # with that of the head
        ("reduce_scatter_base", matrices, hidden),
        ("allreduce", 1, log_probs),
    ):
        total = sent(found, "actor.compute_log_probs", operation, group="tensor")
        assert total == micro_batches * count * num_bytes, operation


def test_the_planner_agrees(file: Path, found: RankRehearsal):
    planned = planned_peaks(load_config(file, dry_run=True))
    assert set(planned) <= {one.name for one in found.phases}
    switch = phase(found, "actor.switch_to_generate").peak_bytes
    assert planned["actor.switch_to_generate"] == pytest.approx(switch, rel=0.05)


def test_a_configuration_that_fails_on_a_rank_fails_here(file: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["rehearse", str(file), "--rank", "8"]) == 2
    assert "--rank 8 must be below the 8 ranks" in capsys.readouterr().err
    assert main(["rehearse", str(file), "actor.parallel=2-3-2"]) == 2
    refused = capsys.readouterr().err
    assert main(["train", str(file), "actor.parallel=2-3-2"]) == 2
    assert capsys.readouterr().err == refused


def test_an_error_of_the_rank_is_raised_here(tmp_path: Path):
    config = load_config(write(tmp_path, SECTIONS), dry_run=True)
    with pytest.raises(TopologyError, match=r"^rank 8 is outside of 2-2-2, which has ranks 0 to 7$"):
        list(rehearse_ranks(config, [LAST_RANK + 1]))
