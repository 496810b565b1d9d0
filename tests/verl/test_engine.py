"""Engines of the plug-in on every parallel axis, compared with transformers, verl's losses and torch's AdamW."""

# pyright: reportMissingImports=false
from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from tests.gloo.ranks import RankLauncher
from tests.gloo.tiny_models import write_model
from tests.verl import engine_ranks, reference, rows
from tests.verl.engine_ranks import Case, Step

GRIDS = {1: ["1-1-1"], 2: ["1-2-1", "2-1-1", "1-1-2"], 4: ["2-1-2", "1-2-2"]}
"""Number of ranks -> parallel sizes "p-t-d"."""
DYNAMIC = {"use_dynamic_bsz": True, "max_token_len_per_gpu": 30}
FIXED = {"use_dynamic_bsz": False, "micro_batch_size_per_gpu": 2}
NUM_STEPS = 2
CASES = {
    "token-mean": Case(
        "ppo",
        {**DYNAMIC, "temperature": 1.0, "calculate_entropy": True},
        {"loss_agg_mode": "token-mean", "entropy_coeff": 0.3, "use_kl_loss": True, "kl_loss_coef": 0.5},
    ),
    "seq-mean-token-mean": Case(
        "ppo",
        {**FIXED, "temperature": 0.7, "calculate_entropy": True},
        {"loss_agg_mode": "seq-mean-token-mean", "entropy_coeff": 0.3, "use_kl_loss": True},
    ),
    "sft-temperature-of-each-row": Case("sft", {**FIXED, "temperature": rows.temperatures()}),
}
VALUE_CASES = {"value": Case("value", DYNAMIC), "value-fixed": Case("value", FIXED, {"cliprange_value": 0.2})}


@pytest.fixture(scope="module")
def language(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, PreTrainedModel]:
    """Return a checkpoint of a language model, and the model in float64."""
    folder = tmp_path_factory.mktemp("language")
    return folder, write_model(folder, "qwen3", num_hidden_layers=2).double().eval()


@pytest.fixture(scope="module")
def value(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, PreTrainedModel]:
    """Return a checkpoint of a value model with a random head, and the model in float64."""
    folder = tmp_path_factory.mktemp("value")
    model = write_model(folder, "qwen3", num_hidden_layers=2, num_labels=1)
    return folder, model.double().eval()


def by_row(outcomes: list[Any], key: str) -> list[torch.Tensor]:
    """Return the rows of all replicas in order."""
    replicas = dict(one for one in outcomes if one is not None)
    assert len(replicas) == sum(one is not None for one in outcomes), "one rank of a replica has results"
    return [row for replica in sorted(replicas) for row in replicas[replica][key]]


@pytest.mark.parametrize("num_ranks", GRIDS)
def test_log_probs_and_entropies_equal_transformers(
    num_ranks: int, language: tuple[Path, PreTrainedModel], run_ranks: RankLauncher
):
    folder, model = language
    temperatures = [1.0, 0.7, rows.temperatures()]
    batches = [
        {**cut, "temperature": temperature, "calculate_entropy": True}
        for cut in (DYNAMIC, FIXED)
        for temperature in temperatures
    ]
    tokens = rows.columns_of(0)["input_ids"]
    with torch.no_grad():
        expected = [reference.language_outputs(model, tokens, one) for one in temperatures]
    by_rank = run_ranks(num_ranks, engine_ranks.infer, folder, "language_model", GRIDS[num_ranks], batches)
    for grid, sizes in enumerate(GRIDS[num_ranks]):
        for number, settings in enumerate(batches):
            label = f"{sizes}, {settings}"
            outcomes = [outcome[grid][number] for outcome in by_rank]
            wanted = expected[number % len(temperatures)]
            for row, (log_probs, entropies) in enumerate(
                zip(by_row(outcomes, "log_probs"), by_row(outcomes, "entropy"), strict=True)
            ):
                assert len(log_probs) == len(entropies) == len(tokens[row]), label
                # Nothing follows a row's last token.
                assert log_probs[:-1].numpy() == pytest.approx(
                    wanted["log_probs"][row][:-1].numpy(), abs=2e-5
                ), label
                assert entropies.numpy() == pytest.approx(wanted["entropy"][row].numpy(), abs=2e-5), label


