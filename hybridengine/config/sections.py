"""The sections of a run configuration, one class each. The line below a field describes it.

Values are plain and small; derived values (rank counts, grids, folders, widths) are properties of `RunConfig`.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, SecretStr, field_validator
from pydantic_core import PydanticCustomError

from hybridengine.config.build_section import BuildSection
from hybridengine.config.environment_section import EnvironmentSection
from hybridengine.config.episode_section import EpisodeSection
from hybridengine.config.values import (
    BYTE_UNITS,
    Bytes,
    Count,
    CountOrZero,
    FolderName,
    GenSizesField,
    NonEmpty,
    NumTerms,
    PathText,
    Positive,
    Seconds,
    Section,
    Seed,
    Share,
    Temperature,
    like,
)
from hybridengine.topology.grid import RankOrder
from hybridengine.topology.sizes import GenSizes


class RunSection(Section):
    """Name, location and length of the run."""

    name: FolderName = "run"
    """Folder of this run inside `folder`; defaults to the name of the configuration file."""
    folder: PathText = "runs"
    """Folder of all runs."""
    seed: Seed = 0
    """Random seed of weights, data and sampling."""
    steps: Count = 100
    """Number of iterations."""
    eval_every: CountOrZero = 10
    """Iterations between two evaluations; 0 evaluates only before the first and after the last."""
    live: bool = True
    """Show a live status at the bottom of the terminal, if there is one."""
    trackers: tuple[Literal["wandb", "mlflow"], ...] = ()
    """Trackers that receive the metrics in addition to the run's folder; each is an optional package."""
    log_format: Literal["text", "json"] = "text"
    """Form of logs: text, or on each process's stderr a line per JSON object with run, role, rank and host."""


RanksPerNode = Annotated[tuple[Count, ...], Field(min_length=1)]
PoolRole = Literal["generation", "critic", "cost_critic", "reference", "teacher", "reward", "cost"]
"""Name of a role other than the actor, whose ranks are `cluster.ranks_per_node`."""
PoolRoles = Annotated[tuple[PoolRole, ...], Field(min_length=1)]


class PoolSection(Section):
    """Separate ranks for some roles, which run concurrently with the others."""

    roles: PoolRoles
    """Roles that share these ranks; the actor and all roles without a pool share `cluster.ranks_per_node`."""
    ranks_per_node: RanksPerNode = (1,)
    """Ranks on each node, one GPU or CPU process each."""

    @property
    def num_ranks(self) -> int:
        """Number of ranks on all nodes."""
        return sum(self.ranks_per_node)


MAIN_POOL = "main"
"""Name of the actor's pool."""
PoolNames = like(
    rf"(?!{MAIN_POOL}$)[A-Za-z][A-Za-z0-9_-]*",
    f"cannot be the name of a pool; use letters, digits, '_' and '-', a letter first, and not {MAIN_POOL!r}, which is"
    " the actor's",
)


Pools = Annotated[dict[str, PoolSection], PoolNames]


class ClusterSection(Section):
    """Ranks and the hardware they run on."""

    ranks_per_node: RanksPerNode = (1,)
    """Ranks on each of the actor's nodes, one GPU or CPU process each: [8, 8] is two nodes of 8."""
    pools: Pools = Field(default_factory=dict)
    """Pools by name, in addition to the actor's, for roles with separate ranks."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device of the models; auto uses GPUs if the node has them."""
    rank_order: Literal["paper", "megatron"] = "paper"
    """Order of the axes, fastest first: tensor, pipeline, data (paper) or tensor, data, pipeline (megatron)."""
    address: PathText | None = None
    """Ray cluster to join: "auto" or host:port; by default a local one is started for the run."""

    @property
    def order(self) -> RankOrder:
        """Rank order as a `RankOrder`."""
        return RankOrder[self.rank_order.upper()]


class ModelSection(Section):
    """The actor's initial model: a checkpoint, a GGUF file to convert, or a model to build."""

    path: PathText | None = None
    """Hugging Face checkpoint folder; exactly one of `path`, `gguf` and `build` is given."""
    gguf: PathText | None = None
    """GGUF file to convert into the run's folder; "package:FILE" is a file in an installed Python package."""
    build: BuildSection | None = None
    """Small model to build into the run's folder."""
    hf_config: PathText | None = None
    """Model shape for --dry-run and planning when the checkpoint is elsewhere: a preset such as llama3-70b, or a
    config.json. `gguf` requires a config.json."""
    tokenizer: PathText | None = None
    """Tokenizer folder; the checkpoint's own by default."""
    chat_template: PathText | None = None
    """Jinja file with the template of prompts, in place of the tokenizer's own, which base models lack."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of the weights in training and in generation."""

    @property
    def gguf_file(self) -> Path | None:
        """Path of the GGUF file; None without one, or if its package is not installed."""
        package, colon, file = (self.gguf or "").rpartition(":")
        if not colon:
            return Path(file) if file else None
        spec = importlib.util.find_spec(package) if package.isidentifier() else None
        return Path(spec.origin).parent / file if spec is not None and spec.origin else None


