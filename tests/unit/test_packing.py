"""Packs of rows compared with the rows themselves: every token and every wanted output is on exactly one rank."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridengine.backends.megatron.packing import Packing


def packs_of(
    batches: list[dict[str, torch.Tensor]], cp_size: int, same_size: bool = False, **more: Any
) -> Any:
    """Return the packs of each context-parallel rank."""
    found = []
    for rank in range(cp_size):
        group: Any = SimpleNamespace(size=lambda: cp_size, rank=lambda own=rank: own)
        found.append(Packing(group, **{"tp_size": 1, **more}).packs(batches, same_size))
    return found


rows = st.lists(st.tuples(st.integers(1, 9), st.integers(0, 9)), min_size=1, max_size=6)


@given(rows, st.sampled_from([1, 2, 3, 4]), st.sampled_from([1, 2, 4]), st.sampled_from([1, 16]))
@settings(max_examples=150, deadline=None)
def test_every_token_and_every_wanted_output_is_on_one_rank(
    rows: list[tuple[int, int]], cp_size: int, tp_size: int, multiple: int
) -> None:
    """Rows have a prompt and a response, whose outputs are wanted; tokens have numbers of their own."""
    width, longest = max(map(sum, rows)), max(1, *(response for _, response in rows))
    tokens = torch.arange(1, len(rows) * width + 1).view(len(rows), width)
    lengths = torch.tensor([sum(row) for row in rows])
    positions = torch.tensor(
        [[prompt - 1 + j if j < response else -1 for j in range(longest)] for prompt, response in rows]
    )
    batch = {"tokens": tokens, "lengths": lengths, "positions": positions}
    seen, whole = [], torch.zeros(len(rows) * longest, dtype=torch.int64)
    for (pack,) in packs_of([batch], cp_size, tp_size=tp_size, multiple=multiple):
        own, bounds = pack.tokens_1S[0], pack.params.cu_seqlens_q
        assert len(own) * cp_size == bounds[-1]
        assert len(own) % (tp_size * multiple) == 0
        assert cp_size == 1 or not (bounds % (2 * cp_size)).any()
        assert pack.params.max_seqlen_q == bounds.diff().max()
        seen += own[own > 0].tolist()
        for token, offset in zip(own.tolist(), pack.offsets_1S[0].tolist(), strict=True):
            assert token == 0 or (token - 1) % width == offset
        assert not whole[pack.places.entries_N].any(), "no other rank has these outputs"
        whole[pack.places.entries_N] = own[pack.wanted_N]
        assert pack.places.shape == (len(rows), longest)
    valid = torch.arange(width) < lengths.unsqueeze(1)
    assert sorted(seen) == tokens[valid].tolist()
    expected = tokens.gather(1, positions.clamp(min=0)).masked_fill(positions < 0, 0)
    assert torch.equal(whole.view_as(positions), expected)


def test_packs_of_one_size_and_rows_without_lengths() -> None:
    batches = [
        {"tokens": torch.ones(2, 3, dtype=torch.int64)},
        {"tokens": torch.ones(1, 4, dtype=torch.int64)},
    ]
    ((first, second),) = packs_of(batches, 1, same_size=True)
    assert first.params.cu_seqlens_q.tolist() == [0, 3, 6]
    assert second.params.cu_seqlens_q.tolist() == [0, 4, 6]
    assert second.tokens_1S.tolist() == [[1, 1, 1, 1, 0, 0]]
    assert second.wanted_N.tolist() == [0, 1, 2, 3]
    ((_, apart),) = packs_of(batches, 1)
    assert apart.params.cu_seqlens_q.tolist() == [0, 4]


def test_context_ranks_have_the_first_and_the_last_parts_in_turn() -> None:
    batch = {"tokens": torch.arange(1, 9).unsqueeze(0)}
    assert [pack.tokens_1S.tolist() for (pack,) in packs_of([batch], 2)] == [[[1, 2, 7, 8]], [[3, 4, 5, 6]]]
