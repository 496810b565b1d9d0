"""Algorithms and their functions by name: those of this project, and user-defined ones that are wrong."""

from __future__ import annotations

import inspect
import pickle
from pathlib import Path

import pytest
import torch

from hybridengine.algorithms.losses.dpo import ipo_loss
from hybridengine.algorithms.losses.policy import clipped_loss
from hybridengine.config import load_config
from hybridengine.config.algorithm import ALGORITHMS, Algorithm, algorithm_class
from hybridengine.config.values import ImportPath
from hybridengine.drivers.dataflow import check_functions
from hybridengine.drivers.dpo import Dpo
from hybridengine.drivers.grpo import Grpo
from hybridengine.drivers.online_dpo import OnlineDpo
from hybridengine.drivers.ppo import Ppo
from hybridengine.drivers.safe_rlhf import SafeRlhf
from hybridengine.drivers.sft import Sft
from hybridengine.errors import ConfigError
from hybridengine.importing import import_object
from hybridengine.training.dry_run import print_dry_run

BASE = Path("configs/arithmetic.yaml").resolve()


@pytest.mark.parametrize("name", ALGORITHMS)
def test_an_algorithm_of_this_project(name: str) -> None:
    kind = algorithm_class(name)
    algorithm = kind()
    assert (algorithm.name, f"{kind.__module__}:{kind.__name__}") == (name, ALGORITHMS[name])
    assert pickle.loads(pickle.dumps(algorithm)) == algorithm
    assert len(inspect.getsource(kind.step).splitlines()) <= 60
    for option, parameters in (("loss", None), ("advantages", kind.advantage_parameters)):
        if (path := getattr(algorithm, option, None)) is not None:
            assert not parameters or tuple(inspect.signature(import_object(path)).parameters) == parameters


