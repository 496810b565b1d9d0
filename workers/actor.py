"""The actor: trains the policy with Megatron-core and generates with vLLM, on the same ranks and weights."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from hybridengine.algorithms.drift import check_drift, save_reproduction
from hybridengine.backends.engine import SamplingSettings
from hybridengine.backends.levelling import Peers
from hybridengine.backends.megatron.model import available_names
from hybridengine.backends.vllm.construction import EngineSettings
from hybridengine.backends.vllm.engine import VllmEngine
from hybridengine.config import RunConfig
from hybridengine.data.datasets import EPISODE_ROWS
from hybridengine.families.family import NameSet
from hybridengine.reshard.compiler import compile_plan
from hybridengine.reshard.domains import domains
from hybridengine.rollouts.drawn import Drawn
from hybridengine.rows.images import IMAGES
from hybridengine.rows.micro_batches import RESPONSE_MASK, ROUTES, SEQUENCE_COLUMNS, drawn_tokens
from hybridengine.rows.protocols import (
    ONE_TO_ALL,
    PROTO_3D,
    PROTO_3D_ALL_MICRO_DP,
    ROW_NUMBERS,
    RankContext,
    register,
)
from hybridengine.rows.supports import SUPPORTS
from hybridengine.topology.grid import group_with
from hybridengine.topology.links import NodeMap
from hybridengine.weights.digests import digests
from hybridengine.weights.executor import Verify
from hybridengine.weights.hybrid_engine import HybridEngine, Return, WeightPush
from hybridengine.weights.link import Link
from hybridengine.weights.storage import WeightStorage
from hybridengine.weights.transport import PointToPointTransport
from workers.episodes import TOKEN_COLUMNS, EpisodeRollouts, respond_by_episodes
from workers.policy import PolicyWorker
from workers.responses import respond
from workers.rollouts import ROLLOUT_COLUMNS, rollouts_of


class ActorWorker(PolicyWorker):
    """One rank of the actor, which starts from the checkpoint `folder`; `stop_token_ids` end a response.

    `tokenizer` is the folder of the engine's tokenizer, for stop strings.
    """

    def __init__(
        self,
        context: RankContext,
        run: RunConfig,
        folder: str | Path,
        stop_token_ids: tuple[int, ...] = (),
        *,
        tokenizer: str | None = None,
    ) -> None:
        super().__init__(context, run, folder)
        generation = context.topology.generation
        assert generation is not None, "an actor's group has generation sizes"
        self._stop_token_ids = stop_token_ids
        # Until HybridEngine has emptied the engine, which is built with weights of its own.
        self.trainer.leave_training()
        self._engine = VllmEngine(
            folder,
            self.shape,
            generation,
            EngineSettings.of(run, tokenizer),
            # Differs between nodes: across them, vLLM on a CPU uses torch.distributed as well.
            identity=f"hybridengine-{os.environ['MASTER_PORT']}-{context.node}",
            tower=self.tower,
        )
        groups = domains(self.trainer.layout, self._engine.layout)
        self.hybrid = HybridEngine(
            compile_plan(
                self.trainer.layout,
                self._engine.layout,
                group_with(context.rank, groups),
                run.bucket_elements,
                NodeMap(run.cluster.ranks_per_node),
            ),
            context.rank,
            self.trainer,
            self._engine,
            PointToPointTransport(self.registry.new(groups)),
            verify=Verify(run.actor.verify),
            resume_from=str(folder),
            back=Return(run.rollout.training_weights) if run.rollout.quantization != "none" else Return.CUT,
        )
        self._peers = Peers(generation, context.rank, run.timeouts.collective_s)
        self._rollouts = rollouts_of(run, self._engine, generation, context.rank, stop_token_ids)
        self._push: WeightPush | None = None
        self._version = 0
        """Version of the weights, as engines on other ranks know it."""

    @register(ONE_TO_ALL)
    def switch_to_generate(self) -> dict[str, str | int | float]:
        """Move the weights to the engine; return the report of this rank's switch."""
        return self.hybrid.to_generate().as_dict()

    @register(ONE_TO_ALL)
    def switch_to_train(self) -> dict[str, str | int | float]:
        """Move the weights back; return the report of this rank's switch."""
        return self.hybrid.to_train().as_dict()

    @register(
        PROTO_3D_ALL_MICRO_DP,
        ["prompt_tokens", "prompt_lengths", ROW_NUMBERS],
        optional=[EPISODE_ROWS, IMAGES],
        returns_rows=True,
    )
    def generate_sequences(
        self, prompts: TensorDictBase, first_seed: int = 0, greedy: bool = False
    ) -> TensorDict:
        """Return a response to each prompt: `tokens` [B, P + R], `response_lengths` [B], `rollout_log_probs` [B, R].

        Reads `prompt_tokens` [B, P] and `prompt_lengths` [B]. Each row has its own seed, counted from `first_seed`.
        Episodes read their rows of the data, and add `episode_columns`.
        """
        seeds = ((first_seed + prompts[ROW_NUMBERS]) % 2**31).tolist()
        padding = self._stop_token_ids[0] if self._stop_token_ids else 0
        rollout = self.run.rollout
        if isinstance(self._rollouts, EpisodeRollouts):
            return respond_by_episodes(self._rollouts, prompts, seeds, rollout, padding, greedy=greedy)
        sampling = SamplingSettings.of(
            rollout, rollout.max_response_tokens, self._stop_token_ids, greedy=greedy
        )
        every = [sampling] * len(prompts)
        rows, _ = respond(self._engine, prompts, seeds, every, sampling.max_tokens, padding, self._peers)
        return rows

    @register(
        PROTO_3D,
        SEQUENCE_COLUMNS,
        optional=["rollout_log_probs", "versions", RESPONSE_MASK, ROUTES, SUPPORTS, IMAGES],
        returns_rows=True,
    )
    def compute_log_probs(self, rollout: TensorDictBase, squares: bool = False) -> TensorDict | None:
        """Return the columns of `PolicyWorker.compute_log_probs`.

        Raises DriftError if the engine's `rollout_log_probs` [B, R], if present, differ by more than
        `guards.log_prob_drift`; the rows are then saved in the run's folder. Rows with tokens of other weights than the
        present ones, by their `versions` [B, R], are not compared.
        """
        result = super().compute_log_probs(rollout, squares)
        bound = self.run.guards.log_prob_drift
        if result is not None and bound is not None and "rollout_log_probs" in rollout.keys():  # noqa: SIM118
            rows = torch.arange(len(rollout))
            if "versions" in rollout.keys():  # noqa: SIM118
                mask = drawn_tokens(rollout, rollout["versions"].size(1))
                rows = rows[((rollout["versions"] == self._version) | ~mask).all(1)]
            check_drift(rollout[rows], result["log_probs"][rows], bound, self._save_reproduction)
        return result

    def _save_reproduction(self, rows: dict[str, Tensor], drift: float) -> Path:
        """Save tokens and both log-probs with the version and layouts of the weights; return the path."""
        weights = self.trainer.weights
        told = {
            "drift": drift,
            "rank": self.context.rank,
            "coordinate": str(self.context.coordinate),
            "parallel": str(self.run.actor.parallel),
            "generate": str(self.run.actor.generate),
            "plan": self.hybrid.plan.digest,
            "temperature": self.run.rollout.temperature,
            "weights": {name: digests([weights[name]])[0].tolist() for name in weights.names},
        }
        return save_reproduction(self.run.run_folder, self.context.rank, rows, told)

    @register(ONE_TO_ALL)
    def link_facts(self) -> tuple[str, int, NameSet]:
        """Return what engines need for a link: address and port of the ranks' store, and the parameters' names."""
        return os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), available_names()

    @register(ONE_TO_ALL)
    def join_link(self, link: Link) -> None:
        """Join a link to engines, in place of any earlier one. Collective over the link."""
        timeout_s = self.run.timeouts.collective_s
        if self._push is not None:
            self._push.close()
        self._push = link.join(
            self.shape, self.context.rank, timeout_s, self.trainer.weights, WeightStorage({})
        )

    @register(ONE_TO_ALL)
    def push_weights(self, version: int) -> dict[str, str | int | float]:
        """Push the weights, which are `version` from now on, to the engines of the link; return this rank's report."""
        assert self._push is not None, "join_link comes first"
        self._version = version
        return self._push.push().as_dict()

    @register(ONE_TO_ALL)
    def join_engines(self) -> None:
        """Switch, and draw responses as the engines on other ranks do, until `leave_engines`."""
        self.hybrid.to_generate()
        self._engine.weights_changed(self._version, keep_kv=True)

    @register(ONE_TO_ALL)
    def leave_engines(self) -> None:
        """Drop all responses and switch back."""
        self._rollouts.withdraw()
        self.hybrid.to_train()

    @register(PROTO_3D_ALL_MICRO_DP, ROLLOUT_COLUMNS, optional=TOKEN_COLUMNS)
    def begin(self, rows: TensorDictBase) -> None:
        """Queue responses (`EngineRollouts.begin`), each on one replica of the engine."""
        self._rollouts.begin(rows)

    @register(PROTO_3D_ALL_MICRO_DP)
    def advance(self, num_steps: int) -> Drawn:
        """Take up to `num_steps` engine steps (`EngineRollouts.advance`)."""
        return self._rollouts.advance(num_steps)

    def close(self) -> None:
        """End the processes of functions."""
        self._rollouts.close()
