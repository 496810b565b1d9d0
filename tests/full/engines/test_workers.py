"""The worker classes without Ray, on ranks of their own: an actor at 2-2-1, a critic at 1-2-2 and a reward model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import yaml
from tensordict import TensorDict
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from hybridengine.config import load_config
from hybridengine.data.tokenizer import build_arithmetic_tokenizer
from tests.full.engines.worker_ranks import MAX_PROMPT_TOKENS, NUM_ROWS, STOP_TOKEN, rollout_of, run_all_roles
from tests.gloo.ranks import RankLauncher
from tests.gloo.tiny_models import write_model

TOLERANCE = 1e-4
TEMPERATURE = 0.8
LR = 1e-3
SIZES: dict[str, Any] = {"head_dim": 32, "vocab_size": 59}

SECTIONS: dict[str, Any] = {
    "run": {"steps": 1, "seed": 5},
    "cluster": {"ranks_per_node": [4]},
    "data": {"batch_size": NUM_ROWS},
    "actor": {
        "parallel": "2-2-1",
        "generate": "1-2",
        "bucket_bytes": "64KiB",
        "micro_batch_tokens": 80,
        "optimizer": {"lr": LR},
    },
    "critic": {"parallel": "1-2-2", "micro_batch_tokens": 70, "optimizer": {"lr": LR}},
    "reference": {"parallel": "1-4-1", "micro_batch_tokens": 64},
    "reward": {"kind": "model", "parallel": "2-2-1", "micro_batch_tokens": 90, "function": "builtins:zip"},
    "rollout": {
        "max_prompt_tokens": 20,
        "max_response_tokens": 10,
        "temperature": TEMPERATURE,
        "kv_cache_bytes": "16MiB",
    },
}


@dataclass(frozen=True)
class Seen:
    """Results of the roles, and transformers' models to compare them with."""

    results: dict[str, Any]
    rows: TensorDict
    policy: PreTrainedModel
    scorer: PreTrainedModel
    saved: PreTrainedModel


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory, run_ranks: RankLauncher) -> Seen:
    folder = tmp_path_factory.mktemp("workers")
    policy = write_model(folder / "policy", "qwen3", tied=True, **SIZES)
    build_arithmetic_tokenizer().save_pretrained(folder / "policy")
    scorer = write_model(folder / "scorer", "llama", num_labels=1, pad_token_id=0, **SIZES)
    (folder / "rows.jsonl").write_text('{"prompt": "1", "answer": "1"}\n')
    sections = SECTIONS | {
        "run": SECTIONS["run"] | {"folder": str(folder / "runs")},
        "model": {"path": str(folder / "policy")},
        "data": SECTIONS["data"] | {"train_file": str(folder / "rows.jsonl")},
        "reference": SECTIONS["reference"] | {"offload": "weights"},
        "reward": SECTIONS["reward"]
        | {"path": str(folder / "scorer"), "function": "tests.unit.reward_cases:answer_lengths"},
    }
    (folder / "run.yaml").write_text(yaml.safe_dump(sections))
    run = load_config(folder / "run.yaml")
    by_rank = run_ranks(4, run_all_roles, run, folder / "policy", folder / "scorer")
    saved = AutoModelForCausalLM.from_pretrained(run.run_folder / "saved", dtype=torch.float32)
    return Seen(by_rank[0], rollout_of(run), policy, scorer, saved)


def test_log_probs_and_entropies_of_actor_and_reference_are_those_of_transformers(seen: Seen):
    for rows, model, log_probs in (
        (seen.rows, seen.policy, seen.results["log_probs"]["log_probs"]),
        (seen.rows, seen.policy, seen.results["ref_log_probs"]["ref_log_probs"]),
        (seen.results["rollout"], seen.policy, seen.results["rollout_log_probs"]),
        (seen.rows, seen.policy, seen.results["ref_log_probs_after"]["ref_log_probs"]),
        (seen.rows, seen.saved, seen.results["log_probs_after"]["log_probs"]),
    ):
        expected = by_response(rows, model, lambda distribution, token: distribution[token])
        torch.testing.assert_close(log_probs, expected, rtol=0, atol=TOLERANCE)
    entropies = by_response(seen.rows, seen.policy, lambda p, _: -(p.exp() * p).sum())
    torch.testing.assert_close(seen.results["log_probs"]["entropies"], entropies, rtol=0, atol=TOLERANCE)


