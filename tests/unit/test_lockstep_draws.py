"""Drawing tokens by inversion: the random stream, the token that a number stands for, and how often each one comes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridengine.backends.vllm.lockstep import draw, uniform

MASK = 2**64 - 1


def splitmix64(state: int) -> int:
    """One output of the generator from its state, with Python's integers."""
    state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 & MASK
    state = (state ^ (state >> 27)) * 0x94D049BB133111EB & MASK
    return state ^ (state >> 31)


def expected_uniform(seed: int, step: int) -> float:
    golden = 0x9E3779B97F4A7C15
    start = splitmix64((seed + golden) & MASK)
    return (splitmix64((start + (step + 1) * golden) & MASK) >> 11) / 2**53


@given(seed=st.integers(0, 2**31 - 1), step=st.integers(0, 200_000))
def test_the_stream_is_splitmix64s(seed: int, step: int):
    found = uniform(torch.tensor([seed]), step)
    assert found.dtype == torch.float64
    assert found.item() == expected_uniform(seed, step)


def test_neighbouring_seeds_and_steps_have_nothing_in_common():
    seeds = torch.arange(2_000)
    numbers = torch.stack([uniform(seeds, step) for step in range(50)]).numpy()
    assert len(np.unique(numbers)) == numbers.size
    assert abs(numbers.mean() - 0.5) < 5 / np.sqrt(12 * numbers.size)
    correlations = np.corrcoef(numbers)[np.triu_indices(50, 1)]
    assert np.abs(correlations).max() < 6 / np.sqrt(2_000)


@settings(max_examples=60)
@given(
    vocab_size=st.integers(1, 700),
    temperature=st.sampled_from([0.3, 1.0, 1.7]),
    seed=st.integers(0, 10_000),
    step=st.integers(0, 500),
)
def test_the_token_is_where_the_cumulative_probability_passes_the_number(
    vocab_size: int, temperature: float, seed: int, step: int
):
    generator = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(4, vocab_size, generator=generator)
    logits[0, : vocab_size // 2] = float("-inf")
    seeds = torch.arange(4) + seed
    tokens, log_probs = draw(logits, seeds, step, temperature)
    scaled = logits.double().numpy() / temperature
    probs = np.exp(scaled - scaled.max(1, keepdims=True))
    probs /= probs.sum(1, keepdims=True)
    for row, token in enumerate(tokens.tolist()):
        number = expected_uniform(seed + row, step)
        below, above = probs[row, :token].sum(), probs[row, : token + 1].sum()
        assert below - 1e-6 <= number <= above + 1e-6
        assert probs[row, token] > 0
        assert log_probs[row].item() == pytest.approx(np.log(probs[row, token]), abs=1e-5)


def test_tokens_come_as_often_as_they_are_likely():
    logits = torch.tensor([0.0, 1.0, -2.0, 2.0, float("-inf"), 0.5]).repeat(20_000, 1)
    counts = np.zeros(6)
    for step in range(5):
        tokens, _ = draw(logits, torch.arange(20_000), step, 1.0)
        counts += np.bincount(tokens.numpy(), minlength=6)
    expected = 100_000 * logits[0].double().softmax(0).numpy()
    likely = expected > 0
    assert counts[~likely].sum() == 0
    assert (
        (counts - expected)[likely] ** 2 / expected[likely]
    ).sum() < 25  # chi-square of 4 degrees: p < 1e-4


def test_temperature_0_takes_the_likeliest_token_whatever_the_seed():
    logits = torch.randn(8, 300, generator=torch.Generator().manual_seed(1))
    tokens, log_probs = draw(logits, torch.arange(8), 3, 0.0)
    assert torch.equal(tokens, logits.argmax(-1))
    torch.testing.assert_close(log_probs, logits.log_softmax(-1).amax(-1))


def test_rows_do_not_depend_on_those_beside_them():
    logits, seeds = torch.randn(6, 130, generator=torch.Generator().manual_seed(2)), torch.arange(6) + 40
    together, _ = draw(logits, seeds, 7, 1.0)
    alone = [draw(logits[row : row + 1], seeds[row : row + 1], 7, 1.0)[0] for row in range(6)]
    assert torch.equal(together, torch.cat(alone))
