"""The workers that score: columns in, columns out, metrics; another test compares the model itself with transformers."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tensordict import NonTensorStack, TensorDict

from hybridengine.config import RunConfig, load_config
from hybridengine.data.tokenizer import build_arithmetic_tokenizer
from hybridengine.errors import DataError
from hybridengine.rows.batch import columns_of
from hybridengine.rows.protocols import ROW_NUMBERS, GroupTopology, RankContext, registered
from workers import reward
from workers.reward import RewardFunctionWorker, RewardModelWorker

TOKENIZER = build_arithmetic_tokenizer()
ROWS = [("3 + 8 - 5 =", "11 6", "6"), ("1 + 1 + 1 =", "2 4", "3"), ("9 - 9 =", "", "0")]

TWO_TERMS = """
  rows_per_call: 2
  terms:
    right: {function: "tests.unit.reward_cases:grader"}
    long: {function: "tests.unit.reward_cases:with_columns", weight: -0.5}
"""


def run_of(folder: Path, reward_section: str) -> RunConfig:
    TOKENIZER.save_pretrained(folder / "tokenizer")
    sections = f"model: {{build: {{}}, tokenizer: {folder / 'tokenizer'}}}\ndata: {{task: {{}}}}\nreward:{reward_section}"
    (folder / "run.yaml").write_text(sections)
    return load_config(folder / "run.yaml")


def context_of(role: str) -> RankContext:
    topology = GroupTopology.parse("1-1-1")
    return RankContext(role, 0, 1, topology, topology.grid.coordinate(0), "127.0.0.1")


def rollout(first_row: int = 0) -> TensorDict:
    tokens, prompts, responses = [], [], []
    for prompt, response, _ in ROWS:
        prompts.append(TOKENIZER(prompt, add_special_tokens=False)["input_ids"])
        responses.append(
            TOKENIZER(response, add_special_tokens=False)["input_ids"] + [TOKENIZER.eos_token_id]
        )
        tokens.append(torch.tensor(prompts[-1] + responses[-1]))
    columns: dict[str, Any] = {
        "tokens": torch.nn.utils.rnn.pad_sequence(tokens, batch_first=True),
        "prompt_lengths": torch.tensor([*map(len, prompts)]),
        "response_lengths": torch.tensor([*map(len, responses)]),
        "answers": NonTensorStack(*(answer for *_, answer in ROWS)),
        ROW_NUMBERS: torch.arange(first_row, first_row + len(ROWS)),
    }
    return TensorDict(columns, batch_size=[len(ROWS)])


def test_functions_score_texts_without_special_tokens(tmp_path: Path) -> None:
    worker = RewardFunctionWorker(context_of("anything"), run_of(tmp_path, TWO_TERMS), section="reward")
    _, registration = registered(RewardFunctionWorker)["compute_scores"]
    assert registration.columns is not None
    scores = worker.compute_scores(rollout().select(*registration.columns))
    assert scores["reward/right"].tolist() == [0.0, 0.0, 0.0]  # "11 6" is not literally "6"
    lengths = [len(prompt) + 10 * (len(response) + 1) for prompt, response, _ in ROWS]
    assert scores["reward/long"].tolist() == lengths
    assert scores["scores"].tolist() == [-0.5 * length for length in lengths]
    assert scores["dropped"].tolist() == [False] * 3
    assert worker.take_metrics()["reward/calls"] == 4.0


def test_a_failure_names_the_rows_of_the_whole_call(tmp_path: Path) -> None:
    section = ' {function: "tests.unit.reward_cases:fails_for_some"}'
    worker = RewardFunctionWorker(context_of("reward"), run_of(tmp_path, section))
    with pytest.raises(
        DataError, match=r"fails_for_some, rows 40 to 42, with row 40 at hand: raised ValueError"
    ):
        worker.compute_scores(rollout(first_row=40))


def test_a_function_that_cannot_be_loaded_is_found_when_the_worker_is_made(tmp_path: Path) -> None:
    run = run_of(tmp_path, ' {function: "tests.unit.reward_cases:no_such"}')
    with pytest.raises(DataError, match="cannot be imported"):
        RewardFunctionWorker(context_of("reward"), run)


def model_worker(
    monkeypatch: pytest.MonkeyPatch, run: RunConfig, role: str, scores: list[float], **arguments: Any
):
    """Return a worker whose model gives these scores, in micro-batches."""

    def build(self: Any, context: RankContext, run: RunConfig, folder: str, **_: object) -> None:
        self.context, self.run, self.max_tokens = context, run, run.reward.micro_batch_tokens
        given = torch.tensor(scores)

        def forward(parts: list[dict[str, torch.Tensor]], output: object) -> list[dict[str, torch.Tensor]]:
            first_tokens = rollout()["tokens"][:, 0]
            rows = [[(first_tokens == row[0]).nonzero().item() for row in part["tokens"]] for part in parts]
            return [{"scores": given[places]} for places in rows]

        self.model = SimpleNamespace(forward=forward, is_last_stage=True)

    monkeypatch.setattr(reward.ModelWorker, "__init__", build)
    return RewardModelWorker(context_of(role), run, "folder", **arguments)


def listed(scores: TensorDict | None) -> dict[str, list]:
    assert scores is not None
    return {name: scores[name].tolist() for name in columns_of(scores)}


def test_a_model_gives_its_terms_column(monkeypatch: pytest.MonkeyPatch) -> None:
    run = RunConfig.model_validate(
        {"reward": {"terms": {"judge": {"kind": "model", "micro_batch_tokens": 21}}}}
    )
    worker = model_worker(monkeypatch, run, "reward_judge", [0.5, -1.0, 2.0], section="reward", term="judge")
    assert (worker.context.role, worker.max_tokens) == ("reward", 21)
    assert listed(worker.compute_scores(rollout())) == {"reward/judge": [0.5, -1.0, 2.0]}


def test_the_only_model_gives_scores_and_drops_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = model_worker(monkeypatch, RunConfig(), "reward", [0.5, -1.0, 2.0])
    assert listed(worker.compute_scores(rollout())) == {
        "scores": [0.5, -1.0, 2.0],
        "dropped": [False, False, False],
    }


def test_a_models_score_that_is_not_finite_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = model_worker(monkeypatch, RunConfig(), "reward", [0.5, float("nan"), float("inf")])
    with pytest.raises(
        DataError, match=r"^reward\.path=folder, row 8: the model's score is nan, and that of 2 of 3 rows"
    ):
        worker.compute_scores(rollout(first_row=7))
