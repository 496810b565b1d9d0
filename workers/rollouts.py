"""Responses that a rank's engine draws in calls of a few steps, on ranks of its own or on the actor's."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from tensordict import TensorDictBase

from hybridengine.backends.engine import Request, Response, SamplingSettings
from hybridengine.backends.lead import Lead
from hybridengine.backends.vllm.engine import VllmEngine
from hybridengine.config import RunConfig
from hybridengine.rollouts.drawn import Drawn, DrawnSupports
from hybridengine.rows.images import images_of_rows
from hybridengine.topology.generation import GenerationGrid
from workers.episodes import EpisodeRollouts
from workers.prompts import PromptReader

ROLLOUT_COLUMNS = ("numbers", "prompt_numbers", "seeds", "drawn_tokens", "drawn_lengths", "drawn_routes")
"""Columns of responses to draw: `numbers`, `prompt_numbers`, `seeds`, `drawn_lengths` and `drawn_routes`, the number of
tokens whose experts are known, [B], and `drawn_tokens` [B, D]."""


def rollouts_of(
    run: RunConfig, engine: VllmEngine, generation: GenerationGrid, rank: int, stops: tuple[int, ...]
) -> EngineRollouts | EpisodeRollouts:
    """Return what draws a run's responses on this rank's engine. Collective over all ranks of the grid."""
    if run.rollout.episode is None:
        return EngineRollouts(run, engine, stops)
    return EpisodeRollouts(run, engine, Lead(generation, rank, run.timeouts.collective_s), stops)


class EngineRollouts:
    """Numbered responses on one rank's engine, and how many of their tokens the controller knows."""

    def __init__(self, run: RunConfig, engine: VllmEngine, stop_token_ids: tuple[int, ...]) -> None:
        self._longest = run.rollout.max_response_tokens
        self._rollout, self._stop_token_ids = run.rollout, stop_token_ids
        self._engine = engine
        self._reader = PromptReader(run)
        self._told: dict[str, int] = {}
        """Number of tokens of each unfinished request that the controller knows."""
        self._told_routes: dict[str, int] = {}
        """Number of tokens whose experts it knows."""

    def begin(self, rows: TensorDictBase) -> None:
        """Queue a request for each row of `ROLLOUT_COLUMNS`; a response that already has tokens is continued."""
        prompts = self._reader.prompts(rows["prompt_numbers"].tolist())
        requests, images = [], images_of_rows(prompts)
        for row in range(len(rows)):
            drawn = rows["drawn_tokens"][row, : rows["drawn_lengths"][row]].tolist()
            prompt = prompts["prompt_tokens"][row, : prompts["prompt_lengths"][row]].tolist()
            requests.append(
                Request(
                    str(int(rows["numbers"][row])),
                    (*prompt, *drawn),
                    int(rows["seeds"][row]),
                    SamplingSettings.of(self._rollout, self._longest - len(drawn), self._stop_token_ids),
                    first_position=len(drawn),
                    num_routed=int(rows["drawn_routes"][row]),
                    images=images[row],
                )
            )
        self._engine.add(requests)
        self._told |= dict.fromkeys((request.request_id for request in requests), 0)
        self._told_routes |= dict.fromkeys((request.request_id for request in requests), 0)

    def advance(self, num_steps: int) -> Drawn:
        """Take up to `num_steps` engine steps while requests are unfinished; return the tokens drawn since then."""
        ended = self._engine.advance(num_steps)
        return self._drawn([*ended, *self._engine.progress()])

    def withdraw(self, numbers: Sequence[int] | None = None) -> None:
        """Drop some requests or all; the controller knows the tokens drawn so far."""
        dropped = (
            [*self._told] if numbers is None else [key for key in map(str, numbers) if key in self._told]
        )
        self._engine.abort(dropped)
        for request_id in dropped:
            del self._told[request_id], self._told_routes[request_id]

    def close(self) -> None:
        """Do nothing: no processes belong to responses of one turn."""

    def _drawn(self, responses: Sequence[Response]) -> Drawn:
        """Return what is new in these responses, and forget those that have ended."""
        news = [response for response in responses if self._is_news(response)]
        begins = [self._told[response.request_id] for response in news]
        routes = [
            response.routes[self._told_routes[response.request_id] :]
            for response in news
            if response.routes is not None
        ]
        for response in news:
            self._told[response.request_id] = len(response.token_ids)
            self._told_routes[response.request_id] = 0 if response.routes is None else len(response.routes)
            if response.finish_reason:
                del self._told[response.request_id], self._told_routes[response.request_id]

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
            routes=tuple(routes),
            supports=DrawnSupports.of(
                [
                    one
                    for response, begin in zip(news, begins, strict=True)
                    for one in (response.supports or ())[begin:]
                ]
            ),
        )

    def _is_news(self, response: Response) -> bool:
        return len(response.token_ids) > self._told[response.request_id] or response.finish_reason is not None
