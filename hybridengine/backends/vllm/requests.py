"""Requests in a vLLM engine: seeding of their draws, and the tokens drawn so far."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from hybridengine.backends.engine import Request, Response, SamplingSettings
from hybridengine.backends.vllm.adapters import LoadedAdapters
from hybridengine.backends.vllm.routes import RequestRoutes
from hybridengine.backends.vllm.structures import go_on, structured_params
from hybridengine.backends.vllm.supports import RequestSupports
from hybridengine.errors import DataError


def position_seed(seed: int, position: int) -> int:
    """Return the seed of one draw, given a request's seed and the position of the token in its response."""
    digest = hashlib.blake2b(struct.pack("<qq", seed, position), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


class RunningRequests:
    """Unfinished requests of an `LLMEngine`.

    A draw depends only on the request's seed and the token's position, not on prompt chunks, preemption or restarts:
    generators of vLLM's first model runner are reseeded before every step; its second one, which needs Triton, has none
    and draws by seed and position itself.

    Args:
        adapter: vLLM's request for the adapter of all requests, if there is one.
        loaded: adapters that requests name, if the engine loads them from files.
        seen: returns vLLM's input for a request with images and a salt of the prefix cache.
    """

    def __init__(
        self,
        engine: Any,
        runner: Any,
        routes: RequestRoutes | None = None,
        supports: RequestSupports | None = None,
        adapter: Any = None,
        loaded: LoadedAdapters | None = None,
        seen: Callable[..., Any] | None = None,
    ) -> None:
        self._engine, self._routes, self._supports = engine, routes, supports
        self._adapter, self._loaded, self._seen = adapter, loaded, seen
        self._states: dict[str, Any] | None = getattr(runner, "requests", None)
        """States with a generator, by request, of the first runner."""
        self._running: dict[str, tuple[Request, Response]] = {}
        self._ended: list[Response] = []
        """Responses that have ended and that `step` has not returned yet."""

    def __len__(self) -> int:
        return len(self._running) + len(self._ended)

    @property
    def ids(self) -> set[str]:
        """Ids of requests whose responses have not been returned."""
        running = [response for _, response in self._running.values()]
        return {response.request_id for response in [*running, *self._ended]}

    @property
    def waiting(self) -> list[str]:
        """Ids of the requests that the scheduler has in its queue, in its order.

        Its second queue, of requests with blocks of the KV cache, needs a KV connector or a streaming client, which no
        engine here has.
        """
        queue = self._engine.engine_core.engine_core.scheduler.waiting
        return [self._running[one.request_id][0].request_id for one in queue]

    def progress(self) -> list[Response]:
        """Return the responses that `step` has not returned, with their tokens so far."""
        for name, (_, response) in self._running.items():
            response.routes = self._routes.so_far(name) if self._routes else None
        return [response for _, response in self._running.values()] + self._ended

    def add(self, requests: Sequence[Request], version: int) -> None:
        """Queue requests; their prompts share cached keys and values only with others of the same `version`."""
        try:
            for request in requests:
                seed = request.seed
                if self._states is not None:
                    seed = position_seed(seed, request.first_position)
                params = _sampling_params(request.sampling, seed)
                salt = f"version {version}"
                prompt: Any = {"prompt_token_ids": list(request.prompt_token_ids), "cache_salt": salt}
                if request.images:
                    assert self._seen is not None, "the engine refuses images of other models"
                    prompt = self._seen(request, cache_salt=salt)
                adapter = self._loaded.request(request.sampling.adapter) if self._loaded else self._adapter
                name = self._engine.add_request(request.request_id, prompt, params, lora_request=adapter)
                kept = None if self._supports is None else []
                self._running[name] = request, Response(request.request_id, supports=kept)
                if request.first_position and request.sampling.reads_text:
                    go_on(self._engine, name, request, params)
                if self._routes:
                    self._routes.begin(name, request.num_routed)
        except BaseException:
            self.abort(request.request_id for request in requests)
            raise

    def step(self, version: int) -> list[Response]:
        """Take one engine step with weights of `version`; return the responses that have ended."""
        if self._running:
            self._step(version)
        ended, self._ended = self._ended, []
        return ended

    def settle(self, version: int) -> None:
        """Finish batches in flight, of which an engine with pipeline stages has several."""
        core = self._engine.engine_core.engine_core
        if not core.batch_queue:
            return
        core.pause_scheduler(mode="keep", clear_cache=False)
        while core.batch_queue:
            self._step(version)
        core.resume_scheduler()

    def _step(self, version: int) -> None:
        self._reseed()
        names = {request.request_id: name for name, (request, _) in self._running.items()}
        for output in self._engine.step():
            name, drawn = names[output.request_id], output.outputs[0]
            response = self._running[name][1]
            response.token_ids += drawn.token_ids
            response.log_probs += [
                entry[token].logprob for token, entry in zip(drawn.token_ids, drawn.logprobs, strict=True)
            ]
            response.versions += [version] * len(drawn.token_ids)
            if self._supports is not None and response.supports is not None:
                response.supports += self._supports.of(name, len(drawn.token_ids))
            if drawn.finish_reason == "error":
                self._pop(name)
                raise DataError(
                    f"response {output.request_id} cannot have the form that is asked of it: no token of the model goes"
                    f" on after its {len(response.token_ids) - 1} tokens; write a form that ends"
                )
            if output.finished:
                response.finish_reason = drawn.finish_reason
                self._ended.append(self._pop(name))

    def _reseed(self) -> None:
        """Seed the generators for the next draw of each request."""
        for name, (request, response) in self._running.items():
            state = (self._states or {}).get(name)
            if state is not None and state.generator is not None:
                position = request.first_position + len(response.token_ids)
                state.generator.manual_seed(position_seed(request.seed, position))

    def abort(self, request_ids: Iterable[str]) -> list[Response]:
        wanted = set(request_ids)
        names = [name for name, (request, _) in self._running.items() if request.request_id in wanted]
        self._engine.abort_request(names, internal=True)
        ended = [response for response in self._ended if response.request_id in wanted]
        self._ended = [response for response in self._ended if response.request_id not in wanted]
        return [*ended, *map(self._pop, names)]

    def _pop(self, name: str) -> Response:
        _, response = self._running.pop(name)
        response.routes = self._routes.take(name) if self._routes else None
        return response


def _sampling_params(sampling: SamplingSettings, seed: int) -> Any:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        max_tokens=sampling.max_tokens,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        seed=seed,
        stop=list(sampling.stop_strings),
        stop_token_ids=list(sampling.stop_token_ids),
        ignore_eos=True,  # only the settings' stop tokens end a response
        logprobs=0,
        structured_outputs=None if sampling.structure is None else structured_params(sampling.structure),
        detokenize=bool(sampling.stop_strings),
        skip_special_tokens=False,  # stop strings may contain special tokens such as <|im_end|>
        output_kind=RequestOutputKind.DELTA,
    )
