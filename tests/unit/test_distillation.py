"""On-policy distillation: advantages in float64, rules of the configuration, and the teacher's tokenizer."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import pytest
import torch
from tensordict import TensorDict

from hybridengine.algorithms.across import ONE_PROCESS
from hybridengine.algorithms.losses.aggregation import Aggregation
from hybridengine.algorithms.losses.distillation import divergence, teacher_loss
from hybridengine.algorithms.losses.policy import clipped_loss
from hybridengine.config import load_config, model_holders
from hybridengine.config.checks import check_run
from hybridengine.config.role_sections import ActorSection
from hybridengine.data.tokenizer import build_arithmetic_tokenizer, check_same_tokens, load_tokenizer
from hybridengine.drivers.distill import Distill
from hybridengine.drivers.teacher_advantages import distill
from hybridengine.errors import DataError
from hybridengine.training.files import claim_run, prepare_files
from tests.unit.test_config import problems_of
from tests.unit.test_config_model_checks import FEW_ROWS
from tests.unit.test_dataflow_functions import KEPT, LENGTHS, NUM_ROWS, ROWS, SAMPLES, assert_rows, returns_of


def log_ratios(row: int) -> list[float]:
    """Return log pi_teacher - log pi of each token of a response."""
    own, teacher = (ROWS[name][row, : LENGTHS[row]].tolist() for name in ("log_probs", "ref_log_probs"))
    return [one - other for one, other in zip(teacher, own, strict=True)]


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_a_token_answers_for_its_own_log_ratio(estimator: str) -> None:
    algorithm = Distill(kl_estimator=estimator)  # type: ignore[arg-type]
    found = distill(ROWS.clone(), ONE_PROCESS, algorithm, SAMPLES)
    assert_rows(found["advantages"], {row: log_ratios(row) for row in KEPT})
    assert found["keep"].tolist() == [row in KEPT for row in range(NUM_ROWS)]


@pytest.mark.parametrize("gamma", [0.7, 1.0])
def test_later_log_ratios_are_discounted(gamma: float) -> None:
    found = distill(ROWS.clone(), ONE_PROCESS, Distill(gamma=gamma), SAMPLES)
    assert_rows(found["advantages"], {row: returns_of(log_ratios(row), gamma) for row in KEPT})


def test_the_reward_has_the_advantages_of_grpo() -> None:
    found = distill(ROWS.clone(), ONE_PROCESS, Distill(reward_coef=0.3), SAMPLES)
    expected = {}
    for first in range(0, NUM_ROWS, SAMPLES):
        scores = {row: float(ROWS["scores"][row]) for row in range(first, first + SAMPLES) if row in KEPT}
        mean = sum(scores.values()) / len(scores)
        deviation = (sum((score - mean) ** 2 for score in scores.values()) / (len(scores) - 1)) ** 0.5
        for row, score in scores.items():
            task = 0.3 * (score - mean) / (deviation + 1e-6)
            expected[row] = [task + ratio for ratio in log_ratios(row)]
    assert_rows(found["advantages"], expected)


def test_the_policy_gradient_is_that_of_the_reverse_kl_divergence() -> None:
    """Over all tokens weighted by the policy, which is what draws estimate: exact, in float64."""
    generator = torch.Generator().manual_seed(5)
    logits, teacher = torch.randn(2, 7, generator=generator, dtype=torch.float64)
    logits.requires_grad_()
    own, others = logits.log_softmax(0), teacher.log_softmax(0)
    (direct,) = torch.autograd.grad((own.exp() * (own - others)).sum(), logits, retain_graph=True)
    rows = ROWS[:7].clone()
    one_token = torch.ones(7, 5, dtype=torch.float64)
    rows.update(
        {
            "log_probs": own.detach()[:, None] * one_token,
            "ref_log_probs": others[:, None] * one_token,
            "response_lengths": torch.ones(7, dtype=torch.int64),
            "dropped": torch.zeros(7, dtype=torch.bool),
            "scores": torch.zeros(7, dtype=torch.float64),
        }
    )
    advantages = distill(rows, ONE_PROCESS, Distill(), 1)["advantages"][:, 0]
    (estimated,) = torch.autograd.grad(-(own.detach().exp() * advantages * own).sum(), logits)
    assert torch.allclose(estimated, direct, atol=1e-14)


def test_the_most_likely_tokens_have_a_loss_instead_of_advantages() -> None:
    found = distill(ROWS.clone(), ONE_PROCESS, Distill(top_k=3), SAMPLES)
    assert not found["advantages"].any()
    both = distill(ROWS.clone(), ONE_PROCESS, Distill(top_k=3, reward_coef=0.3), SAMPLES)["advantages"]
    alone = distill(ROWS.clone(), ONE_PROCESS, Distill(reward_coef=0.3), SAMPLES)["advantages"]
    assert_rows(both - alone, {row: [-ratio for ratio in log_ratios(row)] for row in KEPT})


@pytest.mark.parametrize("count", [1, 3, 6, 7])
def test_the_divergence_of_listed_tokens_and_the_rest(count: int) -> None:
    """A loop over the partition in float64; of all tokens it is the divergence over the vocabulary."""
    generator = torch.Generator().manual_seed(6)
    own, teacher = torch.randn(2, 2, 4, 7, generator=generator, dtype=torch.float64).log_softmax(-1)
    top = teacher.topk(count)
    listed = own.gather(-1, top.indices).requires_grad_()
    result = divergence(listed, top.values)
    found = result.detach()
    for row in range(2):
        for place in range(4):
            mine, theirs = own[row, place].exp().tolist(), teacher[row, place].exp().tolist()
            ids = top.indices[row, place].tolist()
            rest = [max(1 - sum(probs[one] for one in ids), 1e-6) for probs in (mine, theirs)]
            parts = [(mine[one], theirs[one]) for one in ids] + [(rest[0], rest[1])]
            expected = sum(one * math.log(one / other) for one, other in parts)
            assert float(found[row, place]) == pytest.approx(expected, abs=1e-12)
            whole = sum(one * math.log(one / other) for one, other in zip(mine, theirs, strict=True))
            assert expected <= whole + 1e-9
            assert count < 6 or expected == pytest.approx(whole, abs=1e-9), "all tokens, or all but one"
    mask = torch.tensor([[True, True, False, False], [True, True, True, False]])
    total = teacher_loss(listed, top.values, mask, Aggregation("sequence"))
    by_row = [float(found[row, : 2 + row].mean()) for row in range(2)]
    assert float(total.loss_sum) == pytest.approx(sum(by_row))
    assert total.stats.metrics(0) == {"actor/teacher_kl": pytest.approx(sum(by_row) / 2)}
    (grad,) = torch.autograd.grad(total.loss_sum, listed)
    assert not grad[~mask].any() and grad[mask].abs().sum() > 0


DISTILL = ("algorithm.name=distill",)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["algorithm.top_k=57"], None),
        (
            ["algorithm.top_k=58"],
            "algorithm.top_k=58 must be at most the 57 tokens of the smaller vocabulary; lower it",
        ),
        (
            ["algorithm.top_k=5", "algorithm.gamma=0.5"],
            "algorithm.gamma=0.5 is not read with algorithm.top_k=5, whose loss is that of single tokens; leave one of",
        ),
    ],
)
def test_rules_of_the_most_likely_tokens(
    built: Path, teacher: Path, changes: list[str], message: str | None
) -> None:
    given = (*DISTILL, f"teacher.path={teacher}", *changes)
    if message is None:
        assert check_run(load_config(built, [*given])) == []
        return
    (found,) = problems_of(built, *given)
    assert found.startswith(message)


def test_a_teacher_needs_a_checkpoint(built: Path) -> None:
    message = "algorithm.name=distill learns from a teacher, and teacher.path names no checkpoint; give it"
    assert problems_of(built, *DISTILL) == [message]
    (message,) = problems_of(built, *DISTILL, "teacher.path=/no/teacher")
    assert message == "teacher.path=/no/teacher is not a folder; name one that exists"


def test_a_reward_that_is_compared_with_nothing(built: Path, teacher: Path) -> None:
    named = (*DISTILL, f"teacher.path={teacher}")
    (message,) = problems_of(built, *named, "algorithm.reward_coef=0.5")
    assert message.startswith(
        "algorithm.reward_coef=0.5 compares the responses to a prompt, and rollout.samples_per"
    )
    config = load_config(built, [*named, "algorithm.reward_coef=0.5", "rollout.samples_per_prompt=2"])
    (holder,) = (one for one in model_holders(config) if one.role == "teacher")
    assert holder.folder == teacher and not holder.has_score_head and holder.grid == config.grid("actor")


def test_a_punishment_of_scores_that_are_not_trained(built: Path, teacher: Path) -> None:
    named = (*DISTILL, f"teacher.path={teacher}", "rollout.samples_per_prompt=2")
    punished = (*named, "algorithm.overlong.cache_tokens=2")
    (message,) = problems_of(built, *punished)
    assert message.startswith("algorithm.overlong.cache_tokens=2 lowers scores, which are not trained with")
    for read in ((*punished, "algorithm.reward_coef=0.5"), (*named, "algorithm.overlong.mask=true")):
        assert check_run(load_config(built, [*read])) == []


@pytest.fixture
def teacher(built: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder of a model with the actor's tokenizer, and with weights of its own."""
    monkeypatch.chdir(tmp_path)
    config, _ = claim_run(load_config(built, [*FEW_ROWS, "run.name=teacher", "run.seed=5"]))
    prepare_files(config)
    return config.model_folder


