"""Rows with images in Megatron-core compared with transformers, whose vision tower and positions are its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from hybridengine.backends.megatron.groups import initialize_globals
from hybridengine.backends.megatron.trainer import MegatronModel
from hybridengine.backends.megatron.weights import load_weights
from hybridengine.backends.predictions import Predictions
from hybridengine.backends.vision import tower_of
from hybridengine.config.role_sections import MegatronSettings
from hybridengine.models.shapes import ModelShape
from hybridengine.rows.images import image_columns, image_row
from hybridengine.topology.grid import Grid
from hybridengine.topology.sizes import TrainSizes
from hybridengine.weights.process_groups import ProcessGroups
from tests.gloo.ranks import RankLauncher
from tests.gloo.seen_images import grids_of, pixel_values, seen_rows
from tests.gloo.tiny_models import write_model
from tests.unit.model_configs import IMAGE_TOKENS

TOLERANCE = 1e-4
LAYOUTS = ("2-2-1", "1-4-1", "2-1-2", "1-2-1 c=2", "2-1-1 c=2 v=2")


def batch_of(rows: list[tuple[list[int], list[np.ndarray]]]) -> dict[str, Tensor]:
    """Return the rows as a micro-batch, padded at the end."""
    width = max(len(tokens) for tokens, _ in rows)
    padded = torch.tensor([tokens + [7] * (width - len(tokens)) for tokens, _ in rows])
    columns = image_columns([image_row(images) for _, images in rows])
    return {"tokens": padded, "lengths": torch.tensor([len(tokens) for tokens, _ in rows]), **columns}


def forward(rank: int, folder: Path, batches: list[dict[str, Tensor]]) -> list[list[dict[str, Tensor]]]:
    """Return the log-probs of all layouts; empty where a rank has none."""
    initialize_globals(1)
    registry, shape = ProcessGroups(), ModelShape.from_folder(folder)
    found = []
    for sizes in LAYOUTS:
        for sequence_parallel in (False, True) if "1-4" in sizes else (False,):
            settings = MegatronSettings(sequence_parallel=sequence_parallel)
            model = MegatronModel(shape, Grid(TrainSizes.parse(sizes)), rank, registry, settings=settings)
            load_weights(model, folder)
            model.see(tower_of(folder, shape))
            found.append(model.forward(batches, log_probs_of))
    return found


def log_probs_of(predictions: Predictions, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    return {"log_probs": predictions[:, :-1].log_probs(batch["tokens"][:, 1:])[0]}


def reference(model: Any, tokens: list[int], images: list[np.ndarray]) -> Tensor:
    """Return transformers' log-probs of a row's tokens after the first, [T - 1] float64."""
    ids = torch.tensor([tokens])
    seen: dict[str, Any] = {}
    if images:
        seen = {
            "pixel_values": torch.cat([pixel_values(image) for image in images]),
            "image_grid_thw": grids_of(images),
            "mm_token_type_ids": (ids == IMAGE_TOKENS["image_token_id"]).int(),
        }
    with torch.no_grad():
        logits = model(input_ids=ids, **seen).logits[0, :-1].double()
    return logits.log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0]


@pytest.mark.parametrize("tied", [False, True])
def test_log_probs_of_rows_with_images_are_those_of_transformers(
    tied: bool, tmp_path: Path, run_ranks: RankLauncher
) -> None:
    model = write_model(tmp_path / "model", "qwen2_5_vl", tied, num_hidden_layers=5).eval()
    rows = seen_rows()
    batches = [batch_of(rows[:3]), batch_of(rows[3:])]

    by_rank = run_ranks(4, forward, tmp_path / "model", batches)

    expected = [reference(model, *row) for row in rows]
    blind = reference(model, rows[0][0], [np.zeros_like(one) for one in rows[0][1]])
    assert (expected[0] - blind).abs().max() > 100 * TOLERANCE
    for number in range(len(by_rank[0])):
        outputs = [outcome[number] for outcome in by_rank if outcome[number]]
        assert outputs
        for output in outputs:
            found = [one for part in output for one in part["log_probs"]]
            for mine, theirs in zip(found, expected, strict=True):
                assert (mine[: len(theirs)] - theirs).abs().max() < TOLERANCE
