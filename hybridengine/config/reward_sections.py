"""Sections for scoring responses, as rewards and as costs: one scorer, or several with weights."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, SerializerFunctionWrapHandler, model_serializer

from hybridengine.config.judge_section import JudgeSection
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

Urls = Annotated[
    tuple[str, ...],
    Field(min_length=1),
    like(
        r"https?://[^\s/?#@]+([/?#]\S*)?",
        "is not the address of a service; write http://HOST:PORT/PATH or https://..., without a user name",
    ),
]

SERVICE_RETRIES = 4
"""Default number of retries of a call of a service."""


class ServiceSection(Section):
    """HTTP service that scores responses: each call is a POST with the rows as JSON."""

    urls: Urls
    """Addresses, which take the calls in turn; a call that is repeated goes to the next one. Redirects are refused."""
    columns: tuple[Literal["prompts", "prompt_lengths", "response_lengths"], ...] = ()
    """Columns that are sent in addition to responses and answers."""
    key_file: PathText | None = None
    """File with a key, which is sent in the header `Authorization: Bearer KEY`."""
    max_in_flight: Count = 8
    """Maximum number of calls of one rank at a time."""


class ScorerSection(Section):
    """A function of the response's text, a service or a judge that is sent it, or a model's score."""

    kind: Literal["function", "service", "model", "judge", "episode"] = "function"
    """function: rule-based, verifiable; service: scores over HTTP; model: a sequence-classification checkpoint with one
    label; judge: a language model that is asked about the response; episode: what the function of `rollout.episode` has
    returned."""
    function: ImportPath | None = None
    """Scoring function, package.module:function, called as function(responses, answers) plus any extra columns that its
    parameters name."""
    service: ServiceSection | None = None
    """Service of kind=service."""
    judge: JudgeSection | None = None
    """Prompt and verdicts of kind=judge."""
    path: PathText | None = None
    """Checkpoint folder of the model or judge."""
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
    """Scoring of responses by one scorer or a weighted sum of several, and limits for calls of functions and
    services."""

    function: ImportPath | None = "hybridengine.data.tasks:arithmetic_reward"
    """Scoring function, package.module:function, called as function(responses, answers) plus any extra columns that its
    parameters name."""
    terms: Terms = Field(default_factory=dict)
    """Scorers by name, instead of a single one: the score is their weighted sum, and each term's own score is stored as
    the column reward/NAME or cost/NAME."""
    timeout_s: Seconds = 60.0
    """Time limit of one call; of a function, whose process is then ended, or of a service."""
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
    """Retries of a failed call; by default 2 with on_failure=retry, else 0; 4 of a service, which is called again only
    after failures that may pass."""

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
    def services(self) -> dict[str, ServiceSection]:
        """Services, by the name of their term."""
        return {
            name: scorer.service
            for name, scorer in self.scorers.items()
            if scorer.kind == "service" and scorer.service is not None
        }

    @property
    def are_called(self) -> bool:
        """True if ranks call functions or services for rows of their own."""
        return bool(self.functions or self.services)

    @property
    def models(self) -> dict[str, ScorerSection]:
        """Models, by the name of their term."""
        return {name: scorer for name, scorer in self.scorers.items() if scorer.kind == "model"}

    @property
    def judges(self) -> dict[str, JudgeSection]:
        """Judges, by the name of their term."""
        return {
            name: scorer.judge
            for name, scorer in self.scorers.items()
            if scorer.kind == "judge" and scorer.judge is not None
        }

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
        """Retries of a failed call of a function."""
        return (2 if self.on_failure == "retry" else 0) if self.retries is None else self.retries

    @property
    def num_service_retries(self) -> int:
        """Retries of a failed call of a service."""
        return SERVICE_RETRIES if self.retries is None else self.retries


def scorer_key(section: str, term: str) -> str:
    """Return the dotted key of a scorer: "reward", or "reward.terms.NAME"."""
    return f"{section}.terms.{term}" if term else section