def test_a_teacher_with_the_same_tokenizer(built: Path, teacher: Path) -> None:
    """A larger vocabulary of the model is padding; chat templates may differ."""
    (teacher / "chat_template.jinja").unlink()
    config, _ = claim_run(load_config(built, [*FEW_ROWS, *DISTILL, f"teacher.path={teacher}"]))
    prepare_files(config)


def changed_tokenizer(folder: Path, **tokens: str | None) -> None:
    """Rename tokens of a folder's tokenizer, or leave them out."""
    file = folder / "tokenizer.json"
    described = json.loads(file.read_text())
    vocabulary = described["model"]["vocab"]
    for token, name in tokens.items():
        number = vocabulary.pop(token)
        if name is not None:
            vocabulary[name] = number
    file.write_text(json.dumps(described))


def test_a_teacher_with_another_tokenizer_is_refused(built: Path, teacher: Path) -> None:
    """As many tokens, of which two have each other's numbers."""
    changed_tokenizer(teacher, a="A", b="a", A="b")
    config, _ = claim_run(load_config(built, [*FEW_ROWS, *DISTILL, f"teacher.path={teacher}"]))
    with pytest.raises(DataError) as caught:
        prepare_files(config)
    known = load_tokenizer(config.tokenizer_folder).get_vocab()
    assert str(caught.value) == (
        f"teacher.path={teacher} has another tokenizer (57 tokens) than the actor ({config.tokenizer_folder}) (57"
        f" tokens): {known['a']} is 'b', not 'a', {known['b']} is 'a', not 'b'; name a model with the same tokenizer,"
        " whose files are in its folder"
    )


