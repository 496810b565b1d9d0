"""The configuration of one run, and values derived from it."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple, get_args

from pydantic import Field, model_validator

from hybridengine.config.algorithm import ChosenAlgorithm, CorrectionSection, Role, ServedAlgorithm
from hybridengine.config.environment_section import EPISODE_FUNCTION
from hybridengine.config.episode_section import EpisodeSection
from hybridengine.config.reward_sections import RewardSection, scorer_key
from hybridengine.config.role_sections import (
    ActorSection,
    CriticSection,
    LoraSection,
    MegatronSettings,
    ReferenceSection,
    TeacherSection,
)
from hybridengine.config.sections import (
    MAIN_POOL,
    CheckpointSection,
    ClusterSection,
    DataSection,
    FaultSection,
    GenerationSection,
    GuardSection,
    ModelSection,
    PoolSection,
    RolloutSection,
    RunSection,
    ServeSection,
    StalenessSection,
    TimeoutSection,
    WarmupSection,
)
from hybridengine.config.values import PathText, Section, flat
from hybridengine.models.checkpoint_files import COMPANIONS_FOLDER
from hybridengine.models.shapes import DTYPE_BYTES
from hybridengine.redaction import redacted
from hybridengine.topology.generation import GenerationGrid
from hybridengine.topology.grid import Grid
from hybridengine.topology.sizes import GenSizes, TrainSizes

ROLES: tuple[Role, ...] = get_args(Role)
TRAINED: tuple[Role, ...] = ("actor", "critic", "cost_critic")
"""Roles whose weights are updated."""
SCORERS: tuple[Role, ...] = ("reward", "cost")
"""Roles that score responses with functions, models or both."""
CALLS_FILE = "calls.jsonl"
"""File of an asynchronous run with the order of its engines' calls."""
PATH_KEYS = ("folder", "path", "tokenizer", "chat_template", "train_file", "eval_file", "key_file")
"""Keys of any section that hold paths which ranks read or write."""


def ranks_key(pool: str) -> str:
    """Return the dotted key of the ranks of a pool."""
    return "cluster.ranks_per_node" if pool == MAIN_POOL else f"cluster.pools.{pool}.ranks_per_node"


