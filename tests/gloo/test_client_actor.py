"""A client's passes and steps on every axis, compared with transformers in float64; tests/full covers its sampling."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file
from tensordict import TensorDict
from torch import Tensor
from transformers import PreTrainedModel

from hybridengine.config import RunConfig
from hybridengine.config.role_sections import OptimizerSection
from hybridengine.data.tokenizer import build_arithmetic_tokenizer
from hybridengine.errors import DataError, RequestError, StorageError
from hybridengine.reshard.vllm import vllm_layout
from hybridengine.rows.micro_batches import with_empty_rows
from tests.full.engines.vllm_ranks import take_place
from tests.full.engines.worker_ranks import Group
from tests.gloo.client_rows import LENGTHS, SIZES, WIDTH, load_run, make_rows, of_loss
from tests.gloo.plain_generation import PlainGeneration
from tests.gloo.ranks import RankLauncher
from tests.gloo.tiny_models import write_model
from workers.client_actor import ClientActor

SCALE = 1e-3
LINEAR = OptimizerSection(lr=1e6 * SCALE, eps=1e6, clip_grad=0.0)
"""Settings with an eps so large that the first step of Adam is SCALE times the gradient."""
NUM_TOP = 40
"""More tokens than one of two tensor-parallel ranks has."""
CLIPS = {"clip_low_threshold": 0.7, "clip_high_threshold": 1.3}


def plain_engine(folder: object, shape: Any, generation: Any, settings: Any, **_: object) -> Any:
    """Return a generation side without an engine, from the arguments of `VllmEngine`."""
    return PlainGeneration(vllm_layout(shape, generation), torch.distributed.get_rank(), settings.dtype)


def drive(rank: int, runs: list[RunConfig], folder: Path, exports: Path) -> list[dict[str, Any]]:
    """Return what a client sees of an actor on each run's layout; the trained weights are exported."""
    take_place(rank)
    found = []
    with mock.patch("workers.actor.VllmEngine", plain_engine):
        for run in runs:
            group = Group(run, "actor", ClientActor, rank, folder=folder)
            found.append(_drive(group, run, folder, exports / str(run.actor.parallel)))
    return found


def _drive(group: Group, run: RunConfig, folder: Path, exports: Path) -> dict[str, Any]:
    rows, num_replicas = make_rows(), run.actor.parallel.dp_size
    policy, weighted = of_loss(rows, "logprobs", "advantages"), of_loss(rows, "weights")
    group.call("begin_model")
    seen = {"weighted": group.call("pass_rows", weighted, "cross_entropy", {}, backward=False)}
    seen["dro"] = group.call("pass_rows", policy, "dro", {"beta": 0.3}, backward=False)
    with pytest.raises(StorageError, match="no gradients wait"):
        group.worker.step_with(LINEAR)
    first = with_empty_rows(policy[:1], num_replicas)
    seen["first"] = group.call("pass_rows", first, "ppo", CLIPS, backward=True)
    group.call("switch_to_generate")
    group.call("switch_to_train")
    seen["others"] = group.call("pass_rows", policy[1:], "ppo", CLIPS, backward=True)
    seen["step"] = group.call("step_with", LINEAR)
    group.call("export_model", str(exports), str(folder))

    group.call("begin_model")
    group.call("pass_rows", policy, "importance_sampling", {}, backward=True)
    group.call("begin_model")  # drops the gradients
    seen["whole"] = group.call("pass_rows", policy, "ppo", CLIPS, backward=True)
    seen["whole_step"] = group.call("step_with", LINEAR)
    seen["version"] = group.worker.trainer.version
    seen["trained"] = group.call("score", of_loss(rows), NUM_TOP)
    group.call("borrow_weights", str(folder))
    seen["borrowed"] = group.call("score", of_loss(rows), NUM_TOP)
    group.call("return_weights")
    seen["returned"] = group.call("score", of_loss(rows), NUM_TOP)
    wrong = policy.clone()
    wrong["targets"][:, 0] = 59
    with pytest.raises(DataError, match=r"column 'targets' has the token 59, .* from 0 to 58;"):
        group.worker.pass_rows(wrong, "ppo", {}, backward=True)
    with pytest.raises(RequestError, match="ppo takes logprobs, advantages;"):
        group.worker.pass_rows(weighted, "ppo", {}, backward=True)
    return seen


