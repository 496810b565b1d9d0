"""Sections of the worth of a response, for rewards and for costs: one scorer, or several with weights."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, SerializerFunctionWrapHandler, model_serializer

from hybridengine.config.values import (
    Bytes,
    Count,
    CountOrZero,
    ImportPath,
    PathText,
    Seconds,
    Section,
    TrainSizesText,
    like,
)


class ScorerSection(Section):
    """A function of the response's text, or a model's score."""

    kind: Literal["function", "model"] = "function"
    """function: rule-based, verifiable; model: a sequence-classification checkpoint with one label."""
    function: ImportPath | None = None
    """The function, package.module:function, called as function(responses, answers) and with the columns that its
    further parameters name."""
    path: PathText | None = None
    """The model's checkpoint folder."""
    hf_config: PathText | None = None
    """Shapes of that checkpoint for --dry-run and planning where it is elsewhere: a preset, or a config.json."""
    parallel: TrainSizesText | None = None
    """Sizes p-t-d of the model; the actor's where left out."""
    micro_batch_tokens: Count = 4096
    """Most tokens of one micro-batch of the model."""


class TermSection(ScorerSection):
    """One term of a weighted sum."""

    weight: float = 1.0
    """Factor of the term's score; 0 keeps the score as a metric only."""


TermNames = like(
    r"[A-Za-z][A-Za-z0-9_]*",
    "cannot be the name of a term, which is part of a column's name; use letters, digits and '_', a letter first",
)


class RewardSection(ScorerSection):
    """The worth of a response: one scorer, or a weighted sum of several; and the calls of functions."""

    function: ImportPath | None = "hybridengine.data.tasks:arithmetic_reward"
    """The function, package.module:function, called as function(responses, answers) and with the columns that its
    further parameters name."""
    terms: Annotated[dict[str, TermSection], TermNames] = Field(default_factory=dict)
    """Several scorers by name, in place of one: the score is their weighted sum, and each term's own score is the
    column reward/NAME or cost/NAME."""
    timeout_s: Seconds = 60.0
    """Longest that one call of a function may take; its process is then ended."""
    rows_per_call: Count = 64
    """Most rows of one call."""
    num_processes: Count = 1
    """Processes of each function on each rank, which share its calls."""
    memory_bytes: Bytes | None = None
    """Most memory of one process of a function; left out, there is no limit."""
    on_failure: Literal["fail", "retry", "drop"] = "fail"
    """Consequence of a call that raised, did not return or gave no numbers: end the run, call again and then end it, or
    continue without these rows."""
    retries: CountOrZero | None = None
    """Further calls for the rows of a failed one; left out, 2 with on_failure=retry, else 0."""

    @model_serializer(mode="wrap")
    def _without_what_is_not_read(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """A run's configuration is written with its defaults, and can be read again."""
        left_out = ScorerSection.model_fields.keys() if self.terms else ()
        return {key: value for key, value in dump(self).items() if key not in left_out}

    @property
    def scorers(self) -> dict[str, ScorerSection]:
        """Every scorer by the name of its term; a single one has the name ""."""
        return dict(self.terms) if self.terms else {"": self}

    @property
    def functions(self) -> dict[str, str]:
        """Import path of every function, by the name of its term."""
        return {
            name: scorer.function
            for name, scorer in self.scorers.items()
            if scorer.kind == "function" and scorer.function is not None
        }

    @property
    def models(self) -> dict[str, ScorerSection]:
        """Every model, by the name of its term."""
        return {name: scorer for name, scorer in self.scorers.items() if scorer.kind == "model"}

    @property
    def weights(self) -> dict[str, float]:
        """Weight of every term; empty for a single scorer."""
        return {name: term.weight for name, term in self.terms.items()}

    @property
    def num_retries(self) -> int:
        """Further calls for the rows of a failed one."""
        return (2 if self.on_failure == "retry" else 0) if self.retries is None else self.retries


def scorer_key(section: str, term: str) -> str:
    """Return the dotted key of a scorer: "reward", or "reward.terms.NAME"."""
    return f"{section}.terms.{term}" if term else section