class RunConfig(Section):
    """Configuration of one run, created by `load_config` and immutable."""

    run: RunSection = RunSection()
    cluster: ClusterSection = ClusterSection()
    model: ModelSection = ModelSection()
    actor: ActorSection = ActorSection()
    critic: CriticSection = CriticSection()
    cost_critic: CriticSection = CriticSection()
    """The value model of costs."""
    reference: ReferenceSection = ReferenceSection()
    teacher: TeacherSection = TeacherSection()
    reward: RewardSection = RewardSection()
    cost: RewardSection = RewardSection(function=None)
    """Costs of responses."""
    rollout: RolloutSection = RolloutSection()
    generation: GenerationSection = GenerationSection()
    staleness: StalenessSection = StalenessSection()
    data: DataSection = DataSection()
    algorithm: ChosenAlgorithm = Field(default_factory=dict, validate_default=True)  # pyright: ignore
    """The algorithm: its name, and the options of that algorithm."""
    warmup: WarmupSection | None = None
    """Supervised steps before RL; none by default."""
    timeouts: TimeoutSection = TimeoutSection()
    checkpoint: CheckpointSection = CheckpointSection()
    faults: FaultSection = FaultSection()
    guards: GuardSection = GuardSection()
    serve: ServeSection = ServeSection()
    """The server of `hybridengine serve`; ignored by runs."""
    resume: PathText = "never"
    """Checkpoint to start from: `auto` resumes from the newest complete checkpoint in the run's folder, if any; `never`
    starts in a new folder; a checkpoint folder starts from that checkpoint."""

    @model_validator(mode="after")
    def _played(self) -> RunConfig:
        """Let episodes play the environment, unless the run names a function of its own."""
        environment, episode = self.data.environment, self.rollout.episode or EpisodeSection()
        if environment is None or episode.function not in (None, EPISODE_FUNCTION):
            return self
        described = environment.model_dump(mode="json", include={"name", "options", "settings"})
        options = {**episode.options, "environment": described}
        played = episode.model_copy(update={"function": EPISODE_FUNCTION, "options": options})
        rollout = self.rollout.model_copy(update={"episode": played})
        return self.model_copy(update={"rollout": rollout})

    @model_validator(mode="after")
    def _corrected(self) -> RunConfig:
        """Correct the rollouts of an engine in another type, unless the algorithm says otherwise."""
        algorithm = self.algorithm
        if (
            self.rollout.quantization == "none"
            or "correction" in algorithm.model_fields_set
            or algorithm.uncorrected
        ):
            return self
        corrected = algorithm.model_copy(update={"correction": CorrectionSection()})
        return self.model_copy(update={"algorithm": corrected})

    @model_validator(mode="after")
    def _rated(self) -> RunConfig:
        """Rate checkpoints by the algorithm's metric, unless the run names another."""
        best = self.algorithm.best_metric
        if "best" in self.checkpoint.model_fields_set or self.checkpoint.best == best:
            return self
        return self.model_copy(update={"checkpoint": self.checkpoint.model_copy(update={"best": best})})

    def described(self) -> dict[str, Any]:
        """Return the configuration as plain values without secrets, for writing and sending."""
        return redacted(self.model_dump(mode="json"))

    @property
    def pools(self) -> dict[str, PoolSection]:
        """Pools by name, the actor's first."""
        elsewhere = {role for pool in self.cluster.pools.values() for role in pool.roles}
        roles: tuple[Role, ...] = tuple(role for role in self.algorithm.roles if role not in elsewhere)
        main = PoolSection.model_construct(roles=roles, ranks_per_node=self.cluster.ranks_per_node)
        return {MAIN_POOL: main, **self.cluster.pools}

    def pool_of(self, role: Role) -> str:
        """Return the name of the pool of a role."""
        found = (name for name, pool in self.cluster.pools.items() if role in pool.roles)
        return next(found, MAIN_POOL)

    @property
    def num_ranks(self) -> int:
        """Number of ranks in all pools."""
        return sum(pool.num_ranks for pool in self.pools.values())

    @property
    def model_roles(self) -> tuple[Role, ...]:
        """Roles of the dataflow with weights of their own; excludes engines, roles scored only by functions, and the
        reference of an actor with adapters, which is the actor without them."""
        used = self.algorithm.roles
        return tuple(
            role
            for role in ROLES
            if role in used
            and role != "generation"
            and not (role == "reference" and self.actor.lora.rank)
            and (role not in SCORERS or "" in getattr(self, role).models)
        )

    def grid(self, role: Role) -> Grid:
        """Return the training grid of a role; the actor's if the role has no sizes."""
        return Grid(getattr(self, role).parallel or self.actor.parallel, self.cluster.order)

    @property
    def generation_grid(self) -> GenerationGrid:
        """The actor's generation layout over its training grid."""
        return GenerationGrid(self.grid("actor"), self.actor.generate)

    @property
    def bucket_elements(self) -> int:
        """Largest number of weights in the buckets in flight."""
        return self.actor.bucket_bytes // DTYPE_BYTES[self.model.dtype]

    @property
    def captures_graphs(self) -> bool:
        """True if decoding captures CUDA graphs where ranks have GPUs."""
        return self.cluster.device != "cpu" and self.rollout.cuda_graphs is not False

    @property
    def num_loaded_adapters(self) -> int:
        """Number of adapters that an engine loads from files and has at once, as on a server; 0 in a run, whose engines
        have the actor's adapters as parameters."""
        served = isinstance(self.algorithm, ServedAlgorithm) and self.actor.lora.rank
        return self.serve.max_adapters if served else 0

    def without_adapters(self) -> RunConfig:
        """Return the configuration of a run that trains the weights themselves."""
        return self.model_copy(update={"actor": self.actor.model_copy(update={"lora": LoraSection()})})

    @property
    def engines(self) -> tuple[tuple[int, ...], ...]:
        """Ranks on each node of every engine of the role generation; empty without it."""
        if "generation" not in self.algorithm.roles:
            return ()
        size, left, nodes = self.generation.parallel.num_ranks, 0, list[list[int]]()
        for num_ranks in self.pools[self.pool_of("generation")].ranks_per_node:
            while num_ranks:
                if not left:
                    nodes, left = [*nodes, []], size
                nodes[-1].append(min(left, num_ranks))
                left, num_ranks = left - nodes[-1][-1], num_ranks - nodes[-1][-1]
        return tuple(map(tuple, nodes))

    @property
    def started_pools(self) -> dict[str, tuple[int, ...]]:
        """Ranks on each node by pool, as a run starts them: every engine of the role generation has a pool of its own,
        NAME.0 and so on."""
        found = dict[str, tuple[int, ...]]()
        for name, pool in self.pools.items():
            if "generation" in pool.roles:
                found |= {f"{name}.{number}": ranks for number, ranks in enumerate(self.engines)}
            else:
                found[name] = pool.ranks_per_node
        return found

    @property
    def max_tokens(self) -> int:
        """T = P + R: the width of a prompt and its response; of rows of the data, their largest number of tokens."""
        if not self.algorithm.generates:
            return self.data.max_tokens
        return self.rollout.max_prompt_tokens + self.rollout.max_response_tokens

    @property
    def max_response_tokens(self) -> int:
        """R: the width of columns with a value per response token."""
        return self.rollout.max_response_tokens if self.algorithm.generates else self.data.max_tokens

    @property
    def temperature(self) -> float:
        """Temperature of the distributions that responses come from; 1 for responses of the data."""
        return self.rollout.temperature if self.algorithm.generates else 1.0

    @property
    def sequences_per_row(self) -> int:
        """Number of sequences for each row of the data that an iteration reads."""
        algorithm = self.algorithm
        return self.rollout.samples_per_prompt if algorithm.generates else algorithm.rows_per_unit

    @property
    def rows_per_step(self) -> int:
        """Number of sequences per iteration: prompts times responses per prompt."""
        return self.data.batch_size * self.sequences_per_row

    @property
    def calls_file(self) -> Path:
        """File in which an asynchronous run records the order of its engines' calls."""
        return self.run_folder / CALLS_FILE

    @property
    def run_folder(self) -> Path:
        """Folder of everything that the run writes."""
        return Path(self.run.folder) / self.run.name

    @property
    def model_folder(self) -> Path:
        """Hugging Face checkpoint that the run starts from, or path at which a converted or built one is written."""
        return Path(self.model.path) if self.model.path else self.run_folder / "model"

    @property
    def start_folder(self) -> Path:
        """Hugging Face checkpoint of actor and reference at the start of RL, after any warm-up."""
        return self.run_folder / "warmup" if self.warmup else self.model_folder

    @property
    def tokenizer_folder(self) -> Path:
        """Tokenizer folder; with `model.chat_template`, the path at which the tokenizer is written with that template."""
        return self.run_folder / "tokenizer" if self.model.chat_template else self.given_tokenizer_folder

    @property
    def given_tokenizer_folder(self) -> Path:
        """Tokenizer folder that the run starts from."""
        return Path(self.model.tokenizer) if self.model.tokenizer else self.model_folder

    @property
    def engine_sizes(self) -> dict[str, GenSizes]:
        """Key -> sizes of the engines that generate: those on ranks of their own, those of the actor's ranks, or both."""
        found = {"generation.parallel": self.generation.parallel} if self.engines else {}
        if self.algorithm.generates and (self.generation.actor or not self.engines):
            found["actor.generate"] = self.actor.generate
        return found

    @property
    def paths_to_read(self) -> dict[str, Path]:
        """Key -> file or folder that must exist on every node before the run starts."""
        values = flat(self.model_dump(mode="json", exclude={"algorithm", "run"}))
        return {
            key: Path(path).resolve() for key, path in values if path and key.rpartition(".")[2] in PATH_KEYS
        }

    @property
    def companions_folder(self) -> Path:
        """Folder with the configuration, tokenizer and card for every model that the run writes."""
        return self.run_folder / COMPANIONS_FOLDER

    @property
    def data_folder(self) -> Path:
        """Folder of the generated files of a task or an environment."""
        return self.run_folder / "data"

    @property
    def train_file(self) -> Path:
        """Training prompts; for a task or an environment, the path at which they are written."""
        return Path(self.data.train_file) if self.data.train_file else self.data_folder / "train.jsonl"

    @property
    def eval_file(self) -> Path | None:
        """Held-out prompts, if any; for a task or an environment, the path at which they are written."""
        if self.data.eval_file:
            return Path(self.data.eval_file)
        return self.data_folder / "held_out.jsonl" if self.data.task or self.data.environment else None

    @property
    def demonstrations_file(self) -> Path | None:
        """Demonstrations for the warm-up; None without a warm-up."""
        if self.warmup is None:
            return None
        return Path(self.warmup.file) if self.warmup.file else self.data_folder / "train.jsonl"


