"""The server of a generation engine, with stand-ins for Ray's handles of its workers.

Each stand-in runs the engine of one rank: it answers a request with its prompt, reversed, after a number of calls.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from verl.workers.config import RolloutConfig
from verl.workers.rollout.replica import TokenOutput

from hybridengine.backends.engine import Request, Response
from hybridengine.errors import ConfigError, DataError
from hybridengine.integrations.verl.replica import EngineServer
from hybridengine.integrations.verl.rollout import HybridRollout, Place

PLACE = Place(replica=0, position=0, node_id="node", stop_token_ids=(), max_model_tokens=64, vocab_size=100)
TRAINER_STEP = 11


class FakeRollout:
    """The rollout of a worker's process."""

    def __init__(self, num_calls: int) -> None:
        self._num_calls, self._left = num_calls, dict[str, int]()
        self._requests = dict[str, Request]()
        self.events: list[tuple[str, ...]] = []
        """Prompts of the requests of each call, as texts, or the switch to training."""
        self.failure: Exception | None = None

    def advance(self, requests: Sequence[Request], num_steps: int) -> tuple[list[Response], int]:
        self.events.append(tuple(str(list(one.prompt_token_ids)) for one in requests))
        if self.failure is not None:
            failure, self.failure = self.failure, None
            raise failure  # the requests of earlier calls stay
        for one in requests:
            self._requests[one.request_id], self._left[one.request_id] = one, self._num_calls
        ended = []
        for name in list(self._left):
            self._left[name] -= 1
            if not self._left[name]:
                del self._left[name]
                tokens = list(self._requests[name].prompt_token_ids[::-1])
                log_probs = [-float(token) for token in tokens]
                ended.append(Response(name, tokens, log_probs, finish_reason="stop"))
        return ended, TRAINER_STEP

    def to_train(self) -> None:
        self.events.append(("to_train",))


