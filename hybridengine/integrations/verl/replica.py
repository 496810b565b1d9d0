"""Servers of verl's rollout: each drives one generation engine, on the ranks of the actor, by calls to its workers."""

# pyright: reportMissingImports=false
from __future__ import annotations

import asyncio
import hashlib
import itertools
from collections import Counter
from collections.abc import Sequence
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from verl.utils import normalize_token_ids
from verl.workers.rollout.replica import RolloutMode, RolloutReplica, TokenOutput

from hybridengine.backends.engine import Request, Response, SamplingSettings
from hybridengine.errors import ConfigError, DataError
from hybridengine.integrations.verl.rollout import Place, advance_here, place_here, to_train_here

STEPS_PER_CALL = 8
"""Engine steps between two looks at new requests: fewer cost more calls, more let requests wait longer."""
_KNOWN = {"temperature", "top_p", "top_k", "min_p", "stop_token_ids"}
"""verl's sampling parameters that are passed on as they are; see `sampling_of` for others."""


class EngineServer:
    """Collects requests for one engine, and carries them out on its ranks together.

    Args:
        workers: Ray actors of the engine's ranks.
        config: verl's RolloutConfig.
    """

    def __init__(self, workers: list[ActorHandle], place: Place, config: Any) -> None:
        self._workers, self._place, self._config = workers, place, config
        self._new: list[Request] = []
        self._waiting: dict[str, asyncio.Future[tuple[Response, int]]] = {}
        self._numbers = itertools.count()
        self._asked = Counter[tuple[int, ...]]()
        """Requests for each prompt since the last switch."""
        self._driving: asyncio.Task[None] | None = None
        self._calls: list[asyncio.Future[tuple[list[Response], int]]] = []
        """The newest call, by rank."""

    async def generate(
        self,
        prompt_ids: list[int],
        sampling_params: dict[str, Any],
        request_id: str,
        image_data: Any = None,
        video_data: Any = None,
        **_: Any,
    ) -> TokenOutput:
        """Return the tokens of a response, their log-probs, and the trainer's step that made the weights."""
        if image_data is not None or video_data is not None:
            raise DataError("images and videos are not supported by this rollout; take a text dataset")
        prompt = tuple(normalize_token_ids(prompt_ids))
        sampling = sampling_of(sampling_params, len(prompt), self._place, self._config)
        # Checked here, because a call on the ranks carries the requests of many callers.
        for token in (*prompt, *sampling.stop_token_ids):
            if not 0 <= token < self._place.vocab_size:
                raise DataError(
                    f"the token {token} of a prompt or of stop_token_ids is unknown to the model, which has tokens 0 to"
                    f" {self._place.vocab_size - 1}; take tokens of its own tokenizer"
                )
        seed = sampling_params.get("seed")
        if seed is None:
            seed = prompt_seed(self._config.seed, self._place.replica, prompt, self._asked[prompt])
        self._asked[prompt] += 1
        name = f"{request_id}-{next(self._numbers)}"
        self._new.append(Request(name, prompt, seed, sampling))
        future = self._waiting[name] = asyncio.get_running_loop().create_future()
        if self._driving is None or self._driving.done():
            self._driving = asyncio.create_task(self._drive())
        response, steps = await future
        return TokenOutput(
            token_ids=response.token_ids,
            log_probs=response.log_probs if sampling_params.get("logprobs") else None,
            stop_reason="completed",
            num_preempted=0,
            extra_fields={"global_steps": steps},
        )

    async def _drive(self) -> None:
        """Advance the engine until all requests have their responses, or one call has failed."""
        try:
            while self._waiting:
                await self._settle()
                new, self._new = self._new, []
                self._calls = [
                    asyncio.ensure_future(worker.__ray_call__.remote(advance_here, new, STEPS_PER_CALL))
                    for worker in self._workers
                ]
                found = await asyncio.gather(*self._calls)
                ended, steps = found[0]
                for response in ended:
                    # Nobody waits for a response of a call that failed, or of a caller that was cancelled.
                    future = self._waiting.pop(response.request_id, None)
                    if future is not None and not future.done():
                        future.set_result((response, steps))
        except Exception as error:
            failed, self._waiting, self._new = self._waiting, {}, []
            for future in failed.values():
                if not future.done():
                    future.set_exception(error)

    async def _settle(self) -> None:
        """Wait until the newest call has ended on all ranks: if it failed on one, others may still be in a collective."""
        await asyncio.gather(*self._calls, return_exceptions=True)

    async def sleep(self) -> None:
        """Switch the ranks back to training, after the responses that are under way."""
        if self._driving is not None:
            await self._driving
        await self._settle()
        self._asked.clear()
        await asyncio.gather(*(worker.__ray_call__.remote(to_train_here) for worker in self._workers))

    async def wake_up(self) -> None:
        """Do nothing: the actor's `update_weights` switches to generation."""

    async def clear_kv_cache(self) -> None:
        """Do nothing: a switch leaves no keys and values of older weights."""

    async def abort_all_requests(self, reject_request: bool = False) -> None:
        raise ConfigError(
            "asynchronous trainers of verl need a second copy of the weights; set trainer.v1.trainer_mode=sync"
        )


