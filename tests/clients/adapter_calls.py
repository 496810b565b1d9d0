"""Calls of the Tinker SDK with adapters, for the client's Python: `python adapter_calls.py PART MODELS` prints JSON."""

from __future__ import annotations

import json
import sys
from typing import Any

import tinker
from sdk_calls import data_of
from tinker import types

ADAM = types.AdamParams(learning_rate=1e-2, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.01)
STEPS = 4
WANTED: dict[str, dict[str, Any]] = {
    "first": {"rank": 8, "seed": 1},
    "second": {"rank": 3, "seed": 2, "train_attn": False},
}
"""Models, which train on data of their own."""
SHIFTS = {"first": 0, "second": 11}


def model_name(service: tinker.ServiceClient) -> str:
    (served,) = service.get_server_capabilities().supported_models
    assert served.model_name is not None
    return served.model_name


def model_of(service: tinker.ServiceClient, which: str) -> tinker.TrainingClient:
    return service.create_lora_training_client(model_name(service), **WANTED[which]).result()


def data(which: str) -> list[types.Datum]:
    """Return rows whose tokens are all to become likelier."""
    rows = data_of("cross_entropy", SHIFTS[which])
    for row in rows:
        row.loss_fn_inputs["weights"] = types.TensorData(
            data=[1.0] * row.model_input.length, dtype="float32", shape=[row.model_input.length]
        )
    return rows


def drawn(samplers: dict[str, tinker.SamplingClient]) -> dict[str, Any]:
    """Return two samples of each sampler, asked for at once, and the log-probs of one prompt."""
    prompt = types.ModelInput.from_ints([2, 40, 41])
    params = types.SamplingParams(max_tokens=8, seed=7, temperature=1.0)
    futures = {
        name: [
            one.sample(prompt, num_samples=2, sampling_params=params),
            one.sample(prompt, num_samples=1, sampling_params=params, include_prompt_logprobs=True),
        ]
        for name, one in samplers.items()
    }
    found = {}
    for name, (plain, scored) in futures.items():
        found[name] = {
            "tokens": [[*map(int, one.tokens)] for one in plain.result().sequences],
            "logprobs": [[*map(float, one.logprobs or ())] for one in plain.result().sequences],
            "prompt_logprobs": scored.result().prompt_logprobs,
        }
    return found


def together(service: tinker.ServiceClient, *wanted: str) -> dict[str, Any]:
    """Steps of models at a time, the gradients of all before each one's step, and samples of all and of the base."""
    models = {name: model_of(service, name) for name in wanted}
    base = service.create_sampling_client(base_model=model_name(service))
    found: dict[str, Any] = {
        name: {"losses": [], "info": model.get_info().lora_rank} for name, model in models.items()
    }
    early = {}
    for step in range(STEPS):
        passes = {name: model.forward_backward(data(name), "cross_entropy") for name, model in models.items()}
        for name, future in passes.items():
            found[name]["losses"].append(future.result().metrics["loss:sum"])
        for model in models.values():
            model.optim_step(ADAM).result()
        if step == 1:
            models[wanted[0]].save_state("two").result()
            early = {
                name: model.save_weights_and_get_sampling_client().result() for name, model in models.items()
            }
            found["early"] = drawn({"base": base, **early})
        print(f"step {step + 1}", flush=True)
    for name, model in models.items():
        found[name] |= {"path": model.save_weights_for_sampler("end").result().path, "id": model.model_id}
    saved = {name: service.create_sampling_client(model_path=found[name]["path"]) for name in models}
    again = {f"early {name}": one for name, one in early.items()}
    found["late"] = drawn({"base": base, **saved, **again})
    return found


def step_of(model: tinker.TrainingClient, which: str) -> None:
    model.forward_backward(data(which), "cross_entropy").result()
    model.optim_step(ADAM).result()


def states(service: tinker.ServiceClient) -> dict[str, Any]:
    """A model that another one continues from its state, with and without the optimizer's, and one that loads it."""
    model = model_of(service, "second")
    step_of(model, "second")
    state = model.save_state("one").result().path
    step_of(model, "second")
    with_optimizer = service.create_training_client_from_state_with_optimizer(state).result()
    without = service.create_training_client_from_state(state).result()
    found: dict[str, Any] = {"rank": with_optimizer.get_info().lora_rank}
    for one in (with_optimizer, without):
        step_of(one, "second")
    ends = {"on": model, "with": with_optimizer, "without": without}
    found |= {name: one.save_weights_for_sampler("end").result().path for name, one in ends.items()}
    model.load_state_with_optimizer(state).result()
    step_of(model, "second")
    found["loaded"] = model.save_weights_for_sampler("loaded").result().path
    found["refused"] = []
    for call in (
        lambda: service.create_lora_training_client(model_name(service), rank=9).result(),
        lambda: service.create_lora_training_client(model_name(service), rank=0).result(),
        lambda: model_of(service, "first").load_state(state).result(),
        lambda: service.create_sampling_client(model_path=state).result(),
    ):
        try:
            found["refused"].append(f"not refused: {call()}")
        except Exception as error:
            found["refused"].append(str(error))
    return found


def main() -> None:
    service = tinker.ServiceClient()
    try:
        parts = {"together": together, "states": states}
        print(json.dumps(parts[sys.argv[1]](service, *sys.argv[2:])), flush=True)
    finally:
        service.close("success").result()


if __name__ == "__main__":
    main()