class StructureSection(Section):
    """Form of every response, by exactly one of these keys: the engine draws no token that would leave it.

    A response ends in the form unless it reaches `rollout.max_response_tokens` before, or a stop string.
    """

    regex: str = ""
    """Regular expression that matches the whole response."""
    json_schema: dict[str, Any] = Field(default_factory=dict)
    """JSON schema of the response."""
    choices: tuple[NonEmpty, ...] = ()
    """Texts of which the response is one."""


class RolloutSection(Section):
    """Generation with vLLM."""

    max_prompt_tokens: Count = 64
    """Width of the prompt columns; longer prompts are an error."""
    max_response_tokens: Count = 64
    """Width of the response columns, at which generation stops."""
    samples_per_prompt: Count = 1
    """Responses per prompt."""
    temperature: Temperature = 1.0
    """Sampling temperature, in the range that vLLM uses unchanged."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Smallest total probability of the most likely tokens to draw from."""
    top_k: CountOrZero = 0
    """Number of most likely tokens to draw from; 0 for all."""
    min_p: Share = 0.0
    """Minimum probability of a token relative to the most likely one."""
    stop: tuple[NonEmpty, ...] = ()
    """Texts that end a response, which keeps them, as the end token does; special tokens are part of the text."""
    structure: StructureSection | None = None
    """Form of every response."""
    kv_cache_bytes: Bytes = 256 * BYTE_UNITS["MiB"]
    """Size of the KV cache of one rank."""
    max_num_seqs: Count = 256
    """Maximum number of sequences that an engine runs at once."""
    quantization: Literal["none", "fp8"] = "none"
    """Type of the engine's matrices: that of the model, or fp8, with which a rollout is corrected by
    `algorithm.correction` unless that is null."""
    training_weights: Literal["kept", "regathered"] = "kept"
    """With quantization, training weights stay in memory while the engine generates, or are gathered again from the
    optimizer's master weights."""
    cuda_graphs: bool | None = None
    """Capture CUDA graphs for decoding, by default on GPUs; weights then come and go at fixed addresses, by vLLM's sleep
    mode."""
    routing_replay: bool = False
    """Train a mixture with the experts that the engine has chosen for each token; they travel with the responses."""
    episode: EpisodeSection | None = None
    """Responses of several turns, drawn by a function that calls tools; one turn without a function by default."""

    @property
    def restricts(self) -> bool:
        """True if tokens are drawn from parts of the vocabulary, which travel with the responses."""
        return self.top_p < 1 or self.top_k > 0 or self.min_p > 0 or self.structure is not None

    @property
    def reads_text(self) -> bool:
        """True if engines need the tokenizer: functions of episodes may give stop strings."""
        return bool(self.stop) or self.structure is not None or self.episode is not None


class GenerationSection(Section):
    """Engines on ranks of their own, which generate while the actor trains; for algorithms with the role generation.

    Of these keys, a server reads `parallel`.
    """

    parallel: GenSizesField = GenSizes(1, 1)
    """Sizes p_g-t_g of one engine; the pool's ranks are divided into engines of p_g·t_g ranks."""
    kv: Literal["keep", "recompute"] = "keep"
    """At new weights, running requests keep the keys and values of older weights, or recompute them."""
    steps_per_call: Count = 16
    """Engine steps, of one token per request, between two calls: new weights and requests come between calls."""
    actor: bool = False
    """Let the actor's ranks generate as well while they would wait for a batch, after a switch in place."""
    max_tries: Count = 1
    """Prompts that may be tried per place in a batch. Above 1, those whose responses all have the same score are dropped
    for others (dynamic sampling, DAPO, arXiv 2503.14476, section 3.2), until the tries of a batch are used up."""
    replay: PathText | None = None
    """File calls.jsonl of a run with the same configuration, whose order of calls is repeated bit for bit."""


class StalenessSection(Section):
    """Bound on the age of tokens that are trained on, in versions of the weights (optimizer iterations)."""

    max_versions: Annotated[CountOrZero, Field(le=64)] = 1
    """Largest age of a token: the version trained by the update minus the version that drew the token. At most 64: each
    age has a metric of its own."""
    bound: Literal["token", "response"] = "token"
    """token: responses are trained in the order in which they end, without their older tokens. response: in the order
    in which they were begun, so that no token is older; the trainer waits for the oldest."""


class TaskSection(Section):
    """The verifiable task of the demo: sums from reasoning-gym, written into the run's folder."""

    name: Literal["arithmetic"] = "arithmetic"
    """Name of the task."""
    min_terms: NumTerms = 3
    """Minimum number of terms of a sum."""
    max_terms: NumTerms = 3
    """Maximum number of terms of a sum."""
    min_digits: Count = 1
    """Minimum number of digits of a term."""
    max_digits: Count = 1
    """Maximum number of digits of a term."""
    sloppy_fraction: Share = 0.67
    """Share of the problems with a subtraction whose demonstration omits the last term; RL unlearns the habit."""
    train_rows: Count = 3072
    """Number of training problems."""
    eval_rows: Count = 256
    """Number of held-out problems, disjoint from the training problems."""
    seed: CountOrZero = 0
    """Seed of the problems, independent of the run's."""