def prompt_seed(seed: int, replica: int, prompt: Sequence[int], occurrence: int) -> int:
    """Return the seed of a prompt's response, which does not depend on the order in which requests arrive.

    It differs between replicas and between responses to the same prompt. `HybridRollout.advance` adds the trainer's step.
    """
    digest = hashlib.blake2b(repr((seed, replica, *prompt, occurrence)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def sampling_of(params: dict[str, Any], prompt_tokens: int, place: Place, config: Any) -> SamplingSettings:
    """Return verl's sampling parameters as settings; DataError for what is not supported, or too long a prompt."""
    params = {name: value for name, value in params.items() if value is not None}
    room = place.max_model_tokens - prompt_tokens
    if room < 1:
        raise DataError(
            f"a prompt of {prompt_tokens} tokens leaves no room in rollout.max_model_len={place.max_model_tokens}; raise"
            " it, or shorten prompts (data.max_prompt_length)"
        )
    for handled in ("seed", "logprobs"):
        params.pop(handled, None)
    default = min(config.response_length, config.prompt_length + config.response_length - prompt_tokens)
    most = params.pop("max_tokens", params.pop("max_new_tokens", default))
    penalty = params.pop("repetition_penalty", config.repetition_penalty)
    if penalty != 1.0:
        raise DataError(f"repetition_penalty={penalty} is not supported by this rollout; set 1.0")
    params["top_k"] = max(0, params.get("top_k", 0))  # -1 means all
    params["stop_token_ids"] = (*place.stop_token_ids, *params.get("stop_token_ids", ()))
    unknown = sorted(set(params) - _KNOWN)
    if unknown:
        raise DataError(
            f"the sampling parameter {unknown[0]!r} is not supported by this rollout; leave it out"
        )
    return SamplingSettings(max_tokens=max(1, min(most, room)), **params)


class HybridReplica(RolloutReplica):
    """One generation engine of the actor's ranks, with its server."""

    async def init_hybrid(self, worker_group: Any) -> None:
        """Take the workers of this replica's engine, which need not be consecutive ranks, and launch its server."""
        self.rollout_mode = RolloutMode.HYBRID
        places = await asyncio.gather(
            *(worker.__ray_call__.remote(place_here) for worker in worker_group.workers)
        )
        own = [(place, worker) for place, worker in zip(places, worker_group.workers, strict=True)]
        own = sorted(
            ((place, worker) for place, worker in own if place.replica == self.replica_rank),
            key=lambda one: one[0].position,
        )
        self.workers = [worker for _, worker in own]
        await self._launch(own[0][0])

    async def _launch(self, place: Place) -> None:
        server = ray.remote(EngineServer).options(
            name=f"hybridengine_server_{self.replica_rank}{self.name_suffix}",
            scheduling_strategy=NodeAffinitySchedulingStrategy(node_id=place.node_id, soft=False),
            max_concurrency=self.max_concurrency,
        )
        self._server_handle = server.remote(self.workers, place, self.config)
        self.servers = [self._server_handle]
        self._server_address = f"hybridengine-{self.replica_rank}"  # a name: there is no HTTP server

    async def launch_servers(self) -> None:
        raise ConfigError(
            "rollout.name=hybridengine generates on the ranks of the actor alone, not on ranks of its own, such as those"
            " of a reward model, a teacher, or an asynchronous trainer; choose another rollout for these"
        )
