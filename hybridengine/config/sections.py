"""The sections of a run configuration, one class each. A field is described in the line beneath it.

Values are plain and small; what follows from them (rank counts, grids, folders, widths) is a property of `RunConfig`.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from hybridengine.config.values import (
    Bytes,
    Count,
    CountOrZero,
    FolderName,
    GenSizesText,
    NonNegative,
    PathText,
    Positive,
    Seconds,
    Section,
    Share,
    TrainSizesText,
    like,
)
from hybridengine.errors import ConfigError
from hybridengine.families.registry import FAMILIES
from hybridengine.models.shapes import ModelShape
from hybridengine.topology.grid import RankOrder
from hybridengine.topology.sizes import GenSizes, TrainSizes

MEBIBYTE = 2**20

LossAggregation = Literal["token", "sequence", "sequence_sum"]

if TYPE_CHECKING:
    FamilyName = str
else:
    FamilyName = Literal[tuple(FAMILIES)]


class RunSection(Section):
    """Name, place and length of the run."""

    name: FolderName = "run"
    """Folder of this run inside `folder`; the configuration file's name where it is left out."""
    folder: PathText = "runs"
    """Folder of all runs."""
    seed: Annotated[int, Field(ge=0, lt=2**31)] = 0
    """Seed of everything random: weights, data, sampling."""
    steps: Count = 100
    """RL iterations."""
    eval_every: CountOrZero = 10
    """Iterations between two evaluations; 0 evaluates before the first and after the last only."""
    live: bool = True
    """Show what the run is doing at the bottom of the terminal, where there is one."""
    trackers: tuple[Literal["wandb", "mlflow"], ...] = ()
    """Trackers that get the metrics besides the run's folder; each is an optional package with settings of its own."""


RanksPerNode = Annotated[tuple[Count, ...], Field(min_length=1)]


PoolRole = Literal["critic", "cost_critic", "reference", "reward", "cost"]
"""A role beside the actor, whose ranks are `cluster.ranks_per_node`."""


class PoolSection(Section):
    """Ranks of their own for some roles, which work while the others do."""

    roles: Annotated[tuple[PoolRole, ...], Field(min_length=1)]
    """Roles that share these ranks; the actor and every role that no pool names share `cluster.ranks_per_node`."""
    ranks_per_node: RanksPerNode = (1,)
    """Ranks on each node, one GPU or CPU process each."""

    @property
    def num_ranks(self) -> int:
        """Ranks of all nodes."""
        return sum(self.ranks_per_node)


MAIN_POOL = "main"
"""The actor's pool."""
PoolNames = like(
    rf"(?!{MAIN_POOL}$)[A-Za-z][A-Za-z0-9_-]*",
    f"cannot be the name of a pool; use letters, digits, '_' and '-', a letter first, and not {MAIN_POOL!r}, which is"
    " the actor's",
)


class ClusterSection(Section):
    """The ranks, and on what they run."""

    ranks_per_node: RanksPerNode = (1,)
    """Ranks on each node that the actor runs on, one GPU or CPU process each: [8, 8] is two nodes of 8."""
    pools: Annotated[dict[str, PoolSection], PoolNames] = Field(default_factory=dict)
    """Pools by name, beside the actor's, for roles that shall have ranks of their own."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device of the models; auto takes GPUs where the node has them."""
    rank_order: Literal["paper", "megatron"] = "paper"
    """Order of the axes, the fastest first: tensor, pipeline, data (paper) or tensor, data, pipeline (megatron)."""
    address: PathText | None = None
    """Ray cluster to join: "auto" or host:port; left out, a local one is started for the run."""

    @property
    def order(self) -> RankOrder:
        """Rank order as the topology knows it."""
        return RankOrder[self.rank_order.upper()]


BUILT_TOKENS = 57
"""Tokens of the tokenizer that is built with a model."""


def _in_hf(key: str) -> Any:
    """Return the key of a `config.json` that a field of `model.build` is written as."""
    return Field(serialization_alias=key)


