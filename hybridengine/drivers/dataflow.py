"""Parts shared by the dataflows, the one without a critic, and validation of the functions that they run on ranks.

Nothing here imports torch or Ray, because the planner traces the steps of algorithms.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

from hybridengine.config.algorithm import Algorithm, import_named
from hybridengine.config.loss_checks import kind_of, kind_problem
from hybridengine.config.loss_sections import COVARIANCE_LOSSES
from hybridengine.config.values import ImportPath
from hybridengine.drivers.roles import Roles, Sampling, State
from hybridengine.errors import ConfigError
from hybridengine.report import keys

RESPONSE_MASK = "response_mask"
"""Column of episodes alone (`rows.micro_batches`): selected here, it is passed on where it exists."""
COLUMNS = (
    *("response_lengths", "rollout_log_probs", "log_probs", "ref_log_probs", "scores", "dropped"),
    RESPONSE_MASK,
)
"""Columns passed to every advantage function."""
STATISTICS = ("prompt_lengths", *COLUMNS)
"""Columns that `rollout_metrics` reads, in addition to `entropies`."""
ROLLOUT_METRICS = "hybridengine.drivers.advantages:rollout_metrics"
COVARIANT_TOKENS = "hybridengine.drivers.advantages:covariant_tokens"
COVARIANCE_COLUMNS = ("response_lengths", "log_probs", "advantages", "keep", "trained", RESPONSE_MASK)
"""Columns that `covariant_tokens` reads, the last two if there are any."""
NO_SCORES = "look in the log for failures of the reward, or of rollout.episode.function"
"""Remedy for a batch of which no response has a score."""
LOSS_PARAMETERS = ("log_probs", "columns", "algorithm", "actor", "aggregation")
"""Parameters of a loss function."""


def with_advantages(
    roles: Roles,
    batch: Any,
    algorithm: Any,
    samples: int,
    *more: Any,
    columns: Sequence[str] = (),
    seed: int = 0,
) -> Any:
    """Return the batch with the columns computed by `algorithm.advantages` on the ranks that hold its rows.

    It is called with `samples`, the responses per prompt, and then `more`; it reads `columns` in addition to `COLUMNS`
    (`fresh` of an asynchronous batch, among others). If `algorithm.loss` restrains tokens of a high covariance, these are
    chosen as well; `seed` decides among equal ones.
    """
    inputs = batch.select(*COLUMNS, *columns)
    batch = batch.union(roles.compute.map(inputs, algorithm.advantages, algorithm, samples, *more))
    if algorithm.loss not in COVARIANCE_LOSSES:
        return batch
    inputs = batch.select(*COVARIANCE_COLUMNS)
    return batch.union(roles.compute.map(inputs, COVARIANT_TOKENS, algorithm, seed))


def measure_rollout(
    roles: Roles,
    batch: Any,
    algorithm: Algorithm,
    *,
    from_engine: bool = False,
    version: int | None = None,
    max_versions: int = 0,
) -> Any:
    """Return the future of a batch's `rollout_metrics`; `from_engine` if it has the engine's log-probs, not entropies.

    An asynchronous batch is measured with the `version` of the weights that it trains and `staleness.max_versions`.
    """
    columns = [
        *STATISTICS,
        *roles.term_columns,
        *roles.episode_columns,
        *([] if from_engine else ["entropies"]),
    ]
    if version is not None:
        columns += ["versions", "fresh"]
    inputs, terms = batch.select(*columns), roles.term_columns
    return roles.compute.measure(inputs, ROLLOUT_METRICS, algorithm, terms, version, max_versions)


def switch_metrics(
    to_generate: Sequence[Mapping[str, Any]], to_train: Sequence[Mapping[str, Any]]
) -> dict[str, float]:
    """Return the bytes of the switches in both directions, each for the rank with the most."""
    reports = [*to_generate, *to_train]
    return {
        keys.RECEIVED_BYTES: max(report["received_bytes"] for report in to_generate),
        "switch/received_bytes_back": max(report["received_bytes"] for report in to_train),
        keys.PEAK_WEIGHT_BYTES: max(report["peak_weight_bytes"] for report in reports),
        keys.REDUNDANT_BYTES: max(report["redundant_bytes"] for report in reports),
    }


@dataclass
class DrawnBatch:
    """Responses to prompts, and the switches between which they were drawn."""

    rollout: Any
    """Rows of prompts and responses."""
    to_generate: list[Any]
    """Futures of the switches' reports."""
    to_train: list[Any]
    scores: Any = None
    """Rows of the responses' scores, if they are known."""
    metrics: dict[str, float] = field(default_factory=dict)

    def switch_metrics(self) -> dict[str, float]:
        """Return the metrics of all switches."""
        both = self.to_generate, self.to_train
        return switch_metrics(*([report for one in futures for report in one.get()] for futures in both))


