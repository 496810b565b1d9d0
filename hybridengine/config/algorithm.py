"""Base class of algorithms; `algorithm.name` selects the class, and the section's other keys are its fields."""

from __future__ import annotations

import difflib
import inspect
import json
import re
from abc import abstractmethod
from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, Self, get_args

from pydantic import BeforeValidator, SerializeAsAny, model_validator

from hybridengine.config.loss_sections import CLIPPED_LOSS, CovarianceSection, SapoSection
from hybridengine.config.values import (
    IMPORT_PATH,
    CountOrZero,
    ImportPath,
    NonNegative,
    Positive,
    Section,
)
from hybridengine.errors import ConfigError
from hybridengine.importing import import_object

RowsKind = Literal["prompts", "demonstrations", "preferences"]
"""Rows of a data file: prompts alone, with a response to imitate, or with a chosen and a rejected response."""
Role = Literal["actor", "generation", "critic", "cost_critic", "reference", "teacher", "reward", "cost"]
"""A role of a dataflow, by name: a model, or engines with the actor's weights on ranks of their own (`generation`)."""

ALGORITHMS = {
    "ppo": "hybridengine.drivers.ppo:Ppo",
    "grpo": "hybridengine.drivers.grpo:Grpo",
    "grpo_from_engine": "hybridengine.drivers.grpo:GrpoFromEngine",
    "rloo": "hybridengine.drivers.rloo:Rloo",
    "remax": "hybridengine.drivers.remax:Remax",
    "reinforce_plus_plus": "hybridengine.drivers.reinforce_plus_plus:ReinforcePlusPlus",
    "safe_rlhf": "hybridengine.drivers.safe_rlhf:SafeRlhf",
    "online_dpo": "hybridengine.drivers.online_dpo:OnlineDpo",
    "distill": "hybridengine.drivers.distill:Distill",
    "sft": "hybridengine.drivers.sft:Sft",
    "dpo": "hybridengine.drivers.dpo:Dpo",
    "async_grpo": "hybridengine.drivers.async_grpo:AsyncGrpo",
    "async_ppo": "hybridengine.drivers.async_ppo:AsyncPpo",
}
"""Name -> import path of the class; classes are imported only when a configuration names them."""
DEFAULT = next(iter(ALGORITHMS))


class Conflict(NamedTuple):
    """A violated rule between values of a configuration."""

    message: str
    """Values, rule and remedy."""
    keys: tuple[str, ...]
    """Dotted keys of these values."""


CorrectionName = Literal["token_tis", "icepop", "sequence_tis", "sequence_mis", "geometric_filter"]
RANGE_METHODS: tuple[CorrectionName, ...] = ("icepop", "geometric_filter")
"""Corrections that drop tokens or sequences below `low` as well."""


class CorrectionSection(Section):
    """Correction of differences between engine and trainer log-probs: weights rho = pi_train / pi_rollout."""

    name: CorrectionName = "token_tis"
    """Correction method: token_tis (decoupled PPO with a cap) and sequence_tis cap weights at `high`, icepop drops tokens
    whose weight is not between `low` and `high`, sequence_mis drops sequences above `high`, and geometric_filter drops
    sequences whose geometric mean of rho is not between `low` and `high`."""
    high: Positive = 2.0
    """Largest weight, or largest mean for geometric_filter. Published for icepop: 5."""
    low: NonNegative = 0.0
    """Smallest weight for icepop, smallest mean for geometric_filter. Published for icepop: 0.5."""

    def conflicts(self) -> Iterator[Conflict]:
        """Yield the violated rules between these options."""
        if self.low and self.name not in RANGE_METHODS:
            yield Conflict(
                f"algorithm.correction.low={self.low:g} is not read by {self.name}, which has no lower limit; leave it"
                f" out, or choose {' or '.join(RANGE_METHODS)}",
                ("algorithm.correction.low", "algorithm.correction.name"),
            )
        if self.low >= self.high:
            yield Conflict(
                f"algorithm.correction.low={self.low:g} must be less than its high={self.high:g}; lower the one or raise"
                " the other",
                ("algorithm.correction.low", "algorithm.correction.high"),
            )


