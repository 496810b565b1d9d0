"""Guards and stop requests, without ranks: the allowed difference of log-probs, and the effect of signals."""

from __future__ import annotations

import dataclasses
import math
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tensordict import TensorDict
from torch import Tensor

from hybridengine.algorithms.drift import check_drift, save_reproduction
from hybridengine.controller.failures import (
    RankFailedError,
    RankFailure,
    failure_of,
    failure_signature,
    is_passing,
    is_unforeseen,
    rank_failed,
)
from hybridengine.errors import ConfigError, DataError, DriftError, TransferError, WorkerTimeoutError
from hybridengine.training.stopping import StopRequest

ROWS, PROMPT, RESPONSE = 3, 4, 5


def rollout(log_probs: Tensor) -> TensorDict:
    return TensorDict(
        {
            "tokens": torch.arange(ROWS * (PROMPT + RESPONSE)).view(ROWS, -1),
            "prompt_lengths": torch.full((ROWS,), PROMPT),
            "response_lengths": torch.tensor([5, 2, 0]),
            "rollout_log_probs": log_probs,
        },
        batch_size=[ROWS],
    )


def test_the_mean_over_response_tokens_decides(tmp_path: Path) -> None:
    """There are seven response tokens; values beyond the responses do not count."""
    engine = torch.zeros(ROWS, RESPONSE)
    trainer = torch.full((ROWS, RESPONSE), 99.0)
    trainer[0], trainer[1, :2] = 0.5, 0.5
    kept: list[float] = []

    def keep(rows: dict[str, Tensor], drift: float) -> Path:
        kept.append(drift)
        return save_reproduction(tmp_path, 7, rows, {"drift": drift})

    check_drift(rollout(engine), trainer, 0.5, keep)
    assert not kept
    with pytest.raises(
        DriftError, match=r"0\.5 apart \(mean over 7 response tokens\), and guards.log_prob_drift=0.49"
    ):
        check_drift(rollout(engine), trainer, 0.49, keep)
    assert kept == [0.5]
    rows = load_file(tmp_path / "drift" / "rank-00007.safetensors")
    assert torch.equal(rows["log_probs"], trainer) and torch.equal(rows["rollout_log_probs"], engine)
    assert (tmp_path / "drift" / "rank-00007.json").read_text() == '{\n "drift": 0.5\n}\n'


def test_no_number_is_beyond_any_bound(tmp_path: Path) -> None:
    engine = torch.zeros(ROWS, RESPONSE)
    engine[0, 1] = math.nan
    with pytest.raises(DriftError, match=r"nan apart .* the weights of the two differ, or"):
        check_drift(rollout(engine), torch.zeros(ROWS, RESPONSE), 1e9, lambda rows, drift: tmp_path / "x")
    with pytest.raises(
        DriftError, match=r"nan apart .* those of the trainer are not numbers: the model has div"
    ):
        check_drift(rollout(torch.zeros_like(engine)), engine, 1e9, lambda rows, drift: tmp_path / "x")


@pytest.mark.parametrize(
    ("number", "second"), [(signal.SIGTERM, SystemExit), (signal.SIGINT, KeyboardInterrupt)]
)
def test_the_first_signal_asks_and_the_second_ends(
    number: signal.Signals, second: type[BaseException], capsys: pytest.CaptureFixture[str]
) -> None:
    before, stop = signal.getsignal(number), StopRequest()
    with stop.listening():
        assert not stop.asked
        os.kill(os.getpid(), number)
        assert stop.asked
        assert f"{number.name}: the run ends after this step" in capsys.readouterr().err
        with pytest.raises(second):
            os.kill(os.getpid(), number)
    assert signal.getsignal(number) is before


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_who_asks_while_the_model_is_saved_is_told_that_the_run_ends_by_itself(
    number: signal.Signals, capsys: pytest.CaptureFixture[str]
) -> None:
    stop = StopRequest()
    with stop.listening():
        with stop.too_late():
            os.kill(os.getpid(), number)
            assert f"{number.name}: the run ends once its trained model is saved; " in capsys.readouterr().err
            with pytest.raises((SystemExit, KeyboardInterrupt)):
                os.kill(os.getpid(), number)
        assert stop.heard and not stop.asked


def failed(error: BaseException) -> RankFailedError:
    return rank_failed(failure_of(1, error), [])


PASSING: list[Callable[[], BaseException]] = [
    lambda: failed(RuntimeError("an illegal memory access")),
    lambda: failed(TransferError("a peer went away")),
    lambda: rank_failed(RankFailure(0, "gone", died=True), []),
    lambda: WorkerTimeoutError("did not end"),
]
LASTING: list[Callable[[], BaseException]] = [
    lambda: failed(ConfigError("a rule")),
    lambda: failed(DataError("no response has a score")),
    lambda: failed(DriftError("apart")),
    lambda: ValueError("of the dataflow itself"),
]


def test_what_would_come_again_is_not_tried_again() -> None:
    assert all(is_passing(make()) for make in PASSING)
    assert not any(is_passing(make()) for make in LASTING)


def test_an_error_of_a_rank_that_is_alive_may_be_its_input_s() -> None:
    from_collective = dataclasses.replace(
        failed(RuntimeError("a peer went away")).failure, in_collective=True
    )
    assert is_unforeseen(failed(RuntimeError("value cannot be converted to type float without overflow")))
    assert not is_unforeseen(rank_failed(from_collective, []))
    assert not any(is_unforeseen(make()) for make in (*PASSING[1:], *LASTING))


def test_the_same_failure_is_known_again() -> None:
    one, again, other = (
        failed(RuntimeError("bad\nat 1")),
        failed(RuntimeError("bad\nat 2")),
        failed(RuntimeError("worse")),
    )
    assert failure_signature(one) == failure_signature(again) != failure_signature(other)


def test_a_rank_that_dies_again_is_another_process() -> None:
    """Errors of Ray and CUDA contain the process id and other numbers that change."""
    for text in (
        "ActorDiedError: The actor died unexpectedly. actor_id: {:032x} pid: {} ip: 10.0.0.{}"
        + " and so on" * 30,
        "OutOfMemoryError: CUDA out of memory. Tried to allocate 2.{} GiB. Process {} has {:.2f} GiB",
    ):
        one, again = (
            failed(RuntimeError(text.format(*numbers)))
            for numbers in ((0x9C3F4E, 4711222, 12), (0xA1, 815, 13))
        )
        assert failure_signature(one) == failure_signature(again)
