"""Calls of the `openai` package: `python openai_calls.py PART` prints its results as JSON."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

import openai

QUESTION: Any = [{"role": "user", "content": "What is 3 + 8?"}]
TRAINED_ANSWER, END = "200", "<|im_end|>"
"""Answer that only training can explain, and the end of a turn."""


def served(client: openai.OpenAI) -> str:
    (model,) = client.models.list().data
    return model.id


def answers(client: openai.OpenAI) -> dict[str, Any]:
    """Return responses of all endpoints with the settings that agents use."""
    name = served(client)
    chat = client.chat.completions.create(
        model=name,
        messages=QUESTION,
        n=3,
        seed=7,
        max_tokens=4,
        logprobs=True,
        top_logprobs=2,
        extra_body={"return_token_ids": True},
    )
    again = client.chat.completions.create(model=name, messages=QUESTION, n=3, seed=7, max_tokens=4)
    greedy = [
        client.chat.completions.create(model=name, messages=QUESTION, temperature=0, max_tokens=4)
        for _ in range(2)
    ]
    prompt_ids = (chat.model_extra or {})["prompt_token_ids"]
    completion = client.completions.create(
        model=name,
        prompt=prompt_ids,
        logprobs=2,
        max_tokens=4,
        temperature=0,
        extra_body={"return_token_ids": True},
    )
    several = client.completions.create(
        model=name, prompt=[prompt_ids, prompt_ids[:5]], n=2, max_tokens=1, temperature=0
    )
    return {
        "models": client.models.list().model_dump(),
        "chat": chat.model_dump(),
        "again": [choice.message.content for choice in again.choices],
        "greedy": [each.choices[0].message.content for each in greedy],
        "completion": completion.model_dump(),
        "several": [choice.text for choice in several.choices],
    }


def refusals(client: openai.OpenAI) -> dict[str, Any]:
    """Return the exceptions of calls that the server refuses, by what is wrong with them."""
    name = served(client)

    def chat(**arguments: Any) -> Callable[[], Any]:
        return lambda: client.chat.completions.create(
            **({"model": name, "messages": QUESTION, "max_tokens": 2} | arguments)
        )

    tool: Any = {
        "type": "function",
        "function": {"name": "add", "parameters": {"type": "object", "properties": {}}},
    }
    calls: dict[str, Callable[[], Any]] = {
        "key": lambda: client.with_options(api_key="tml-other").models.list(),
        "model": chat(model="gpt-6"),
        "tools": chat(tools=[tool]),
        "stream": chat(stream=True),
        "length": chat(messages=[{"role": "user", "content": "a" * 400}]),
        "max_tokens": chat(max_tokens=0),
        "temperature": chat(temperature=-1.0),
        "echo": lambda: client.completions.create(model=name, prompt="1", echo=True, max_tokens=1),
        "token_id": lambda: client.completions.create(model=name, prompt=[1, 10**6], max_tokens=1),
        "endpoint": lambda: client.embeddings.create(model=name, input="1"),
    }
    found: dict[str, Any] = {}
    for problem, call in calls.items():
        try:
            call()
        except openai.APIStatusError as error:
            body: Any = error.body
            found[problem] = {"class": type(error).__name__, "status": error.status_code} | body
    found["good"] = chat()().choices[0].finish_reason
    return found


def training(client: openai.OpenAI) -> dict[str, Any]:
    """Return greedy answers before and after a Tinker client trains, and log-probs of samples by both clients."""
    import tinker
    import torch
    from tinker import types

    name = served(client)

    def chat(**settings: Any) -> Any:
        return client.chat.completions.create(
            model=name, messages=QUESTION, extra_body={"return_token_ids": True}, **settings
        )

    service = tinker.ServiceClient()
    try:
        model = service.create_lora_training_client(name, rank=0).result()
        before = chat(temperature=0, max_tokens=4)
        prompt = before.model_extra["prompt_token_ids"]
        target: Any = client.completions.create(  # the tokens of a text, by the server
            model=name,
            prompt=TRAINED_ANSWER + END,
            max_tokens=1,
            extra_body={"return_token_ids": True},
        )
        tokens = [*prompt, *target.choices[0].prompt_token_ids]
        weights = torch.zeros(len(tokens) - 1)
        weights[len(prompt) - 1 :] = 1
        inputs: Any = {"target_tokens": torch.tensor(tokens[1:]), "weights": weights}
        datum = types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs)
        losses = []
        while not losses or losses[-1] > 0.4:
            passed = model.forward_backward([datum], "cross_entropy")
            model.optim_step(types.AdamParams(learning_rate=1e-3)).result()
            losses.append(passed.result().metrics["loss:sum"])
            assert len(losses) < 50, losses
        after = chat(temperature=0, max_tokens=4)
        cut = chat(temperature=0, max_tokens=4, stop=TRAINED_ANSWER[1])
        short = chat(temperature=0, max_tokens=1)
        drawn = chat(n=8, seed=3, max_tokens=4, logprobs=True)
        sampler = model.save_weights_and_get_sampling_client().result()
        computed = [
            sampler.compute_logprobs(types.ModelInput.from_ints([*prompt, *choice.token_ids])).result()
            for choice in drawn.choices
        ]
        return {
            "before": before.choices[0].message.content,
            "after": after.choices[0].message.content,
            "stopped": [cut.choices[0].message.content, cut.choices[0].finish_reason],
            "short": [short.choices[0].message.content, short.choices[0].finish_reason],
            "losses": losses,
            "tokens": [choice.token_ids for choice in drawn.choices],
            "drawn": [[each.logprob for each in choice.logprobs.content] for choice in drawn.choices],
            "computed": [values[len(prompt) :] for values in computed],
        }
    finally:
        service.close("success").result()


if __name__ == "__main__":
    parts = {"answers": answers, "refusals": refusals, "training": training}
    print(
        json.dumps(parts[sys.argv[1]](openai.OpenAI(max_retries=0)) | {"version": openai.__version__}),
        flush=True,
    )
