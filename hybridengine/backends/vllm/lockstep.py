"""Generation on a CPU without vLLM's scheduler: one loop, with the engine's model, attention kernels and KV cache.

The scheduler looks after every sequence at every token, in Python. That pays where requests come and go; on a CPU, with
a batch that is there from the beginning, it is most of a small model's time (docs/decisions/0024). Here

    each prompt is computed once, however many rows of a batch have it, and its KV cache copied
    all rows then advance together, and those that have ended drop out

Shapes: B rows, U different prompts, N tokens of a forward pass, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

GOLDEN, MIX_1, MIX_2 = (
    constant - 2**64 for constant in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
)
"""Constants of splitmix64 as signed numbers. Source: Steele, Lea and Flood, OOPSLA 2014, figure 17."""


PREFILL_TOKENS = 8192
"""Prompt tokens of a forward pass, which needs memory for each."""


@dataclass(frozen=True)
class Drawn:
    """Responses of all rows, [B, R] each; entries beyond a row's length mean nothing."""

    tokens: Tensor
    log_probs: Tensor
    lengths: Tensor


class LockstepDecoder:
    """Advances all rows of a batch together, with a runner's model and KV cache.

    Args:
        runner: vLLM's model runner, on a CPU and with one pipeline stage.
    """

    def __init__(self, runner: Any) -> None:
        (group,) = runner.kv_cache_config.kv_cache_groups
        self._runner, self._layers = runner, list(group.layer_names)
        self._builder = runner.attn_groups[0][0].get_metadata_builder()
        self._block_size = group.kv_cache_spec.block_size
        self._num_blocks = runner.kv_cache_config.num_blocks - 1  # vLLM's block 0 stands for none

    def batches(self, prompts: Sequence[Sequence[int]], max_tokens: int, max_rows: int) -> Iterator[range]:
        """Consecutive rows for which the KV cache has room at their longest, at most `max_rows` at a time."""
        first, taken = 0, 0
        for row, prompt in enumerate(prompts):
            blocks = self._blocks_of(len(prompt) + max_tokens)
            if row > first and (taken + blocks > self._num_blocks or row - first == max_rows):
                yield range(first, row)
                first, taken = row, 0
            taken += blocks
        if prompts:
            yield range(first, len(prompts))

    @torch.inference_mode()
    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        seeds: Sequence[int],
        max_tokens: int,
        temperature: float,
        stop_token_ids: Sequence[int],
    ) -> Drawn:
        """A response to each prompt; the same for a row whatever rows are beside it, up to rounding."""
        tables = self._block_tables(prompts, max_tokens)
        lengths = torch.tensor([len(prompt) for prompt in prompts])
        row_seeds, stops = torch.tensor(seeds), torch.tensor(stop_token_ids, dtype=torch.int64)
        drawn = Drawn(
            torch.zeros(len(prompts), max_tokens, dtype=torch.int64),
            torch.zeros(len(prompts), max_tokens),
            torch.full((len(prompts),), max_tokens),
        )
        logits, rows = self._prefill(prompts, tables), torch.arange(len(prompts))
        for step in range(max_tokens):
            tokens, log_probs = draw(logits, row_seeds[rows], step, temperature)
            drawn.tokens[rows, step], drawn.log_probs[rows, step] = tokens, log_probs
            ended = torch.isin(tokens, stops)
            if ended.any():
                drawn.lengths[rows[ended]] = step + 1
                tokens, rows = tokens[~ended], rows[~ended]
            if not len(rows) or step == max_tokens - 1:
                break
            logits = self._forward(tokens, lengths[rows] + step, torch.ones_like(rows), tables[rows])
        return drawn

    def _blocks_of(self, num_tokens: int) -> int:
        return -(-num_tokens // self._block_size)

    def _block_tables(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> Tensor:
        """Blocks of each row's sequence, [B, most blocks of a row]; no block has two rows."""
        counts = torch.tensor([self._blocks_of(len(prompt) + max_tokens) for prompt in prompts])
        first = counts.cumsum(0) - counts + 1
        return (first[:, None] + torch.arange(int(counts.max()))).clamp(max=self._num_blocks).int()

    def _prefill(self, prompts: Sequence[Sequence[int]], tables: Tensor) -> Tensor:
        """Logits [B, V] behind each prompt; afterwards the KV cache holds every row's prompt."""
        first: dict[tuple[int, ...], int] = {}
        owners = [first.setdefault(tuple(prompt), row) for row, prompt in enumerate(prompts)]
        unique = list(first.values())
        logits = torch.cat(
            [
                self._forward(
                    torch.tensor([token for row in rows for token in prompts[row]]),
                    torch.cat([torch.arange(len(prompts[row])) for row in rows]),
                    torch.tensor([len(prompts[row]) for row in rows]),
                    tables[rows],
                )
                for rows in _parts(unique, prompts)
            ]
        )
        pairs = [
            (row, owner, block)
            for row, owner in enumerate(owners)
            if row != owner
            for block in range(self._blocks_of(len(prompts[row])))
        ]
        if pairs:
            rows, sources, blocks = torch.tensor(pairs).unbind(1)
            to, source = tables[rows, blocks].long(), tables[sources, blocks].long()
            for cache in self._runner.kv_caches:
                cache[to] = cache[source]
        places = {row: place for place, row in enumerate(unique)}
        return logits[[places[owner] for owner in owners]]

    def _forward(self, tokens: Tensor, positions: Tensor, new: Tensor, tables: Tensor) -> Tensor:
        """Logits [B, V] behind the last of the `new` [B] tokens of each row; their keys and values go to the KV cache.

        Args:
            tokens, positions: of all rows one behind the other, [N].
        """
        from vllm.forward_context import set_forward_context
        from vllm.v1.attention.backend import CommonAttentionMetadata

        starts = torch.zeros(len(new) + 1, dtype=torch.int32)
        starts[1:] = new.cumsum(0)
        last = (starts[1:] - 1).long()
        blocks = tables.repeat_interleave(new, 0).gather(1, (positions // self._block_size)[:, None])[:, 0]
        slots = blocks.long() * self._block_size + positions % self._block_size
        seen = (positions[last] + 1).int()
        metadata = self._builder.build(
            0,
            CommonAttentionMetadata(
                query_start_loc=starts,
                query_start_loc_cpu=starts,
                seq_lens=seen,
                num_reqs=len(new),
                num_actual_tokens=len(tokens),
                max_query_len=int(new.max()),
                max_seq_len=int(seen.max()),
                block_table_tensor=tables,
                slot_mapping=slots,
                positions=positions,
            ),
        )
        layers: list[str] = self._layers
        with set_forward_context(
            dict.fromkeys(layers, metadata),
            self._runner.vllm_config,
            num_tokens=len(tokens),
            slot_mapping=dict.fromkeys(layers, slots),  # pyright: ignore[reportArgumentType]
        ):
            hidden = self._runner.model(tokens, positions)
        return self._runner.model.compute_logits(hidden[last])


def _parts(rows: Sequence[int], prompts: Sequence[Sequence[int]]) -> Iterator[list[int]]:
    """Rows whose prompts are computed together: `PREFILL_TOKENS`, or one row."""
    part, num_tokens = list[int](), 0
    for row in rows:
        if part and num_tokens + len(prompts[row]) > PREFILL_TOKENS:
            yield part
            part, num_tokens = [], 0
        part.append(row)
        num_tokens += len(prompts[row])
    yield part


def draw(logits_BV: Tensor, seeds_B: Tensor, step: int, temperature: float) -> tuple[Tensor, Tensor]:
    """(token, its log-probability) of each row, [B] each: by inversion, with one number per row from its seed and `step`.

    A token's log-probability is under softmax(logits / temperature); temperature 0 takes the likeliest token.
    """
    scaled = logits_BV.float()
    if temperature > 0 and temperature != 1.0:
        scaled = scaled / temperature
    probs_BV = scaled.softmax(-1)
    if temperature > 0:
        tokens_B = _invert(probs_BV, uniform(seeds_B, step))
    else:
        tokens_B = probs_BV.argmax(-1)
    return tokens_B, probs_BV.gather(1, tokens_B[:, None])[:, 0].log()


def uniform(seeds: Tensor, step: int) -> Tensor:
    """A number in [0, 1) for each seed, float64: splitmix64's `step`-th of a stream that begins at the mixed seed."""
    ahead = ((step + 1) * GOLDEN + 2**63) % 2**64 - 2**63  # as an int64 that has wrapped around
    state = _mixed(seeds.long() + GOLDEN) + ahead
    return ((_mixed(state) >> 11) & (2**53 - 1)).double() * 2.0**-53


def _mixed(state: Tensor) -> Tensor:
    state = (state ^ (state >> 30 & 2**34 - 1)) * MIX_1
    state = (state ^ (state >> 27 & 2**37 - 1)) * MIX_2
    return state ^ (state >> 31 & 2**33 - 1)


def _invert(probs_BV: Tensor, uniform_B: Tensor) -> Tensor:
    """The first token whose cumulative probability exceeds `uniform_B`, found in two steps: its run, then its place."""
    num_rows, vocab_size = probs_BV.shape
    width = 1 << (vocab_size.bit_length() // 2)
    padded = torch.nn.functional.pad(probs_BV, (0, -vocab_size % width)).view(num_rows, -1, width)
    runs = padded.sum(-1, dtype=torch.float64).cumsum(-1)
    wanted = uniform_B * runs[:, -1]
    run = torch.searchsorted(runs, wanted[:, None], right=True).clamp(max=runs.size(1) - 1)
    before = (runs - padded.sum(-1, dtype=torch.float64)).gather(1, run)
    inside = padded[torch.arange(num_rows), run[:, 0]].double().cumsum(-1)
    place = torch.searchsorted(inside, wanted[:, None] - before, right=True).clamp(max=width - 1)
    tokens = (run * width + place)[:, 0]
    # Rounding may point behind the last token that has a probability.
    return torch.where(
        probs_BV.gather(1, tokens.clamp(max=vocab_size - 1)[:, None])[:, 0] > 0, tokens, probs_BV.argmax(-1)
    )