def test_an_update_changes_the_policy(seen: Seen):
    before, after = (seen.results[name]["log_probs"] for name in ("log_probs", "log_probs_after"))
    assert (before - after).abs().max() > 0.01


def test_policy_update_is_that_of_one_process(seen: Seen):
    """A step of Adam by hand on transformers' model gives the same weights."""
    batch = seen.results["batch"]
    model = seen.policy
    expected = {name: p.detach().clone() for name, p in model.named_parameters()}
    total, count = torch.zeros(()), 0
    for row in range(NUM_ROWS):
        length = int(batch["response_lengths"][row])
        log_probs = row_log_probs(model, batch, row)
        ratio = (log_probs - batch["log_probs"][row, :length]).exp()
        advantages = batch["advantages"][row, :length]
        total = total - torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages).sum()
        count += length
    gradients = dict(zip(expected, torch.autograd.grad(total / count, list(model.parameters())), strict=True))
    norm = torch.sqrt(sum((g.double() ** 2).sum() for g in gradients.values()))  # type: ignore[arg-type]
    metrics = seen.results["actor_update"][0]
    assert metrics["actor/grad_norm"] == pytest.approx(float(norm), rel=1e-3)
    assert metrics["actor/lr"] == pytest.approx(LR)
    clip = min(1.0, 1.0 / (float(norm) + 1e-6))
    saved = dict(seen.saved.named_parameters())
    for name, before in expected.items():
        gradient = gradients[name] * clip
        # The first step of Adam: both moments are corrected to the gradient itself.
        after = before - LR * gradient / (gradient.abs() + 1e-8)
        clear = gradient.abs() > 1e-5  # where the gradient is noise, so is its sign
        assert clear.float().mean() > 0.5, name
        torch.testing.assert_close(saved[name][clear], after[clear], rtol=0, atol=0.02 * LR)


def test_rewards_of_a_model_are_those_of_transformers(seen: Seen):
    for row, score in enumerate(seen.results["scores"]["scores"].tolist()):
        length = int(seen.rows["prompt_lengths"][row] + seen.rows["response_lengths"][row])
        with torch.no_grad():
            expected = seen.scorer(seen.rows["tokens"][row : row + 1, :length]).logits.item()
        assert score == pytest.approx(expected, abs=TOLERANCE)


def test_rewards_of_a_function_see_the_responses_text_and_the_rows_answer(seen: Seen):
    tokenizer = build_arithmetic_tokenizer()
    for row, score in enumerate(seen.results["rule_scores"]["scores"].tolist()):
        first, length = int(seen.rows["prompt_lengths"][row]), int(seen.rows["response_lengths"][row])
        text = tokenizer.decode(seen.rows["tokens"][row, first : first + length], skip_special_tokens=True)
        assert score == len(text) + 100.0 * row


def test_verdicts_are_the_likeliest_digits_of_transformers(seen: Seen):
    """Judges of two sizes on ranks of an actor that generates and trains in between, one with its weights offloaded."""
    tokenizer, expected = build_arithmetic_tokenizer(), list[float]()
    digits = tokenizer.convert_tokens_to_ids(list("0123456789"))
    for row in range(NUM_ROWS):
        first, length = int(seen.rows["prompt_lengths"][row]), int(seen.rows["response_lengths"][row])
        tokens = seen.rows["tokens"][row]
        prompt, response = (
            tokenizer.decode(part, skip_special_tokens=True)
            for part in (tokens[:first], tokens[first : first + length])
        )
        asked = tokenizer(
            f"<|im_start|>user{prompt}={response}?{row}<|im_end|><|im_start|>assistant"
        ).input_ids
        with torch.no_grad():
            logits = seen.policy(torch.tensor([asked])).logits[0, -1]
        expected.append(float(logits[digits].argmax()) if len(asked) <= MAX_PROMPT_TOKENS else float("nan"))
    too_long = sum(score != score for score in expected)
    assert 0 < too_long < NUM_ROWS and len(set(expected)) > 2, expected
    for found in (*seen.results["verdicts"].values(), seen.results["verdicts_after"]):
        torch.testing.assert_close(found["scores"], torch.tensor(expected), rtol=0, atol=0, equal_nan=True)
        assert torch.equal(found["dropped"], torch.tensor(expected).isnan())
    asked = NUM_ROWS - too_long
    assert seen.results["judge_metrics"] == [
        {
            "reward/verdicts": 2.0 * asked,
            "reward/unparsed": 0.0,
            "reward/long_prompts": 2.0 * too_long,
            "reward/verdict_tokens": 4.0 * asked,
        },
        {},
        {},
        {},
    ]


