"""Work of an iteration, independent of placement: calls, models, rows and lengths."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from hybridengine.config import RunConfig, holder_shape, model_holders, rows_for_every_rank
from hybridengine.config.algorithm import Role
from hybridengine.config.role_sections import MegatronSettings
from hybridengine.config.run_config import TRAINED
from hybridengine.models.shapes import ModelShape
from hybridengine.planning.costs.dataflows import METHODS, Call, Work, calls_of
from hybridengine.planning.costs.lengths import Lengths, MicroBatches
from hybridengine.topology.sizes import TrainSizes

GENERATING = (Work.SWITCH, Work.GENERATE)
"""Work of generation, which engines on ranks of their own take over from the trainers."""


@dataclass(frozen=True)
class PlannedModel:
    """Model that needs ranks."""

    name: str
    """Name of the model's group: a role, or "reward_NAME" for one of several terms."""
    role: Role
    shape: ModelShape
    micro_batch_tokens: int
    trains: bool = False
    ppo_epochs: int = 1
    mini_batches: int = 1
    offload: str = "none"
    """Kept in host memory until it is needed: `none`, `optimizer` for the optimizer's state, or `weights`."""
    settings: MegatronSettings = MegatronSettings()


@dataclass(frozen=True, eq=False)
class Workload:
    algorithm: str
    calls: tuple[Call, ...]
    """Calls of the iteration, with one for each model of a reward of several terms."""
    models: tuple[PlannedModel, ...]
    """Models, the actor first."""
    num_prompts: int
    samples_per_prompt: int
    prompt_tokens: float
    lengths: Lengths
    max_tokens: int
    """Largest number of tokens of prompt and response together."""
    max_num_seqs: int
    dtype: str
    bucket_bytes: int
    rank_rows: Mapping[str, int] = field(default_factory=dict)
    """Number of rows, by role, that the ranks of its pool divide, with at least one each."""
    warmup_rows: int | None = None
    """Number of rows in an optimizer step of the warm-up; None without a warm-up."""

    @property
    def rows_per_step(self) -> int:
        return self.num_prompts * self.samples_per_prompt

    def row_bytes(self, call: Call) -> int:
        """Return the bytes per row that a call fetches."""
        method, response_width = METHODS[call.method], self.lengths.max_tokens
        tokens = method.tokens * self.max_tokens + method.prompts * (self.max_tokens - response_width)
        return 8 * tokens + 4 * method.numbers * response_width

    @property
    def num_tokens(self) -> float:
        """Mean number of tokens in an iteration, prompts and responses."""
        return self.rows_per_step * (self.prompt_tokens + self.lengths.mean)

    @property
    def has_engines(self) -> bool:
        """True if engines on ranks of their own generate."""
        return any(call.role == "generation" for call in self.calls)

    def without_generation(self) -> Workload:
        """Return the workload of ranks that only train: all calls except switches and generation."""
        kept = [place for place, call in enumerate(self.calls) if call.work not in GENERATING]
        places = {old: new for new, old in enumerate(kept)}
        calls = (
            replace(call, reads=tuple(places[read] for read in call.reads if read in places))
            for call in (self.calls[place] for place in kept)
        )
        return replace(self, calls=tuple(calls))

    def synchronous(self) -> Workload:
        """Return the workload in which the actor's ranks generate a batch before all other calls."""
        if not self.has_engines:
            return self
        begin = [
            Call("actor", method, num_rows=self.rows_per_step)
            for method in ("switch_to_generate", "generate_sequences", "switch_to_train")
        ]
        others = self.without_generation().calls
        shifted = (replace(call, reads=(1, *(read + len(begin) for read in call.reads))) for call in others)
        return replace(self, calls=(*begin, *shifted))

    @property
    def roles(self) -> dict[str, tuple[str, ...]]:
        """Names of each role's models, which share a pool; the actor first."""
        found: dict[str, tuple[str, ...]] = {}
        for model in self.models:
            found[model.role] = (*found.get(model.role, ()), model.name)
        return found

    def model(self, name: str) -> PlannedModel:
        return next(model for model in self.models if model.name == name)

    def micro_batches(self, model: PlannedModel, call: Call, sizes: TrainSizes) -> MicroBatches:
        """Return the micro-batches of one replica in a call; for an update, in one optimizer step."""
        parts = sizes.dp_size * (model.mini_batches if call.work is Work.UPDATE else 1)
        rows = -(-call.num_rows // parts)
        unit = 2 if call.method == "update_preferences" else 1
        return MicroBatches.of(
            rows, self.prompt_tokens, self.lengths, model.micro_batch_tokens, unit, sizes.row_unit
        )


def workload_of(config: RunConfig, lengths: Lengths, prompt_tokens: float | None = None) -> Workload:
    """Return the workload of a run with prompts of `prompt_tokens` on average, by default the maximum; ConfigError if
    the step cannot be traced or a model does not exist."""
    models = [
        PlannedModel(
            name=holder.name,
            role=holder.role,
            shape=holder_shape(config, holder),
            micro_batch_tokens=holder.section.micro_batch_tokens,
            trains=holder.role in TRAINED,
            ppo_epochs=getattr(holder.section, "ppo_epochs", 1),
            mini_batches=getattr(holder.section, "mini_batches", 1),
            offload=getattr(holder.section, "offload", "none"),
            settings=holder.settings,
        )
        for holder in model_holders(config)
    ]
    samples = config.rollout.samples_per_prompt
    lora = bool(config.actor.lora.rank)
    calls = calls_of(config.algorithm, config.data.batch_size, samples, has_adapters=lora)
    return Workload(
        algorithm=config.algorithm.name,
        calls=_with_terms(calls, models),
        models=tuple(models),
        num_prompts=config.data.batch_size,
        samples_per_prompt=samples,
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
    """Return `Workload.rank_rows`; roles without a model count for the actor."""
    placed, found = {model.role for model in models}, dict[str, int]()
    for role, num_rows in rows_for_every_rank(config).items():
        where = role if role in placed else "actor"
        found[where] = min(num_rows, found.get(where, num_rows))
    return found


def _with_terms(calls: Sequence[Call], models: Sequence[PlannedModel]) -> tuple[Call, ...]:
    """Return one call for each model of a call's role; calls of roles without a model (helpers, functions) are kept."""
    found: list[Call] = []
    places: list[range] = []  # indices of each call among the new ones
    for call in calls:
        reads = tuple(place for old in call.reads for place in places[old])
        names = [model.name for model in models if model.role == call.role] or [call.role]
        places.append(range(len(found), len(found) + len(names)))
        found += [replace(call, role=name, reads=reads) for name in names]
    return tuple(found)
