"""Checkpoints of trainers on every layout: a resumed run is the same, and any other layout reads the same tensors."""

from __future__ import annotations

import io
import math
import pickle
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from hybridengine.checkpoints.conversion import import_model
from hybridengine.checkpoints.folders import ROLE_FILES
from hybridengine.checkpoints.tensors import TensorFolder, read_metadata
from hybridengine.models.shapes import ModelShape
from hybridengine.reshard.boxes import full_box
from tests.gloo.checkpoint_ranks import (
    load_and_save,
    load_converted,
    load_what_is_refused,
    save_at_once,
    save_where_a_rank_is_refused,
    save_where_the_disk_fills,
    save_while_training,
)
from tests.gloo.ranks import RankLauncher
from tests.gloo.tiny_models import write_model

LAYOUTS = {
    1: [("1-1-1", "PAPER")],
    4: [
        ("2-2-1", "PAPER"),
        ("1-1-4", "PAPER"),
        ("1-2-2", "PAPER"),
        ("2-1-2", "MEGATRON"),
        ("1-2-1 c=2", "PAPER"),
        ("2-1-1 c=2 v=2", "MEGATRON"),
    ],
}
"""Number of ranks -> (sizes, rank order): every pair of axes, and optimizer states in four ranges."""
EXPERT_LAYOUTS = {
    1: [("1-1-1", "PAPER")],
    4: [
        ("1-2-2 e=2 etp=1", "PAPER"),
        ("1-2-2 e=2", "MEGATRON"),
        ("2-1-2 e=2", "PAPER"),
        ("2-1-2 e=2", "MEGATRON"),
        ("1-1-4 e=2", "PAPER"),
        ("1-2-2 etp=1", "PAPER"),
        ("2-1-1 c=2 v=2 e=2", "PAPER"),
    ],
}
LATENT_LAYOUTS = {
    1: [("1-1-1", "PAPER")],
    4: [("1-2-2 e=2 etp=1", "PAPER"), ("2-1-2 e=2", "MEGATRON"), ("2-1-1 c=2 v=2 e=2", "PAPER")],
}
MODELS = {
    "qwen3-tied": {"family": "qwen3", "tied": True},
    "llama-value-head": {"family": "llama", "num_labels": 1},
    "phi3-untied": {"family": "phi3", "tied": False},
}
CUT = {4: [("2-2-1", "PAPER")]}
"""A layout that cuts layers and tensors, as a model's own parameters need."""


@dataclass(frozen=True)
class Saved:
    """A model in `source`, and checkpoints of it in SIZES-ORDER."""

    folder: Path
    layouts: dict[int, list[tuple[str, str]]]
    differing: dict[str, list[str]]
    """Layout and rank -> names that differed after one more step, with a save during it and after loading it."""


def saved_by(
    folder: Path, layouts: dict[int, list[tuple[str, str]]], dtype: str, run_ranks: RankLauncher
) -> Saved:
    """Train, save, load and train again on every layout."""
    differing = {}
    for num_ranks, tried in layouts.items():
        by_rank = run_ranks(
            num_ranks, save_while_training, folder / "source", tried, dtype, folder, timeout_s=120
        )
        for rank, outcomes in enumerate(by_rank):
            for (one, order), different in zip(tried, outcomes, strict=True):
                differing[f"{one} {order}, rank {rank}"] = different
    return Saved(folder, layouts, differing)


@pytest.fixture(
    scope="module",
    params=[("qwen2", LAYOUTS), ("qwen3_moe", EXPERT_LAYOUTS), ("deepseek_v3", LATENT_LAYOUTS)],
    ids=lambda one: one[0],
)
def every_layout(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, run_ranks: RankLauncher
) -> Saved:
    folder = tmp_path_factory.mktemp("checkpoints")
    family, layouts = request.param
    write_model(folder / "source", family, tied=False, dtype="bfloat16", num_hidden_layers=4)
    return saved_by(folder, layouts, "bfloat16", run_ranks)