def assert_steps(expected: reference.Training, by_rank: list[list[Step]], sizes: str) -> None:
    num_replicas = int(sizes[-1])
    for index in range(NUM_STEPS):
        told = [steps[index] for steps in by_rank if steps[index].is_source]
        assert sorted(one.replica for one in told) == list(range(num_replicas))
        assert [one.grad_norm for one in told] == pytest.approx(
            [expected.grad_norms[index]] * num_replicas, rel=2e-5
        )
        assert all(len(one.losses) >= 2 for one in told), "several micro-batches"
        # verl takes the mean over replicas of what it sums over micro-batches.
        assert sum(sum(one.losses) for one in told) / num_replicas == pytest.approx(
            expected.losses[index], rel=2e-5
        )
        for name in ("actor/pg_loss", "actor/entropy_loss", "kl_loss", "critic/vf_loss"):
            if name in expected.metrics[index]:
                mean = sum(one.metrics[name] for one in told) / num_replicas
                assert mean == pytest.approx(expected.metrics[index][name], rel=2e-5, abs=1e-6), name


def assert_weights(trained: Path, model: PreTrainedModel, before: dict[str, torch.Tensor]) -> None:
    found, wanted = load_file(trained / "model.safetensors"), model.state_dict()
    assert found.keys() == wanted.keys()
    for name, tensor in found.items():
        errors = (tensor - wanted[name]).abs()
        assert errors.mean() < 1e-7, name
        assert (errors > 1e-6).double().mean() < 1e-3, name
        # Adam divides by the gradient: of an element with almost none, rounding can decide a good part of the update.
        assert errors.max() < engine_ranks.LR, name
        assert (tensor - before[name]).abs().max() > engine_ranks.LR, f"{name} was trained"


def check_training(
    num_ranks: int,
    source: tuple[Path, PreTrainedModel],
    cases: dict[str, Case],
    exports: Path,
    run_ranks: RankLauncher,
) -> None:
    folder, model = source
    by_rank = run_ranks(num_ranks, engine_ranks.train, folder, GRIDS[num_ranks], cases, NUM_STEPS, exports)
    for name, case in cases.items():
        trained = copy.deepcopy(model)
        expected = reference.train(trained, case, NUM_STEPS)
        assert all(norm > engine_ranks.CLIP_GRAD for norm in expected.grad_norms), "clipping takes part"
        for sizes in GRIDS[num_ranks]:
            assert_steps(expected, [outcomes[sizes, name] for outcomes in by_rank], sizes)
            assert_weights(exports / f"{sizes}-{name}", trained, model.state_dict())


@pytest.mark.parametrize("num_ranks", GRIDS)
def test_steps_of_a_language_model_equal_plain_pytorch(
    num_ranks: int, language: tuple[Path, PreTrainedModel], tmp_path: Path, run_ranks: RankLauncher
):
    check_training(num_ranks, language, CASES, tmp_path, run_ranks)


@pytest.mark.parametrize("num_ranks", GRIDS)
def test_steps_of_a_value_model_equal_plain_pytorch(
    num_ranks: int, value: tuple[Path, PreTrainedModel], tmp_path: Path, run_ranks: RankLauncher
):
    check_training(num_ranks, value, VALUE_CASES, tmp_path, run_ranks)


def test_values_equal_transformers(value: tuple[Path, PreTrainedModel], run_ranks: RankLauncher):
    folder, model = value
    tokens = rows.columns_of(0, language=False)["input_ids"]
    by_rank = run_ranks(2, engine_ranks.infer, folder, "value_model", GRIDS[2], [DYNAMIC, FIXED])
    for grid, number in ((grid, number) for grid in range(len(GRIDS[2])) for number in range(2)):
        found = by_row([outcome[grid][number] for outcome in by_rank], "values")
        for row, values in zip(tokens, found, strict=True):
            with torch.no_grad():
                expected = reference.scores_of(model, row)
            assert values.numpy() == pytest.approx(expected.numpy(), abs=1e-5)
            assert expected.abs().max() > 0.1


