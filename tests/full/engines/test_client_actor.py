"""A client's actor samples from vLLM, each prompt with settings of its own, while gradients wait for their step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from hybridengine.backends.engine import SamplingSettings
from hybridengine.backends.megatron.weights import load_weights
from hybridengine.config import RunConfig
from hybridengine.config.role_sections import OptimizerSection
from hybridengine.data.tokenizer import build_arithmetic_tokenizer
from tests.full.engines.vllm_ranks import take_place
from tests.full.engines.worker_ranks import Group
from tests.gloo.client_rows import SIZES, load_run, make_rows, of_loss
from tests.gloo.ranks import RankLauncher
from tests.gloo.tiny_models import write_model
from workers.client_actor import ClientActor
from workers.reference import ReferenceWorker

PROMPT, OTHER = [9, 24, 50], [3, 17, 31, 40, 12]
LONGEST = 8
PLAIN = SamplingSettings(LONGEST)
GREEDY = SamplingSettings(LONGEST, 0.0)


def prompts_of(*tokens: list[int], seeds: list[int]) -> TensorDict:
    padded = torch.zeros(len(tokens), 8, dtype=torch.long)
    for row, prompt in enumerate(tokens):
        padded[row, : len(prompt)] = torch.tensor(prompt)
    lengths = torch.tensor([len(prompt) for prompt in tokens])
    columns = {"prompt_tokens": padded, "prompt_lengths": lengths, "seeds": torch.tensor(seeds)}
    return TensorDict(columns, batch_size=[len(tokens)])  # type: ignore[arg-type]


def sample_between_passes(rank: int, run: RunConfig, folder: Path) -> dict[str, Any]:
    """Return responses that are sampled while gradients wait, and the steps with and without that."""
    take_place(rank)
    group = Group(run, "actor", ClientActor, rank, folder=folder)
    rows = of_loss(make_rows(), "logprobs", "advantages")
    settings = OptimizerSection(lr=1e-3)
    group.call("begin_model")
    reference = Group(run, "reference", ReferenceWorker, rank, folder=folder)
    whole = of_loss(make_rows())
    scored = {"actor": group.call("score", whole, 5), "reference": reference.call("score", whole, 5)}
    last = whole["lengths"] - 1
    whole["draws"] = torch.zeros_like(whole["tokens"])
    whole["draws"][torch.arange(len(whole)), last] = torch.arange(1, len(whole) + 1)
    scored["drawn"] = reference.call("score", whole, 5)
    whole["targets"][torch.arange(len(whole)), last] = scored["drawn"]["drawn"][
        torch.arange(len(whole)), last
    ]
    scored["of_drawn"] = group.call("score", whole.exclude("draws"), 5)
    group.call("pass_rows", rows, "importance_sampling", {}, backward=True)
    seen: dict[str, Any] = {"scored": scored, "undisturbed": group.call("step_with", settings)}
    load_weights(group.worker.trainer, folder)
    group.call("begin_model")
    group.call("pass_rows", rows, "importance_sampling", {}, backward=True)
    group.call("switch_to_generate")
    greedy = group.call("sample", prompts_of(PROMPT, OTHER, seeds=[0, 0]), [GREEDY, GREEDY])
    seen["greedy"] = responses_of(greedy)
    first, second = seen["greedy"]
    tokenizer = build_arithmetic_tokenizer()
    text = str(tokenizer.decode(second[2:4]))
    asked: list[tuple[list[int], int, SamplingSettings]] = [
        (PROMPT, 2**62, PLAIN),
        (OTHER, 7, SamplingSettings(3, 1.7, top_k=1)),
        (PROMPT, 8, SamplingSettings(LONGEST, 2.0, top_p=1e-6)),
        (PROMPT, 9, SamplingSettings(LONGEST, 0.0, stop_token_ids=(first[4],))),
        (OTHER, 9, SamplingSettings(LONGEST, 0.0, stop_strings=(text,))),
        (PROMPT, 5, PLAIN),
        (PROMPT, 2**62, SamplingSettings(5)),
    ]
    batch = prompts_of(*(prompt for prompt, _, _ in asked), seeds=[seed for _, seed, _ in asked])
    mixed = group.call("sample", batch, [sampling for _, _, sampling in asked])
    seen |= {"mixed": responses_of(mixed), "stopped": mixed["stopped"].tolist(), "text": text}
    seen["shapes"] = {name: tuple(mixed[name].shape) for name in ("tokens", "rollout_log_probs")}
    group.call("switch_to_train")
    seen["disturbed"] = group.call("step_with", settings)
    return seen


def responses_of(rows: TensorDict) -> list[list[int]]:
    known = {len(PROMPT): PROMPT, len(OTHER): OTHER}
    found = []
    for tokens, length in zip(rows["tokens"].tolist(), rows["response_lengths"].tolist(), strict=True):
        (start,) = (size for size, prompt in known.items() if tokens[:size] == prompt)
        found.append(tokens[start : start + length])
    return found


@pytest.mark.timeout(600)
def test_rows_are_sampled_with_their_own_settings_between_a_pass_and_its_step(
    tmp_path: Path, run_ranks: RankLauncher
):
    write_model(tmp_path / "policy", "qwen3", tied=True, **SIZES)
    tokenizer = build_arithmetic_tokenizer()
    tokenizer.save_pretrained(tmp_path / "policy")
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1", "answer": "1"}\n')
    seen, other_rank = run_ranks(2, sample_between_passes, load_run(tmp_path, "1-2-1"), tmp_path / "policy")
    first, second = seen["greedy"]
    drawn, narrow, likely, stopped, spelled, other, short = seen["mixed"]
    assert narrow == second[:3]
    assert likely == first
    end = first.index(first[4]) + 1
    assert stopped == first[:end]
    ends = [n for n in range(1, LONGEST + 1) if seen["text"] in tokenizer.decode(second[:n])]
    assert spelled == second[: ends[0]]
    assert seen["stopped"] == [False, False, False, True, True, False, False]
    assert len(drawn) == len(other) == LONGEST
    assert drawn != other, "the same prompt, another seed"
    assert short == drawn[:5]
    assert seen["shapes"] == {"tokens": (7, 8 + LONGEST), "rollout_log_probs": (7, LONGEST)}
    assert seen["disturbed"] == seen["undisturbed"]
    scored = seen["scored"]
    for name in ("log_probs", "top_ids", "top_log_probs"):
        # their micro-batches differ
        torch.testing.assert_close(scored["actor"][name], scored["reference"][name])
        torch.testing.assert_close(scored["of_drawn"][name], scored["drawn"][name])
    assert torch.equal(scored["drawn"]["drawn"], other_rank["scored"]["drawn"]["drawn"])