class BuildSection(Section):
    """A small model that the project builds itself, weights and tokenizer."""

    family: Annotated[FamilyName, _in_hf("model_type")] = "qwen3"
    """Architecture."""
    num_layers: Annotated[Count, _in_hf("num_hidden_layers")] = 4
    """Decoder layers."""
    hidden_size: Count = 128
    """Width of the residual stream."""
    ffn_hidden_size: Annotated[Count, _in_hf("intermediate_size")] = 384
    """Width of the MLP."""
    num_heads: Annotated[Count, _in_hf("num_attention_heads")] = 4
    """Query heads."""
    num_kv_heads: Annotated[Count, _in_hf("num_key_value_heads")] = 2
    """Key and value heads."""
    head_dim: Count = 32
    """Width of a head; vLLM on a CPU needs a multiple of 32."""
    vocab_size: Count = BUILT_TOKENS
    """Rows of the embedding, at least the tokenizer's tokens."""
    max_positions: Annotated[Count, _in_hf("max_position_embeddings")] = 256
    """Longest sequence, prompt and response."""
    tied_embeddings: Annotated[bool, _in_hf("tie_word_embeddings")] = True
    """The output head shares the embedding's weights."""
    rope_theta: Positive = 10000.0
    """Base of the rotary frequencies."""
    init_std: Annotated[Positive, _in_hf("initializer_range")] = 0.02
    """Standard deviation of the random weights."""

    def hf_config(self) -> dict[str, Any]:
        """Return the contents of the model's Hugging Face `config.json`."""
        family = FAMILIES[self.family]
        return {
            "architectures": [family.architectures[0]],
            **self.model_dump(by_alias=True),
            "rms_norm_eps": 1e-6,
            "hidden_act": "silu",
            **family.built_config,
        }

    def shape(self) -> ModelShape:
        """Return the shape of the model.

        Raises:
            ConfigError: the sizes do not fit together.
        """
        try:
            return ModelShape.from_hf_config(self.hf_config())
        except ConfigError as error:
            broken = str(error).rpartition(";")[0].replace(" of config.json", "")
            for name, field in BuildSection.model_fields.items():
                broken = broken.replace(field.serialization_alias or name, name)
            raise ConfigError(f"{broken}; choose other values beneath model.build") from None


class ModelSection(Section):
    """The actor's starting point: a checkpoint, a GGUF file to convert, or a model to build."""

    path: PathText | None = None
    """Hugging Face checkpoint folder; exactly one of `path`, `gguf` and `build` is given."""
    gguf: PathText | None = None
    """GGUF file to convert into the run's folder; "package:FILE" is a file inside an installed Python package."""
    build: BuildSection | None = None
    """Small model to build into the run's folder."""
    hf_config: PathText | None = None
    """Shapes for --dry-run and planning where the checkpoint is elsewhere: a preset such as llama3-70b, or a
    config.json, which `gguf` needs."""
    tokenizer: PathText | None = None
    """Tokenizer folder; the checkpoint's own where it is left out."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of the weights, in training and in generation."""

    @property
    def gguf_file(self) -> Path | None:
        """Path of the GGUF file; None without one, or where its package is not installed."""
        package, colon, file = (self.gguf or "").rpartition(":")
        if not colon:
            return Path(file) if file else None
        spec = importlib.util.find_spec(package) if package.isidentifier() else None
        return Path(spec.origin).parent / file if spec is not None and spec.origin else None


class OptimizerSection(Section):
    """AdamW under Megatron's distributed optimizer."""

    lr: Positive = 1e-5
    """Learning rate after warm-up."""
    min_lr: NonNegative = 0.0
    """Learning rate at the end of a linear or cosine schedule."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Course of the learning rate after warm-up."""
    warmup_steps: CountOrZero = 0
    """Optimizer steps over which the learning rate rises from 0."""
    weight_decay: NonNegative = 0.0
    """Decoupled weight decay."""
    clip_grad: NonNegative = 1.0
    """Largest gradient norm; 0 does not clip."""
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = (0.9, 0.95)
    """Decay rates of the two moments."""
    eps: Positive = 1e-8
    """Term that keeps the update's denominator above 0."""


