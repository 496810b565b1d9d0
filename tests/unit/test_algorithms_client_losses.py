"""The losses of the Tinker API: values and gradients compared with loops over floats, and what is refused."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from hybridengine.algorithms.losses.client import CLIENT_LOSSES, LOSS_SUM, client_loss
from hybridengine.algorithms.losses.client_inputs import CLIENT_INPUTS, check_client_loss
from hybridengine.algorithms.masking import response_mask
from hybridengine.errors import RequestError

LENGTHS = [5, 0, 1, 3, 4, 2]
WIDTH = 5
MASK_BT = response_mask(torch.tensor(LENGTHS), WIDTH)

CASES: list[tuple[str, dict[str, float]]] = [
    ("cross_entropy", {}),
    ("importance_sampling", {}),
    ("ppo", {}),
    ("ppo", {"clip_low_threshold": 0.5, "clip_high_threshold": 1.1}),
    ("cispo", {}),
    ("cispo", {"clip_low_threshold": 0.9}),
    ("dro", {}),
    ("dro", {"beta": 2.0}),
    ("gspo", {}),
    ("gspo", {"clip_low_threshold": 0.6, "clip_high_threshold": 1.4}),
]
DEFAULTS = {
    "ppo": {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2},
    "cispo": {"clip_low_threshold": 0.0, "clip_high_threshold": 4.0},
    "dro": {"beta": 0.05},
    "gspo": {"clip_low_threshold": 0.9997, "clip_high_threshold": 1.0004},
}


def _column(seed: int, scale: float = 1.0) -> Tensor:
    """Return random float64 [B, T]; entries of padding are NaN."""
    generator = torch.Generator().manual_seed(seed)
    values_BT = torch.randn(MASK_BT.shape, dtype=torch.float64, generator=generator) * scale
    return values_BT.masked_fill(~MASK_BT, math.nan)


def _columns() -> tuple[Tensor, dict[str, Tensor]]:
    """Return new log-probs with gradients, and columns; ratios are on both sides of every clip, also of whole rows."""
    q_BT = -_column(1).abs()
    marked_BT = (_column(4) > -0.8).double().masked_fill(~MASK_BT, math.nan)
    columns = {
        "logprobs": q_BT,
        "advantages": _column(2),
        "weights": _column(3),
        "sequence_ratio_mask": marked_BT,
    }
    return (q_BT + _column(5, scale=0.9)).requires_grad_(), columns


def _row(
    loss: str, new: list[float], row: dict[str, list[float]], config: dict[str, float]
) -> list[tuple[float, float]]:
    """Return (loss, its derivative by the log-prob) of every token of one row, from the formulas of the documentation."""
    low, high = config.get("clip_low_threshold", 0.0), config.get("clip_high_threshold", 0.0)
    marked = [
        n - q for n, q, mark in zip(new, row["logprobs"], row["sequence_ratio_mask"], strict=True) if mark
    ]
    whole = math.exp(sum(marked) / len(marked)) if marked else 1.0
    found = []
    for token, log_prob in enumerate(new):
        q, advantage, weight = (row[name][token] for name in ("logprobs", "advantages", "weights"))
        ratio = whole if loss == "gspo" else math.exp(log_prob - q)
        bounded = min(max(ratio, low), high)
        if loss == "cross_entropy":
            found.append((-log_prob * weight, -weight))
        elif loss == "importance_sampling":
            found.append((-ratio * advantage, -ratio * advantage))
        elif loss == "cispo":
            found.append((-bounded * log_prob * advantage, -bounded * advantage))
        elif loss == "dro":
            difference = log_prob - q
            value = -(log_prob * advantage - 0.5 * config["beta"] * difference**2)
            found.append((value, -(advantage - config["beta"] * difference)))
        else:
            is_clipped = bounded * advantage < ratio * advantage
            gain = min(ratio * advantage, bounded * advantage)
            found.append((-gain, 0.0 if is_clipped else -ratio * advantage))
    return found


@pytest.mark.parametrize(("loss", "changed"), CASES)
def test_values_and_gradients_are_those_of_the_formulas(loss: str, changed: dict[str, float]) -> None:
    new_BT, columns = _columns()
    needed = {name: columns[name] for name in CLIENT_INPUTS[loss].columns}
    settings = check_client_loss(loss, needed, changed)
    assert settings == pytest.approx(DEFAULTS.get(loss, {}) | changed, abs=1e-12)
    losses_B, metrics = client_loss(loss, new_BT, needed, MASK_BT, settings)
    losses_B.sum().backward()
    assert new_BT.grad is not None
    kinds = set()
    for row, length in enumerate(LENGTHS):
        plain = {name: column[row, :length].tolist() for name, column in columns.items()}
        expected = _row(loss, new_BT[row, :length].tolist(), plain, settings)
        assert losses_B[row].item() == pytest.approx(math.fsum(value for value, _ in expected), rel=1e-12)
        assert new_BT.grad[row, :length].tolist() == pytest.approx(
            [slope for _, slope in expected], rel=1e-12
        )
        assert not new_BT.grad[row, length:].any()
        kinds |= {slope == 0 for _, slope in expected}
    assert kinds == ({True, False} if loss in ("ppo", "gspo") else {False})
    assert metrics.keys() == {LOSS_SUM}
    assert torch.equal(metrics[LOSS_SUM], losses_B.detach())
    assert not metrics[LOSS_SUM].requires_grad


@pytest.mark.parametrize("loss", CLIENT_LOSSES)
def test_zero_advantages_and_weights_give_zero_gradients(loss: str) -> None:
    new_BT, columns = _columns()
    zeros = dict.fromkeys(("advantages", "weights"), torch.zeros_like(new_BT).detach())
    settings = check_client_loss(loss, CLIENT_INPUTS[loss].columns, {"beta": 0.0} if loss == "dro" else {})
    losses_B, _ = client_loss(loss, new_BT, columns | zeros, MASK_BT, settings)
    losses_B.sum().backward()
    assert new_BT.grad is not None
    assert not new_BT.grad.any()
    assert not losses_B.any()


@pytest.mark.parametrize("loss", ["importance_sampling", "ppo", "cispo", "gspo"])
def test_ratios_do_not_overflow(loss: str) -> None:
    """Where a sampler's log-prob is far below the model's, a zero advantage still gives zero."""
    new_BT = torch.zeros(1, 2, requires_grad=True)
    columns = {"logprobs": torch.full((1, 2), -1e4), "advantages": torch.zeros(1, 2)}
    columns["sequence_ratio_mask"] = torch.ones(1, 2)
    settings = CLIENT_INPUTS[loss].settings
    losses_B, _ = client_loss(loss, new_BT, columns, torch.ones(1, 2, dtype=torch.bool), settings)
    losses_B.sum().backward()
    assert new_BT.grad is not None
    assert losses_B.item() == 0.0
    assert not new_BT.grad.any()


@pytest.mark.parametrize(
    ("loss", "columns", "settings", "message"),
    [
        (
            "stable_reinforce",
            (),
            {},
            "'stable_reinforce' is not built here; choose one of cross_entropy,",
        ),
        (
            "ppo",
            ("logprobs", "advantages"),
            {"beta": 1},
            "has beta, and ppo takes clip_low_threshold,",
        ),
        (
            "cross_entropy",
            ("weights",),
            {"beta": 1},
            "has beta, and cross_entropy takes nothing;",
        ),
        (
            "dro",
            ("logprobs", "advantages"),
            {"beta": math.nan},
            "beta=nan of dro must be a number",
        ),
        (
            "dro",
            ("logprobs", "advantages"),
            {"beta": -1.0},
            "beta=-1.0 of dro must be .* at least 0",
        ),
        (
            "ppo",
            ("logprobs", "advantages"),
            {"clip_low_threshold": 1.3},
            "clip_low_threshold=1.3 of ppo exceeds clip_high_threshold=1.2;",
        ),
        (
            "gspo",
            ("logprobs", "advantages"),
            {},
            "gspo takes logprobs, advantages, sequence_ratio_mask;",
        ),
        (
            "cross_entropy",
            (),
            {},
            "has nothing beside the targets, and cross_entropy takes weights;",
        ),
        (
            "ppo",
            ("logprobs", "advantages"),
            {"clip_high_threshold": 1e100},
            r"clip_high_threshold=1e\+100 of ppo must be .* at most 3.402823e\+38, the largest float32",
        ),
        ("cross_entropy", ("mask", "weights"), {}, "has mask, weights beside the targets"),
    ],
)
def test_what_a_loss_would_ignore_or_lack_is_refused(
    loss: str, columns: tuple[str, ...], settings: dict[str, float], message: str
) -> None:
    with pytest.raises(RequestError, match=message):
        check_client_loss(loss, columns, settings)
