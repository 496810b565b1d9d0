"""Rows of a data file as token batches, in shuffled epochs with random access."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
import torch
from tensordict import NonTensorStack, TensorDict
from transformers import PreTrainedTokenizerBase

from hybridengine.data.images import ImageReader
from hybridengine.data.row_files import Message, Row, raise_listed, read_rows
from hybridengine.data.tokenizer import token_id
from hybridengine.errors import DataError
from hybridengine.rows.images import IMAGES, image_row

EPISODE_ROWS = "episode_rows"
"""Column of the data's rows as JSON, for functions of episodes: `number`, `prompt` and `answer`; and `place`, its file
and line, for messages."""
TOKENIZED_AT_ONCE = 4096
SHOWN_CHARACTERS = 8
MAX_CHARACTERS_PER_TOKEN = 256
"""Twice the longest tokens of known vocabularies, runs of spaces: a text with more characters per token is too long."""


def rows_after(num_rows: int, batch_size: int, seed: int, num_drawn: int) -> list[int]:
    """Return the row numbers of the batch that follows `num_drawn` rows of an endless stream of shuffled epochs.

    Every epoch contains each row exactly once; a batch may span two. The result depends only on the arguments.
    """
    assert num_rows > 0 and batch_size > 0 and num_drawn >= 0, f"{num_rows=} {batch_size=} {num_drawn=}"
    rows: list[int] = []
    for position in range(num_drawn, num_drawn + batch_size):
        epoch, offset = divmod(position, num_rows)
        rows.append(int(_order(num_rows, seed, epoch)[offset]))
    return rows


@lru_cache(maxsize=4)
def _order(num_rows: int, seed: int, epoch: int) -> np.ndarray:
    return np.random.Generator(np.random.PCG64([seed, epoch])).permutation(num_rows)


def numbered_rows(num_rows: int, seed: int, numbers: Sequence[int]) -> list[int]:
    """Return the row numbers of prompts with these numbers in the stream of `rows_after`."""
    return [rows_after(num_rows, 1, seed, number)[0] for number in numbers]


class PromptDataset:
    """Tokenised prompts, and the data that rewards need for each.

    Shapes: a batch holds `prompt_tokens` [B, P] int64 right-padded, `prompt_lengths` [B] int64, `answers` [B] texts
    and `row_ids` [B] int64 (the row's number in the file from 0); P = max_prompt_tokens. For a model that reads images,
    it holds `IMAGES` as well (`image_row`).
    """

    unit = 1
    """Number of sequences of a row."""

    def __init__(
        self,
        path: str | Path,
        tokenizer: PreTrainedTokenizerBase,
        max_prompt_tokens: int,
        json_column: str | None = None,
        reader: ImageReader | None = None,
    ) -> None:
        """Read and tokenise a JSONL or parquet file; raise DataError for malformed rows or prompts that are too long.

        With `json_column`, batches have the rows themselves in a column of this name: JSON objects with `place`,
        `number`, `prompt` and `answer`.
        """
        rows = read_rows(path)
        self.max_prompt_tokens = max_prompt_tokens
        if json_column:
            raise_listed(
                [
                    f"{row.place}: images are for responses of one turn, not for functions of episodes; remove the key"
                    " images, or rollout.episode"
                    for row in rows
                    if row.images
                ]
            )
        self.tokens = prompt_tokens(rows, tokenizer, reader, max_prompt_tokens)
        self._images = Images(rows, reader)
        self.answers = [row.answer for row in rows]
        self._json_column = json_column
        self._rows = rows if json_column else []
        self.pad_id = token_id(tokenizer, "pad")

    def __len__(self) -> int:
        return len(self.tokens)

    def rows(self, row_ids: Sequence[int]) -> TensorDict:
        """Return the prompts with these row numbers, in the given order (repetitions allowed)."""
        chosen = [self.tokens[row] for row in row_ids]
        more = {self._json_column: NonTensorStack(*map(self._json, row_ids))} if self._json_column else {}
        return TensorDict(
            {
                **more,
                **self._images.columns(row_ids),
                "prompt_tokens": right_padded(chosen, self.max_prompt_tokens, self.pad_id),
                "prompt_lengths": torch.tensor([len(tokens) for tokens in chosen]),
                "answers": NonTensorStack(*(self.answers[row] for row in row_ids)),
                "row_ids": torch.tensor(list(row_ids)),
            },
            batch_size=[len(chosen)],
        )

    def _json(self, number: int) -> str:
        row = self._rows[number]
        found = {"place": row.place, "number": number, "prompt": row.prompt, "answer": row.answer}
        return json.dumps(found)


def prompts_digest(prompts: PromptDataset, seed: int, numbers: Sequence[int]) -> str:
    """Return the SHA-256 of the tokens of numbered prompts, which are others with another seed, file or tokenizer."""
    tokens = [prompts.tokens[row] for row in numbered_rows(len(prompts), seed, numbers)]
    return hashlib.sha256(json.dumps(tokens).encode()).hexdigest()


class Images:
    """Images of a data file's rows, read from their files when they are needed."""

    def __init__(self, rows: Sequence[Row], reader: ImageReader | None) -> None:
        self._paths, self._reader = [row.images for row in rows], reader
        self._places = [row.place for row in rows]

    def columns(self, row_ids: Sequence[int]) -> dict[str, NonTensorStack]:
        """Return the column of rows; none for a model that reads no images."""
        if self._reader is None:
            return {}
        entries = {
            row: image_row([self._read(row, path) for path in self._paths[row]]) for row in set(row_ids)
        }
        return {IMAGES: NonTensorStack(*(entries[row] for row in row_ids))}

    def _read(self, row: int, path: Path) -> np.ndarray:
        assert self._reader is not None, "asked for rows of a model that reads images"
        try:
            return self._reader.read(path)
        except DataError as error:
            raise DataError(f"{self._places[row]}: {error}") from None


def prompt_tokens(
    rows: Sequence[Row],
    tokenizer: PreTrainedTokenizerBase,
    reader: ImageReader | None = None,
    max_tokens: int | None = None,
) -> list[list[int]]:
    """Return the tokens of each row's prompt, with those of its images.

    Raises DataError for images that cannot be read, texts unknown to the tokenizer, and prompts of more than
    `max_tokens`.
    """
    messages, sizes, problems = list[list[Message]](), list[list[tuple[int, int]]](), list[str]()
    for row in rows:
        if row.images and reader is None:
            problems.append(
                f"{row.place}: the prompt has images, and the model has no vision tower; remove the key images, or name a"
                " model such as Qwen2.5-VL"
            )
        try:
            messages.append(reader.messages(row, tokenizer) if reader else row.messages)
            sizes.append([reader.size(path) for path in row.images] if reader else [])
        except DataError as error:
            problems.append(f"{row.place}: {error}")
    raise_listed(problems)
    texts = _prompt_texts(rows, messages, tokenizer)
    most = None if max_tokens is None else max_tokens * MAX_CHARACTERS_PER_TOKEN
    raise_listed(
        [
            f"{row.place}: the prompt has {len(text)} characters, max_prompt_tokens={max_tokens} holds at most {most};"
            " raise the limit or shorten the prompt"
            for row, text in zip(rows, texts, strict=True)
            if most is not None and len(text) > most
        ]
    )
    tokens = tokenized(rows, texts, tokenizer, "prompt")
    if reader is not None:
        tokens = [reader.expanded(*one) for one in zip(rows, tokens, sizes, strict=True)]
    raise_listed(
        [
            f"{row.place}: the prompt has {len(found)} tokens, {_share(size, reader)}max_prompt_tokens={max_tokens};"
            f" raise the limit or shorten the prompt{', or lower max_pixels in preprocessor_config.json' * bool(size)}"
            for row, found, size in zip(rows, tokens, sizes, strict=True)
            if max_tokens is not None and len(found) > max_tokens
        ]
    )
    return tokens


def _share(sizes: Sequence[tuple[int, int]], reader: ImageReader | None) -> str:
    return f"{sum(map(reader.num_tokens, sizes))} of them of its images, " if reader and sizes else ""


def _prompt_texts(
    rows: Sequence[Row], messages: Sequence[list[Message]], tokenizer: PreTrainedTokenizerBase
) -> list[str]:
    """Return each row's prompt in the tokenizer's chat template, a foreign program that jinja's sandbox isolates."""
    texts, problems = list[str](), list[str]()
    for row, asked in zip(rows, messages, strict=True):
        prompt: Any = asked
        try:
            text: Any = tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True)
            text.encode()
            texts.append(text)
        except Exception as error:  # also arithmetic, types, the sandbox's own limits
            if isinstance(error, jinja2.TemplateError) and not isinstance(error, jinja2.TemplateSyntaxError):
                problems.append(
                    f"{row.place}: the chat template refuses the prompt ({error}); correct its roles"
                )
                continue
            template = f"the chat template of {tokenizer.name_or_path or 'the tokenizer'}"
            reason = f"{type(error).__name__}: {error}"
            problems.append(f"{row.place}: {template} fails ({reason}); correct it")
    raise_listed(problems)
    return texts


