"""What an iteration of a run has to do, apart from where: calls, models, rows and lengths."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from hybridengine.config import RunConfig, holder_shape, model_holders, rows_for_every_rank
from hybridengine.config.algorithm import Role
from hybridengine.config.run_config import TRAINED
from hybridengine.model_shapes import ModelShape
from hybridengine.planning.dataflows import HELPERS, Call, Count, Work, calls_of
from hybridengine.planning.lengths import Lengths
from hybridengine.planning.passes import MicroBatches


@dataclass(frozen=True)
class PlannedModel:
    """A model that needs ranks."""

    name: str
    """Of its group: a role, or "reward_NAME" for a model among several terms."""
    role: Role
    shape: ModelShape
    micro_batch_tokens: int
    trains: bool = False
    ppo_epochs: int = 1
    mini_batches: int = 1
    offloads: bool = False
    """Its optimizer state moves to host memory while it does not train."""
    recompute: bool = False


@dataclass(frozen=True, eq=False)
class Workload:
    """An iteration."""

    algorithm: str
    calls: tuple[Call, ...]
    """With one call for each model of a reward of several terms."""
    models: tuple[PlannedModel, ...]
    """The actor first."""
    num_prompts: int
    samples_per_prompt: int
    prompt_tokens: float
    """Mean."""
    lengths: Lengths
    max_tokens: int
    """Of a row: the longest prompt and response."""
    max_num_seqs: int
    dtype: str
    bucket_bytes: int
    rank_rows: Mapping[str, int] = field(default_factory=dict)
    """Role -> rows that all ranks of its pool share out, each at least one."""
    warmup_rows: int | None = None
    """Of an optimizer step of the warm-up before the run, if there is one."""

    def num_rows(self, count: Count) -> int:
        """Rows of a call."""
        each = {Count.ROWS: self.samples_per_prompt, Count.PROMPTS: 1, Count.PAIRS: 2}
        return self.num_prompts * each[count]

    def row_bytes(self, call: Call) -> int:
        """Bytes of a row that a call fetches."""
        response_width = self.lengths.max_tokens
        return call.columns.num_bytes(self.max_tokens - response_width, response_width)

    @property
    def num_tokens(self) -> float:
        """Of an iteration: prompts and responses."""
        return self.num_rows(Count.ROWS) * (self.prompt_tokens + self.lengths.mean)

    def without_generation(self) -> Workload:
        """What those do that only train: every call but the switches and generation."""
        kept = [
            place for place, call in enumerate(self.calls) if call.work not in (Work.SWITCH, Work.GENERATE)
        ]
        place_of = {old: new for new, old in enumerate(kept)}
        calls = [
            replace(call, reads=tuple(place_of[read] for read in call.reads if read in place_of))
            for call in (self.calls[place] for place in kept)
        ]
        return replace(self, calls=tuple(calls))

    @property
    def roles(self) -> dict[str, tuple[str, ...]]:
        """Role -> names of its models, which share a pool; the actor first."""
        found: dict[str, tuple[str, ...]] = {}
        for model in self.models:
            found[model.role] = (*found.get(model.role, ()), model.name)
        return found

    def model(self, name: str) -> PlannedModel:
        """The model of a group."""
        return next(model for model in self.models if model.name == name)

    def micro_batches(self, model: PlannedModel, call: Call, dp_size: int) -> MicroBatches:
        """What one replica passes over: of an update, for one optimizer step."""
        parts = dp_size * (model.mini_batches if call.work is Work.UPDATE else 1)
        rows = -(-self.num_rows(call.count) // parts)
        unit = 2 if call.count is Count.PAIRS else 1
        return MicroBatches.of(rows, self.prompt_tokens, self.lengths, model.micro_batch_tokens, unit)


def workload_of(config: RunConfig, lengths: Lengths, prompt_tokens: float | None = None) -> Workload:
    """The workload of a run.

    Args:
        prompt_tokens: mean length of the prompts; the longest that is allowed, where left out.

    Raises:
        ConfigError: a step that cannot be traced, or a model that nobody has.
    """
    models = [
        PlannedModel(
            name=holder.name,
            role=holder.role,
            shape=holder_shape(config, holder),
            micro_batch_tokens=holder.section.micro_batch_tokens,
            trains=holder.role in TRAINED,
            ppo_epochs=getattr(holder.section, "ppo_epochs", 1),
            mini_batches=getattr(holder.section, "mini_batches", 1),
            offloads=getattr(holder.section, "offload", "none") == "optimizer",
            recompute=getattr(holder.section, "recompute", "none") == "full",
        )
        for holder in model_holders(config)
    ]
    return Workload(
        algorithm=config.algorithm.name,
        calls=_with_terms(calls_of(config.algorithm), models),
        models=tuple(models),
        num_prompts=config.data.batch_size,
        samples_per_prompt=config.rollout.samples_per_prompt,
        prompt_tokens=config.rollout.max_prompt_tokens if prompt_tokens is None else prompt_tokens,
        lengths=lengths,
        max_tokens=config.max_tokens,
        max_num_seqs=config.rollout.max_num_seqs,
        dtype=config.model.dtype,
        bucket_bytes=config.actor.bucket_bytes,
        rank_rows=_rank_rows(config, models),
        warmup_rows=config.warmup.batch_size if config.warmup else None,
    )


def _rank_rows(config: RunConfig, models: Sequence[PlannedModel]) -> dict[str, int]:
    """As the configuration counts them; roles without a model are where the actor is."""
    placed, found = {model.role for model in models}, dict[str, int]()
    for role, num_rows in rows_for_every_rank(config).items():
        where = role if role in placed else "actor"
        found[where] = min(num_rows, found.get(where, num_rows))
    return found


def _with_terms(calls: Sequence[Call], models: Sequence[PlannedModel]) -> tuple[Call, ...]:
    """Calls of a role that has several models become one for each; a role without a model, functions, keeps its call."""
    found: list[Call] = []
    places: list[tuple[int, ...]] = []  # of a call among the new ones
    for call in calls:
        reads = tuple(place for old in call.reads for place in places[old])
        names = [model.name for model in models if model.role == call.role] or [call.role]
        if call.role in HELPERS:
            names = [call.role]
        places.append(tuple(range(len(found), len(found) + len(names))))
        found += [Call(name, call.method, reads, call.count) for name in names]
    return tuple(found)
