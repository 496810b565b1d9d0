"""Engines of asynchronous runs report each token, its support and its experts to the controller once."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict

from hybridengine.backends.engine import Request, Response
from hybridengine.config import load_config
from workers.rollouts import EngineRollouts

NUM_LAYERS, NUM_ACTIVE = 3, 2
PROMPT = [4, 5, 6]


class FakeEngine:
    """Draws a token per step for its only request, whose expert at each position is the position."""

    def __init__(self) -> None:
        self.request, self.response = None, Response("")

    def add(self, requests: Sequence[Request]) -> None:
        [self.request] = requests
        self.response = Response(self.request.request_id, supports=[])

    def advance(self, num_steps: int) -> list[Response]:
        assert self.request is not None
        self.response.token_ids += [9] * num_steps
        self.response.log_probs += [-0.5] * num_steps
        self.response.versions += [0] * num_steps
        assert self.response.supports is not None
        begin = self.request.first_position + len(self.response.supports)
        self.response.supports += [np.array([begin + step], dtype=np.int32) for step in range(num_steps)]
        end = len(self.request.prompt_token_ids) + len(self.response.token_ids) - 1
        positions = np.arange(self.request.num_routed, end, dtype=np.int8)
        shape = len(positions), NUM_LAYERS, NUM_ACTIVE
        self.response.routes = np.broadcast_to(positions[:, None, None], shape)
        return []

    def progress(self) -> list[Response]:
        return [self.response]

    def abort(self, request_ids: Sequence[str]) -> None:
        pass


def rows(drawn: list[int], num_routed: int) -> TensorDict:
    columns: dict[str, Any] = {
        "numbers": torch.tensor([7]),
        "prompt_numbers": torch.tensor([0]),
        "seeds": torch.tensor([1]),
        "drawn_lengths": torch.tensor([len(drawn)]),
        "drawn_tokens": torch.tensor([drawn], dtype=torch.int32),
        "drawn_routes": torch.tensor([num_routed]),
    }
    return TensorDict(columns, batch_size=[1])


def test_supports_and_experts_are_told_once_also_by_an_engine_that_goes_on_with_a_response() -> None:
    told: list[np.ndarray] = []
    supports: list[int] = []
    drawn: list[int] = []
    for calls in ([2, 1], [4]):  # the second engine continues after the tokens of the first
        engine: Any = FakeEngine()
        rollouts = EngineRollouts(load_config("configs/async-grpo.yaml"), engine, ())
        prompts = {"prompt_tokens": torch.tensor([PROMPT]), "prompt_lengths": torch.tensor([len(PROMPT)])}
        rollouts._reader = SimpleNamespace(prompts=lambda _, prompts=prompts: prompts)  # type: ignore[assignment]
        rollouts.begin(rows(drawn, sum(map(len, told))))
        for num_steps in calls:
            news = rollouts.advance(num_steps)
            assert news.counts.tolist() == [num_steps]
            drawn += news.tokens.tolist()
            told += news.routes
            supports += news.supports.words.tolist()
        rollouts.withdraw()
    assert drawn == [9] * 7
    assert supports == [*range(7)]
    experts = np.concatenate(told)[:, 0, 0]
    np.testing.assert_array_equal(experts, np.arange(len(PROMPT) + len(drawn) - 1))
