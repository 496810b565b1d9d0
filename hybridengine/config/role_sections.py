"""The sections of roles with a model: how each is trained, on which sizes. The line below a field describes it."""

from __future__ import annotations

from typing import Literal

from hybridengine.config.values import (
    BYTE_UNITS,
    AboveOne,
    BucketBytes,
    Count,
    CountOrZero,
    DecayRate,
    GenSizesField,
    NonNegative,
    PathText,
    Positive,
    Section,
    Share,
    TrainSizesField,
)
from hybridengine.families.adapters import MODULES
from hybridengine.families.sizes import AdapterSizes
from hybridengine.topology.sizes import GenSizes, TrainSizes

LossAggregation = Literal["token", "sequence", "sequence_sum"]


class OptimizerSection(Section):
    """AdamW under Megatron's distributed optimizer."""

    lr: Positive = 1e-5
    """Learning rate after warm-up."""
    min_lr: NonNegative = 0.0
    """Learning rate at the end of a linear or cosine schedule."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Shape of the learning-rate curve after warm-up."""
    warmup_steps: CountOrZero = 0
    """Optimizer steps over which the learning rate rises from 0."""
    weight_decay: NonNegative = 0.0
    """Decoupled weight decay."""
    clip_grad: NonNegative = 1.0
    """Largest gradient norm; 0 disables clipping."""
    betas: tuple[DecayRate, DecayRate] = (0.9, 0.95)
    """Decay rates of the two moments."""
    eps: Positive = 1e-8
    """Term that keeps the update's denominator positive."""


class MegatronSettings(Section):
    """Features of Megatron-core; except for fp8 and losses, results change by float32 rounding at most."""

    recompute: Literal["none", "selective", "full"] = "none"
    """Activations recomputed in the backward pass instead of stored; selective: those of MLPs and experts."""
    sequence_parallel: bool = True
    """With t > 1, each tensor-parallel rank has a part of the sequence where tensors are not sharded, such as norms."""
    overlap_reduction: bool = True
    """Reduce gradients over replicas during the backward pass of a step's last micro-batch."""
    fusions: bool = True
    """Rotate queries and keys, and add up gradients of weights, in Transformer Engine's fused kernels; acts on GPUs."""
    fp8: Literal["none", "tensorwise", "blockwise", "mxfp8"] = "none"
    """Scaling of matrix products in 8 bits by Transformer Engine, on GPUs that have them; results change within FP8's
    precision."""
    router_aux_loss_coef: NonNegative = 0.0
    """Weight of the loss that balances the load of a mixture's experts; 1 is its value if they are balanced."""
    router_z_loss_coef: NonNegative = 0.0
    """Weight of the mean squared log-sum-exp of a mixture's router logits, which keeps them small."""


class TrainedSection(MegatronSettings):
    """Settings of a trained model."""

    optimizer: OptimizerSection = OptimizerSection()
    """Optimizer settings."""
    micro_batch_tokens: Count = 4096
    """Maximum number of tokens in one micro-batch; rows are packed into micro-batches by length."""
    ppo_epochs: Count = 1
    """Passes over the rows of an iteration."""
    mini_batches: Count = 1
    """Optimizer steps per pass."""
    offload: Literal["none", "optimizer"] = "none"
    """State that moves to host memory while the model is not training; optimizer: its moments and master weights."""


class LoraSection(Section):
    """Low-rank adapters that are trained in place of the actor's weights; the frozen weights are its reference."""

    rank: Literal[0, 1, 8, 16, 32, 64, 128, 256, 320, 512] = 0
    """Rank of the adapters, one of those that vLLM has; 0 trains the weights themselves."""
    alpha: Positive = 32.0
    """Adapters count alpha / rank times."""
    modules: tuple[Literal["linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"], ...] = MODULES
    """Adapted layers, by Megatron's names: q, k and v; the attention's output; gate and up; down; with experts."""
    path: PathText | None = None
    """PEFT folder whose adapters the run starts from; by default A is random and B is 0."""

    @property
    def adapters(self) -> AdapterSizes | None:
        """Adapters of a model's shape; None without."""
        return AdapterSizes(self.rank, self.alpha, tuple(sorted(self.modules))) if self.rank else None


class ActorSection(TrainedSection):
    """The policy: trained at p-t-d, and generating at p_g-t_g on the same ranks."""

    parallel: TrainSizesField = TrainSizes(1, 1, 1)
    """Training sizes p-t-d: pipeline stages, tensor shards, data-parallel replicas. Context-parallel ranks and virtual
    stages may follow: "2-2-1 c=2 v=2"."""
    generate: GenSizesField = GenSizes(1, 1)
    """Generation sizes p_g-t_g of one engine; if p_g | p and t_g | t, and p_g = 1 with v > 1, no weight is held twice."""
    lora: LoraSection = LoraSection()
    """Adapters; by default the weights themselves are trained."""
    bucket_bytes: BucketBytes = 512 * BYTE_UNITS["MiB"]
    """Maximum weight bytes in flight during a switch; at least one float32."""
    verify: Literal["first", "always", "never"] = "first"
    """Switches in which receivers verify the digests of received weights."""
    clip_low: Share = 0.2
    """Lower clip range: the policy ratio is clipped at 1 - clip_low."""
    clip_high: Positive = 0.2
    """Upper clip range: the policy ratio is clipped at 1 + clip_high."""
    dual_clip: AboveOne | None = None
    """Bound of a token's loss for a negative advantage, in multiples of it; none by default."""
    entropy_coef: NonNegative = 0.0
    """Weight of the entropy bonus."""
    kl_loss_coef: NonNegative = 0.0
    """Weight of the KL divergence from the reference as a separate loss, instead of or in addition to a penalty."""
    kl_loss_estimator: Literal["k1", "k2", "k3", "abs", "k1+", "k3+", "abs+"] = "k3"
    """Estimator of the KL loss; with a + it has the gradient of k2, which is that of the KL divergence."""
    loss_aggregation: LossAggregation = "token"
    """Aggregation of the loss: mean over tokens, or over sequences of the mean or sum of their tokens."""


class CriticSection(TrainedSection):
    """The value model."""

    parallel: TrainSizesField | None = None
    """Training sizes p-t-d; the actor's by default."""
    path: PathText | None = None
    """Initial checkpoint; by default the actor's with a new value head."""
    hf_config: PathText | None = None
    """Model shape for --dry-run and planning when the checkpoint is elsewhere: a preset, or a config.json."""
    value_clip: NonNegative = 0.2
    """Largest change of a value in the loss; 0 disables clipping."""


class ReferenceSection(Section):
    """The frozen copy of the actor's initial model, used for the KL penalty."""

    parallel: TrainSizesField | None = None
    """Sizes p-t-d; the actor's by default."""
    micro_batch_tokens: Count = 4096
    """Maximum number of tokens in one micro-batch."""
    offload: Literal["none", "weights"] = "none"
    """weights: they are in host memory while the reference computes nothing."""


class TeacherSection(Section):
    """A frozen model with the actor's tokenizer, which the actor is distilled from."""

    path: PathText | None = None
    """Its checkpoint, with tokenizer files; required by algorithms with a teacher."""
    hf_config: PathText | None = None
    """Model shape for --dry-run and planning when the checkpoint is elsewhere: a preset, or a config.json."""
    parallel: TrainSizesField | None = None
    """Sizes p-t-d; the actor's by default."""
    micro_batch_tokens: Count = 4096
    """Maximum number of tokens in one micro-batch."""
    offload: Literal["none", "weights"] = "none"
    """weights: they are in host memory while the teacher computes nothing."""
