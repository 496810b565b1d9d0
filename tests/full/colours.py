"""A visual task: squares of one colour, which a small Qwen2.5-VL with a random tower learns to name by a letter."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image

from hybridengine.data.tokenizer import build_arithmetic_tokenizer
from tests.gloo.tiny_models import write_model

COLOURS = {"r": (220, 30, 30), "g": (30, 200, 40), "b": (40, 50, 220), "y": (230, 220, 40)}
SIDES = (8, 16, 24)
"""Heights and widths, of 1, 2 and 3 tokens."""
MARKS = ("<|vision_start|>", "<|image_pad|>", "<|vision_end|>", "<|video_pad|>")
NUM_TOKENS = 61
"""Those of the demo's tokenizer, and those of images."""


def write_colour_model(folder: Path, *, tied: bool = False) -> None:
    """Write the model, its tokenizer, and the limits of its images."""
    tokenizer = build_arithmetic_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": list(MARKS)})
    ids = {mark: tokenizer.get_vocab()[mark] for mark in MARKS}
    write_model(
        folder,
        "qwen2_5_vl",
        tied,
        vocab_size=NUM_TOKENS,
        hidden_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vision_start_token_id=ids[MARKS[0]],
        image_token_id=ids[MARKS[1]],
        vision_end_token_id=ids[MARKS[2]],
        video_token_id=ids[MARKS[3]],
    )
    tokenizer.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(
        json.dumps({"min_pixels": 64, "max_pixels": 24 * 24, "patch_size": 4, "merge_size": 2})
    )


def write_colour_files(folder: Path, count: int, seed: int = 0) -> Path:
    """Write images and rows, which are prompts and demonstrations; return the file of rows."""
    rng, rows = np.random.default_rng(seed), []
    (folder / "images").mkdir(parents=True, exist_ok=True)
    for number in range(count):
        letter = list(COLOURS)[number % len(COLOURS)]
        height, width = rng.choice(SIDES, 2)
        noise = rng.integers(-20, 21, (height, width, 3))
        pixels = (np.array(COLOURS[letter]) + noise).clip(0, 255).astype(np.uint8)
        name = f"images/{seed}-{number}.png"
        Image.fromarray(pixels).save(folder / name)
        rows.append({"prompt": "<image> ?", "images": [name], "answer": letter, "response": letter})
    file = folder / f"rows-{seed}.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def colour_reward(responses: Sequence[str], answers: Sequence[str]) -> list[float]:
    """Return 1.0 for a response that is the letter alone."""
    return [float(response.strip() == answer) for response, answer in zip(responses, answers, strict=True)]
