"""Calls of the Tinker SDK, for the client's Python: `python sdk_calls.py PART ARGUMENTS` prints its results as JSON."""

from __future__ import annotations

import json
import sys
from typing import Any

import tinker
import torch
from tinker import types

TOKENS = [[2, 40, 41, 42, 43, 44], [2, 50, 60, 70], [2, 80, 81, 82, 83]]
ADAM = types.AdamParams(learning_rate=1e-3, beta1=0.9, beta2=0.95, eps=1e-8)
LOSSES: dict[types.LossFnType, tuple[str, ...]] = {
    "cross_entropy": ("weights",),
    "importance_sampling": ("logprobs", "advantages"),
    "ppo": ("logprobs", "advantages"),
    "cispo": ("logprobs", "advantages"),
    "dro": ("logprobs", "advantages"),
    "gspo": ("logprobs", "advantages", "sequence_ratio_mask"),
}


def data_of(loss: types.LossFnType, shift: int = 0) -> list[types.Datum]:
    """Return the rows of a loss; `shift` makes those of another step."""
    data = []
    for number, tokens in enumerate(TOKENS):
        moved = [token + shift for token in tokens]
        length = len(moved) - 1
        columns = {
            "weights": torch.linspace(-0.5, 1.0, length),
            "logprobs": torch.linspace(-6.0, -5.0, length),
            "advantages": torch.linspace(1.0, -0.5, length) * (1 + number),
            "sequence_ratio_mask": torch.ones(length),
        }
        inputs: dict[str, Any] = {"target_tokens": torch.tensor(moved[1:])}
        inputs |= {name: columns[name] for name in LOSSES[loss]}
        data.append(types.Datum(model_input=types.ModelInput.from_ints(moved[:-1]), loss_fn_inputs=inputs))
    return data


def model_of(service: tinker.ServiceClient) -> tinker.TrainingClient:
    (served,) = service.get_server_capabilities().supported_models
    assert served.model_name is not None
    return service.create_lora_training_client(served.model_name, rank=0).result()


def passed(output: types.ForwardBackwardOutput) -> dict[str, Any]:
    return {
        "logprobs": [row["logprobs"].tolist() for row in output.loss_fn_outputs],
        "metrics": output.metrics,
    }


def losses(service: tinker.ServiceClient) -> dict[str, Any]:
    """One step on the sum of all losses, with a sample in between, and the stepped weights under a name."""
    model = model_of(service)
    found: dict[str, Any] = {"model_id": model.model_id, "info": model.get_info().model_data.model_name}
    found["forward"] = passed(model.forward(data_of("cross_entropy"), "cross_entropy").result())
    futures = {loss: model.forward_backward(data_of(loss), loss) for loss in LOSSES}
    sampler = model.save_weights_and_get_sampling_client()
    stepped = model.optim_step(ADAM)
    found |= {loss: passed(future.result()) for loss, future in futures.items()}
    found["step"] = stepped.result().metrics
    found["sampler_weights"] = model.save_weights_for_sampler("stepped").result().path
    del sampler
    return found


def custom(service: tinker.ServiceClient) -> dict[str, Any]:
    """A loss of the client's own, equal to cross_entropy with weights of 1: both give the same step."""
    model = model_of(service)

    def loss(_: list[types.Datum], log_probs: list[torch.Tensor]) -> tuple[torch.Tensor, dict[str, float]]:
        total = -torch.cat(log_probs).sum()
        return total, {"own:sum": total.item()}

    data = data_of("cross_entropy")
    for datum in data:
        weights = torch.ones(len(datum.loss_fn_inputs["weights"].data))
        datum.loss_fn_inputs["weights"] = types.TensorData.from_torch(weights)
    start = model.save_state("start").result().path
    found: dict[str, Any] = {"custom": passed(model.forward_backward_custom(data, loss).result())}
    model.optim_step(ADAM).result()
    found["after_custom"] = passed(model.forward(data, "cross_entropy").result())
    model.load_state_with_optimizer(start).result()
    found["built_in"] = passed(model.forward_backward(data, "cross_entropy").result())
    model.optim_step(ADAM).result()
    found["after_built_in"] = passed(model.forward(data, "cross_entropy").result())
    return found


def sampling(service: tinker.ServiceClient) -> dict[str, Any]:
    """Samples of the base model, of a model that has stepped, and of its saved weights."""
    (served,) = service.get_server_capabilities().supported_models
    model = model_of(service)
    base = service.create_sampling_client(base_model=served.model_name)
    prompt = types.ModelInput.from_ints([2, 40, 41, 42])
    params = types.SamplingParams(max_tokens=4, seed=7, temperature=1.0, stop=[3])

    def drawn(sampler: tinker.SamplingClient) -> dict[str, Any]:
        answer = sampler.sample(
            prompt,
            num_samples=3,
            sampling_params=params,
            include_prompt_logprobs=True,
            topk_prompt_logprobs=2,
        ).result()
        return {
            "tokens": [[*map(int, one.tokens)] for one in answer.sequences],
            "logprobs": [[*map(float, one.logprobs or ())] for one in answer.sequences],
            "prompt_logprobs": answer.prompt_logprobs,
            "top": answer.topk_prompt_logprobs,
        }

    found: dict[str, Any] = {"base": drawn(base)}
    whole = types.ModelInput.from_ints([2, 40, 41, 42, *found["base"]["tokens"][0]])
    found["computed"] = base.compute_logprobs(whole).result()
    live = model.save_weights_and_get_sampling_client().result()
    found["before"] = drawn(live)
    for shift in range(3):
        model.forward_backward(data_of("cross_entropy", shift), "cross_entropy")
        model.optim_step(ADAM).result()
    found["after"] = drawn(model.save_weights_and_get_sampling_client().result())
    path = model.save_weights_for_sampler("three").result().path
    state = model.save_state("three").result().path
    model.forward_backward(data_of("cross_entropy", 5), "cross_entropy")
    model.optim_step(ADAM).result()
    found["saved"] = drawn(service.create_sampling_client(model_path=path))
    found["base_again"] = drawn(base)
    model.load_state(state).result()
    found["loaded"] = drawn(model.save_weights_and_get_sampling_client().result())
    return found


def steps(service: tinker.ServiceClient, number: str) -> dict[str, Any]:
    """Steps, each told by a line when it is done, and the weights after the last one under a name."""
    model = model_of(service)
    for step in range(int(number)):
        model.forward_backward(data_of("ppo", step), "ppo")
        model.forward_backward(data_of("cross_entropy", step), "cross_entropy")
        model.optim_step(ADAM).result()
        if step == 1:
            model.save_state("two").result()
        print(f"step {step + 1}", flush=True)
    return {"model_id": model.model_id, "path": model.save_weights_for_sampler("end").result().path}


if __name__ == "__main__":
    service = tinker.ServiceClient()
    try:
        parts = {"losses": losses, "custom": custom, "sampling": sampling, "steps": steps}
        print(json.dumps(parts[sys.argv[1]](service, *sys.argv[2:])), flush=True)
    finally:
        service.close("success").result()
