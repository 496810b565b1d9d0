"""Supervised rows for the warm-up: a prompt followed by the response to imitate."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from tensordict import TensorDict
from transformers import PreTrainedTokenizerBase

from hybridengine.data.chat_template import length_problem
from hybridengine.data.epochs import shuffled_rows
from hybridengine.data.prompts import right_padded, tokenize_prompts, unknown_tokens
from hybridengine.data.rows import Row, raise_listed, read_rows
from hybridengine.data.tokenizer import token_id


class DemonstrationDataset:
    """Tokenised prompts, each followed by its response and the end-of-sequence token.

    Shapes: a batch holds `tokens` [B, P + R] int64 right-padded, `prompt_lengths`, `response_lengths` (with the
    end-of-sequence token) and `row_ids`, all [B] int64; P = max_prompt_tokens, R = max_response_tokens. These are the
    columns of a finished rollout, so that log-probs and their mask are computed alike.
    """

    def __init__(
        self,
        path: str | Path,
        tokenizer: PreTrainedTokenizerBase,
        max_prompt_tokens: int,
        max_response_tokens: int,
        seed: int = 0,
    ) -> None:
        """Read and tokenise the rows of `path` (JSONL or parquet, keys prompt, answer and response).

        Raises:
            DataError: an unusable file, malformed rows, or prompts or responses over their limit (all at once).
        """
        rows = read_rows(path, needs_response=True)
        self.width = max_prompt_tokens + max_response_tokens
        self.seed = seed
        self.prompts = tokenize_prompts(rows, tokenizer, max_prompt_tokens)
        self.responses = _tokenize_responses(rows, tokenizer, max_response_tokens)
        self._pad_id = token_id(tokenizer, "pad")

    def __len__(self) -> int:
        """Number of demonstrations."""
        return len(self.prompts)

    def batch(self, step: int, batch_size: int) -> TensorDict:
        """Demonstrations of step `step` (from 0) of the endless shuffled stream."""
        return self.rows(shuffled_rows(len(self), batch_size, self.seed, step))

    def rows(self, row_ids: Sequence[int]) -> TensorDict:
        """The named demonstrations, in the order given."""
        prompts = [self.prompts[row] for row in row_ids]
        responses = [self.responses[row] for row in row_ids]
        whole = [prompt + response for prompt, response in zip(prompts, responses, strict=True)]
        return TensorDict(
            {
                "tokens": right_padded(whole, self.width, self._pad_id),
                "prompt_lengths": torch.tensor([len(tokens) for tokens in prompts]),
                "response_lengths": torch.tensor([len(tokens) for tokens in responses]),
                "row_ids": torch.tensor(list(row_ids)),
            },
            batch_size=[len(whole)],
        )


def _tokenize_responses(
    rows: Sequence[Row], tokenizer: PreTrainedTokenizerBase, max_response_tokens: int
) -> list[list[int]]:
    texts = [row.response or "" for row in rows]
    too_long = (
        length_problem(row, "response", len(text), max_response_tokens)
        for row, text in zip(rows, texts, strict=True)
    )
    raise_listed(list(filter(None, too_long)))
    end = token_id(tokenizer, "eos")
    tokens = [[*found, end] for found in tokenizer(texts, add_special_tokens=False)["input_ids"]]
    problems: list[str] = []
    for row, row_tokens in zip(rows, tokens, strict=True):
        if len(row_tokens) > max_response_tokens:
            problems.append(
                f"{row.place}: the response has {len(row_tokens)} tokens with the end-of-sequence token,"
                f" max_response_tokens={max_response_tokens}; raise the limit or shorten the response"
            )
        problems += unknown_tokens(row, row_tokens, tokenizer, "response")
    raise_listed(problems)
    return tokens