class OverlongSection(Section):
    """Treatment of responses near `rollout.max_response_tokens`, at which generation stops. As for that limit, what an
    environment adds to a response counts."""

    cache_tokens: CountOrZero = 0
    """Number of tokens before the maximum over which the score falls linearly; 0 punishes no response."""
    penalty: Positive = 1.0
    """Amount by which the score of a response of `rollout.max_response_tokens` falls."""
    mask: bool = False
    """Exclude responses of `rollout.max_response_tokens` from the loss; their scores count in the mean of their group."""

    def conflicts(self, max_response_tokens: int) -> Iterator[Conflict]:
        """Yield the violated rules between these options, and with the width of the responses."""
        if not self.cache_tokens and not self.mask:
            yield Conflict(
                "algorithm.overlong with cache_tokens=0 and mask=false has no effect; give cache_tokens, or mask=true, or"
                " leave it out",
                ("algorithm.overlong.cache_tokens", "algorithm.overlong.mask"),
            )
        if self.cache_tokens > max_response_tokens:
            yield Conflict(
                f"algorithm.overlong.cache_tokens={self.cache_tokens} must be at most rollout.max_response_tokens="
                f"{max_response_tokens}; lower the one or raise the other",
                ("algorithm.overlong.cache_tokens", "rollout.max_response_tokens"),
            )


class Algorithm(Section):
    """Base class of all algorithms. Options are fields, validated like every section of the configuration.

    Functions that run on ranks are given by import path, so that planning imports neither torch nor Ray.
    """

    roles: ClassVar[tuple[Role, ...]] = ()
    """Models of the dataflow."""
    generates: ClassVar[bool] = True
    """False for an offline algorithm, which trains on responses of the data: the actor has no engine."""
    rows_kind: ClassVar[RowsKind] = "prompts"
    """Kind of the rows of `data.train_file` and `data.eval_file`."""
    best_metric: ClassVar[str] = "eval/score_mean"
    """Metric of the best checkpoint, unless `checkpoint.best` names another."""
    min_samples: ClassVar[int] = 1
    """Minimum number of responses per prompt: 2 where responses to the same prompt are compared."""
    rows_per_unit: ClassVar[int] = 1
    """Number of rows that the actor's update keeps in one micro-batch: 2 for a preference."""
    uncorrected: ClassVar[str | None] = None
    """Reason why the algorithm does not use a rollout correction; None if it does."""
    reads_overlong: ClassVar[bool] = True
    """False for an algorithm without advantages, which does not use the option `overlong`."""
    advantage_parameters: ClassVar[tuple[str, ...]] = ("rows", "across", "algorithm", "samples")
    """Parameters of the function given by the option `advantages`, for algorithms with that option."""

    name: str = ""
    """Name of a built-in algorithm, or import path of a custom class, package.module:Class."""
    loss: ImportPath = CLIPPED_LOSS
    """Loss function of the actor's update, called as function(log_probs, columns, algorithm, actor, aggregation)."""
    sapo: SapoSection = SapoSection()
    """Options of SAPO's loss."""
    covariance: CovarianceSection = CovarianceSection()
    """Options of the losses clip-cov and kl-cov."""
    kl_estimator: Literal["k1", "k2", "k3", "abs"] = "k1"
    """Estimator of the KL divergence from the reference policy."""
    correction: CorrectionSection | None = None
    """Rollout correction; none by default."""
    overlong: OverlongSection | None = None
    """Punishment or masking of over-long responses; none by default."""

    @model_validator(mode="before")
    @classmethod
    def _named(cls, values: Any) -> Any:
        """Set the name of an object that is constructed without one to that of its class."""
        path = f"{cls.__module__}:{cls.__qualname__}"
        name = next((name for name, known in ALGORITHMS.items() if known == path), path)
        return {"name": name, **values} if isinstance(values, dict) else values

    @property
    def needs_on_policy(self) -> str | None:
        """Reason why every row must be drawn from the weights that are trained next; None if older rows are corrected."""
        return None

    def first_update(self, role: str) -> int:
        """Return the number of the first iteration that updates a trained role."""
        return 1

    @property
    def num_rounds(self) -> int:
        """Largest number of times that an iteration draws responses to as many prompts as it trains."""
        return 1

    def traced(self) -> Self:
        """Return the algorithm whose iterations make the usual calls and update all roles, which the planner traces."""
        return self

    @abstractmethod
    def step(self, roles: Any, sampling: Any, state: dict[str, float]) -> dict[str, float]:
        """Run one iteration over the worker groups; return its metrics. The planner traces this method with stand-ins.

        `roles` is a `drivers.roles.Roles` and `sampling` a `Sampling`; `state` is carried over and saved in checkpoints.
        """

    def scored_rows(self, num_prompts: int, num_rows: int) -> int:
        """Return the number of rows of the smallest call that scores responses."""
        return num_rows

    def conflicts(self, config: Any) -> Iterator[Conflict]:
        """Yield the violated rules between the algorithm and other sections of its `RunConfig`."""
        yield from ()