def test_values_are_zero_at_first_and_move_towards_the_returns(seen: Seen):
    lengths, returns = seen.results["batch"]["response_lengths"], seen.results["batch"]["returns"]
    values, after = (seen.results[name]["values"] for name in ("values", "values_after"))
    mask = torch.arange(returns.size(1)) < lengths.unsqueeze(1)
    assert values.shape == after.shape == returns.shape
    assert not values.any()
    assert not after[~mask].any()
    assert after[mask].abs().min() > 0
    loss_before, loss_after = (0.5 * (v - returns)[mask].square().mean() for v in (values, after))
    assert loss_after < loss_before
    metrics = seen.results["critic_update"][0]
    assert metrics["critic/value_loss"] == pytest.approx(float(loss_before), rel=1e-4)


def test_generated_rows_follow_the_columns_contract(seen: Seen):
    for name in ("rollout", "greedy"):
        rollout = seen.results[name]
        assert rollout["row_ids"].tolist() == list(range(NUM_ROWS))
        assert list(rollout["answers"]) == list(map(str, range(NUM_ROWS)))
        assert torch.equal(rollout["prompt_tokens"], seen.rows["prompt_tokens"])
        for row in range(NUM_ROWS):
            first, length = int(rollout["prompt_lengths"][row]), int(rollout["response_lengths"][row])
            tokens = rollout["tokens"][row]
            assert torch.equal(tokens[:first], seen.rows["tokens"][row, :first])
            response = tokens[first : first + length].tolist()
            assert 1 <= length <= 10
            assert STOP_TOKEN not in response[:-1]
            assert length == 10 or response[-1] == STOP_TOKEN
            assert not rollout["rollout_log_probs"][row, length:].any()
    assert any(
        int(length) < 10 for length in seen.results["rollout"]["response_lengths"]
    )  # ended by a stop token


def test_greedy_responses_are_those_of_transformers(seen: Seen):
    greedy = seen.results["greedy"]
    for row in range(NUM_ROWS):
        first, length = int(greedy["prompt_lengths"][row]), int(greedy["response_lengths"][row])
        tokens = greedy["tokens"][row : row + 1, : first + length]
        with torch.no_grad():
            best = seen.policy(tokens).logits[0, first - 1 : -1].argmax(-1)
        assert torch.equal(tokens[0, first:], best)


def test_log_probs_of_engine_and_trainer_agree(seen: Seen):
    difference = seen.results["rollout"]["rollout_log_probs"] - seen.results["rollout_log_probs"]
    assert difference.abs().max() < TOLERANCE


def by_response(rows: TensorDict, model: PreTrainedModel, value: Callable[[Tensor, int], Tensor]) -> Tensor:
    """Return `value(log-probabilities of the vocabulary, token)` of response tokens, [B, R] float32, 0 where masked."""
    width = rows["tokens"].size(1) - rows["prompt_tokens"].size(1)
    result = torch.zeros(len(rows), width)
    for row in range(len(rows)):
        first, length = int(rows["prompt_lengths"][row]), int(rows["response_lengths"][row])
        with torch.no_grad():
            logits = model(rows["tokens"][row : row + 1, : first + length]).logits[0]
        for step in range(length):
            distribution = (logits[first - 1 + step].double() / TEMPERATURE).log_softmax(-1)
            result[row, step] = value(distribution, int(rows["tokens"][row, first + step]))
    return result


def row_log_probs(model: PreTrainedModel, rows: TensorDict, row: int) -> Tensor:
    """Return the log-probabilities of a row's response tokens, [length], with their graph."""
    first, length = int(rows["prompt_lengths"][row]), int(rows["response_lengths"][row])
    logits = model(rows["tokens"][row : row + 1, : first + length]).logits[0, first - 1 : -1]
    tokens = rows["tokens"][row, first : first + length]
    return (logits / TEMPERATURE).log_softmax(-1).gather(1, tokens.unsqueeze(1)).squeeze(1)
