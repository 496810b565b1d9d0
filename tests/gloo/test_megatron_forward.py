"""Megatron-core compared with transformers: equal log-probabilities and entropies, and unchanged checkpoints."""

from __future__ import annotations

import errno
import itertools
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor

from hybridengine.backends.megatron.groups import initialize_globals
from hybridengine.backends.megatron.trainer import MegatronModel
from hybridengine.backends.megatron.weights import load_weights, save_weights
from hybridengine.backends.predictions import Predictions
from hybridengine.checkpoints.hf_files import HfWriter
from hybridengine.errors import OutputError
from hybridengine.families.registry import FAMILIES
from hybridengine.models.shapes import ModelShape
from hybridengine.topology.grid import Grid, RankOrder
from hybridengine.topology.sizes import TrainSizes
from hybridengine.weights.process_groups import ProcessGroups
from tests.gloo.ranks import RankLauncher
from tests.gloo.tiny_models import YARN, write_model

LAYOUTS = [
    ("2-2-1", RankOrder.PAPER),
    ("1-4-1", RankOrder.PAPER),
    ("2-1-2", RankOrder.MEGATRON),
    ("1-2-1 c=2", RankOrder.PAPER),
    ("2-1-1 c=2 v=2", RankOrder.MEGATRON),
]
WINDOWED_LAYOUTS = [
    ("2-2-1", RankOrder.PAPER),
    ("1-4-1", RankOrder.PAPER),
    ("2-1-2", RankOrder.MEGATRON),
    ("2-1-2 v=2", RankOrder.MEGATRON),
]
"""Layouts of models with windows, whose rows are not divided."""
MODELS = [
    (family, tied)
    for family, described in FAMILIES.items()
    for tied in (False, True)
    if (family, tied) != ("deepseek_v3", True) and not described.has_vision
]
"""Models that read images: test_images.py."""
MAX_FILE_BYTES = 150_000
TOLERANCE = 1e-4


@dataclass(frozen=True)
class Outcome:
    """Results of one rank under one layout."""

    is_last_stage: bool
    outputs: list[dict[str, Tensor]]


def forward_and_export(
    rank: int, folder: Path, batches: list[Tensor], layouts: list[tuple[str, RankOrder]], exports: Path
) -> list[Outcome]:
    initialize_globals(1)
    registry = ProcessGroups()
    shape = ModelShape.from_folder(folder)
    outcomes = []
    for sizes, order in layouts:
        model = MegatronModel(shape, Grid(TrainSizes.parse(sizes), order), rank, registry)
        load_weights(model, folder)

        def output(predictions: Predictions, batch: dict[str, Tensor]) -> dict[str, Tensor]:
            log_probs, entropy = predictions[:, :-1].log_probs(batch["tokens"][:, 1:])
            return {"log_probs": log_probs, "entropy": entropy}

        outputs = model.forward([{"tokens": tokens} for tokens in batches], output)
        outcomes.append(Outcome(model.is_last_stage, outputs))
        save_weights(
            model, registry, exports / f"{sizes}-{order.name}", folder, max_file_bytes=MAX_FILE_BYTES
        )
    return outcomes