class ModelHolder(NamedTuple):
    """A set of weights on the ranks: a role, or a model among the terms of a reward. Keys are dotted."""

    role: Role
    key: str
    section: Any
    """Section with `parallel` and `micro_batch_tokens`."""
    grid: Grid
    sizes_key: str
    folder: Path
    """Hugging Face checkpoint at the start of RL."""

    @property
    def name(self) -> str:
        """Name of the worker group: "reward", or "reward_NAME" for a term."""
        return self.key.replace(".terms.", "_")

    @property
    def term(self) -> str:
        """Name of the term; "" for a role."""
        return self.key.partition(".terms.")[2]

    @property
    def sizes(self) -> TrainSizes:
        """Sizes (p, t, d)."""
        return self.grid.sizes

    @property
    def settings(self) -> MegatronSettings:
        """Features of Megatron-core; the defaults for a model that is not trained."""
        return self.section if isinstance(self.section, MegatronSettings) else MegatronSettings()

    @property
    def path(self) -> str | None:
        """Path of its own checkpoint, if any."""
        return getattr(self.section, "path", None)

    @property
    def hf_config(self) -> str | None:
        """Description of that checkpoint for when it is elsewhere."""
        return getattr(self.section, "hf_config", None)

    @property
    def has_score_head(self) -> bool:
        """True if the model returns scores or values instead of log-probs."""
        return self.role not in ("actor", "reference", "teacher")


