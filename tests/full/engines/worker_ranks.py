"""Runs on each rank: the four worker classes as the controller creates them, with rows split by their protocols."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tensordict import NonTensorStack, TensorDict

from hybridengine.config import Role, RunConfig
from hybridengine.config.judge_section import JudgeSection, MessageSection
from hybridengine.config.sections import StructureSection
from hybridengine.rows.batch import columns_of
from hybridengine.rows.protocols import ROW_NUMBERS, GroupTopology, RankContext, Registration, registered
from hybridengine.topology.sizes import GenSizes, TrainSizes
from tests.full.engines.vllm_ranks import take_place
from tests.gloo.row_parts import concat_rows, slice_rows
from workers.actor import ActorWorker
from workers.critic import CriticWorker
from workers.judge import JudgeWorker
from workers.reference import ReferenceWorker
from workers.reward import RewardFunctionWorker, RewardModelWorker

NUM_ROWS = 12
STOP_TOKEN = 3
FIRST_SEED = 50


MAX_PROMPT_TOKENS = 36
"""Longest prompt of the judges, which some rows exceed."""


def judging(run: RunConfig, engine: GenSizes, folder: Path, offload: bool) -> RunConfig:
    """Return a run whose reward is the digit that a judge answers."""
    judge = JudgeSection(
        messages=(MessageSection(role="user", content="{prompt}={response}?{answer}"),),
        regex="([0-9])",
        structure=StructureSection(regex="[0-9]"),
        max_tokens=2,
        max_prompt_tokens=MAX_PROMPT_TOKENS,
        engine=engine,
        kv_cache_bytes=16 * 2**20,
        offload=offload,
    )
    sizes = TrainSizes(engine.pp_size, engine.tp_size, 4 // engine.num_ranks)
    update = {"kind": "judge", "path": str(folder), "judge": judge, "parallel": sizes}
    return run.model_copy(update={"reward": run.reward.model_copy(update=update)})


def rollout_of(run: RunConfig, seed: int = 0) -> TensorDict:
    """Return rows with prompts and responses of many lengths, including responses of one token and of full width."""
    generator = torch.Generator().manual_seed(seed)
    prompt_width, width = run.rollout.max_prompt_tokens, run.rollout.max_response_tokens

    def draw(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=generator)

    prompts, responses = draw(1, prompt_width + 1, NUM_ROWS), draw(1, width + 1, NUM_ROWS)
    responses[0], responses[1], prompts[2], prompts[3] = 1, width, 1, prompt_width
    tokens = draw(4, 57, NUM_ROWS, prompt_width + width)
    tokens[torch.arange(prompt_width + width) >= (prompts + responses).unsqueeze(1)] = 0
    prompt_tokens = tokens[:, :prompt_width].clone()
    prompt_tokens[torch.arange(prompt_width) >= prompts.unsqueeze(1)] = 0
    return TensorDict(
        {
            "prompt_tokens": prompt_tokens,
            "prompt_lengths": prompts,
            "tokens": tokens,
            "response_lengths": responses,
            "row_ids": torch.arange(NUM_ROWS),
            "answers": NonTensorStack(*map(str, range(NUM_ROWS))),
        },
        batch_size=[NUM_ROWS],
    )


class Group:
    """A worker on this rank; a call takes all rows, passes this rank its own, and returns what a controller would."""

    def __init__(self, run: RunConfig, role: Role, worker: type, rank: int, **arguments: Any) -> None:
        grid = run.grid(role)
        self._topology = GroupTopology(grid, run.generation_grid if role == "actor" else None)
        self._rank = rank
        self._methods = registered(worker)
        context = RankContext(role, rank, grid.num_ranks, self._topology, grid.coordinate(rank), "127.0.0.1")
        self.worker = worker(context, run, **arguments)

    def call(self, method: str, *arguments: Any, **options: Any) -> Any:
        """Return the result that the controller would collect; it is the same on every rank."""
        _, registration = self._methods[method]
        sizes = {len(value) for value in arguments if isinstance(value, TensorDict)}
        ranges = registration.protocol.row_ranges(sizes.pop(), self._topology) if sizes else ()
        args = [
            self._part(value, ranges[self._rank], registration) if isinstance(value, TensorDict) else value
            for value in arguments
        ]
        result = getattr(self.worker, method)(*args, **options)
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, result)
        results = [everyone[rank] for rank in registration.protocol.source_ranks(self._topology)]
        return concat_rows(results) if registration.returns_rows else results

    @staticmethod
    def _part(batch: TensorDict, rows: range, registration: Registration) -> TensorDict:
        part = slice_rows(batch, rows)
        part[ROW_NUMBERS] = torch.arange(rows.start, rows.stop)
        if registration.columns is None:
            return part
        return part.select(*registration.columns, *(set(registration.optional) & set(columns_of(part))))


def run_all_roles(rank: int, run: RunConfig, actor: Path, scorer: Path) -> dict[str, Any]:
    """Call every method that a run calls once, with colocated roles on grids of their own."""
    take_place(rank)
    seen: dict[str, Any] = {}
    rows = rollout_of(run)
    group = Group(run, "actor", ActorWorker, rank, folder=actor, stop_token_ids=(STOP_TOKEN,))
    critic = Group(run, "critic", CriticWorker, rank, folder=actor)
    reference = Group(run, "reference", ReferenceWorker, rank, folder=actor)
    reward = Group(run, "reward", RewardModelWorker, rank, folder=scorer)
    rule_only = run.model_copy(update={"reward": run.reward.model_copy(update={"kind": "function"})})
    rule = Group(rule_only, "reward", RewardFunctionWorker, rank)
    judges = {
        engine: Group(
            judging(run, engine, actor, offload=engine.tp_size > 1),
            "reward",
            JudgeWorker,
            rank,
            folder=actor,
            stop_token_ids=(STOP_TOKEN,),
        )
        for engine in (GenSizes(1, 1), GenSizes(1, 4))
    }
    group.call("start_training")

    seen["log_probs"] = group.call("compute_log_probs", rows)
    seen["ref_log_probs"] = reference.call("compute_log_probs", rows)
    seen["scores"] = reward.call("compute_scores", rows)
    seen["rule_scores"] = rule.call("compute_scores", rows)
    seen["values"] = critic.call("compute_values", rows)
    seen["verdicts"] = {str(engine): judge.call("compute_scores", rows) for engine, judge in judges.items()}

    group.call("switch_to_generate")
    seen["rollout"] = rows.copy().update(group.call("generate_sequences", rows, FIRST_SEED))
    seen["greedy"] = rows.copy().update(group.call("generate_sequences", rows, greedy=True))
    group.call("switch_to_train")
    seen["rollout_log_probs"] = group.call("compute_log_probs", seen["rollout"])["log_probs"]

    generator = torch.Generator().manual_seed(3)
    width = run.rollout.max_response_tokens
    batch = concat_rows([rows])
    batch.update(seen["values"])
    batch.update(seen["log_probs"])
    batch["returns"] = torch.randn(NUM_ROWS, width, generator=generator)
    batch["advantages"] = torch.randn(NUM_ROWS, width, generator=generator)
    seen["batch"] = batch
    seen["critic_update"] = critic.call("update", batch)
    seen["actor_update"] = group.call("update", batch)
    seen["values_after"] = critic.call("compute_values", rows)
    seen["log_probs_after"] = group.call("compute_log_probs", rows)
    seen["ref_log_probs_after"] = reference.call("compute_log_probs", rows)
    seen["verdicts_after"] = judges[GenSizes(1, 4)].call("compute_scores", rows)
    seen["judge_metrics"] = judges[GenSizes(1, 4)].call("take_metrics")
    group.call("export_model", str(run.run_folder / "saved"), str(actor))
    return seen