def test_the_values_of_a_language_model_are_zero(
    language: tuple[Path, PreTrainedModel], run_ranks: RankLauncher
):
    (found,) = run_ranks(1, engine_ranks.infer, language[0], "value_model", ["1-1-1"], [DYNAMIC])
    values = by_row([found[0][0]], "values")
    assert [len(row) for row in values] == [len(row) for row in rows.columns_of(0)["input_ids"]]
    assert not torch.cat(values).any()


def test_a_value_model_has_gradients_only_while_it_trains(
    value: tuple[Path, PreTrainedModel], run_ranks: RankLauncher
):
    folder, model = value
    (found,) = run_ranks(1, engine_ranks.gradient_bytes_in_contexts, folder, VALUE_CASES["value"])
    before, *inside, after = found
    assert before == after == 0
    assert len(set(inside)) == 1
    # One float32 for each weight; Megatron's buffers are padded.
    assert inside[0] == pytest.approx(4 * model.num_parameters(), rel=0.05)


@pytest.mark.parametrize("ratio", [0.3, 0.0])
def test_learning_rates_follow_the_linear_schedule(
    ratio: float, language: tuple[Path, PreTrainedModel], run_ranks: RankLauncher
):
    steps, warmup, lowest, highest = 10, int(ratio * 10), 1e-4, 1e-3

    def rate(number: int) -> float:
        if number < warmup:
            return highest * number / warmup
        return lowest + (highest - lowest) * max(0.0, 1 - (number - warmup) / (steps - warmup))

    optimizer = {"lr_decay_style": "linear", "lr_warmup_steps_ratio": ratio, "lr": highest, "min_lr": lowest}
    case = CASES["sft-temperature-of-each-row"]
    ((rates, changed),) = run_ranks(1, engine_ranks.learning_rates, language[0], case, optimizer, 12)
    assert rates == pytest.approx([rate(number) for number in range(1, 13)], rel=1e-9)
    # A warm-up begins with a rate of zero, which both steps of the first pair have.
    assert changed == [ratio == 0.0] + [True] * 11


@pytest.mark.parametrize(("before", "after"), [("1-2-1", "2-1-1"), ("2-1-1", "1-1-2")])
def test_a_checkpoint_is_resumed_at_other_sizes(
    before: str,
    after: str,
    language: tuple[Path, PreTrainedModel],
    tmp_path: Path,
    run_ranks: RankLauncher,
):
    schedule = {"lr_decay_style": "linear", "lr_warmup_steps": 2}
    outcomes = run_ranks(
        2, engine_ranks.resume, language[0], CASES["token-mean"], before, after, schedule, tmp_path
    )
    for outcome in outcomes:
        # Four of ten steps are taken, two of them of the warm-up.
        assert outcome.rates == pytest.approx([engine_ranks.LR * (1 - 2 / 8)] * 2, rel=1e-9)
        assert outcome.left == ["checkpoints/global_step_2/actor", "checkpoints/global_step_3/actor"]
    weights = {
        name: load_file(tmp_path / name / "model.safetensors")
        for name in ("saved", "loaded", "uninterrupted", "resumed")
    }
    for name, saved in weights["saved"].items():
        assert torch.equal(weights["loaded"][name], saved), name
        assert (weights["resumed"][name] - weights["uninterrupted"][name]).abs().max() <= 1e-6, name
        assert (weights["uninterrupted"][name] - saved).abs().max() > 1e-5, f"{name} was trained"
    # The Hugging Face checkpoint beside it has the same weights, and is loaded by transformers.
    exported = AutoModelForCausalLM.from_pretrained(
        tmp_path / "checkpoints/global_step_3/actor/huggingface", dtype=torch.float32
    )
    assert all(torch.equal(value, weights["saved"][name]) for name, value in exported.state_dict().items())
    with torch.no_grad():
        expected = reference.language_outputs(exported.double(), rows.columns_of(0)["input_ids"])["log_probs"]
    for found, wanted in zip(
        by_row([one.loaded for one in outcomes], "log_probs"), expected.unbind(), strict=True
    ):
        assert found[:-1].numpy() == pytest.approx(wanted[:-1].numpy(), abs=2e-5)
