"""Short PPO runs with several layouts, model sizes and batch sizes, to which coefficients are fitted.

The learning rate is so small that the model hardly changes: response lengths are those of a random model in every step.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from hybridengine.backends.vllm.environment import CACHE_BLOCK_TOKENS
from hybridengine.config import RunConfig, load_config
from hybridengine.models.shapes import DTYPE_BYTES
from hybridengine.topology.sizes import TrainSizes

HEAD_DIM = 32
RUN = f"""
run: {{steps: 6, eval_every: 0, live: false}}
model:
  build: {{family: qwen2, head_dim: {HEAD_DIM}, max_positions: 128, tied_embeddings: false}}
data:
  task: {{train_rows: 1024, eval_rows: 8}}
actor: {{micro_batch_tokens: 2048, mini_batches: 2, optimizer: {{lr: 1e-9}}}}
critic: {{micro_batch_tokens: 2048, mini_batches: 2, optimizer: {{lr: 1e-9}}}}
reference: {{micro_batch_tokens: 2048}}
rollout: {{max_prompt_tokens: 16, max_response_tokens: 48}}
"""
"""Configuration shared by all runs: two warm-up steps, three counted steps, and a last one with an evaluation."""

Pair = tuple[int, int]
"""Sizes p and t; d follows from the number of ranks."""


@dataclass(frozen=True)
class Case:
    """Layout and model of a series of runs, one per batch size."""

    name: str
    actor: Pair
    generate: Pair
    critic: Pair
    reference: Pair
    layers: int
    hidden_size: int
    batch_sizes: tuple[int, ...]
    share: int = 1
    """Divisor of the number of ranks: 1 uses all, 2 half of them, to measure how ranks that share devices interfere."""

    def fits(self, num_ranks: int) -> bool:
        """Return True if `num_ranks` ranks can have this layout."""
        own, rest = divmod(num_ranks, self.share)
        return not rest and all(own % (p * t) == 0 for p, t in (self.actor, self.critic, self.reference))


CPU_CASES = (
    Case("small-all", (2, 2), (1, 1), (1, 2), (2, 2), 2, 128, (64, 256)),
    Case("middle-tensor-data", (1, 2), (1, 1), (1, 2), (1, 2), 4, 256, (32, 128)),
    Case("middle-data", (1, 1), (1, 1), (2, 1), (1, 1), 4, 256, (64, 192)),
    Case("middle-tensor", (1, 4), (1, 2), (2, 2), (1, 4), 4, 256, (48, 128)),
    Case("large-pipeline", (2, 2), (1, 2), (1, 2), (2, 2), 6, 512, (16, 48)),
    Case("large-tensor-data", (1, 2), (1, 1), (4, 1), (1, 1), 6, 512, (16, 48)),
    Case("middle-fewer-ranks", (1, 1), (1, 1), (1, 2), (1, 1), 4, 256, (64, 192), share=2),
)
"""Cases for 4 ranks; other numbers of ranks use those that fit."""
SINGLE_CASES = (
    Case("small", (1, 1), (1, 1), (1, 1), (1, 1), 2, 128, (64, 256)),
    Case("middle", (1, 1), (1, 1), (1, 1), (1, 1), 4, 256, (32, 128)),
    Case("large", (1, 1), (1, 1), (1, 1), (1, 1), 6, 512, (16, 48)),
)
"""Cases added if too few of the above fit."""
GPU_SCALE, GPU_BATCHES = 8, 4
"""Factors by which models are wider and batches larger on GPUs, to keep them busy."""


def cases_for(num_ranks: int, on_gpus: bool) -> list[Case]:
    """Return the cases to measure with `num_ranks` ranks."""
    found = [case for case in CPU_CASES if case.fits(num_ranks)]
    if len(found) < len(SINGLE_CASES):
        found = [*found, *SINGLE_CASES]
    unit = 2 * num_ranks  # rows of a mini-batch on every rank
    scale, batches = (GPU_SCALE, GPU_BATCHES) if on_gpus else (1, 1)
    return [
        replace(
            case,
            layers=case.layers * (2 if on_gpus else 1),
            hidden_size=case.hidden_size * scale,
            batch_sizes=tuple(-(-batches * size // unit) * unit for size in case.batch_sizes),
        )
        for case in found
    ]


def case_configs(case: Case, num_ranks: int, dtype: str, folder: Path) -> list[RunConfig]:
    """Return a configuration for each batch size of a case, with files under `folder`."""
    file, own_ranks = folder / f"{case.name}.yaml", num_ranks // case.share
    file.write_text(RUN)
    heads, (gen_pp, gen_tp) = case.hidden_size // HEAD_DIM, case.generate
    pairs = {"actor": case.actor, "critic": case.critic, "reference": case.reference}
    overrides = [
        f"run.folder={folder}",
        f"cluster.ranks_per_node=[{own_ranks}]",
        *(f"{role}.parallel={TrainSizes(p, t, own_ranks // (p * t))}" for role, (p, t) in pairs.items()),
        f"actor.generate={gen_pp}-{gen_tp}",
        f"actor.bucket_bytes={max(2**20, case.hidden_size**2 * 16)}",
        f"model.dtype={dtype}",
        f"model.build.num_layers={case.layers}",
        f"model.build.hidden_size={case.hidden_size}",
        f"model.build.ffn_hidden_size={case.hidden_size * 11 // 4}",
        f"model.build.num_heads={heads}",
        f"model.build.num_kv_heads={heads // 2}",
    ]
    # The KV cache holds all responses of an engine.
    rank_values = -(-case.layers // gen_pp) * max(1, heads // 2 // gen_tp) * HEAD_DIM
    block_bytes = CACHE_BLOCK_TOKENS * 2 * rank_values * DTYPE_BYTES[dtype]
    num_engines = own_ranks // (gen_pp * gen_tp)
    return [
        load_config(
            file,
            [
                *overrides,
                f"run.name={case.name}-{size}",
                f"data.batch_size={size}",
                f"rollout.kv_cache_bytes={(size // num_engines + 2) * block_bytes}",
            ],
        )
        for size in case.batch_sizes
    ]
