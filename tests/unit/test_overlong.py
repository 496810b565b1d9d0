"""Over-long responses: their punishment compared with DAPO's formula, their mask, metrics, and conflicting options."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hybridengine.algorithms.across import ONE_PROCESS
from hybridengine.algorithms.overlong import cut_responses, length_penalties
from hybridengine.config import load_config
from hybridengine.config.algorithm import OverlongSection
from hybridengine.drivers import advantages
from hybridengine.drivers.advantages import counted_rows, rollout_metrics
from hybridengine.drivers.grpo import Grpo
from hybridengine.errors import ConfigError
from tests.unit.test_dataflow_functions import (
    DROPPED,
    KEPT,
    LENGTHS,
    NUM_ROWS,
    ROWS,
    SAMPLES,
    SETTINGS,
    WIDTH,
    whitened,
)

CUT = [row for row in range(NUM_ROWS) if LENGTHS[row] == WIDTH]
BASE = Path(__file__).parents[2] / "configs/arithmetic.yaml"


@given(max_tokens=st.integers(1, 40), data=st.data(), penalty=st.floats(0.1, 5))
def test_punishment_is_daposs(max_tokens: int, data: st.DataObject, penalty: float) -> None:
    """Equation 13 of arXiv 2503.14476: 0, then ((L_max - L_cache) - |y|)/L_cache, and -1 at L_max."""
    cache = data.draw(st.integers(1, max_tokens))
    lengths = list(range(max_tokens + 1))
    found = length_penalties(torch.tensor(lengths), max_tokens, cache, penalty)
    expected = [
        0.0 if length <= max_tokens - cache else ((max_tokens - cache) - length) / cache for length in lengths
    ]
    assert (-found / penalty).tolist() == pytest.approx(expected, abs=1e-12)
    assert found[-1].item() == pytest.approx(penalty)
    assert not length_penalties(torch.tensor(lengths), max_tokens, 0, penalty).any()
    assert cut_responses(torch.tensor(lengths), max_tokens).tolist() == [False] * max_tokens + [True]


def test_scores_fall_and_advantages_with_them() -> None:
    """With 5 response tokens and a cache of 2, the score falls by half the penalty at 4 tokens and by all of it at 5."""
    algorithm = Grpo(overlong=OverlongSection(cache_tokens=2, penalty=3.0), normalize_std=False)
    falls = [{4: 1.5, 5: 3.0}.get(length, 0.0) for length in LENGTHS]
    scores = [float(ROWS["scores"][row]) - falls[row] if row in KEPT else 0.0 for row in range(NUM_ROWS)]
    counted = counted_rows(ROWS.clone(), algorithm)
    assert counted.scores_B.dtype == ROWS["scores"].dtype
    assert counted.scores_B.tolist() == pytest.approx(scores)
    found = advantages.grpo(ROWS.clone(), ONE_PROCESS, algorithm, SAMPLES)
    assert "trained" not in found
    for first in range(0, NUM_ROWS, SAMPLES):
        rows = [row for row in range(first, first + SAMPLES) if row in KEPT]
        mean = sum(scores[row] for row in rows) / len(rows)
        for row in rows:
            expected = [scores[row] - mean] * LENGTHS[row]
            assert found["advantages"][row, : LENGTHS[row]].tolist() == pytest.approx(expected)


def test_masked_responses_leave_the_loss_but_not_their_group() -> None:
    algorithm = Grpo(overlong=OverlongSection(mask=True))
    found = advantages.grpo(ROWS.clone(), ONE_PROCESS, algorithm, SAMPLES)
    plain = advantages.grpo(ROWS.clone(), ONE_PROCESS, Grpo(), SAMPLES)
    assert torch.equal(found["advantages"], plain["advantages"])
    assert torch.equal(found["keep"], plain["keep"])
    assert any(row in KEPT for row in CUT)
    assert found["trained"].tolist() == [
        [row in KEPT and row not in CUT and place < LENGTHS[row] for place in range(WIDTH)]
        for row in range(NUM_ROWS)
    ]


def test_whitening_leaves_masked_responses_out() -> None:
    overlong = OverlongSection(mask=True)
    found = advantages.ppo(
        ROWS.clone(), ONE_PROCESS, SETTINGS.model_copy(update={"overlong": overlong}), SAMPLES
    )
    bare = SETTINGS.model_copy(update={"whiten_advantages": False})
    estimates = advantages.ppo(ROWS.clone(), ONE_PROCESS, bare, SAMPLES)["advantages"]
    expected = whitened(
        {row: estimates[row, : LENGTHS[row]].tolist() for row in KEPT if row not in CUT and LENGTHS[row]}
    )
    for row in range(NUM_ROWS):
        values = expected.get(row, [])
        assert found["advantages"][row].tolist() == pytest.approx(
            values + [0.0] * (WIDTH - len(values)), abs=1e-6
        )


def test_metrics_of_lengths() -> None:
    """The mean reward is that before the punishment."""
    algorithm = SETTINGS.model_copy(update={"overlong": OverlongSection(cache_tokens=2, penalty=3.0)})
    found, plain = (rollout_metrics(ROWS, ONE_PROCESS, one) for one in (algorithm, SETTINGS))
    falls = [{4: 1.5, 5: 3.0}.get(LENGTHS[row], 0.0) for row in KEPT]
    assert found["overlong/cut_share"] == len(CUT) / NUM_ROWS
    assert found["overlong/penalty_mean"] == pytest.approx(sum(falls) / (NUM_ROWS - sum(DROPPED)))
    added = {"overlong/cut_share", "overlong/penalty_mean"}
    assert {name: value for name, value in found.items() if name not in added} == plain


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["algorithm.overlong.cache_tokens=4"], None),
        (["algorithm.overlong.mask=true", "algorithm.name=grpo", "rollout.samples_per_prompt=2"], None),
        (
            ["algorithm.overlong.penalty=2"],
            "algorithm.overlong with cache_tokens=0 and mask=false has no effect; give cache_tokens, or mask=true, or",
        ),
        (
            ["algorithm.overlong.cache_tokens=9", "rollout.max_response_tokens=8"],
            "algorithm.overlong.cache_tokens=9 must be at most rollout.max_response_tokens=8; lower the one or raise",
        ),
        (
            [
                "algorithm.name=online_dpo",
                "rollout.samples_per_prompt=2",
                "algorithm.overlong.cache_tokens=4",
            ],
            "algorithm.overlong is not read by algorithm.name=online_dpo, which computes no advantages; leave it out",
        ),
    ],
)
def test_options_that_conflict(overrides: list[str], message: str | None) -> None:
    if message is None:
        assert load_config(BASE, overrides).algorithm.overlong is not None
        return
    with pytest.raises(ConfigError) as caught:
        load_config(BASE, overrides)
    assert str(caught.value).startswith(message)
