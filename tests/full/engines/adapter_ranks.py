"""Runs on a rank: a trainer's adapters as a PEFT folder, and vLLM with its own loader of such folders."""

from __future__ import annotations

from pathlib import Path

from hybridengine.backends.megatron.groups import initialize_globals
from hybridengine.backends.megatron.trainer import MegatronTrainer
from hybridengine.backends.megatron.weights import load_weights, save_weights, start_adapters
from hybridengine.backends.vllm.construction import process_state_kept
from hybridengine.models.shapes import ModelShape
from hybridengine.topology.grid import Grid
from hybridengine.topology.sizes import TrainSizes
from hybridengine.weights.process_groups import ProcessGroups
from tests.full.engines.vllm_ranks import take_place
from tests.gloo.adapters_by_hand import ADAPTERS, RANK


def export_and_generate(
    rank: int, folder: Path, adapters: Path, out: Path, prompts: list[list[int]], num_tokens: int
) -> list[list[int]]:
    """Export what the trainer has read, and return vLLM's greedy tokens with the exported folder."""
    take_place(rank)
    initialize_globals(1)
    registry, shape = ProcessGroups(), ModelShape.from_folder(folder).with_adapters(ADAPTERS)
    trainer = MegatronTrainer(shape, Grid(TrainSizes(1, 1, 1)), rank, registry)
    load_weights(trainer, folder)
    start_adapters(trainer, 0, adapters)
    save_weights(trainer, registry, out, base=folder)

    from vllm import LLM, SamplingParams
    from vllm.lora.request import LoRARequest

    with process_state_kept():
        llm = LLM(
            model=str(folder),
            skip_tokenizer_init=True,
            dtype="float32",
            enforce_eager=True,
            enable_lora=True,
            max_lora_rank=RANK,
            max_model_len=128,
            kv_cache_memory_bytes=2**26,
            distributed_executor_backend="external_launcher",
        )
        found = llm.generate(
            [{"prompt_token_ids": prompt} for prompt in prompts],
            SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True, detokenize=False),
            lora_request=LoRARequest("exported", 1, str(out)),
            use_tqdm=False,
        )
    return [list(one.outputs[0].token_ids) for one in found]
