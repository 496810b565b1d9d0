"""A small Qwen2.5-VL learns the colours of images: Megatron, vLLM and transformers see the same in all of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file
from transformers import Qwen2_5_VLForConditionalGeneration

from hybridengine.config import RunConfig, load_config
from hybridengine.models.shapes import ModelShape
from hybridengine.rows.images import images_of_rows
from tests.full.colours import write_colour_files, write_colour_model
from tests.full.engines.image_ranks import STEPS, learn_colours
from tests.gloo.ranks import RankLauncher
from tests.gloo.seen_images import grids_of, pixel_values

TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    folder = tmp_path_factory.mktemp("images")
    write_colour_model(folder / "model")
    rows = write_colour_files(folder, 32)
    sections = {
        "run": {"steps": STEPS, "folder": str(folder / "runs")},
        "cluster": {"ranks_per_node": [2]},
        "model": {"path": str(folder / "model")},
        "data": {"train_file": str(rows), "batch_size": 8},
        "algorithm": {"name": "grpo"},
        "actor": {
            "parallel": "2-1-1",
            "generate": "1-1",
            "bucket_bytes": "64KiB",
            "kl_loss_coef": 0.01,
            "optimizer": {"lr": 1e-3},
        },
        "reference": {"parallel": "1-2-1"},
        "reward": {"function": "tests.full.colours:colour_reward"},
        "rollout": {
            "max_prompt_tokens": 32,
            "max_response_tokens": 4,
            "samples_per_prompt": 4,
            "kv_cache_bytes": "16MiB",
        },
    }
    (folder / "run.yaml").write_text(yaml.safe_dump(sections))
    return load_config(folder / "run.yaml")


@pytest.fixture(scope="module")
def by_rank(run: RunConfig, run_ranks: RankLauncher) -> list[dict[str, Any]]:
    return run_ranks(2, learn_colours, run, timeout_s=400)


def test_responses_to_images_are_those_of_transformers(run: RunConfig, by_rank: list[dict[str, Any]]) -> None:
    model = Qwen2_5_VLForConditionalGeneration.from_pretrained(run.model_folder, dtype=torch.float32).eval()
    rollout, found = by_rank[0]["untrained"], by_rank[0]["untrained_log_probs"]
    vision = ModelShape.from_folder(run.model_folder).vision
    assert vision is not None
    images = images_of_rows(rollout)
    assert len({image.shape for (image,) in images}) > 2
    for row, seen in enumerate(images):
        first, length = int(rollout["prompt_lengths"][row]), int(rollout["response_lengths"][row])
        ids = rollout["tokens"][row : row + 1, : first + length]
        kinds = (ids == vision.image_token).int()
        kinds[:, first:] = 0
        with torch.no_grad():
            logits = model(
                input_ids=ids,
                pixel_values=torch.cat([pixel_values(image) for image in seen]),
                image_grid_thw=grids_of(list(seen)),
                mm_token_type_ids=kinds,
            ).logits[0, first - 1 : -1]
        assert torch.equal(logits.argmax(-1), ids[0, first:])
        expected = logits.log_softmax(-1).gather(-1, ids[0, first:, None])[:, 0]
        for log_probs in (found, rollout["rollout_log_probs"]):
            torch.testing.assert_close(log_probs[row, :length], expected, rtol=0, atol=TOLERANCE)


def test_the_model_learns_what_it_sees(by_rank: list[dict[str, Any]]) -> None:
    for seen in by_rank:
        assert seen["shares_tower"]
        assert max(step["difference"] for step in seen["steps"]) < TOLERANCE
    # A model that does not see names one of four colours.
    assert by_rank[0]["steps"][-1]["reward"] > 0.5
    assert by_rank[0]["steps"][-1]["update"][-1]["actor/grad_norm"] > 0


def test_the_switch_moves_the_decoder_once_and_the_tower_never(
    run: RunConfig, by_rank: list[dict[str, Any]]
) -> None:
    shape = ModelShape.from_folder(run.model_folder)
    for seen in by_rank:
        assert seen["tower_bytes"] == 4 * shape.num_frozen
        for step in seen["steps"]:
            assert {report["redundant_bytes"] for report in step["reports"]} == {0}
            received = [
                report["received_bytes"] for report in step["reports"] if report["direction"] == "to_generate"
            ]
            assert sum(received) < 4 * (shape.num_parameters + 64 * shape.hidden_size)


def test_an_export_has_the_trained_decoder_and_the_frozen_tower(
    run: RunConfig, by_rank: list[dict[str, Any]]
) -> None:
    before, after = (_tensors(folder) for folder in (run.model_folder, run.run_folder / "saved"))
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert torch.equal(tensor, after[name]) is name.startswith("visual."), name
    Qwen2_5_VLForConditionalGeneration.from_pretrained(run.run_folder / "saved")


def _tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {name: one for file in folder.glob("*.safetensors") for name, one in load_file(file).items()}
