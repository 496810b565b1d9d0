"""Rollouts of a `verifiers` environment: `python verifiers_calls.py PART ARGUMENTS` prints its results as JSON."""

# pyright: reportMissingImports=false
# The clients' environment has the package, the project's does not.

from __future__ import annotations

import asyncio
import json
import os
import sys
from typing import Any

import tinker
import torch
import verifiers.v1 as vf
from tinker import types

NUM_SAMPLES, NUM_STEPS = 8, 2


class TwoTurns(vf.Env[vf.SingleAgentEnvConfig]):
    """The question twice in one conversation, whatever the first reply is."""

    async def run(self, task: vf.Task, agents: vf.Agents) -> None:
        """Play the user."""
        async with agents.agent.interaction(task) as talk:
            await talk.turn()
            await talk.turn(task.data.prompt[-1].content)


def served_model(service: tinker.ServiceClient) -> str:
    (served,) = service.get_server_capabilities().supported_models
    assert served.model_name is not None
    return served.model_name


def environment_config(questions: str) -> vf.SingleAgentEnvConfig:
    return vf.SingleAgentEnvConfig.model_validate(
        {
            "taskset": {"id": "sums", "file": questions},
            "agent": {"harness": {"id": "sums"}, "runtime": {"type": "subprocess"}},
        }
    )


def policy(model: str, tokenizer: str) -> vf.ModelContext:
    """Return the served model as the environment samples from it for training: by token ids."""
    return vf.ModelContext(
        model=model,
        client=vf.TrainClientConfig(
            base_url=os.environ["OPENAI_BASE_URL"],
            api_key_var="OPENAI_API_KEY",
            renderer={"name": "default", "tool_parser": "qwen3"},
            renderer_model_name=tokenizer,
        ),
        sampling=vf.Sampling(temperature=1.0, max_tokens=5),
    )


async def roll_out(env: vf.Env, context: vf.ModelContext, num_samples: int) -> list[list[vf.Trace]]:
    """Return the traces of each task, which are of one agent."""
    async with env.serving():
        slots = [env.slots(task, num_samples) for task in env.taskset]
        done = await asyncio.gather(*(env.run_slot(slot, context) for group in slots for slot in group))
    episodes = iter(done)
    return [[next(episodes).traces[0] for _ in group] for group in slots]


def told(trace: vf.Trace) -> dict[str, Any]:
    (branch,) = trace.branches
    return {
        "answer": trace.task.data.answer,
        "replies": [node.message.content for node in branch.nodes if any(node.mask)],
        "tools": [tool.name for tool in branch.tools],
        "reward": trace.reward,
        "token_ids": branch.token_ids,
        "sampled": branch.sampled_mask,
        "logprobs": branch.logprobs,
        "errors": [error.message for error in trace.errors],
    }


def datum_of(trace: vf.Trace, advantage: float) -> types.Datum:
    """Return a trace as a row of importance_sampling."""
    (branch,) = trace.branches
    mask = torch.tensor(branch.sampled_mask[1:], dtype=torch.float32)
    inputs: Any = {
        "target_tokens": torch.tensor(branch.token_ids[1:]),
        "logprobs": torch.tensor(branch.logprobs[1:]),
        "advantages": advantage * mask,
    }
    return types.Datum(model_input=types.ModelInput.from_ints(branch.token_ids[:-1]), loss_fn_inputs=inputs)


def training(service: tinker.ServiceClient, questions: str, tokenizer: str) -> dict[str, Any]:
    """Train on rollouts of the environment, each of the weights of the step before."""
    name = served_model(service)
    model = service.create_lora_training_client(name, rank=0).result()
    env = vf.load_environment(environment_config(questions))
    context = policy(name, tokenizer)
    found: dict[str, Any] = {"rollouts": [], "computed": []}
    for step in range(NUM_STEPS + 1):
        groups = asyncio.run(roll_out(env, context, NUM_SAMPLES))
        found["rollouts"].append([[told(trace) for trace in group] for group in groups])
        sampler = model.save_weights_and_get_sampling_client().result()
        inputs = [types.ModelInput.from_ints(group[0].branches[0].token_ids) for group in groups]
        futures = [sampler.compute_logprobs(each) for each in inputs]
        found["computed"].append([future.result() for future in futures])
        if step < NUM_STEPS:
            data = []
            for group in groups:
                mean = sum(trace.reward for trace in group) / len(group)
                data += [datum_of(trace, trace.reward - mean) for trace in group]
            model.forward_backward(data, "importance_sampling").result()
            model.optim_step(types.AdamParams(learning_rate=1e-3)).result()
    return found


def two_turns(service: tinker.ServiceClient, questions: str, tokenizer: str) -> dict[str, Any]:
    """Return conversations of two turns with the log-probs of the base model."""
    name = served_model(service)
    env = TwoTurns(environment_config(questions))
    groups = asyncio.run(roll_out(env, policy(name, tokenizer), 1))
    sampler = service.create_sampling_client(base_model=name)
    traces = [trace for group in groups for trace in group]
    futures = [
        sampler.compute_logprobs(types.ModelInput.from_ints(trace.branches[0].token_ids)) for trace in traces
    ]
    return {
        "traces": [told(trace) for trace in traces],
        "computed": [future.result() for future in futures],
    }


if __name__ == "__main__":
    service = tinker.ServiceClient()
    try:
        parts = {"training": training, "two_turns": two_turns}
        print(json.dumps(parts[sys.argv[1]](service, *sys.argv[2:])), flush=True)
    finally:
        service.close("success").result()