class TrainedSection(Section):
    """Settings of every model that is trained."""

    optimizer: OptimizerSection = OptimizerSection()
    """Settings of the weights' updates."""
    micro_batch_tokens: Count = 4096
    """Most tokens of one micro-batch; rows are packed into micro-batches by their lengths."""
    ppo_epochs: Count = 1
    """Passes over the rows of an iteration."""
    mini_batches: Count = 1
    """Optimizer steps per pass."""
    offload: Literal["none", "optimizer"] = "none"
    """State that moves to host memory while the model does not train; optimizer: its moments and master weights."""
    recompute: Literal["none", "full"] = "none"
    """Activations computed again in the backward pass instead of being kept."""


class ActorSection(TrainedSection):
    """The policy: trains at p-t-d, generates at p_g-t_g on the same ranks."""

    parallel: TrainSizesText = "1-1-1"
    """Training sizes p-t-d: pipeline stages, tensor shards, data-parallel replicas."""
    generate: GenSizesText = "1-1"
    """Generation sizes p_g-t_g of one engine; with p_g | p and t_g | t no weight is held twice."""
    bucket_bytes: Annotated[Bytes, Field(ge=4)] = 512 * MEBIBYTE
    """Weights that are in flight at once while switching; at least one float32."""
    verify: Literal["first", "always", "never"] = "first"
    """Switches in which receivers check the digests of the weights that they receive."""
    clip_low: Share = 0.2
    """The policy ratio is clipped below at 1 - clip_low."""
    clip_high: Positive = 0.2
    """The policy ratio is clipped above at 1 + clip_high."""
    dual_clip: Annotated[float, Field(gt=1)] | None = None
    """Bound of a token's loss where the advantage is negative, in multiples of it; left out, there is none."""
    entropy_coef: NonNegative = 0.0
    """Weight of the entropy bonus."""
    kl_loss_coef: NonNegative = 0.0
    """Weight of the KL divergence from the reference as a loss of its own, beside or in place of the reward's penalty."""
    kl_loss_estimator: Literal["k1", "k2", "k3"] = "k3"
    """Estimator of that loss."""
    loss_aggregation: LossAggregation = "token"
    """Mean over tokens, over sequences of their tokens' means, or over sequences of their tokens' sums."""

    @property
    def train_sizes(self) -> TrainSizes:
        """(p, t, d)."""
        return TrainSizes.parse(self.parallel)

    @property
    def gen_sizes(self) -> GenSizes:
        """(p_g, t_g)."""
        return GenSizes.parse(self.generate)


class CriticSection(TrainedSection):
    """The value model."""

    parallel: TrainSizesText | None = None
    """Training sizes p-t-d; the actor's where left out."""
    path: PathText | None = None
    """Checkpoint to start from; the actor's where left out, with a new value head."""
    hf_config: PathText | None = None
    """Shapes of that checkpoint for --dry-run and planning where it is elsewhere: a preset, or a config.json."""
    value_clip: NonNegative = 0.2
    """A new value moves at most this far from the old one in the loss; 0 does not clip."""


class ReferenceSection(Section):
    """The frozen copy of the actor's starting point that the KL penalty is measured against."""

    parallel: TrainSizesText | None = None
    """Sizes p-t-d; the actor's where left out."""
    micro_batch_tokens: Count = 4096
    """Most tokens of one micro-batch."""


