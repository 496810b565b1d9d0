"""Measurement of a server's own time per request: each kind of request in turn, through the Tinker SDK."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import tinker
import torch
from tinker import types

from hybridengine.bench.serve.server import KEY, MODEL, SWITCH, ServerProcess, running_server
from hybridengine.bench.serve.spec import KINDS, STEP, TOGETHER, WARM_UP_ROUNDS, ServeSpec, Timing
from hybridengine.bench.step.own import StepFiles, prepare_step
from hybridengine.bench.step.spec import StepSpec
from hybridengine.errors import WorkerError
from hybridengine.temporary import temporary_folder

ADAM = types.AdamParams(learning_rate=1e-6, beta1=0.9, beta2=0.95, eps=1e-8)
SPARE_TOKENS = 1


def measure_serve(config_file: str, spec: ServeSpec, say: Callable[[str], None]) -> list[dict[str, Timing]]:
    """Start a server on the model of a configuration and return the timings of each round by kind of request.

    Raises:
        ConfigError, CheckpointError, DataError: the model or the prompts cannot be used.
        WorkerError: the server failed, or did other work than was asked for.
    """
    os.environ.setdefault("TINKER_TELEMETRY", "0")
    with temporary_folder("serve") as folder:
        work = StepSpec(
            spec.num_samples, 1, spec.response_tokens, "float32", spec.repetitions, spec.timeout_s
        )
        files = prepare_step(config_file, work, folder)
        say(f"starting a server: {spec.train} / {spec.gen}")
        with running_server(folder / "server", server_sections(spec, files), spec.timeout_s) as server:
            service = tinker.ServiceClient(base_url=server.url, api_key=KEY)
            try:
                return list(_rounds(spec, files, server, service, say))
            finally:
                service.close("success").result()


def server_sections(spec: ServeSpec, files: StepFiles) -> dict[str, Any]:
    """Return the sections of the server's configuration."""
    longest = max(map(len, files.prompts.tokens))
    return {
        "cluster": {"ranks_per_node": [spec.train.num_ranks]},
        "model": {"path": str(files.model), "tokenizer": str(files.tokenizer)},
        "actor": {"parallel": str(spec.train), "generate": str(spec.gen)},
        "rollout": {"max_prompt_tokens": longest, "max_response_tokens": spec.response_tokens + SPARE_TOKENS},
        "timeouts": {"start_s": spec.timeout_s, "call_s": spec.timeout_s},
    }


def _rounds(
    spec: ServeSpec,
    files: StepFiles,
    server: ServerProcess,
    service: tinker.ServiceClient,
    say: Callable[[str], None],
) -> Iterator[dict[str, Timing]]:
    model = service.create_lora_training_client(MODEL, rank=0).result()
    rows = [files.prompts.tokens[row] for row in files.step_rows(spec.num_samples, 1)]
    prompts = [types.ModelInput.from_ints([*map(int, row)]) for row in rows]
    for number in range(WARM_UP_ROUNDS + spec.repetitions):
        kinds = _requests(spec, model, prompts, seed=1000 * number)
        timings = {}
        for kind in KINDS:
            server.take_calls()
            begin = time.perf_counter()
            kinds[kind]()
            seconds = time.perf_counter() - begin
            calls = server.take_calls()
            timings[kind] = Timing(seconds, calls.seconds, calls.count[SWITCH], calls.count.total())
        if number >= WARM_UP_ROUNDS:
            yield timings
            own = ", ".join(f"{kind} {1000 * timings[kind].server_s:.0f}" for kind in KINDS)
            say(f"{number + 1 - WARM_UP_ROUNDS} of {spec.repetitions}: the server's own ms: {own}")


def _requests(
    spec: ServeSpec, model: tinker.TrainingClient, prompts: Sequence[types.ModelInput], seed: int
) -> Mapping[str, Callable[[], object]]:
    """Return a function for each kind, which sends its requests and waits for their results."""
    drawn: list[types.SampledSequence] = []

    def sampler() -> tinker.SamplingClient:
        return model.save_weights_and_get_sampling_client().result()

    def sample(client: tinker.SamplingClient, chosen: Sequence[types.ModelInput]) -> None:
        futures = []
        for place, prompt in enumerate(chosen):
            # without stop tokens, also the tokenizer's
            params = types.SamplingParams(max_tokens=spec.response_tokens, seed=seed + place, stop=[])
            futures.append(client.sample(prompt, 1, params))
        drawn[:] = [future.result().sequences[0] for future in futures]
        if any(len(one.tokens) != spec.response_tokens for one in drawn):
            raise WorkerError("the server has drawn responses of another length than was asked for")

    def data() -> list[types.Datum]:
        return [_datum(prompt, response) for prompt, response in zip(prompts, drawn, strict=True)]

    def step() -> None:
        sample(sampler(), prompts)
        passed = model.forward_backward(data(), "importance_sampling")
        stepped = model.optim_step(ADAM)
        passed.result()
        stepped.result()

    client = sampler()
    return {
        "asample": lambda: sample(client, prompts[:1]),
        TOGETHER: lambda: sample(client, prompts),
        "compute_logprobs": lambda: client.compute_logprobs(prompts[0]).result(),
        "forward_backward": lambda: model.forward_backward(data(), "importance_sampling").result(),
        "optim_step": lambda: model.optim_step(ADAM).result(),
        STEP: step,
    }


def _datum(prompt: types.ModelInput, response: types.SampledSequence) -> types.Datum:
    """Return the row of a policy gradient: the advantage is 1 on the response and 0 on the prompt."""
    whole = [*prompt.to_ints(), *map(int, response.tokens)]
    before = prompt.length - 1
    log_probs = torch.tensor([0.0] * before + [*map(float, response.logprobs or ())])
    advantages = torch.tensor([0.0] * before + [1.0] * len(response.tokens))
    return types.Datum(
        model_input=types.ModelInput.from_ints(whole[:-1]),
        loss_fn_inputs={
            "target_tokens": types.TensorData.from_torch(torch.tensor(whole[1:])),
            "logprobs": types.TensorData.from_torch(log_probs),
            "advantages": types.TensorData.from_torch(advantages),
        },
    )
