"""Rows of a data file with the responses to train on: demonstrations and preferences, as token batches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

import torch
from tensordict import TensorDict
from transformers import PreTrainedTokenizerBase

from hybridengine.config.algorithm import RowsKind
from hybridengine.data.chat import Chat
from hybridengine.data.datasets import (
    Images,
    prompt_tokens,
    right_padded,
    rows_after,
    tokenized,
    unknown_problems,
)
from hybridengine.data.images import ImageReader
from hybridengine.data.row_files import Row, raise_listed, read_rows
from hybridengine.data.tokenizer import token_id
from hybridengine.errors import DataError
from hybridengine.rows.micro_batches import RESPONSE_MASK

TooLong = Literal["error", "truncate", "drop"]


class _Sequence(NamedTuple):
    """Tokens of a prompt and a response; `trained` are the response's tokens that the assistant has written."""

    prompt: list[int]
    response: list[int]
    trained: list[bool]

    @property
    def num_tokens(self) -> int:
        return len(self.prompt) + len(self.response)

    def cut(self, max_tokens: int) -> _Sequence:
        """Return the first tokens."""
        left = max(0, max_tokens - len(self.prompt))
        return _Sequence(self.prompt[:max_tokens], self.response[:left], self.trained[:left])


class ResponseDataset:
    """Tokenised prompts, each followed by its response and the tokens that end a turn (`Chat.turn_end`).

    A demonstration is one sequence, a preference two: its chosen response and its rejected one. In a conversation, the
    response begins with the assistant's first message, and `response_mask` excludes what the assistant has not written.

    Shapes: a batch holds `tokens` [B, T] int64 right-padded, `prompt_lengths`, `response_lengths` and `row_ids`, all [B]
    int64; if there are conversations `response_mask` [B, T] bool; for a model that reads images also `IMAGES`;
    T = max_tokens. These are the columns of a finished rollout, so that log-probs and their mask are computed alike.
    """

    def __init__(
        self,
        path: str | Path,
        tokenizer: PreTrainedTokenizerBase,
        kind: RowsKind,
        max_tokens: int,
        too_long: TooLong = "error",
        seed: int = 0,
        *,
        limit: str = "data.max_tokens",
        reader: ImageReader | None = None,
    ) -> None:
        """Read and tokenise a JSONL or parquet file; `limit` is the name of `max_tokens` in messages.

        `reader` reads the images of a model that has a vision tower.

        Raises DataError for malformed rows, for rows over the limit if that is an error, and if no row is left.
        """
        rows = read_rows(path, kind)
        self.path, self.kind, self.max_tokens, self.seed = path, kind, max_tokens, seed
        self.unit = 2 if kind == "preferences" else 1
        """Number of sequences of a row."""
        self.num_truncated = self.num_dropped = 0
        self._pad_id = token_id(tokenizer, "pad")
        self._sequences, kept, problems = list[_Sequence](), list[Row](), list[str]()
        self._has_mask = any(row.later for row in rows)
        for row, found in zip(rows, _sequences(rows, tokenizer, reader), strict=True):
            longest = max(one.num_tokens for one in found)
            if longest > max_tokens and too_long == "error":
                problems.append(
                    f"{row.place}: prompt and response have {longest} tokens with the end token,"
                    f" {limit}={max_tokens}; raise the limit or shorten the row"
                )
                continue
            cut = [one.cut(max_tokens) for one in found]
            has_lost = cut != found
            if has_lost and (too_long == "drop" or not _teaches(cut)):
                self.num_dropped += 1
                continue
            self.num_truncated += has_lost
            self._sequences += cut
            kept.append(row)
        raise_listed(problems)
        self._images = Images(kept, reader)
        if not self._sequences:
            raise DataError(
                f"data file {path} has no row left of {len(rows)}: all are longer than {limit}={max_tokens}; raise it"
            )

    def __len__(self) -> int:
        return len(self._sequences) // self.unit

    def __str__(self) -> str:
        """Return the number of rows, and what became of long ones, as text."""
        lost = [f"{self.num_truncated:,} truncated to {self.max_tokens} tokens"] * bool(self.num_truncated)
        lost += [f"{self.num_dropped:,} too long and dropped"] * bool(self.num_dropped)
        return f"{len(self):,} {self.kind}{', ' * bool(lost)}{', '.join(lost)}"

    def batch(self, step: int, batch_size: int) -> TensorDict:
        """Return the demonstrations of step `step` (from 0) in the endless shuffled stream."""
        return self.rows(rows_after(len(self), batch_size, self.seed, step * batch_size))

    def rows(self, numbers: Sequence[int]) -> TensorDict:
        """Return the sequences with these numbers, in the given order: of row n, those from n·unit on."""
        chosen = [self._sequences[number] for number in numbers]
        row_ids = [number // self.unit for number in numbers]
        columns = {
            **self._images.columns(row_ids),
            "tokens": right_padded(
                [one.prompt + one.response for one in chosen], self.max_tokens, self._pad_id
            ),
            "prompt_lengths": torch.tensor([len(one.prompt) for one in chosen]),
            "response_lengths": torch.tensor([len(one.response) for one in chosen]),
            "row_ids": torch.tensor(row_ids),
        }
        if self._has_mask:
            columns[RESPONSE_MASK] = right_padded([one.trained for one in chosen], self.max_tokens, 0).bool()
        return TensorDict(columns, batch_size=[len(chosen)])  # pyright: ignore[reportArgumentType]


def _teaches(sequences: Sequence[_Sequence]) -> bool:
    """Return True if every sequence has a token to train, and those of a preference differ."""
    return all(any(one.trained) for one in sequences) and (
        len(sequences) == 1 or sequences[0] != sequences[1]
    )


def _sequences(
    rows: Sequence[Row], tokenizer: PreTrainedTokenizerBase, reader: ImageReader | None
) -> Iterator[list[_Sequence]]:
    """Yield the sequences of each row; raise DataError for texts unknown to the tokenizer or its chat template."""
    prompts, chat = prompt_tokens(rows, tokenizer, reader), Chat(tokenizer)
    texts = [[chat.without_end(text) for text in (*row.responses, *_written(row))] for row in rows]
    places = [row for row, own in zip(rows, texts, strict=True) for _ in own]
    flat = [text for own in texts for text in own]
    turns = iter([[*one, *chat.turn_end] for one in tokenized(places, flat, tokenizer, "response")])
    problems, found = list[str](), list[list[_Sequence]]()
    for row, prompt in zip(rows, prompts, strict=True):
        if not prompt:
            problems.append(
                f"{row.place}: the chat template puts nothing before the response; correct the prompt or the template"
            )
        if not row.later:
            responses = [next(turns) for _ in row.responses]
            found.append([_Sequence(prompt, one, [True] * len(one)) for one in responses])
            if not _teaches(found[-1]):
                problems.append(
                    f"{row.place}: chosen and rejected response have the same tokens; correct one of them, or remove the"
                    " row"
                )
            continue
        try:
            found.append([_conversation(row, prompt, [next(turns) for _ in _written(row)], chat)])
        except DataError as error:
            problems.append(f"{row.place}: {error}")
            continue
        text = "".join(message["content"] for message in row.later)
        problems += unknown_problems(row, text, found[-1][0].response, tokenizer, "messages")
    raise_listed(problems)
    yield from found


def _written(row: Row) -> list[str]:
    return [message["content"] for message in row.later if message["role"] == "assistant"]


def _conversation(row: Row, prompt: list[int], turns: Sequence[list[int]], chat: Chat) -> _Sequence:
    """Return a conversation's tokens, turn by turn as a rollout of several turns has them."""
    response, trained, between, left = list[int](), list[bool](), list[dict[str, str]](), iter(turns)
    last = list[int]()
    for message in row.later:
        if message["role"] != "assistant":
            between.append(dict(message))  # pyright: ignore[reportArgumentType]
            continue
        told = chat.message_tokens(between, last) if last else []
        last, between = next(left), []
        response += told + last
        trained += [False] * len(told) + [True] * len(last)
    return _Sequence(prompt, response, trained)