def reward_sections(config: RunConfig) -> dict[Role, RewardSection]:
    """Return the sections that score responses in the run's dataflow, by name."""
    return {role: getattr(config, role) for role in SCORERS if role in config.algorithm.roles}


def judge_is_alone(config: RunConfig, role: Role) -> bool:
    """Return True if a judge of the role's section is the only model on its ranks."""
    section = getattr(config, role)
    return (
        config.pools[config.pool_of(role)].roles == (role,)
        and len(section.judges) == len(section.scorers) == 1
    )


def model_holders(config: RunConfig) -> list[ModelHolder]:
    """Return all model holders of a run, roles first."""
    holders = [_holder(config, role, role, getattr(config, role)) for role in config.model_roles]
    for role, section in reward_sections(config).items():
        models = section.models.items()
        holders += [_holder(config, role, scorer_key(role, term), one) for term, one in models if term]
    return holders


def _holder(config: RunConfig, role: Role, key: str, section: Any) -> ModelHolder:
    grid = Grid(section.parallel or config.actor.parallel, config.cluster.order)
    sizes_key = f"{key}.parallel" if section.parallel else "actor.parallel"
    folder = Path(getattr(section, "path", None) or config.start_folder)
    return ModelHolder(role, key, section, grid, sizes_key, folder)
