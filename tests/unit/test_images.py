"""Images of rows: reading, tokens, entries and positions, compared with transformers; and what is wrong with them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from PIL.PngImagePlugin import PngInfo
from tensordict import NonTensorStack, TensorDict

from hybridengine.backends.vision import identity, image_places, positions
from hybridengine.data.datasets import PromptDataset
from hybridengine.data.images import ImageReader
from hybridengine.data.responses import ResponseDataset
from hybridengine.data.tokenizer import build_arithmetic_tokenizer
from hybridengine.errors import CheckpointError, ConfigError, DataError
from hybridengine.families.sizes import VisionSizes
from hybridengine.models.shapes import ModelShape
from hybridengine.rows.batch import payload_bytes
from hybridengine.rows.images import (
    IMAGE_BYTES,
    IMAGE_SIZES,
    IMAGES,
    NO_IMAGES,
    image_columns,
    image_row,
    images_of,
    images_of_columns,
    images_of_rows,
)
from hybridengine.rows.micro_batches import cut_rows
from tests.unit.model_configs import SIZES, vision_entries

MARKS = ["<|vision_start|>", "<|image_pad|>", "<|vision_end|>"]
BEGIN, PAD, END = 57, 58, 59
VISION = VisionSizes(PAD, BEGIN, END, 4, 2, 2, (1, 1, 2), 2, 32, 48)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    found = build_arithmetic_tokenizer()
    found.add_special_tokens({"additional_special_tokens": MARKS})
    return found


@pytest.fixture
def reader(tmp_path: Path) -> ImageReader:
    limits = {"min_pixels": 64, "max_pixels": 40 * 40}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(limits))
    return ImageReader(tmp_path, VISION)


def write_image(path: Path, height: int, width: int, seed: int = 0) -> np.ndarray:
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(path)
    return pixels


def write_rows(folder: Path, *rows: dict[str, Any]) -> Path:
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps({"answer": "1", **row}) + "\n" for row in rows))
    return file


@pytest.mark.parametrize(("height", "width"), [(16, 24), (17, 30), (3, 5), (90, 31), (41, 200)])
def test_pixels_are_those_of_transformers_processor(
    height: int, width: int, tmp_path: Path, reader: ImageReader
) -> None:
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    write_image(tmp_path / "one.png", height, width)
    theirs = Qwen2VLImageProcessorPil(
        patch_size=4, merge_size=2, size={"shortest_edge": 64, "longest_edge": 40 * 40}
    )(images=[Image.open(tmp_path / "one.png")], return_tensors="pt")
    image = reader.read(tmp_path / "one.png")
    assert reader.size(tmp_path / "one.png") == image.shape[:2]
    _, rows, columns = theirs["image_grid_thw"][0].tolist()
    assert image.shape == (rows * 4, columns * 4, 3)
    assert reader.num_tokens(image.shape[:2]) == rows * columns // 4
    patches = theirs["pixel_values"].view(rows // 2, columns // 2, 2, 2, 3, 2, 4, 4)
    for frame in range(2):
        colours = patches[..., frame, :, :].permute(0, 2, 5, 1, 3, 6, 4).reshape(image.shape)
        expected = (torch.from_numpy(image.copy()) / 255 - torch.tensor(reader.mean)) / torch.tensor(
            reader.std
        )
        torch.testing.assert_close(colours, expected)


def write_turned(path: Path, orientation: int) -> None:
    exif = Image.Exif()
    exif[0x112] = orientation
    pixels = np.random.default_rng(0).integers(0, 256, (20, 31, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(path, exif=exif)


@pytest.mark.parametrize("kind", ["jpg", "png", "webp", "tiff"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_images_are_read_upright_as_transformers_loads_them(
    orientation: int, kind: str, tmp_path: Path, reader: ImageReader
) -> None:
    from transformers.image_utils import load_image

    turned, upright = tmp_path / f"turned.{kind}", tmp_path / "upright.png"
    write_turned(turned, orientation)
    load_image(str(turned)).save(upright)
    assert reader.size(turned) == reader.size(upright) == ((32, 16) if orientation > 4 else (16, 32))
    assert np.array_equal(reader.read(turned), reader.read(upright))


def test_an_orientation_after_the_pixels_of_a_png_is_refused(tmp_path: Path, reader: ImageReader) -> None:
    """exiftool writes it there; the tokens of the prompt are counted from the beginning of the file."""
    file = tmp_path / "one.png"
    write_turned(file, 6)
    content = file.read_bytes()
    begin = content.index(b"eXIf") - 4
    end = begin + 12 + int.from_bytes(content[begin : begin + 4], "big")
    last = content.index(b"IEND") - 4
    file.write_bytes(content[:begin] + content[end:last] + content[begin:end] + content[last:])
    with pytest.raises(
        DataError, match=r"cannot be read \(it gives its orientation at its end\); write it again"
    ):
        reader.read(file)


def test_damaged_exif_data_are_named(tmp_path: Path, reader: ImageReader) -> None:
    described = PngInfo()
    described.add_text("Raw profile type exif", "exif\n\n\nno digits")
    Image.new("RGB", (8, 8)).save(tmp_path / "one.png", pnginfo=described)
    with pytest.raises(
        DataError, match=r"one\.png cannot be read \(non-hexadecimal .*\); write it again as a PNG"
    ):
        reader.size(tmp_path / "one.png")


def test_entries_of_rows_are_read_back_and_counted() -> None:
    rng = np.random.default_rng(0)
    images = [rng.integers(0, 256, (h, w, 3), dtype=np.uint8) for h, w in ((8, 16), (24, 8), (8, 8))]
    entries = [image_row(images[:2]), image_row([]), image_row(images[2:])]
    assert np.array_equal(entries[1], NO_IMAGES)
    for entry, expected in zip(entries, (images[:2], [], images[2:]), strict=True):
        found = images_of(entry)
        assert len(found) == len(expected)
        assert all(np.array_equal(one, other) for one, other in zip(found, expected, strict=True))
    assert len(entries[0]) == 4 + 2 * 8 + 3 * (8 * 16 + 24 * 8)
    columns = image_columns(entries)
    assert columns[IMAGE_SIZES].tolist() == [len(entry) for entry in entries]
    assert columns[IMAGE_BYTES].dtype == torch.uint8
    assert [len(row) for row in images_of_columns(columns)] == [2, 0, 1]
    rows = TensorDict({IMAGES: NonTensorStack(*entries)}, batch_size=[3])  # type: ignore[arg-type]
    assert payload_bytes(rows) == sum(map(len, entries))
    assert [len(row) for row in images_of_rows(rows)] == [2, 0, 1]
    assert images_of_rows(rows.exclude(IMAGES)) == [(), (), ()]
    assert identity(images[0]) != identity(images[0].reshape(16, 8, 3))


def test_micro_batches_have_the_images_of_their_rows() -> None:
    images = [np.full((8, 8, 3), number, np.uint8) for number in range(4)]
    batch = TensorDict(
        {
            "tokens": torch.zeros(4, 12, dtype=torch.int64),
            "prompt_lengths": torch.tensor([9, 2, 9, 2]),
            "response_lengths": torch.tensor([3, 1, 2, 1]),
            IMAGES: NonTensorStack(*(image_row([image]) for image in images)),
        },  # type: ignore[arg-type]
        batch_size=[4],
    )
    parts = cut_rows(batch, 16)
    assert len(parts) > 1
    for part in parts:
        for row, (image,) in zip(part.rows, images_of_columns(part.columns), strict=True):
            assert np.array_equal(image, images[row])


def test_positions_are_those_of_transformers() -> None:
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    entries = vision_entries(SIZES["hidden_size"], SIZES["num_attention_heads"])
    tokens = {
        "image_token_id": PAD,
        "video_token_id": 60,
        "vision_start_token_id": BEGIN,
        "vision_end_token_id": END,
    }
    with torch.device("meta"):
        model: Any = Qwen2_5_VLForConditionalGeneration(Qwen2_5_VLConfig(**{**SIZES, **entries, **tokens}))
    sides = [(3, 4), (1, 1), (5, 2)]
    row = [1, 2]
    for height, width in sides:
        row += [BEGIN, *[PAD] * (height * width), END, 3]
    ids = torch.tensor([row])
    grids = torch.tensor([[1, 2 * height, 2 * width] for height, width in sides])
    expected, deltas = model.model.get_rope_index(
        ids, mm_token_type_ids=(ids == PAD).int(), image_grid_thw=grids
    )
    images = [np.zeros((8 * height, 8 * width, 3), np.uint8) for height, width in sides]
    places = image_places(row, images, VISION)
    found = positions(len(row), places)
    assert np.array_equal(found, expected[:, 0].numpy())
    assert found.max() + 1 - len(row) == deltas.item()
    # What a model draws itself is text, the token of images included.
    longer = positions(len(row) + 2, image_places([*row, PAD, PAD], images, VISION))
    assert np.array_equal(longer[:, -2:], np.broadcast_to(found.max() + np.array([1, 2]), (3, 2)))
    with pytest.raises(
        DataError, match="image 3 of a row has 1 tokens, and the row's tokens have no 1 on end"
    ):
        image_places(row, [*images, images[1]], VISION)


def test_prompts_have_the_tokens_of_their_images(tmp_path: Path, tokenizer: Any, reader: ImageReader) -> None:
    first, second = write_image(tmp_path / "a.png", 16, 24), write_image(tmp_path / "b.png", 8, 8, 1)
    file = write_rows(
        tmp_path,
        {"prompt": "1<image>+<image>", "images": ["a.png", str(tmp_path / "b.png")], "response": "2"},
        {"prompt": [{"role": "user", "content": "<image> 3"}], "images": ["b.png"], "response": "2"},
        {"prompt": "4", "response": "2"},
    )
    prompts = PromptDataset(file, tokenizer, 48, reader=reader)
    assert [row.count(PAD) for row in prompts.tokens] == [7, 1, 0]
    assert prompts.tokens[0][prompts.tokens[0].index(BEGIN) :][:8] == [BEGIN, *[PAD] * 6, END]
    rows = prompts.rows([1, 0, 2, 1])
    seen = images_of_rows(rows)
    assert [len(row) for row in seen] == [1, 2, 0, 1]
    assert np.array_equal(seen[1][0], first) and np.array_equal(seen[0][0], second)
    demonstrations = ResponseDataset(file, tokenizer, "demonstrations", 56, reader=reader)
    shown = demonstrations.rows([0, 1, 2])
    for number, tokens in enumerate(prompts.tokens):
        assert shown["tokens"][number, : shown["prompt_lengths"][number]].tolist() == tokens
    assert [len(row) for row in images_of_rows(demonstrations.rows([0, 2]))] == [2, 0]


def test_bad_images_are_named_with_their_rows(tmp_path: Path, tokenizer: Any, reader: ImageReader) -> None:
    write_image(tmp_path / "a.png", 16, 24)
    write_image(tmp_path / "thin.png", 2, 900)
    (tmp_path / "text.png").write_text("no image")
    (tmp_path / "folder.png").mkdir()
    file = write_rows(
        tmp_path,
        {"prompt": "<image>", "images": ["gone.png"]},
        {"prompt": "<image>", "images": ["text.png"]},
        {"prompt": "no place", "images": ["a.png"]},
        {"prompt": "<image>", "images": ["thin.png"]},
        {"prompt": "<image>", "images": ["folder.png"]},
    )
    with pytest.raises(DataError) as caught:
        PromptDataset(file, tokenizer, 48, reader=reader)
    gone, text, place, thin, folder = caught.value.problems
    assert gone.startswith(f"{file}, line 1: image {tmp_path / 'gone.png'} does not exist; ")
    assert text.startswith(f"{file}, line 2: image {tmp_path / 'text.png'} cannot be read (")
    assert place.startswith(f"{file}, line 3: the prompt has 0 times <image> for 1 images; write it once")
    assert "line 4" in thin and "absolute aspect ratio must be smaller than 200" in thin
    assert "line 5" in folder and "cannot be read" in folder


@pytest.mark.parametrize("damage", ["cut off", "a chunk that is too short"])
def test_damaged_pixels_are_told_with_their_row(
    tmp_path: Path, tokenizer: Any, reader: ImageReader, damage: str
) -> None:
    image = tmp_path / "a.png"
    write_image(image, 40, 40)
    content = image.read_bytes()
    begin = content.index(b"IDAT")
    image.write_bytes(
        content[:-200] if damage == "cut off" else content[: begin - 4] + b"\0\0\0\12" + content[begin:]
    )
    file = write_rows(tmp_path, {"prompt": "<image>", "images": ["a.png"]})
    dataset = PromptDataset(file, tokenizer, 48, reader=reader)
    with pytest.raises(DataError, match=rf"^{file}, line 1: image {image} cannot be read \("):
        dataset.rows([0])


def test_prompts_with_images_that_nothing_reads_are_refused(
    tmp_path: Path, tokenizer: Any, reader: ImageReader
) -> None:
    write_image(tmp_path / "a.png", 40, 40)
    file = write_rows(tmp_path, {"prompt": "<image>", "images": ["a.png"]})
    with pytest.raises(DataError, match="line 1: the prompt has images, and the model has no vision tower"):
        PromptDataset(file, tokenizer, 48)
    with pytest.raises(DataError, match="line 1: images are for responses of one turn"):
        PromptDataset(file, tokenizer, 48, "rows", reader)
    with pytest.raises(
        DataError, match=r"line 1: the prompt has 3\d tokens, 25 of them of its images, max_prompt"
    ):
        PromptDataset(file, tokenizer, 24, reader=reader)
    file = write_rows(tmp_path, {"prompt": "<|image_pad|> 1"})
    with pytest.raises(
        DataError, match=f"line 1: the prompt has 1 times the token of images {PAD} for 0 images"
    ):
        PromptDataset(file, tokenizer, 48, reader=reader)


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"patch_size": 14}, "patch_size=14 is not the 4 of config.json"),
        ({"min_pixels": 100, "max_pixels": 10}, "min_pixels=100 and max_pixels=10 must be positive integers"),
        ({"image_mean": [0.5]}, "image_mean and image_std three numbers each"),
    ],
)
def test_settings_of_another_processor_are_refused(
    settings: dict[str, Any], problem: str, tmp_path: Path
) -> None:
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(settings))
    with pytest.raises(CheckpointError, match=problem):
        ImageReader(tmp_path, VISION)


def contents(**changes: Any) -> dict[str, Any]:
    """Return a config.json as older versions of transformers wrote it, with all keys at the top."""
    entries = vision_entries(SIZES["hidden_size"], SIZES["num_attention_heads"])
    rotary = {"type": "mrope", "mrope_section": entries.pop("rope_parameters")["mrope_section"]}
    sizes = {key: value for key, value in SIZES.items() if key != "head_dim"}
    tokens = {"image_token_id": PAD, "vision_start_token_id": BEGIN, "vision_end_token_id": END}
    names = {"architectures": ["Qwen2_5_VLForConditionalGeneration"], "model_type": "qwen2_5_vl"}
    return {**names, **sizes, **entries, **tokens, "rope_scaling": rotary, "rope_theta": 1e6, **changes}


def test_both_styles_of_config_json_describe_the_same_model() -> None:
    from transformers import Qwen2_5_VLConfig

    shape = ModelShape.from_hf_config(contents())
    assert shape.vision == VISION
    assert (shape.rope_type, shape.rope_theta) == ("default", 1e6)
    saved = json.loads(Qwen2_5_VLConfig(**contents()).to_json_string())
    assert "num_hidden_layers" not in saved
    assert ModelShape.from_hf_config(saved) == shape
    assert ModelShape.from_hf_config(contents(tie_word_embeddings=True)).tied_embeddings


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"rope_scaling": {"type": "mrope"}}, "mrope_section=null must be three numbers"),
        (
            {"rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 1]}},
            r"mrope_section=\[1, 1, 1\] must be",
        ),
        ({"vision_config": {"depth": -1}}, "vision_config.depth=-1 must be positive integers"),
        (
            {"vision_config": {"out_hidden_size": 64}},
            "vision_config.out_hidden_size=64 is not supported; it must",
        ),
        ({"image_token_id": 131}, "image_token_id=131 must be below vocab_size=131"),
        ({"use_sliding_window": True}, "use_sliding_window=true is not supported"),
        ({"text_config": {"layer_types": "none"}}, 'layer_types="none" must be a list'),
        ({"vision_config": 3}, "vision_config=3 must be an object"),
    ],
)
def test_unsupported_models_are_refused(changes: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        ModelShape.from_hf_config(contents(**changes))