@pytest.mark.parametrize("lacks", ["teacher", "actor"])
def test_tokens_that_only_one_has(lacks: str, tmp_path: Path) -> None:
    for name in ("actor", "teacher"):
        build_arithmetic_tokenizer().save_pretrained(tmp_path / name)
    changed_tokenizer(tmp_path / lacks, **dict.fromkeys("?!:,"))
    with pytest.raises(DataError) as caught:
        check_same_tokens(load_tokenizer(tmp_path / "actor"), tmp_path / "teacher", "one", "the other")
    numbers = {"teacher": "(53 tokens) than one (57 tokens)", "actor": "(57 tokens) than one (53 tokens)"}
    told = {"teacher": "is missing, not", "actor": "not missing"}
    assert f"the other has another tokenizer {numbers[lacks]}" in str(caught.value)
    assert told[lacks] in str(caught.value) and ", and 1 more; name" in str(caught.value)


def test_a_teacher_without_a_tokenizer_is_refused(built: Path, teacher: Path, tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    shutil.copytree(teacher, bare)
    for file in bare.glob("*token*"):
        file.unlink()
    config, _ = claim_run(load_config(built, [*FEW_ROWS, *DISTILL, f"teacher.path={bare}"]))
    with pytest.raises(DataError, match=rf"{bare} has another tokenizer \(1 tokens\) .* are in its folder$"):
        prepare_files(config)


@pytest.mark.parametrize("top_k", [0, 3])
def test_a_policy_becomes_its_teacher(top_k: int) -> None:
    """A table of states, from one token to the next, trained on its own draws by the project's functions."""
    generator = torch.Generator().manual_seed(4)
    num_tokens, num_rows, width = 5, 64, 6
    teacher = (2 * torch.randn(num_tokens, num_tokens, generator=generator)).log_softmax(-1)
    logits = torch.zeros(num_tokens, num_tokens, requires_grad=True)
    optimizer = torch.optim.Adam([logits], lr=0.1)
    algorithm, aggregation = Distill(top_k=top_k), Aggregation("token")

    def distance() -> float:
        own = logits.detach().log_softmax(-1)
        return float((own.exp() * (own - teacher)).sum(-1).mean())

    before = distance()
    for _ in range(80):
        own = logits.log_softmax(-1)
        states = torch.zeros(num_rows, width + 1, dtype=torch.int64)
        for place in range(width):
            probs = own.detach()[states[:, place]].exp()
            states[:, place + 1] = probs.multinomial(1, generator=generator)[:, 0]
        at, drawn = states[:, :-1], states[:, 1:]
        log_probs = own[at, drawn]
        rows = TensorDict(
            {
                **dict.fromkeys(("log_probs", "rollout_log_probs"), log_probs.detach()),
                "ref_log_probs": teacher[at, drawn],
                "response_lengths": torch.full((num_rows,), width),
                "scores": torch.zeros(num_rows),
                "dropped": torch.zeros(num_rows, dtype=torch.bool),
            },
            batch_size=[num_rows],
        )  # pyright: ignore[reportArgumentType]
        mask = torch.ones(num_rows, width, dtype=torch.bool)
        found = distill(rows, ONE_PROCESS, algorithm, 1)
        columns = {"mask": mask, "log_probs": log_probs.detach(), "advantages": found["advantages"]}
        total = clipped_loss(log_probs, columns, algorithm, ActorSection(), aggregation)
        if top_k:
            likeliest = teacher[at].topk(top_k)
            total = total + teacher_loss(
                own[at].gather(-1, likeliest.indices), likeliest.values, mask, aggregation
            )
        optimizer.zero_grad()
        (total.loss_sum / aggregation.count(mask)).backward()
        optimizer.step()
    assert before > 0.8 and distance() < 0.1
