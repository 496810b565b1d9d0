"""Sections for scoring responses, as rewards and as costs: one scorer, or several with weights."""

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
    TrainSizesField,
    like,
)


class ScorerSection(Section):
    """A function of the response's text, or a model's score."""

    kind: Literal["function", "model", "episode"] = "function"
    """function: rule-based, verifiable; model: a sequence-classification checkpoint with one label; episode: what the
    function of `rollout.episode` has returned."""
    function: ImportPath | None = None
    """Scoring function, package.module:function, called as function(responses, answers) plus any extra columns that its
    parameters name."""
    path: PathText | None = None
    """The model's checkpoint folder."""
    hf_config: PathText | None = None
    """Model shape for --dry-run and planning when the checkpoint is elsewhere: a preset, or a config.json."""
    parallel: TrainSizesField | None = None
    """Sizes p-t-d of the model; the actor's by default."""
    micro_batch_tokens: Count = 4096
    """Maximum number of tokens in one micro-batch of the model."""


class TermSection(ScorerSection):
    """One term of a weighted sum."""

    weight: float = 1.0
    """Factor of the term's score; with 0, the score is only a metric."""


TermNames = like(
    r"[A-Za-z][A-Za-z0-9_]*",
    "cannot be the name of a term, which is part of a column's name; use letters, digits and '_', a letter first",
)


Terms = Annotated[dict[str, TermSection], TermNames]


class RewardSection(ScorerSection):
    """Scoring of responses by one scorer or a weighted sum of several, and limits for calls of functions."""

    function: ImportPath | None = "hybridengine.data.tasks:arithmetic_reward"
    """Scoring function, package.module:function, called as function(responses, answers) plus any extra columns that its
    parameters name."""
    terms: Terms = Field(default_factory=dict)
    """Scorers by name, instead of a single one: the score is their weighted sum, and each term's own score is stored as
    the column reward/NAME or cost/NAME."""
    timeout_s: Seconds = 60.0
    """Time limit of one call of a function, after which its process is ended."""
    rows_per_call: Count = 64
    """Maximum number of rows in one call."""
    num_processes: Count = 1
    """Processes per function and rank, which share its calls."""
    memory_bytes: Bytes | None = None
    """Memory limit of one process of a function; none by default."""
    on_failure: Literal["fail", "retry", "drop"] = "fail"
    """Action after a call that raised, timed out or returned invalid scores: end the run, retry the call and then end the
    run, or continue without the rows."""
    retries: CountOrZero | None = None
    """Retries of a failed call; by default 2 with on_failure=retry, else 0."""

    @model_serializer(mode="wrap")
    def _without_what_is_not_read(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Return the section as plain values without the keys that `terms` replaces, so that it can be loaded again."""
        left_out = ScorerSection.model_fields.keys() if self.terms else ()
        return {key: value for key, value in dump(self).items() if key not in left_out}

    @property
    def scorers(self) -> dict[str, ScorerSection]:
        """Scorers by the name of their term; "" for a single scorer."""
        return dict(self.terms) if self.terms else {"": self}

    @property
    def functions(self) -> dict[str, str]:
        """Import paths of functions, by the name of their term."""
        return {
            name: scorer.function
            for name, scorer in self.scorers.items()
            if scorer.kind == "function" and scorer.function is not None
        }

    @property
    def models(self) -> dict[str, ScorerSection]:
        """Models, by the name of their term."""
        return {name: scorer for name, scorer in self.scorers.items() if scorer.kind == "model"}

    @property
    def episodes(self) -> tuple[str, ...]:
        """Names of the terms that are rewards of episodes."""
        return tuple(name for name, scorer in self.scorers.items() if scorer.kind == "episode")

    @property
    def weights(self) -> dict[str, float]:
        """Weights of terms; empty for a single scorer."""
        return {name: term.weight for name, term in self.terms.items()}

    @property
    def num_retries(self) -> int:
        """Retries of a failed call."""
        return (2 if self.on_failure == "retry" else 0) if self.retries is None else self.retries


def scorer_key(section: str, term: str) -> str:
    """Return the dotted key of a scorer: "reward", or "reward.terms.NAME"."""
    return f"{section}.terms.{term}" if term else section
