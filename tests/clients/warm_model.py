"""A small model for the cookbook's recipes: its tokenizer, its random weights, and demonstrations of their questions.

The teacher of the demonstrations answers every other time with a question mark: reinforcement learning has one habit to
unlearn, which takes few steps.
"""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
import yaml
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from hybridengine.data.tokenizer import PAD, ROLES, TURN_END, TURN_START, UNKNOWN, token_id

NAME = "Qwen/Qwen3-4B-Instruct-2507"
"""Name by which the recipes choose the renderer qwen3_instruct."""

NUM_QUESTIONS = {"batches": 6, "each": 8}
"""Questions of arithmetic_env that are demonstrated: the first batches of `groups_per_batch=8`."""

SHOT = "What is 4 + 5?", "9"
BOXED = " Provide a numerical answer without units, written inside \\boxed{}."
BOXED_SHOT = (
    "How many r's are in strawberry?",
    "Let's spell the word out and number all the letters: 1) s 2) t 3) r 4) a 5) w 6) b 7) e 8) r 9) r 10) y. We have"
    " r's at positions 3, 8, and 9. \\boxed{3}",
)
"""Example and suffix of rl_loop's prompts."""

PHRASES = (*ROLES, *map(str, range(201)), "What is ", " + ", "\\boxed{", BOXED, *BOXED_SHOT)
"""Texts with a token of their own, which keeps prompts of the recipes short."""

CHAT_TEMPLATE = (
    f"{{% for message in messages %}}{TURN_START}{{{{ message['role'] + '\\n' + message['content'] }}}}{TURN_END}"
    f"{{{{ '\\n' }}}}{{% endfor %}}{{% if add_generation_prompt %}}{TURN_START}assistant{{{{ '\\n' }}}}{{% endif %}}"
)
"""Qwen's ChatML, with the line breaks of the cookbook's renderers."""


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer of all bytes, the phrases and the special tokens of ChatML."""
    tokens = [PAD, UNKNOWN, TURN_START, TURN_END, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges=[], unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([PAD, UNKNOWN, TURN_START, TURN_END])
    tokenizer.add_tokens(list(PHRASES))
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        unk_token=UNKNOWN,
        eos_token=TURN_END,
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        padding_side="right",
    )


def write_random_model(folder: Path) -> None:
    """Write a model with random weights and its tokenizer as a Hugging Face checkpoint."""
    tokenizer = build_tokenizer()
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        initializer_range=0.06,
        bos_token_id=None,
        eos_token_id=token_id(tokenizer, "eos"),
        pad_token_id=token_id(tokenizer, "pad"),
    )
    torch.manual_seed(0)
    Qwen3ForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def questions() -> Iterator[tuple[int, int]]:
    """Yield the terms of arithmetic_env's first questions, which depend on the number of their batch alone."""
    for batch in range(NUM_QUESTIONS["batches"]):
        generator = np.random.RandomState(batch)
        for _ in range(NUM_QUESTIONS["each"]):
            yield int(generator.randint(0, 101)), int(generator.randint(0, 101))


def write_demonstrations(file: Path) -> None:
    """Write the right answer and a question mark to each question, as arithmetic_env and as rl_loop asks it."""
    forms = (("", SHOT, "{}"), (BOXED, BOXED_SHOT, "\\boxed{{{}}}"))
    with file.open("w") as lines:
        for (x, y), (suffix, (asked, answered), form) in itertools.product(questions(), forms):
            messages = [
                {"role": "user", "content": asked + suffix},
                {"role": "assistant", "content": answered},
                {"role": "user", "content": f"What is {x} + {y}?{suffix}"},
            ]
            for response in (form.format(x + y), "?"):
                row = {"prompt": messages, "answer": str(x + y), "response": response}
                lines.write(json.dumps(row) + "\n")


def write_datasets(folder: Path) -> None:
    """Write the data sets that rl_loop and sl_loop load by name, into a folder in which they are found offline."""
    generator = random.Random(0)
    asked = [*questions()]
    generator.shuffle(asked)
    gsm8k = [
        {"question": f"What is {x} + {y}?", "answer": f"{x} + {y} = {x + y}\n#### {x + y}"} for x, y in asked
    ]
    no_robots = [
        {
            "messages": [
                {"role": "user", "content": f"What is {x} + {y}?"},
                {"role": "assistant", "content": f"{x} + {y} is {x + y}."},
            ]
        }
        for x, y in asked
    ]
    for name, config, rows in (
        ("openai/gsm8k", "main", gsm8k),
        ("HuggingFaceH4/no_robots", "default", no_robots),
    ):
        (folder / name / config).mkdir(parents=True)
        (folder / name / config / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        (folder / name / "README.md").write_text(
            f"---\nconfigs:\n- config_name: {config}\n  data_files:\n"
            f"  - split: train\n    path: {config}/train.jsonl\n---\n"
        )


def warm_up(folder: Path, run: Callable[..., None]) -> Path:
    """Train the small model on the demonstrations; return its checkpoint. `run` runs `hybridengine` with arguments."""
    write_random_model(folder / "random")
    write_demonstrations(folder / "demonstrations.jsonl")
    sections = {
        "run": {"name": "warm", "folder": str(folder / "runs"), "steps": 1, "eval_every": 0, "live": False},
        "cluster": {"ranks_per_node": [2]},
        "model": {"path": str(folder / "random")},
        "data": {"train_file": str(folder / "demonstrations.jsonl"), "batch_size": 2},
        "warmup": {
            "file": str(folder / "demonstrations.jsonl"),
            "steps": 120,
            "batch_size": 128,
            "lr": 3e-3,
        },
        "actor": {"parallel": "1-1-2", "generate": "1-1", "micro_batch_tokens": 8192},
        "reference": {"parallel": "1-1-2"},
        "reward": {"function": "hybridengine.data.tasks:arithmetic_reward"},
        "rollout": {
            "max_prompt_tokens": 36,
            "max_response_tokens": 5,
            "samples_per_prompt": 2,
            "kv_cache_bytes": "16MiB",
        },
        "algorithm": {"name": "grpo"},
        "checkpoint": {"every": 0},
    }
    (folder / "warm.yaml").write_text(yaml.safe_dump(sections))
    run("train", folder / "warm.yaml")
    return folder / "runs/warm/final"