def tokenized(
    rows: Sequence[Row], texts: Sequence[str], tokenizer: PreTrainedTokenizerBase, key: str
) -> list[list[int]]:
    """Return the tokens of each row's text under `key`; raise DataError for unknown texts."""
    tokens, problems = list[list[int]](), list[str]()
    for first in range(0, len(texts), TOKENIZED_AT_ONCE):
        found = tokenizer(list(texts[first : first + TOKENIZED_AT_ONCE]), add_special_tokens=False)
        tokens += found["input_ids"]
    for row, text, found in zip(rows, texts, tokens, strict=True):
        problems += unknown_problems(row, text, found, tokenizer, key)
    raise_listed(problems)
    return tokens


def unknown_problems(
    row: Row, text: str, tokens: Sequence[int], tokenizer: PreTrainedTokenizerBase, key: str
) -> list[str]:
    """Return the problem of a row whose `text` under `key` has characters that the tokenizer does not know, if any."""
    unknown: Any = tokenizer.unk_token_id
    if unknown in (None, tokenizer.eos_token_id, tokenizer.pad_token_id):
        return []
    if not (num_unknown := list(tokens).count(unknown)):
        return []
    characters = list[str]()
    if tokenizer.is_fast:
        found: Any = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        pairs = zip(found["input_ids"], found["offset_mapping"], strict=True)
        spans = dict.fromkeys(text[slice(*place)] for one, place in pairs if one == unknown)
        characters = [json.dumps(span, ensure_ascii=False) for span in spans]
    named = ", ".join(characters[:SHOWN_CHARACTERS]) + ", ..." * (len(characters) > SHOWN_CHARACTERS)
    return [
        f"{row.place}: parts of the {key} unknown to the tokenizer: {named or f'{num_unknown} tokens'}; remove those"
        " characters or use another tokenizer"
    ]


def right_padded(rows: Sequence[Sequence[int]], width: int, pad_id: int) -> torch.Tensor:
    """Return token rows as one padded tensor [len(rows), width]."""
    padded = [[*tokens, *[pad_id] * (width - len(tokens))] for tokens in rows]
    return torch.tensor(padded, dtype=torch.int64).reshape(len(rows), width)