class Worker:
    """Ray's handle of a worker: only the transport is replaced."""

    def __init__(self, rollout: FakeRollout) -> None:
        self.rollout = rollout
        self.__ray_call__ = self
        self.free = asyncio.Event()
        """Calls wait for it."""
        self.free.set()

    def remote(self, function: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:
        async def call() -> Any:
            await asyncio.sleep(0)
            await self.free.wait()
            HybridRollout.here = self.rollout  # type: ignore[assignment]
            try:
                return function(self, *args)
            finally:
                HybridRollout.here = None

        return asyncio.ensure_future(call())


def make_server(num_workers: int = 2, num_calls: int = 2) -> tuple[EngineServer, list[FakeRollout]]:
    rollouts = [FakeRollout(num_calls) for _ in range(num_workers)]
    workers: Any = [Worker(rollout) for rollout in rollouts]
    config = RolloutConfig(name="hybridengine", prompt_length=32, response_length=32)
    return EngineServer(workers, PLACE, config), rollouts


def ask(server: EngineServer, prompt: list[int], **params: Any) -> asyncio.Task[TokenOutput]:
    return asyncio.create_task(server.generate(prompt, params, request_id="same for all turns"))


def test_requests_that_arrive_together_go_to_all_workers_in_one_call():
    async def run() -> None:
        server, rollouts = make_server()
        prompts = [[1, 2], [3, 4, 5], [1, 2], [6]]
        outputs = await asyncio.gather(*(ask(server, prompt, logprobs=True) for prompt in prompts))
        for prompt, output in zip(prompts, outputs, strict=True):
            assert output.token_ids == prompt[::-1]
            assert output.log_probs == [-token for token in prompt[::-1]]
            assert output.stop_reason == "completed"
            assert output.extra_fields["global_steps"] == TRAINER_STEP
        for rollout in rollouts:
            assert rollout.events == [tuple(map(str, prompts)), ()], "the second call brings the responses"

    asyncio.run(run())


def test_requests_that_arrive_later_join_those_under_way():
    async def run() -> None:
        server, rollouts = make_server(num_calls=3)
        first = ask(server, [1, 2])
        while not rollouts[-1].events:
            await asyncio.sleep(0)
        second = ask(server, [3, 4])
        assert (await first).token_ids == [2, 1]
        assert not second.done()
        assert (await second).token_ids == [4, 3]
        for rollout in rollouts:
            assert rollout.events == [("[1, 2]",), ("[3, 4]",), (), ()]

    asyncio.run(run())


def test_log_probs_are_given_to_those_who_ask():
    async def run() -> None:
        server, _ = make_server()
        assert (await ask(server, [1, 2])).log_probs is None
        assert (await ask(server, [1, 2], logprobs=True)).log_probs == [-2.0, -1.0]

    asyncio.run(run())


def test_a_call_that_fails_fails_all_waiting_requests_and_none_after_them():
    async def run() -> None:
        server, rollouts = make_server(num_calls=3)
        failure = DataError("a request that the engine refuses")
        early = ask(server, [1, 2])
        while not rollouts[-1].events:
            await asyncio.sleep(0)
        for rollout in rollouts:
            rollout.failure = failure
        outputs = await asyncio.gather(early, ask(server, [3, 4]), return_exceptions=True)
        assert outputs == [failure, failure]
        # The engines still have the early request, whose response comes while a later one is waited for.
        assert (await ask(server, [5, 6])).token_ids == [6, 5]
        for rollout in rollouts:
            assert rollout.events == [("[1, 2]",), ("[3, 4]",), ("[5, 6]",), (), ()]

    asyncio.run(run())


@pytest.mark.parametrize("failing", [0, 1])
def test_the_failure_of_any_worker_is_that_of_the_requests(failing: int):
    async def run() -> None:
        server, rollouts = make_server()
        rollouts[failing].failure = RuntimeError("a worker's error")
        with pytest.raises(RuntimeError, match=r"^a worker's error$"):
            await ask(server, [1, 2])
        await server.sleep()
        assert [rollout.events for rollout in rollouts] == [[("[1, 2]",), ("to_train",)]] * 2

    asyncio.run(run())


@pytest.mark.parametrize("method", ["sleep", "generate"])
def test_a_call_that_failed_ends_on_all_ranks_before_the_next(method: str):
    async def run() -> None:
        server, rollouts = make_server()
        late: Any = server._workers[1]
        rollouts[0].failure = RuntimeError("a worker's error")
        late.free.clear()
        with pytest.raises(RuntimeError, match=r"^a worker's error$"):
            await ask(server, [1, 2])
        following = asyncio.create_task(server.sleep()) if method == "sleep" else ask(server, [3, 4])
        await asyncio.sleep(0.01)
        assert [len(rollout.events) for rollout in rollouts] == [1, 0]
        late.free.set()
        await following
        assert rollouts[0].events == rollouts[1].events

    asyncio.run(run())


def test_a_caller_that_is_cancelled_does_not_disturb_others():
    async def run() -> None:
        server, rollouts = make_server(num_calls=3)
        cancelled, other = ask(server, [1, 2]), ask(server, [3, 4])
        while not rollouts[0].events:
            await asyncio.sleep(0)
        cancelled.cancel()
        assert (await other).token_ids == [4, 3]
        assert cancelled.cancelled()

    asyncio.run(run())


def test_a_request_that_is_refused_does_not_disturb_others():
    async def run() -> None:
        server, rollouts = make_server()
        outputs = await asyncio.gather(
            ask(server, [1, 2]),
            ask(server, [1], repetition_penalty=2.0),
            ask(server, [1], stop_token_ids=[100]),
            ask(server, [1, -1]),
            return_exceptions=True,
        )
        assert isinstance(outputs[0], TokenOutput)
        assert all(isinstance(output, DataError) for output in outputs[1:])
        assert str(outputs[2]) == (
            "the token 100 of a prompt or of stop_token_ids is unknown to the model, which has tokens 0 to 99; take"
            " tokens of its own tokenizer"
        )
        assert rollouts[0].events[0] == ("[1, 2]",)
        with pytest.raises(
            DataError, match=r"^images and videos are not supported by this rollout; take a text"
        ):
            await server.generate([1], {}, "name", image_data=[object()])

    asyncio.run(run())


def test_sleep_waits_for_the_responses_under_way():
    async def run() -> None:
        server, rollouts = make_server(num_calls=4)
        asked = ask(server, [1, 2])
        while not rollouts[0].events:
            await asyncio.sleep(0)
        await server.sleep()
        assert asked.done()
        assert (await asked).token_ids == [2, 1]
        await server.sleep()  # verl sleeps a second time before it trains
        for rollout in rollouts:
            assert rollout.events == [("[1, 2]",), (), (), (), ("to_train",), ("to_train",)]

    asyncio.run(run())


def test_asynchronous_trainers_are_refused():
    server, _ = make_server()
    with pytest.raises(ConfigError, match=r"set trainer\.v1\.trainer_mode=sync$"):
        asyncio.run(server.abort_all_requests())
