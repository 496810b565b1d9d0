"""A vLLM engine inside the rank's own process, whose weights and KV cache can release their memory.

All ranks of an engine run the same requests in the same steps (vLLM's external launcher); every request has its own
seed, so that tensor-parallel peers, which sample independently, draw equal tokens.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hybridengine.backends.engine import Request, Response
from hybridengine.backends.vision import VisionTower, image_places
from hybridengine.backends.vllm.adapters import (
    LoadedAdapters,
    activate,
    base_name,
    lora_options,
    scaled,
    slots,
)
from hybridengine.backends.vllm.construction import (
    EngineSettings,
    build_llm,
    prepare_pipeline,
    process_state_kept,
)
from hybridengine.backends.vllm.ends import unused_ends_dropped
from hybridengine.backends.vllm.groups import install_groups
from hybridengine.backends.vllm.host_segments import HostSegments
from hybridengine.backends.vllm.latent import own_parameters, rotate_all_heads, view_absorbed
from hybridengine.backends.vllm.quantized import QuantizedWeights
from hybridengine.backends.vllm.requests import RunningRequests
from hybridengine.backends.vllm.routes import RequestRoutes, routes_cached
from hybridengine.backends.vllm.sleeping import CuMemSegments, SleepingWeights
from hybridengine.backends.vllm.supports import RequestSupports
from hybridengine.errors import DataError, StorageError
from hybridengine.importing import nothing_collected
from hybridengine.models.shapes import ModelShape
from hybridengine.reshard.layout import Layout
from hybridengine.reshard.vllm import vllm_layout
from hybridengine.topology.generation import GenerationGrid
from hybridengine.weights.storage import WeightStorage, return_memory_to_system


class VllmEngine:
    """One rank's part of a generation engine (`backends.engine.Engine`). All ranks of the world construct it together.

    Args:
        folder: checkpoint folder, of which only `config.json` is read; a switch fills in the weights.
        identity: name of the job in shared memory.
        tower: vision tower for a model that reads images.
    """

    def __init__(
        self,
        folder: str | Path,
        shape: ModelShape,
        generation: GenerationGrid,
        settings: EngineSettings,
        identity: str,
        tower: VisionTower | None = None,
    ) -> None:
        num_loaded = settings.num_loaded_adapters
        self.layout: Layout = vllm_layout(shape, generation, not num_loaded)
        on_gpu = torch.cuda.is_available()
        if settings.cuda_graphs is None:
            settings = replace(settings, cuda_graphs=on_gpu)
        stages = shape.gen_stage_layers(generation.train.sizes.pp_size, generation.sizes.pp_size)
        with nothing_collected():  # otherwise vLLM imports them while it builds
            importlib.import_module("vllm.entrypoints.llm")
            importlib.import_module("vllm.v1.engine.core")
        with process_state_kept():
            self._groups = install_groups(generation, identity)
            adapters = None if shape.merges_adapters else shape.adapters
            adapted = vllm_layout(shape, generation) if num_loaded else self.layout
            options = lora_options(adapters, adapted, num_loaded) if adapters else {}
            seen = None
            if shape.vision is not None:
                from hybridengine.backends.vllm import seeing

                seeing.register()
                options |= seeing.OPTIONS
                if tower is not None:
                    seen = functools.partial(seeing.with_images, vision=shape.vision, tower=tower)
            with contextlib.ExitStack() as stack:
                stack.enter_context(unused_ends_dropped(tied=shape.tied_embeddings))
                caches = stack.enter_context(routes_cached(shape)) if settings.keep_routes else []
                if adapters and not num_loaded:  # vLLM scales those that it loads
                    stack.enter_context(scaled(adapters))
                self._llm = build_llm(folder, generation, settings, stages, on_gpu, options)
        self._engine = self._llm.llm_engine
        self._runner = self._engine.model_executor.driver_worker.worker.model_runner
        prepare_pipeline(self._runner, generation)
        self._loaded = LoadedAdapters(self._runner, on_gpu) if num_loaded else None
        adapter = activate(self._runner, adapters) if adapters and not num_loaded else None
        self.weights = self._make_weights(on_gpu and bool(settings.cuda_graphs), on_gpu)
        if settings.quantization != "none":
            self.weights = QuantizedWeights(self.weights, self._runner.model_config.dtype)
        self.version = 0
        """Version of the weights that produce the next tokens."""
        self._caches = _cache_storages([*self._runner.kv_caches, *(cache.experts_SLK for cache in caches)])
        routes = RequestRoutes(self._engine, caches[0]) if caches else None
        self.no_routes = None if routes is None else routes.none
        """Experts of no tokens, [0, L, K]; None unless the engine keeps them."""
        supports = (
            RequestSupports(self._engine, self._runner, shape.vocab_size) if settings.keep_supports else None
        )
        self._requests = RunningRequests(
            self._engine, self._runner, routes, supports, adapter, self._loaded, seen
        )
        self._settings, self.vocab_size, self._vision = settings, shape.vocab_size, tower and shape.vision
        self._is_ready = True

    def _make_weights(self, sleeps: bool, on_gpu: bool) -> WeightStorage:
        model = self._runner.model
        if on_gpu and not sleeps:
            view_absorbed(model)
            return WeightStorage(self._parameters(), current=self._parameters)
        whole = {**own_parameters(model), **self._slots()}
        segments = CuMemSegments(whole.values()) if on_gpu else HostSegments(whole)
        view_absorbed(model)
        if not on_gpu:
            rotate_all_heads(model)
        kept = [*model.buffers(), *(slots(model).values() if self._loaded else ())]
        return SleepingWeights(self._parameters(), kept, segments, self._parameters)

    def _slots(self) -> dict[str, Tensor]:
        """Return the memory of adapters that a switch fills; that of loaded ones stays."""
        return {} if self._loaded else slots(self._runner.model)

    def _parameters(self) -> dict[str, Tensor]:
        """Return the model's parameters by their names in the layout: those of experts one by one."""
        model = self._runner.model
        found: dict[str, Tensor] = {name: slot[0, 0] for name, slot in self._slots().items()}
        for name, parameter in own_parameters(model).items():
            if parameter.dim() < 3:
                found[base_name(name)] = parameter
            else:
                found |= {f"{name}[{place}]": part for place, part in enumerate(parameter)}
        return found

    @property
    def kv_cache_bytes(self) -> int:
        """Bytes currently owned by the KV cache."""
        if self._settings.cuda_graphs and not self._is_ready:
            return 0  # its storages keep their addresses
        return sum(storage.nbytes() for storage, _ in self._caches)

    @property
    def num_unfinished(self) -> int:
        """Number of unfinished requests."""
        return len(self._requests)

    @property
    def max_running(self) -> int:
        """Largest number of requests that run at once."""
        return self._settings.max_sequences

    @property
    def waiting(self) -> list[str]:
        """Ids of the requests that wait for a slot or for room in the KV cache, in the order in which they will run."""
        return self._requests.waiting

    def leave_generation(self) -> None:
        """Release the KV cache; the HybridEngine releases the weights. Unfinished requests are recomputed later."""
        self._is_ready = False
        self._forget_kv()
        if self._settings.cuda_graphs:
            # not release_kv_cache_memory(): it refuses while the scheduler remembers requests that have ended
            self._engine.model_executor.discard(("kv_cache",))
        else:
            for storage, _ in self._caches:
                storage.resize_(0)
        return_memory_to_system()  # otherwise the trainer's weights take places in the cache's segment, and pin it

    def enter_generation(self, version: int) -> None:
        """Reallocate the KV cache, zeroed without graphs; the weights are those of `version` now."""
        return_memory_to_system()  # one allocation, too large for the gaps of the caching allocator
        if self._settings.cuda_graphs:
            self._llm.wake_up(tags=["kv_cache"])
        else:
            for storage, num_bytes in self._caches:
                storage.resize_(num_bytes)
                torch.tensor([], dtype=torch.uint8, device=storage.device).set_(storage).zero_()
        self.version, self._is_ready = version, True

    def settle(self) -> None:
        """Finish steps in flight, before the weights change."""
        self._groups.use()
        self._requests.settle(self.version)

    def weights_changed(self, version: int, keep_kv: bool) -> None:
        """Continue with weights of `version` that were written in generation mode (`Engine`)."""
        if not keep_kv:
            self._forget_kv()
        self.version = version

    def _forget_kv(self) -> None:
        """Drop cached prefixes, which would survive a weight change, and recompute unfinished requests."""
        self.settle()
        self._engine.reset_prefix_cache(reset_running_requests=True)

    def add(self, requests: Sequence[Request]) -> None:
        """Queue requests: either all of them or none; raises as `Engine.add` does."""
        self._expect_weights()
        taken = self._requests.ids
        for request in requests:
            self._check(request, taken)
            taken.add(request.request_id)
        self._requests.add(requests, self.version)

    def _check(self, request: Request, taken: set[str]) -> None:
        sampling, name = request.sampling, request.request_id
        if sampling.adapter and self._loaded is None:
            raise DataError(
                f"request {name!r} has adapter={sampling.adapter!r}, and the engine loads none; leave it out, or build"
                " the engine with num_loaded_adapters"
            )
        if name in taken:
            raise DataError(f"the engine has a request {name!r} already; give each an id of its own")
        longest = self._settings.max_model_tokens - sampling.max_tokens
        if not 1 <= len(request.prompt_token_ids) <= longest:
            raise DataError(
                f"the prompt of request {name!r} has {len(request.prompt_token_ids)} tokens, and its response up to"
                f" {sampling.max_tokens}; the engine takes prompts of 1 to {longest}"
            )
        named = {"prompt": request.prompt_token_ids, "stop_token_ids": sampling.stop_token_ids}
        for what, tokens in named.items():
            unknown = [token for token in tokens if not 0 <= token < self.vocab_size]
            if unknown:
                raise DataError(
                    f"the {what} of request {name!r} has the token {unknown[0]}, and the model knows tokens from 0 to"
                    f" {self.vocab_size - 1}; take tokens of the model's own tokenizer"
                )
        if request.images and self._vision is None:
            raise DataError(
                f"request {name!r} has images, and the engine reads none; leave them out, or build it with the vision"
                " tower of a model such as Qwen2.5-VL"
            )
        if self._vision is not None:
            image_places(request.prompt_token_ids, request.images, self._vision)
        if sampling.reads_text and self._settings.tokenizer is None:
            found = f"stop_strings={list(sampling.stop_strings)}" if sampling.stop_strings else "a structure"
            raise DataError(
                f"request {name!r} has {found}, and the engine has no tokenizer to find them; build the engine with"
                " one, or give stop_token_ids"
            )

    def advance(self, num_steps: int = 1) -> list[Response]:
        """Take up to `num_steps` engine steps, while requests are unfinished; return the responses that have ended."""
        self._expect_weights()
        self._groups.use()
        ended: list[Response] = []
        for _ in range(num_steps):
            if self._requests:
                ended += self._requests.step(self.version)
        return ended

    def progress(self) -> list[Response]:
        """Return the tokens drawn so far for each request whose response `advance` has not returned."""
        return self._requests.progress()

    def abort(self, request_ids: Iterable[str]) -> list[Response]:
        """Drop requests whose responses `advance` has not returned; return the tokens drawn for each so far."""
        return self._requests.abort(request_ids)

    def _expect_weights(self) -> None:
        if not self._is_ready:
            raise StorageError("the engine has no weights in training mode; switch to generation first")


def _cache_storages(caches: Sequence[Any]) -> list[tuple[torch.UntypedStorage, int]]:
    """Return every storage behind the KV cache tensors, once, with its size."""
    tensors = [one for cache in caches for one in (cache if isinstance(cache, list | tuple) else [cache])]
    storages = {storage._cdata: storage for storage in (tensor.untyped_storage() for tensor in tensors)}
    return [(storage, storage.nbytes()) for storage in storages.values()]