def assert_resumed_as_saved(saved: Saved, dtype: str, num_places: int) -> None:
    assert saved.differing == {place: [] for place in saved.differing}
    assert len(saved.differing) == num_places
    for folder in saved.folder.glob("*-*-*-*"):
        assert_each_element_once(folder, ModelShape.from_folder(saved.folder / "source"), dtype)


def test_steps_after_loading_are_bitwise_those_of_the_run_that_went_on_on_every_layout(
    every_layout: Saved,
) -> None:
    """A checkpoint that is saved during training contains the weights from the beginning of the save."""
    assert_resumed_as_saved(every_layout, "bfloat16", 1 + 4 * len(every_layout.layouts[4]))


@pytest.mark.parametrize("model_name", MODELS)
def test_steps_after_loading_are_bitwise_those_of_the_run_that_went_on(
    model_name: str, tmp_path: Path, run_ranks: RankLauncher
):
    write_model(tmp_path / "source", **MODELS[model_name])  # type: ignore[arg-type]
    assert_resumed_as_saved(saved_by(tmp_path, CUT, "float32", run_ranks), "float32", 4)


def kinds_of(tensor: str, dtype: str) -> list[str]:
    """Return what a checkpoint has of a logical tensor; an expert bias is not trained."""
    if tensor.endswith("e_score_correction_bias"):
        return ["weights"]
    return ["weights", "exp_avg", "exp_avg_sq"] + (["master"] if dtype == "bfloat16" else [])


def assert_each_element_once(folder: Path, shape: ModelShape, dtype: str) -> None:
    """Assert that every kind of every logical tensor is complete and has no element twice: bytes on disk are exact."""
    tensors = TensorFolder(folder)
    expected = {
        f"{kind}.{name}": size for name, size in shape.tensors.items() for kind in kinds_of(name, dtype)
    }
    assert tensors.shapes == expected
    described = read_metadata(folder).state_dict_metadata.values()
    stored = sum(chunk.sizes.numel() for one in described for chunk in one.chunks)  # type: ignore[union-attr]
    assert stored == sum(map(math.prod, expected.values()))


def test_any_layout_reads_what_any_other_has_written(
    every_layout: Saved, tmp_path: Path, run_ranks: RankLauncher
):
    written, again = every_layout.folder, tmp_path
    source = written / "source"
    everything = [f"{sizes}-{order}" for layouts in every_layout.layouts.values() for sizes, order in layouts]
    others = iter(everything[1:] + everything[:1])  # each layout reads what the next one has written
    for num_ranks, layouts in every_layout.layouts.items():
        loads = [(next(others), *layout) for layout in layouts]
        run_ranks(num_ranks, load_and_save, source, loads, "bfloat16", written, again)
    seen = 0
    for folder in sorted(again.iterdir()):
        original = TensorFolder(written / folder.name.partition(" in ")[0])
        read = TensorFolder(folder)
        assert read.shapes == original.shapes
        for name, size in read.shapes.items():
            assert torch.equal(read.read(name, full_box(size)), original.read(name, full_box(size))), (
                folder,
                name,
            )
            seen += 1
    assert {folder.name.partition(" in ")[0] for folder in again.iterdir()} == set(everything)
    num_kinds = [len(kinds_of(name, "bfloat16")) for name in ModelShape.from_folder(source).tensors]
    assert seen == len(list(again.iterdir())) * sum(num_kinds)


def test_another_models_checkpoint_is_refused_before_anything_changes(
    tmp_path: Path, run_ranks: RankLauncher
):
    write_model(tmp_path / "source", "qwen2", tied=False)
    write_model(tmp_path / "other", "qwen2", tied=False, hidden_size=32)
    run_ranks(4, save_at_once, tmp_path / "source", tmp_path / "saved")
    for error, untouched in run_ranks(2, load_what_is_refused, tmp_path / "other", tmp_path / "saved"):
        assert "another model: hidden_size is 64, not 32" in error
        assert untouched