def expected_of(
    model: PreTrainedModel, rows: TensorDict
) -> tuple[Tensor, Tensor, list[float], dict[str, Tensor]]:
    """Return (log-probs of the targets [B, T] and of all tokens [B, T, V], ppo's losses of the rows, gradients of their
    sum), row by row."""
    log_probs, losses = torch.zeros(len(LENGTHS), WIDTH, dtype=torch.float64), []
    whole = torch.zeros(len(LENGTHS), WIDTH, SIZES["vocab_size"], dtype=torch.float64)
    for row, length in enumerate(LENGTHS):
        logits = model(rows["tokens"][row : row + 1, :length]).logits[0]
        whole[row, :length] = logits.log_softmax(-1).detach()
        picked = logits.log_softmax(-1).gather(1, rows["targets"][row, :length, None])[:, 0]
        log_probs[row, :length] = picked.detach()
        ratio = (picked - rows["logprobs"][row, :length].double()).exp()
        advantage = rows["advantages"][row, :length].double()
        losses.append(-torch.min(ratio * advantage, ratio.clamp(0.7, 1.3) * advantage).sum())
    named = dict(model.named_parameters())
    gradients = torch.autograd.grad(torch.stack(losses).sum(), list(named.values()))
    return log_probs, whole, [loss.item() for loss in losses], dict(zip(named, gradients, strict=True))


@dataclass(frozen=True)
class Expected:
    """A checkpoint, and what transformers computes with it in float64."""

    folder: Path
    log_probs: Tensor
    whole: Tensor
    losses: list[float]
    gradients: dict[str, Tensor]


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Expected:
    folder = tmp_path_factory.mktemp("client")
    model = write_model(folder / "policy", "qwen3", tied=True, **SIZES)
    build_arithmetic_tokenizer().save_pretrained(folder / "policy")
    (folder / "rows.jsonl").write_text('{"prompt": "1", "answer": "1"}\n')
    return Expected(folder, *expected_of(model.double(), make_rows()))


@pytest.mark.parametrize("layouts", [["1-1-1"], ["2-1-1", "1-2-1", "1-1-2"]], ids=["one", "two"])
def test_passes_and_steps_are_those_of_one_process(
    layouts: list[str], expected: Expected, tmp_path: Path, run_ranks: RankLauncher
):
    runs = [load_run(expected.folder, parallel) for parallel in layouts]
    by_rank = run_ranks(runs[0].num_ranks, drive, runs, expected.folder / "policy", tmp_path)
    for parallel, seen in zip(layouts, by_rank[0], strict=True):
        check_passes(seen, expected)
        check_scores(seen, expected)
        norm = torch.sqrt(sum((gradient**2).sum() for gradient in expected.gradients.values())).item()  # type: ignore[arg-type]
        for step in (*seen["step"], *seen["whole_step"]):
            assert step["grad_norm"] == pytest.approx(norm, rel=1e-4), parallel
            assert (step["lr"], step["skipped"]) == (LINEAR.lr, 0.0)
        assert seen["version"] == 1
        before = load_file(expected.folder / "policy" / "model.safetensors")
        after = load_file(tmp_path / parallel / "model.safetensors")
        for name, gradient in expected.gradients.items():
            moved = (before[name].double() - after[name].double()) / SCALE
            torch.testing.assert_close(moved, gradient, rtol=1e-3, atol=1e-3)


def check_scores(seen: dict[str, Any], expected: Expected) -> None:
    """Other weights are scored as transformers scores them, and the own ones come back bit by bit."""
    found = seen["borrowed"]
    torch.testing.assert_close(found["log_probs"].double(), expected.log_probs, rtol=0, atol=1e-4)
    top = expected.whole.topk(NUM_TOP).values
    torch.testing.assert_close(found["top_log_probs"].double(), top, rtol=0, atol=1e-4)
    of_ids = expected.whole.gather(2, found["top_ids"])
    torch.testing.assert_close(found["top_log_probs"].double(), of_ids, rtol=0, atol=1e-4)
    for name in ("log_probs", "top_ids", "top_log_probs"):
        assert torch.equal(seen["returned"][name], seen["trained"][name]), name
    assert not torch.equal(seen["returned"]["log_probs"], found["log_probs"])


def check_passes(seen: dict[str, Any], expected: Expected) -> None:
    """Two passes, of one row and of the others, add up to one pass; empty rows add nothing."""
    close: dict[str, Any] = {"rel": 1e-4, "abs": 1e-4}
    first, others = seen["first"], seen["others"]
    for found in (
        seen["weighted"]["log_probs"],
        torch.cat([first["log_probs"][:1], others["log_probs"]]),
        seen["whole"]["log_probs"],
    ):
        torch.testing.assert_close(found.double(), expected.log_probs, rtol=0, atol=1e-4)
    weighted = -(expected.log_probs * make_rows()["weights"]).sum(1)
    assert seen["weighted"]["loss:sum"].tolist() == pytest.approx(weighted.tolist(), **close)
    far = (expected.log_probs - make_rows()["logprobs"]).square()
    dro = (0.15 * far - expected.log_probs * make_rows()["advantages"]).sum(1)
    assert seen["dro"]["loss:sum"].tolist() == pytest.approx(dro.tolist(), **close)
    two = torch.cat([first["loss:sum"][:1], others["loss:sum"]])
    for found in (two, seen["whole"]["loss:sum"]):
        assert found.tolist() == pytest.approx(expected.losses, **close)
    assert not first["loss:sum"][1:].any()