class RolloutSection(Section):
    """Generation with vLLM."""

    max_prompt_tokens: Count = 64
    """Width of the prompt columns; a longer prompt is an error."""
    max_response_tokens: Count = 64
    """Width of the response columns; generation stops there."""
    samples_per_prompt: Count = 1
    """Responses per prompt."""
    temperature: Annotated[float, Field(ge=0.01, le=2)] = 1.0
    """Sampling temperature, in the range in which vLLM takes it as it is."""
    kv_cache_bytes: Bytes = 256 * MEBIBYTE
    """KV cache of one rank while it generates."""
    max_num_seqs: Count = 256
    """Most sequences that an engine advances at once."""
    cuda_graphs: bool = False
    """Capture CUDA graphs for decoding; weights then go through vLLM's sleep mode, which takes them all at once."""


class TaskSection(Section):
    """The verifiable task of the demo: reasoning-gym's sums, written into the run's folder."""

    name: Literal["arithmetic"] = "arithmetic"
    """The task."""
    min_terms: Annotated[int, Field(ge=3)] = 3
    """Fewest terms of a sum."""
    max_terms: Annotated[int, Field(ge=3)] = 3
    """Most terms of a sum."""
    min_digits: Count = 1
    """Fewest digits of a term."""
    max_digits: Count = 1
    """Most digits of a term."""
    sloppy_fraction: Share = 0.67
    """Share of the problems with a subtraction whose demonstration stops before the last term; RL unlearns the habit."""
    train_rows: Count = 3072
    """Problems to train on."""
    eval_rows: Count = 256
    """Held-out problems; none of them is among the training problems."""
    seed: CountOrZero = 0
    """Seed of the problems, apart from the run's."""


class DataSection(Section):
    """Prompts: JSONL or parquet files, or a task that generates them."""

    train_file: PathText | None = None
    """Prompts to train on; either this or `task`."""
    eval_file: PathText | None = None
    """Held-out prompts."""
    task: TaskSection | None = None
    """Task that generates both files; either this or `train_file`."""
    batch_size: Count = 32
    """Prompts per iteration."""


class WarmupSection(Section):
    """Supervised steps on demonstrations before RL, in the actor's own worker."""

    file: PathText | None = None
    """Demonstrations: rows with a response; the task's own where it is left out."""
    steps: Count = 100
    """Optimizer steps."""
    batch_size: Count = 64
    """Problems per step."""
    lr: Positive = 1e-3
    """Learning rate."""


COLLECTIVE_SHARE = 2.0
"""Limit of a collective, in limits of a call: ranks that wait for a hung one would else fail first, and be blamed."""


class TimeoutSection(Section):
    """Limits of waiting, in seconds."""

    start_s: Seconds = 600.0
    """Limit until all workers have started."""
    call_s: Seconds = 1800.0
    """Limit until every rank has answered one call."""
    save_s: Seconds = 1800.0
    """Limit until a checkpoint is written, from when the run has to wait for it."""

    @property
    def collective_s(self) -> float:
        """Limit until a collective fails by itself: later than its call, whose error names the missing ranks."""
        return COLLECTIVE_SHARE * self.call_s


class CheckpointSection(Section):
    """Checkpoints, from which a run can be resumed."""

    every: CountOrZero = 10
    """Iterations between two checkpoints; the last iteration is saved too. 0 saves nothing."""
    keep: Count = 2
    """The newest ones stay."""
    best: PathText | None = "eval/score_mean"
    """Metric whose checkpoint with the highest value stays as well; left empty, none does."""


class FaultSection(Section):
    """Restarts after ranks have failed."""

    max_restarts: CountOrZero = 3
    """Times that a run starts its ranks again and resumes from its last checkpoint."""


class GuardSection(Section):
    """Limits that end a run before it trains on nonsense."""

    skipped_steps: CountOrZero = 10
    """Optimizer steps on end whose gradient may not be finite; each is skipped, and counted in ROLE/skipped_steps."""
    log_prob_drift: Positive | None = 0.5
    """Largest distance of the log-probs of engine and trainer, as a mean over the response tokens of a replica; left
    empty, there is no limit. In bfloat16 a few hundredths are usual."""