@pytest.mark.parametrize(("before", "most"), [("finish", 1000), ("end_role", 10)])
def test_a_disk_that_fills_up_at_the_end_of_a_save(
    before: str, most: int, tmp_path: Path, run_ranks: RankLauncher
):
    """The description of tensors no longer fits, or the list of files does not."""
    write_model(tmp_path / "source", "qwen2", tied=False)
    for errors, num_tensors in run_ranks(
        2, save_where_the_disk_fills, tmp_path / "source", tmp_path / "saved", before, most
    ):
        refused, again = errors
        assert refused.startswith(f"{tmp_path / 'saved' / 'one'} could not be written by rank 0: OSError: ")
        assert not (tmp_path / "saved" / "one" / ROLE_FILES).exists()
        assert again == "none"
        assert num_tensors == 3 * len(ModelShape.from_folder(tmp_path / "source").tensors)


def test_a_rank_that_is_refused_waits_for_the_others_and_keeps_nothing(
    tmp_path: Path, run_ranks: RankLauncher
):
    write_model(tmp_path / "source", "qwen2", tied=False)
    for refused, writes, left, again in run_ranks(
        2, save_where_a_rank_is_refused, tmp_path / "source", tmp_path / "saved"
    ):
        assert refused.startswith(f"{tmp_path / 'saved' / 'refused'} could not be written by rank 1: ")
        assert "has not ended in time" not in refused
        assert (writes, left, again) == (False, 0, "none")


class Harmful:
    """An object that would write a file when it is unpickled."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return (open, (str(self.target), "w"))


def put_harm_into_tensors(folder: Path, harm: bytes) -> list[bytes]:
    """Write `harm` where the bytes of each tensor begin; return what a reader of each then finds."""
    places = list((read_metadata(folder).storage_data or {}).values())
    for place in places:
        assert place.length > len(harm)
        with (folder / place.relative_path).open("r+b") as opened:
            opened.seek(place.offset)
            opened.write(harm)
    return [
        (folder / place.relative_path).read_bytes()[place.offset : place.offset + place.length]
        for place in places
    ]


def test_code_in_a_checkpoint_does_not_run(tmp_path: Path, run_ranks: RankLauncher):
    write_model(tmp_path / "source", "qwen2", tied=False)
    folder, target = tmp_path / "saved", tmp_path / "harm"
    run_ranks(4, save_at_once, tmp_path / "source", folder)
    for found in put_harm_into_tensors(folder, pickle.dumps(Harmful(target))):
        with pytest.raises(RuntimeError, match="Invalid magic number"):
            torch.load(io.BytesIO(found), weights_only=False)
        target.unlink()  # a reader that trusted the file would run it
    for error, _ in run_ranks(2, load_what_is_refused, tmp_path / "source", folder):
        assert "has no tensor at byte" in error
    assert not target.exists()


def test_a_first_save_holds_the_weights_of_the_folder_that_they_came_from(
    tmp_path: Path, run_ranks: RankLauncher
):
    """The safetensors are the reference: names, boxes and bits of the weights are those of the Hugging Face model."""
    write_model(tmp_path / "source", "qwen3", tied=True)
    run_ranks(4, save_at_once, tmp_path / "source", tmp_path / "saved")
    saved = TensorFolder(tmp_path / "saved")
    expected = load_file(tmp_path / "source" / "model.safetensors")
    for name, tensor in expected.items():
        assert torch.equal(saved.read(f"weights.{name}", full_box(tuple(tensor.shape))), tensor), name


def test_a_converted_hugging_face_checkpoint_begins_like_the_folder_itself(
    tmp_path: Path, run_ranks: RankLauncher
):
    """Weights in the model's type, float32 copies of them, a fresh optimizer."""
    write_model(tmp_path / "source", "qwen3", tied=True, dtype="bfloat16")
    converted = import_model(tmp_path / "source", tmp_path / "start", dtype="bfloat16")
    for different in run_ranks(4, load_converted, tmp_path / "source", converted.folder / "actor"):
        assert not different