def reference(model: torch.nn.Module, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Return (log-probabilities of the next tokens, entropies), both [B, T - 1] float64, from transformers' logits."""
    with torch.no_grad():
        logits = model(tokens).logits[:, :-1].double()
    log_probs = logits.log_softmax(-1)
    return log_probs.gather(-1, tokens[:, 1:, None])[..., 0], -(log_probs.exp() * log_probs).sum(-1)


def assert_outcomes(
    model: torch.nn.Module,
    batches: list[Tensor],
    layouts: list[tuple[str, RankOrder]],
    by_rank: list[list[Outcome]],
) -> None:
    expected = [reference(model, tokens) for tokens in batches]
    for index, (sizes, order) in enumerate(layouts):
        train = TrainSizes.parse(sizes)
        on_last_stage = [outcomes[index] for outcomes in by_rank if outcomes[index].is_last_stage]
        assert len(on_last_stage) == train.num_ranks // train.pp_size
        assert all(not outcomes[index].outputs for outcomes in by_rank if not outcomes[index].is_last_stage)
        for outcome in on_last_stage:
            for output, (log_probs, entropy) in zip(outcome.outputs, expected, strict=True):
                worst = (output["log_probs"] - log_probs).abs().max().item()
                assert worst < TOLERANCE, f"{sizes} {order.name}: log-probs differ by {worst}"
                worst = (output["entropy"] - entropy).abs().max().item()
                assert worst < TOLERANCE, f"{sizes} {order.name}: entropies differ by {worst}"


def read_checkpoint(folder: Path) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        part = load_file(file)
        assert not tensors.keys() & part.keys()
        tensors |= part
    return tensors


@pytest.mark.parametrize(
    ("family", "tied"), MODELS, ids=[f"{f}-{'tied' if t else 'untied'}" for f, t in MODELS]
)
def test_log_probs_and_round_trip_of_every_family_and_layout(
    family: str, tied: bool, tmp_path: Path, run_ranks: RankLauncher
):
    source, exports = tmp_path / "source", tmp_path / "exports"
    model = write_model(source, family, tied, num_hidden_layers=5)
    generator = torch.Generator().manual_seed(0)
    batches = [
        torch.randint(0, 131, (rows, length), generator=generator) for rows, length in ((3, 9), (1, 14))
    ]

    layouts = WINDOWED_LAYOUTS if ModelShape.from_folder(source).windows else LAYOUTS

    by_rank = run_ranks(4, forward_and_export, source, batches, layouts, exports)

    assert_outcomes(model, batches, layouts, by_rank)
    original = read_checkpoint(source)
    assert ("lm_head.weight" in original) is not tied
    for sizes, order in layouts:
        folder = exports / f"{sizes}-{order.name}"
        files = list(folder.glob("*.safetensors"))
        assert len(files) > 1
        large = [file for file in files if file.stat().st_size >= MAX_FILE_BYTES + 4096]  # plus a header
        assert all(len(load_file(file)) == 1 for file in large)
        exported = read_checkpoint(folder)
        assert exported.keys() == original.keys()
        assert all(torch.equal(exported[name], original[name]) for name in original), (sizes, order)
    loaded = type(model).from_pretrained(exports / "2-2-1-PAPER")
    assert torch.equal(loaded(batches[0]).logits, model(batches[0]).logits)


SCALINGS: dict[str, dict[str, Any]] = {
    # It slows the rotations that take more than 2048 positions; a short sequence does not show it.
    "llama3": {
        "rope_type": "llama3",
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "linear": {"rope_type": "linear", "factor": 4.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256},
    "latent yarn": YARN,
}


@pytest.mark.parametrize("kind", SCALINGS)
def test_rope_scaling(kind: str, tmp_path: Path, run_ranks: RankLauncher):
    scaling = {"rope_theta": 10000.0, **SCALINGS[kind]}
    positions = int(scaling["factor"] * scaling.get("original_max_position_embeddings", 8192))
    family = "deepseek_v3" if kind == "latent yarn" else "llama"
    long: dict[str, Any] = {"max_position_embeddings": positions, "num_hidden_layers": 2}
    scaled = write_model(tmp_path / "scaled", family, rope_parameters=scaling, **long)
    plain = write_model(tmp_path / "plain", family, **long)
    tokens = torch.randint(0, 131, (1, 1000), generator=torch.Generator().manual_seed(0))
    assert (reference(scaled, tokens)[0] - reference(plain, tokens)[0]).abs().max() > 100 * TOLERANCE
    layouts = [("1-2-1", RankOrder.PAPER), ("2-1-1", RankOrder.PAPER), ("1-1-1 c=2", RankOrder.PAPER)]

    by_rank = run_ranks(2, forward_and_export, tmp_path / "scaled", [tokens], layouts, tmp_path / "exports")

    assert_outcomes(scaled, [tokens], layouts, by_rank)


WINDOWED = {
    "mistral": {"sliding_window": 4},
    "phi3": {"sliding_window": 4},
    "qwen2": {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 0},
}


@pytest.mark.parametrize("family", WINDOWED)
def test_windows(family: str, tmp_path: Path, run_ranks: RankLauncher):
    windowed = write_model(tmp_path / "windowed", family, **WINDOWED[family])
    full = write_model(tmp_path / "full", family)
    tokens = torch.randint(0, 131, (2, 30), generator=torch.Generator().manual_seed(0))
    assert (reference(windowed, tokens)[0] - reference(full, tokens)[0]).abs().max() > 100 * TOLERANCE
    layouts = [("1-2-1", RankOrder.PAPER), ("2-1-1", RankOrder.PAPER)]

    by_rank = run_ranks(2, forward_and_export, tmp_path / "windowed", [tokens], layouts, tmp_path / "exports")

    assert_outcomes(windowed, [tokens], layouts, by_rank)


def export_over(rank: int, source: Path, target: Path) -> None:
    initialize_globals(1)
    registry = ProcessGroups()
    model = MegatronModel(ModelShape.from_folder(source), Grid(TrainSizes(1, 1, 1)), rank, registry)
    load_weights(model, source)
    save_weights(model, registry, target, source)


def test_export_replaces_an_older_folder_and_the_leavings_of_a_failed_one(
    tmp_path: Path, run_ranks: RankLauncher
):
    write_model(tmp_path / "source", "qwen2")
    target, partial = tmp_path / "target", tmp_path / ".target.partial"
    for folder in (target, partial):
        folder.mkdir()
        (folder / "model-00001-of-00002.safetensors").write_text("left over")

    run_ranks(1, export_over, tmp_path / "source", target)

    assert {file.name for file in target.iterdir()} >= {"model.safetensors", "config.json"}
    assert not (target / "model-00001-of-00002.safetensors").exists()
    assert not partial.exists()


def export_to_a_full_disk(rank: int, source: Path, target: Path) -> list[str]:
    """Return errors of exports in which rank 0's disk refuses the second bucket, or the folder; the last succeeds."""
    initialize_globals(1)
    registry = ProcessGroups()
    model = MegatronModel(ModelShape.from_folder(source), Grid(TrainSizes(1, 2, 1)), rank, registry)
    load_weights(model, source)
    full, errors = OSError(errno.ENOSPC, "No space left on device"), list[str]()
    write, calls = HfWriter.write, itertools.count()

    def write_once(files: HfWriter, name: str, tensor: Tensor) -> None:
        if next(calls):
            raise full
        write(files, name, tensor)

    for name, fault in (
        ("write", write_once),
        ("__enter__", mock.Mock(side_effect=full)),
        ("_finish", mock.Mock(side_effect=full)),
    ):
        with mock.patch.object(HfWriter, name, fault):
            try:
                save_weights(model, registry, target, source)
            except OutputError as error:
                errors.append(str(error))
        assert not target.exists()
        assert not target.with_name(f".{target.name}.partial").exists()
        ones = torch.ones(1)
        dist.all_reduce(ones, group=registry.of(model.grid.groups("pp", "dp", "tp")))
        assert ones.item() == 2
    save_weights(model, registry, target, source)
    return errors


def test_an_export_that_the_disk_refuses_leaves_the_ranks_as_they_were(
    tmp_path: Path, run_ranks: RankLauncher
):
    write_model(tmp_path / "source", "qwen2")
    first, second = run_ranks(2, export_to_a_full_disk, tmp_path / "source", tmp_path / "target")
    assert [re.search(r"target cannot be written \(No space left", error) is not None for error in first] == [
        True
    ] * 3
    assert second == []
    expected, found = read_checkpoint(tmp_path / "source"), read_checkpoint(tmp_path / "target")
    assert expected.keys() == found.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
