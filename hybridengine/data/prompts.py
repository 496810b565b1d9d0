"""Prompts of a data file as token batches, in shuffled epochs with random access."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from tensordict import NonTensorStack, TensorDict
from transformers import PreTrainedTokenizerBase

from hybridengine.data.chat_template import rendered_prompts
from hybridengine.data.epochs import shuffled_rows
from hybridengine.data.rows import Row, raise_listed, read_rows
from hybridengine.data.tokenizer import token_id

TOKENIZED_AT_ONCE = 4096


class PromptDataset:
    """Tokenised prompts and what the reward needs for each.

    Shapes: a batch holds `prompt_tokens` [B, P] int64 right-padded, `prompt_lengths` [B] int64, `answers` [B] texts
    and `row_ids` [B] int64 (the row's number in the file from 0); P = max_prompt_tokens.
    """

    def __init__(
        self, path: str | Path, tokenizer: PreTrainedTokenizerBase, max_prompt_tokens: int, seed: int = 0
    ) -> None:
        """Read and tokenise the rows of `path` (JSONL or parquet, keys prompt and answer).

        Raises:
            DataError: an unusable file, malformed rows, or prompts longer than `max_prompt_tokens` (all at once).
        """
        rows = read_rows(path)
        self.max_prompt_tokens = max_prompt_tokens
        self.seed = seed
        self.tokens = tokenize_prompts(rows, tokenizer, max_prompt_tokens)
        self.answers = [row.answer for row in rows]
        self._pad_id = token_id(tokenizer, "pad")

    def __len__(self) -> int:
        """Number of prompts."""
        return len(self.tokens)

    def batch(self, step: int, batch_size: int) -> TensorDict:
        """Prompts of step `step` (from 0) of the endless shuffled stream; depends only on seed, size and step."""
        return self.rows(shuffled_rows(len(self), batch_size, self.seed, step))

    def rows(self, row_ids: Sequence[int]) -> TensorDict:
        """The named prompts, in the order given (repetitions allowed)."""
        chosen = [self.tokens[row] for row in row_ids]
        return TensorDict(
            {
                "prompt_tokens": right_padded(chosen, self.max_prompt_tokens, self._pad_id),
                "prompt_lengths": torch.tensor([len(tokens) for tokens in chosen]),
                "answers": NonTensorStack(*(self.answers[row] for row in row_ids)),
                "row_ids": torch.tensor(list(row_ids)),
            },
            batch_size=[len(chosen)],
        )


def tokenize_prompts(
    rows: Sequence[Row], tokenizer: PreTrainedTokenizerBase, max_prompt_tokens: int
) -> list[list[int]]:
    """Tokens of each row's prompt through the chat template, with the start of the assistant's turn.

    Raises:
        DataError: rows that the template refuses, that are too long, or that hold characters unknown to the
            tokenizer.
    """
    tokens: list[list[int]] = []
    problems: list[str] = []
    for first in range(0, len(rows), TOKENIZED_AT_ONCE):
        texts, found = rendered_prompts(rows[first : first + TOKENIZED_AT_ONCE], tokenizer, max_prompt_tokens)
        problems += found
        tokens += tokenizer(texts, add_special_tokens=False)["input_ids"]
    for row, row_tokens in zip(rows, tokens, strict=True):
        if len(row_tokens) > max_prompt_tokens:
            problems.append(
                f"{row.place}: the prompt has {len(row_tokens)} tokens, max_prompt_tokens={max_prompt_tokens};"
                " raise the limit or shorten the prompt"
            )
        problems += unknown_tokens(row, row_tokens, tokenizer, "prompt")
    raise_listed(problems)
    return tokens


def unknown_tokens(
    row: Row, tokens: Sequence[int], tokenizer: PreTrainedTokenizerBase, key: str
) -> list[str]:
    """A problem where the tokenizer replaced characters by its unknown token; none where it has no such token."""
    unknown = tokenizer.unk_token_id
    if unknown in (None, tokenizer.eos_token_id, tokenizer.pad_token_id):
        return []
    num_unknown = sum(token == unknown for token in tokens)
    if not num_unknown:
        return []
    return [
        f"{row.place}: {num_unknown} {'part' if num_unknown == 1 else 'parts'} of the {key} unknown to the tokenizer;"
        " remove those characters or use another tokenizer"
    ]


def right_padded(rows: Sequence[Sequence[int]], width: int, pad_id: int) -> torch.Tensor:
    """Token rows as one tensor.

    Shapes: the result is [len(rows), width] int64.
    """
    padded = torch.full((len(rows), width), pad_id, dtype=torch.int64)
    for number, tokens in enumerate(rows):
        padded[number, : len(tokens)] = torch.tensor(tokens, dtype=torch.int64)
    return padded