class DataSection(Section):
    """Prompts, demonstrations or preferences: JSONL or parquet files, or a task or an environment that generates them."""

    train_file: PathText | None = None
    """Training rows; exclusive with `task` and `environment`."""
    eval_file: PathText | None = None
    """Held-out rows."""
    task: TaskSection | None = None
    """Task that generates both files; exclusive with `train_file`."""
    environment: EnvironmentSection | None = None
    """Environment that writes both files and plays the episodes of their rows; exclusive with `train_file`."""
    batch_size: Count = 32
    """Rows of the files per iteration."""
    max_tokens: Count = 2048
    """Largest number of tokens of a sequence of sft and dpo, prompt and response."""
    too_long: Literal["error", "truncate", "drop"] = "error"
    """Treatment of longer sequences of sft and dpo: an error before anything starts, without the tokens at their end, or
    without their row; rows that would have nothing left to train are dropped as well."""


class WarmupSection(Section):
    """Supervised steps on demonstrations before RL, run by the actor's worker."""

    file: PathText | None = None
    """Demonstrations: rows as those of sft; the task's own by default."""
    steps: Count = 100
    """Optimizer steps."""
    batch_size: Count = 64
    """Demonstrations per step."""
    lr: Positive = 1e-3
    """Learning rate."""


COLLECTIVE_SHARE = 2.0
"""Time limit of a collective in multiples of a call's: otherwise ranks that wait for a hung one would fail first."""


class TimeoutSection(Section):
    """Time limits in seconds."""

    start_s: Seconds = 600.0
    """Time limit for starting all workers."""
    call_s: Seconds = 1800.0
    """Time limit for every rank to answer a call."""
    save_s: Seconds = 1800.0
    """Time limit for writing a checkpoint, from the moment at which the run waits for it."""

    @property
    def collective_s(self) -> float:
        """Time limit of a collective: longer than a call's, whose error names the missing ranks."""
        return COLLECTIVE_SHARE * self.call_s


class ServeSection(Section):
    """The server of `hybridengine serve`."""

    host: str = "127.0.0.1"
    """Address to listen at; 0.0.0.0 for all of the machine's."""
    port: Annotated[int, Field(ge=1, le=65535)] = 8000
    """Port to listen at."""
    api_key: SecretStr | None = None
    """Key that clients send, which begins with tml-, as the Tinker SDK demands; a random one is printed by default."""
    database: SecretStr | None = None
    """SQLAlchemy URL of the database; by default, an SQLite file in the run's folder."""
    model_name: str | None = None
    """Name that clients give as `base_model`; by default, the model's folder."""
    kept_steps: Annotated[int, Field(ge=0)] = 4
    """Number of past steps whose weights are kept on disk for their samplers, which a script may use while it trains."""
    newest_sampler: bool = False
    """Let samplers whose weights are not kept any more sample from the newest weights, instead of refusing them."""
    reference: bool = False
    """Hold the base model on the ranks as the role reference too, which answers its log-probs; see section reference."""
    wait_s: Seconds = 600.0
    """Longest wait of a client's new model for the ranks while the models of other clients hold them."""
    max_adapters: Count = 4
    """Number of models that train at a time if each has adapters of its own (`actor.lora`), and of different adapters in
    a batch of the engine; other models wait."""
    calls_file: PathText | None = None
    """File for a JSON line about each call on the ranks, with its begin and end, for measurements; none if empty."""

    @field_validator("api_key")
    @classmethod
    def _check_key(cls, key: SecretStr | None) -> SecretStr | None:
        if key is not None and not key.get_secret_value().startswith("tml-"):
            raise PydanticCustomError("api_key", "a text that begins with tml-, as the Tinker SDK demands")
        return key


class CheckpointSection(Section):
    """Checkpoints from which a run can be resumed."""

    every: CountOrZero = 10
    """Iterations between two checkpoints; the last iteration is always saved. 0 disables checkpoints."""
    keep: Count = 2
    """Number of newest checkpoints to keep."""
    best: PathText | None = "eval/score_mean"
    """Metric whose best checkpoint is kept as well: the lowest loss or perplexity, the highest value of any other; none
    if empty. The default is eval/loss for sft and dpo."""


class FaultSection(Section):
    """Restarts after rank failures."""

    max_restarts: CountOrZero = 3
    """Largest number of times that a run restarts its ranks and resumes from its last checkpoint."""


class GuardSection(Section):
    """Limits that stop a run before it trains on invalid data."""

    skipped_steps: CountOrZero = 10
    """Largest number of consecutive optimizer steps with a non-finite gradient; each is skipped and counted in
    ROLE/skipped_steps."""
    log_prob_drift: Positive | None = 0.5
    """Largest mean distance between the log-probs of engine and trainer over the response tokens of a replica; no limit
    if empty. A few hundredths are usual in bfloat16."""
