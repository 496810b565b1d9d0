"""Calls of the Tinker SDK that a server has to refuse: `python bad_calls.py` prints their errors as JSON."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import tinker
import torch
from tinker import types

TOKENS = [2, 40, 41, 42, 43]
TOO_LONG = [40] * 400
TARGETS, WEIGHTS = torch.tensor(TOKENS[1:]), torch.ones(len(TOKENS) - 1)
BAD_ROWS: dict[str, tuple[Any, list[int], dict[str, torch.Tensor]]] = {
    "loss": ("mystery", TOKENS, {"target_tokens": TARGETS, "weights": WEIGHTS}),
    "shape": ("cross_entropy", TOKENS, {"target_tokens": TARGETS, "weights": WEIGHTS[:-1]}),
    "dtype": ("cross_entropy", TOKENS, {"target_tokens": TARGETS.float(), "weights": WEIGHTS}),
    "vocabulary": ("cross_entropy", TOKENS, {"target_tokens": TARGETS + 10**6, "weights": WEIGHTS}),
    "row": (
        "cross_entropy",
        TOO_LONG,
        {"target_tokens": torch.tensor(TOO_LONG[1:]), "weights": torch.ones(len(TOO_LONG) - 1)},
    ),
}
"""Loss, tokens and columns of a row, by what is wrong with it."""


def main() -> dict[str, Any]:
    service = tinker.ServiceClient()
    try:
        (served,) = service.get_server_capabilities().supported_models
        name = served.model_name
        assert name is not None
        base = service.create_sampling_client(base_model=name)
        found: dict[str, Any] = {"errors": {}, "good": []}

        def attempt(problem: str, call: Callable[[], Any]) -> None:
            try:
                call()
            except tinker.TinkerError as error:
                category = str(getattr(error, "category", ""))
                found["errors"][problem] = [type(error).__name__, category, str(error)]
            found["good"].append(base.compute_logprobs(types.ModelInput.from_ints(TOKENS)).result())

        for problem, (loss, tokens, columns) in BAD_ROWS.items():
            model = service.create_lora_training_client(name, rank=0).result()  # the earlier one was stopped
            inputs: Any = columns
            datum = types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs)
            attempt(problem, model.forward_backward([datum], loss).result)

        model = service.create_lora_training_client(name, rank=0).result()
        one = types.SamplingParams(max_tokens=1)
        prompt = types.ModelInput.from_ints(TOO_LONG)
        attempt("prompt", base.sample(prompt, num_samples=1, sampling_params=one).result)
        attempt("state", model.save_state("../../outside").result)
        attempt("sampler", model.save_weights_for_sampler("/outside").result)
        outside = "tinker://a/weights/../../../outside"
        attempt("load", lambda: service.create_training_client_from_state(outside).result())
        short = types.ModelInput.from_ints(TOKENS)
        attempt(
            "source",
            lambda: service.create_sampling_client(model_path=outside).compute_logprobs(short).result(),
        )
        attempt(
            "key",
            lambda: tinker.ServiceClient(api_key="tml-other").create_lora_training_client(name).result(),
        )
        loss, tokens, columns = BAD_ROWS["loss"]
        inputs = columns
        good = types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs)
        passed = model.forward([good], "cross_entropy").result()  # a failed save does not stop the model
        found["passed"] = passed.loss_fn_outputs[0]["logprobs"].tolist()
        return found
    finally:
        service.close("success").result()


if __name__ == "__main__":
    print(json.dumps(main()), flush=True)
