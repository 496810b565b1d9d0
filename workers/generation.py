"""An engine on ranks of its own: it generates all the time, with weights that the actor pushes between two calls."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from tensordict import TensorDictBase

from hybridengine.backends.engine import Request, Response, SamplingSettings
from hybridengine.backends.vllm.construction import EngineSettings
from hybridengine.backends.vllm.engine import VllmEngine
from hybridengine.config import RunConfig
from hybridengine.models.shapes import ModelShape
from hybridengine.rollouts.drawn import Drawn
from hybridengine.rows.protocols import ONE_TO_ALL, PROTO_3D, RankContext, register
from hybridengine.topology.generation import GenerationGrid
from hybridengine.weights.hybrid_engine import WeightPush
from hybridengine.weights.link import Link
from hybridengine.weights.storage import WeightStorage
from workers.prompts import PromptReader


class GenerationWorker:
    """One rank of an engine for the model of the checkpoint `folder`, of which only the configuration is read."""

    def __init__(
        self,
        context: RankContext,
        run: RunConfig,
        folder: str | Path,
        stop_token_ids: tuple[int, ...] = (),
    ) -> None:
        self._run, self._context = run, context
        self._shape = ModelShape.from_folder(folder)
        self._sampling = {"temperature": run.rollout.temperature, "stop_token_ids": stop_token_ids}
        self._engine = VllmEngine(
            folder,
            self._shape,
            GenerationGrid(context.topology.grid, run.generation.parallel),
            EngineSettings.of(run),
            identity=f"hybridengine-{os.environ['MASTER_PORT']}-{context.node}",
        )
        self._reader = PromptReader(run)
        self._push: WeightPush | None = None
        self._told: dict[str, int] = {}
        """Number of tokens of each unfinished request that the controller knows."""

    @register(ONE_TO_ALL)
    def join_link(self, link: Link, engine: int) -> None:
        """Join a link as its engine of this number, in place of any earlier link. Collective over the link."""
        rank = link.first_rank(engine) + self._context.rank
        timeout_s = self._run.timeouts.collective_s
        self._push = link.join(self._shape, rank, timeout_s, WeightStorage({}), self._engine.weights)

    @register(ONE_TO_ALL)
    def receive_weights(self, version: int) -> dict[str, str | int | float]:
        """Receive the weights of `version` from the actor, and go on with them; return the report of this rank."""
        assert self._push is not None, "join_link comes first"
        self._engine.settle()
        report = self._push.push()
        self._engine.weights_changed(version, keep_kv=self._run.generation.kv == "keep")
        return report.as_dict()

    @register(PROTO_3D, ["numbers", "prompt_numbers", "seeds", "drawn_tokens", "drawn_lengths"])
    def begin(self, rows: TensorDictBase) -> None:
        """Queue a request for each row; a response that already has tokens is continued.

        Reads `numbers` of the responses, `prompt_numbers`, `seeds` and `drawn_lengths` [B], and `drawn_tokens` [B, D].
        """
        longest = self._run.rollout.max_response_tokens
        prompts = self._reader.prompts(rows["prompt_numbers"].tolist())
        requests = []
        for row in range(len(rows)):
            drawn = rows["drawn_tokens"][row, : rows["drawn_lengths"][row]].tolist()
            prompt = prompts["prompt_tokens"][row, : prompts["prompt_lengths"][row]].tolist()
            requests.append(
                Request(
                    str(int(rows["numbers"][row])),
                    (*prompt, *drawn),
                    int(rows["seeds"][row]),
                    SamplingSettings(max_tokens=longest - len(drawn), **self._sampling),
                    first_position=len(drawn),
                )
            )
        self._engine.add(requests)
        self._told |= dict.fromkeys((request.request_id for request in requests), 0)

    @register(PROTO_3D)
    def advance(self, num_steps: int) -> Drawn:
        """Take up to `num_steps` engine steps while requests are unfinished; return the tokens drawn since then."""
        ended = self._engine.advance(num_steps)
        return self._drawn([*ended, *self._engine.progress()])

    @register(PROTO_3D)
    def withdraw(self) -> None:
        """Drop all requests; the controller knows the tokens drawn so far."""
        self._engine.abort(list(self._told))
        self._told.clear()

    def _drawn(self, responses: Sequence[Response]) -> Drawn:
        """Return what is new in these responses, and forget those that have ended."""
        news = [response for response in responses if self._is_news(response)]
        begins = [self._told[response.request_id] for response in news]
        for response in news:
            self._told[response.request_id] = len(response.token_ids)
            if response.finish_reason:
                del self._told[response.request_id]

        def joined(name: str, kind: type) -> np.ndarray:
            parts = [getattr(response, name)[begin:] for response, begin in zip(news, begins, strict=True)]
            return np.array([value for part in parts for value in part], dtype=kind)

        return Drawn(
            numbers=np.array([int(response.request_id) for response in news], dtype=np.int64),
            counts=np.array(
                [len(one.token_ids) - begin for one, begin in zip(news, begins, strict=True)], dtype=np.int64
            ),
            has_ended=np.array([response.finish_reason is not None for response in news], dtype=bool),
            tokens=joined("token_ids", np.int32),
            log_probs=joined("log_probs", np.float32),
            versions=joined("versions", np.int32),
        )

    def _is_news(self, response: Response) -> bool:
        return len(response.token_ids) > self._told[response.request_id] or response.finish_reason is not None
