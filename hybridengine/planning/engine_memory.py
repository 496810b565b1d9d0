"""Memory of engines beside their weights: activations of any engine, and everything that the engines of judges hold."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from hybridengine.config import Role, RunConfig
from hybridengine.config.judge_section import JudgeSection
from hybridengine.config.model_checks import shape_at
from hybridengine.config.reward_sections import scorer_key
from hybridengine.config.run_config import judge_is_alone, reward_sections
from hybridengine.models.shapes import DTYPE_BYTES, ModelShape
from hybridengine.planning.costs.memory import generation_bytes
from hybridengine.topology.sizes import GenSizes

BATCHED_TOKENS = 8192
"""Largest number of prompt tokens in an engine's forward pass, as in backends/vllm/construction.py."""
LOGIT_COPIES = 3
"""Float32 tensors of the size of the logits in vLLM's sampler: logits, log-probs, and probabilities or noise."""


def engine_activations(config: RunConfig, shape: ModelShape, sizes: GenSizes) -> int:
    """Return the bytes of the largest forward pass of the actor's engine (`forward_bytes`)."""
    return forward_bytes(shape, sizes, config.model.dtype, config.max_tokens, config.rollout.max_num_seqs)


def forward_bytes(shape: ModelShape, sizes: GenSizes, dtype: str, longest: int, max_num_seqs: int) -> int:
    """Return the bytes of an engine's largest forward pass: one layer's tensors, and logits of all sequences, of at most
    `longest` tokens each.

    vLLM's experts (`TritonExperts.workspace_shapes`) have two buffers, with a row for each expert of each token, whose
    experts may be on other ranks: the rows' gate and up and what becomes of them, then the output.
    """
    tokens, element = max(longest, BATCHED_TOKENS), DTYPE_BYTES[dtype]
    mlp = 3 * shape.ffn_hidden_size / sizes.tp_size
    if experts := shape.experts:
        hidden, ffn = shape.hidden_size, experts.ffn_hidden_size / sizes.expert_shards
        rows = experts.num_active * (max(ffn, hidden) + max(2 * ffn, hidden))
        mlp = max(mlp, rows) if experts.num_dense_layers else rows
    layer = 4 * shape.hidden_size + mlp + 2 * (shape.q_size + shape.kv_size) / sizes.tp_size
    logits = LOGIT_COPIES * 4 * max_num_seqs * shape.vocab_size
    return int(tokens * element * layer + logits)


class JudgeMemory(NamedTuple):
    """Bytes of a judge's engine on its fullest rank."""

    key: str
    """Its key in the configuration, such as reward.judge."""
    weights: int
    cache: int
    computing: int
    """Activations of the largest forward pass."""
    is_offloaded: bool
    """True if the weights wait in host memory between calls."""
    is_alone: bool
    """True if no other model uses the ranks: the cache stays between calls, and decoding is captured."""

    @property
    def awake(self) -> int:
        """Bytes while it draws verdicts."""
        return self.weights + self.cache + self.computing

    @property
    def idle(self) -> int:
        """Bytes between its calls."""
        return self.weights * (not self.is_offloaded) + self.cache * self.is_alone


def judges_memory(config: RunConfig, pool: str) -> list[JudgeMemory]:
    """Return the memory of the judges on a pool's ranks."""
    found = []
    for role, term, judge in _judges(config, pool):
        scorer = getattr(config, role).scorers[term]
        shape, dtype = shape_at(scorer.path, scorer.hf_config), config.model.dtype
        longest = judge.max_prompt_tokens + judge.max_tokens
        found.append(
            JudgeMemory(
                f"{scorer_key(role, term)}.judge",
                generation_bytes(shape, judge.engine.pp_size, judge.engine, dtype),
                judge.kv_cache_bytes,
                forward_bytes(shape, judge.engine, dtype, longest, judge.max_num_seqs),
                judge.offload,
                judge_is_alone(config, role),
            )
        )
    return found


def judge_changes(config: RunConfig, pool: str) -> Iterator[tuple[str, RunConfig]]:
    """Yield changes of judges that may lower a phase's bytes, each with a configuration that has it."""
    for role, term, judge in _judges(config, pool):
        key = f"{scorer_key(role, term)}.judge"
        for text, values in (
            (
                f"lower {key}.kv_cache_bytes={judge.kv_cache_bytes}",
                {"kv_cache_bytes": judge.kv_cache_bytes // 2},
            ),
            (f"set {key}.offload=true", {"offload": True}),
        ):
            yield text, _with_judge(config, role, term, judge.model_copy(update=values))


def _judges(config: RunConfig, pool: str) -> Iterator[tuple[Role, str, JudgeSection]]:
    """Yield role, term and section of the judges on a pool's ranks."""
    for role, section in reward_sections(config).items():
        if config.pool_of(role) == pool:
            for term, judge in section.judges.items():
                yield role, term, judge


def _with_judge(config: RunConfig, role: Role, term: str, judge: JudgeSection) -> RunConfig:
    section = getattr(config, role)
    changed: dict[str, object] = {"judge": judge}
    if term:
        changed = {"terms": {**section.terms, term: section.terms[term].model_copy(update=changed)}}
    return config.model_copy(update={role: section.model_copy(update=changed)})