HEAD = "from hybridengine.config.algorithm import Algorithm\n"


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (None, "cannot be imported (ModuleNotFoundError: No module named 'my_flows_none')"),
        ("1 / 0", "cannot be imported (ZeroDivisionError: division by zero)"),
        ("import sys; sys.exit(7)", "calls sys.exit(7) while it is imported; put that beneath"),
        ("Flows = 3", "cannot be imported (AttributeError: module"),
        ("Flow = 3", "is not a subclass of hybridengine.Algorithm; derive it"),
        (
            HEAD + "class Flow(Algorithm): ...",
            "has the roles []; give it a tuple `roles` of actor, generation, critic",
        ),
        (
            HEAD + "class Flow(Algorithm): roles = ('actor', 'judge')",
            "has the roles ['actor', 'judge']; give it",
        ),
        (HEAD + "class Flow(Algorithm): roles = ('reward',)", "with the actor, which generates"),
        (
            HEAD + "class Flow(Algorithm): roles = ('actor',)",
            "needs a method step(self, roles, sampling, state)",
        ),
        (
            HEAD + "class Flow(Algorithm):\n roles = ('actor',)\n def step(self, roles): ...",
            "needs a method step(self, roles, sampling, state), which returns an iteration's metrics (too many",
        ),
    ],
)
def test_a_class_of_ones_own_that_cannot_be_used(
    code: str | None,
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:
    number = request.node.callspec.indices["code"]
    package = f"my_flows_{'none' if code is None else number}"
    monkeypatch.syspath_prepend(tmp_path)
    if code is not None:
        (tmp_path / package).mkdir()
        (tmp_path / package / "flow.py").write_text(code)
    with pytest.raises(ConfigError) as error:
        load_config(BASE, [f"algorithm.name={package}.flow:Flow"])
    assert str(error.value).startswith(f"algorithm: {package}.flow:Flow "), "and no other problem"
    assert words in str(error.value)


class Own(Ppo):
    """PPO with an option."""

    decay: float = 0.5
    shares: dict[str, float] = {}  # noqa: RUF012
    limit: int | str = 3


def advantages(rows, across, algorithm, samples): ...


def too_few(rows, across): ...


def own_policy_loss(log_probs, columns, algorithm, actor, aggregation):
    return clipped_loss(log_probs, columns, algorithm, actor, aggregation)


def own_preference_loss(log_probs, columns, algorithm, actor, aggregation):
    return ipo_loss(log_probs, columns, algorithm, actor, aggregation)


def smoothed_loss(log_probs, columns, algorithm, actor, aggregation):
    return algorithm.label_smoothing * log_probs.sum()


def loss_on_gpus(log_probs, columns, algorithm, actor, aggregation):
    scales = {"told": 1.0}
    return (log_probs * columns["mask"]).sum() / torch.distributed.get_world_size() + scales["advantages"]


def missing_option(log_probs, columns, algorithm, actor, aggregation):
    return algorithm.no_such_option * columns["told"] * columns["advantages"]


class OwnPairs(OnlineDpo):
    loss: ImportPath = f"{__name__}:own_preference_loss"


NOT_CALLABLE = 3


def test_an_algorithm_of_ones_own_keeps_its_options(tmp_path: Path) -> None:
    name = f"{__name__}:Own"
    overrides = [
        f"algorithm.name={name}",
        "algorithm.decay=0.25",
        f"algorithm.advantages={__name__}:advantages",
    ]
    config = load_config(BASE, overrides)
    assert config.algorithm == Own(name=name, decay=0.25, kl_coef=0.02, advantages=f"{__name__}:advantages")
    assert config.described()["algorithm"]["decay"] == 0.25
    assert pickle.loads(pickle.dumps(config)) == config
    check_functions(config.algorithm)
    with pytest.raises(ConfigError, match=r"unknown key algorithm\.decai; did you mean algorithm\.decay\?"):
        load_config(BASE, [overrides[0], "algorithm.decai=0.25"])
    with pytest.raises(ConfigError, match=r'algorithm\.shares\.a="x" must be a number; .* the default \{\}'):
        load_config(BASE, [overrides[0], "algorithm.shares.a=x"])
    with pytest.raises(ConfigError, match=r"algorithm\.limit\.int=\[\] must be an integer; .* the default 3"):
        load_config(BASE, [overrides[0], "algorithm.limit=[]"])


def test_a_dry_run_looks_for_functions_of_ones_own() -> None:
    config = load_config(BASE, ["algorithm.loss=my.own:function"], dry_run=True)
    with pytest.raises(ConfigError, match=r"algorithm\.loss: my\.own:function cannot be imported"):
        print_dry_run(config)


@pytest.mark.parametrize(
    ("algorithm", "words"),
    [
        (
            Grpo(advantages="my.own:function"),
            "algorithm.advantages: my.own:function cannot be imported (Module",
        ),
        (
            Grpo(advantages=f"{__name__}:NOT_CALLABLE"),
            "cannot be called as advantages(rows, across, algorithm,",
        ),
        (
            Grpo(advantages=f"{__name__}:too_few"),
            "cannot be called as advantages(rows, across, alg",
        ),
        (
            Ppo(loss=f"{__name__}:advantages"),
            "cannot be called as loss(log_probs, columns, algorithm, actor, aggr",
        ),
        (
            SafeRlhf(advantages=f"{__name__}:advantages"),
            "called as advantages(rows, across, algorithm, samples, mult",
        ),
        (
            Ppo(loss="builtins:int"),
            "cannot be called as loss(",
        ),
        (
            Sft(loss=f"{__name__}:clipped_loss"),
            "is a loss of advantages, and algorithm.name=sft trains on demonstrations; leave it out for",
        ),
        (
            Grpo(loss=f"{__name__}:ipo_loss"),
            "is a loss of preferences, and algorithm.name=grpo trains on advantages; leave it out for",
        ),
        (
            Dpo(loss=f"{__name__}:own_policy_loss"),
            "own_policy_loss reads columns['log_probs'], which an update of algorithm.name=dpo does not have; read what",
        ),
        (
            Sft(loss=f"{__name__}:own_preference_loss"),
            "reads algorithm.beta, which an update of algorithm.name=sft does not have; read what it has, or choose",
        ),
        (
            OwnPairs(loss=f"{__name__}:missing_option"),
            "reads algorithm.no_such_option, which an update of algorithm.name=",
        ),
    ],
)
def test_functions_are_checked_before_ranks_start(algorithm: Algorithm, words: str) -> None:
    with pytest.raises(ConfigError) as error:
        check_functions(algorithm)
    assert words in str(error.value)


@pytest.mark.parametrize(
    "algorithm",
    [
        Grpo(loss=f"{__name__}:own_policy_loss"),
        Grpo(loss=f"{__name__}:loss_on_gpus"),
        Sft(loss=f"{__name__}:loss_on_gpus"),
        Dpo(loss=f"{__name__}:own_preference_loss"),
        OnlineDpo(loss=f"{__name__}:smoothed_loss"),
        OwnPairs(loss=f"{__name__}:smoothed_loss"),
        OwnPairs(),
    ],
    ids=lambda one: f"{one.name.rpartition(':')[2]}-{one.loss.rpartition(':')[2]}",
)
def test_losses_of_ones_own_that_fit(algorithm: Algorithm) -> None:
    check_functions(algorithm)


def test_a_file_or_an_override_that_names_another_algorithm_leaves_the_options_of_the_first(
    tmp_path: Path,
) -> None:
    pairs = ["rollout.samples_per_prompt=2"]
    assert load_config(BASE).algorithm == Ppo(kl_coef=0.02)
    assert load_config(BASE, ["algorithm.name=grpo", *pairs]).algorithm == Grpo()
    upon = tmp_path / "upon.yaml"
    upon.write_text(f"base: {BASE}\nalgorithm: {{name: online_dpo, beta: 0.3}}\n")
    assert load_config(upon, pairs).algorithm == OnlineDpo(beta=0.3)
    for overrides in (["algorithm.name=grpo", "algorithm.kl_coef=0.1"], ["algorithm.kl_coef=0.1"]):
        with pytest.raises(ConfigError, match=r"algorithm\.kl_coef; keys here are "):
            load_config(upon, [*overrides, *pairs])