def draw_round(roles: Roles, sampling: Sampling, num_more: int = 0, round_number: int = 0) -> DrawnBatch:
    """Return responses to the next prompts, each with `sampling.samples_per_prompt` of them.

    Args:
        num_more: prompts that were drawn before beyond one batch for each iteration.
        round_number: number of times that this iteration has drawn before; seeds go on after those of the last round.
    """
    actor, samples = roles.actor, sampling.samples_per_prompt
    prompts = roles.prompts.training_prompts(sampling.prompts, sampling.step, num_more).repeat(samples)
    seed = sampling.first_seed + round_number * sampling.num_prompts * samples
    to_generate = actor.switch_to_generate()
    rollout = prompts.union(actor.generate_sequences(prompts, seed))
    return DrawnBatch(rollout, [to_generate], [actor.switch_to_train()])


def metrics_of(updates: Sequence[Any]) -> dict[str, float]:
    """Return the metrics of updates, which are waited for in order."""
    return {name: value for update in updates for name, value in update.get()[0].items()}


class CriticFree(Algorithm):
    """Base of GRPO, RLOO and REINFORCE++, whose advantages are computed from a batch's scores alone."""

    roles = ("actor", "reference", "reward")
    from_engine: ClassVar[bool] = False
    """True if the engine's log-probs replace those of the old policy, which are then not computed."""

    advantages: ImportPath
    """Function that computes the advantages of a batch, called as function(rows, across, algorithm, samples)."""

    @property
    def needs_squares(self) -> bool:
        """True if the advantages read `squared_probs` [B, R], the sums over the vocabulary of squared probabilities."""
        return False

    @property
    def more_columns(self) -> tuple[str, ...]:
        """Columns that the advantages read in addition to `COLUMNS`."""
        return ("squared_probs",) if self.needs_squares else ()

    def penalised(self, state: State) -> Self:
        """Return the algorithm with the present weight of its KL penalty, if its rewards have one."""
        return self

    def adapt(self, state: State, metrics: Mapping[str, float]) -> dict[str, float]:
        """Adapt the weight of the KL penalty, if there is one; return metrics of it."""
        return {}

    def draw(self, roles: Roles, sampling: Sampling, state: State) -> DrawnBatch:
        """Return the responses of an iteration."""
        return draw_round(roles, sampling)

    def compared(self, roles: Roles, rollout: Any) -> Any:
        """Return `ref_log_probs` of the model that the KL divergence is measured from."""
        return roles.reference.compute_log_probs(rollout)

    def step(self, roles: Roles, sampling: Sampling, state: State) -> dict[str, float]:
        """Run one iteration; return its metrics."""
        actor, samples = roles.actor, sampling.samples_per_prompt

        drawn = self.draw(roles, sampling, state)
        rollout = drawn.rollout
        batch = rollout.union(
            rollout.select_as(log_probs="rollout_log_probs")
            if self.from_engine
            else actor.compute_log_probs(rollout, self.needs_squares),
            self.compared(roles, rollout),
            roles.reward.compute_scores(rollout) if drawn.scores is None else drawn.scores,
        )
        batch = with_advantages(
            roles,
            batch,
            self.penalised(state),
            samples,
            columns=self.more_columns,
            seed=sampling.first_seed,
        )
        update = actor.update(batch, self)
        measured = measure_rollout(roles, batch, self, from_engine=self.from_engine)

        metrics = measured.get()[0] | drawn.switch_metrics() | update.get()[0] | drawn.metrics
        return metrics | self.adapt(state, metrics)


def check_functions(algorithm: Algorithm) -> None:
    """Raise ConfigError if a custom function of the algorithm does not exist, or has an unsuitable signature."""
    parameters = {"loss": LOSS_PARAMETERS, "advantages": algorithm.advantage_parameters}
    for option, arguments in parameters.items():
        path, form = getattr(algorithm, option, None), f"{option}({', '.join(arguments)})"
        if path is None or path == type(algorithm).model_fields[option].default:
            continue
        try:
            function = import_named(path, "a function")
        except ValueError as error:
            raise ConfigError(f"algorithm.{option}: {error}") from error
        try:
            inspect.signature(function).bind(*arguments)
        except (TypeError, ValueError) as error:  # ValueError: built-in functions without a signature
            raise ConfigError(
                f"algorithm.{option}={path} cannot be called as {form} ({error}); change its parameters"
            ) from None
        if option == "loss":
            _check_loss(algorithm, function)


def _check_loss(algorithm: Algorithm, function: Any) -> None:
    """Raise ConfigError if a loss needs rows or options that the algorithm does not have."""
    from hybridengine.algorithms.losses.trial import missing_input

    # A loss of the project may be named as a member of another module.
    defined = f"{getattr(function, '__module__', '')}:{getattr(function, '__qualname__', '')}"
    if (problem := kind_problem(algorithm, defined)) is not None:
        raise ConfigError(problem)
    if (missing := missing_input(function, algorithm, kind_of(algorithm))) is not None:
        raise ConfigError(
            f"algorithm.loss={algorithm.loss} reads {missing}, which an update of algorithm.name={algorithm.name} does"
            " not have; read what it has, or choose another algorithm.name or loss"
        )