class ServedAlgorithm(Algorithm):
    """Algorithm of a server's configuration: its clients train the actor with losses and steps of their own."""

    roles = ("actor",)

    def step(self, roles: Any, sampling: Any, state: dict[str, float]) -> dict[str, float]:
        """Raise ConfigError: the clients of a server decide what it does."""
        raise ConfigError(f"algorithm.name={self.name} is for hybridengine serve; choose one for a run")


class ServedWithReference(ServedAlgorithm):
    """Algorithm of a server with `serve.reference`."""

    roles = ("actor", "reference")


class ServedWithEngines(ServedAlgorithm):
    """Algorithm of a server with a pool of the role generation, whose engines sample while the actor trains."""

    roles = ("actor", "generation")


class ServedWithBoth(ServedAlgorithm):
    """Algorithm of a server with `serve.reference` and a pool of the role generation."""

    roles = ("actor", "generation", "reference")


def served_algorithm(*, has_engines: bool, has_reference: bool) -> ServedAlgorithm:
    """Return the algorithm of a server with these roles besides the actor."""
    if has_engines:
        return ServedWithBoth() if has_reference else ServedWithEngines()
    return ServedWithReference() if has_reference else ServedAlgorithm()


def algorithm_class(name: str) -> type[Algorithm]:
    """Return the class with an algorithm's name or import path; raise ValueError if there is no such algorithm."""
    if name not in ALGORITHMS and not re.fullmatch(IMPORT_PATH, name, re.ASCII):
        near = difflib.get_close_matches(name, ALGORITHMS, n=1)
        meant = f"did you mean {near[0]}? " if near else ""
        raise ValueError(
            f"{name!r} is not an algorithm; {meant}choose from {', '.join(ALGORITHMS)}, or give the import path of a"
            " class of your own: package.module:Class"
        )
    found = import_named(ALGORITHMS.get(name, name), "a class")
    if not (isinstance(found, type) and issubclass(found, Algorithm)):
        raise ValueError(f"{name} is not a subclass of hybridengine.Algorithm; derive it from that class")
    wrong = [role for role in found.roles if role not in get_args(Role)]
    if wrong or "actor" not in found.roles:
        raise ValueError(
            f"{name} has the roles {list(found.roles)}; give it a tuple `roles` of {', '.join(get_args(Role))}, with"
            " the actor, which generates"
        )
    try:
        if inspect.isabstract(found):
            raise TypeError("there is none")
        inspect.signature(found.step).bind("self", "roles", "sampling", "state")
    except TypeError as error:
        raise ValueError(
            f"{name} needs a method step(self, roles, sampling, state), which returns an iteration's metrics ({error});"
            " write it"
        ) from None
    return found


def import_named(path: str, kind: str) -> Any:
    """Return the object at an import path; raise ValueError if the import fails, whatever its module raises."""
    try:
        return import_object(path)
    except Exception as error:
        cause = error.__cause__ if isinstance(error, ConfigError) else error
        raise ValueError(
            f"{path} cannot be imported ({type(cause).__name__}: {cause}); name {kind} of a module that is installed,"
            " or lies where the command is run"
        ) from error


def _chosen(value: Any) -> Any:
    """Return the section `algorithm` as an object of the class that it names."""
    if not isinstance(value, dict):
        return value
    name = value.get("name", DEFAULT)
    kind = algorithm_class(name if isinstance(name, str) else DEFAULT)
    return kind.model_validate_json(json.dumps({"name": name, **value}), strict=True)


ChosenAlgorithm = Annotated[SerializeAsAny[Algorithm], BeforeValidator(_chosen)]
"""The section `algorithm`."""
