"""Adapters of several clients of the Tinker SDK over one base, on real ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.clients.servers import Server, finish, result_of
from tests.clients.warm_model import write_random_model

pytestmark = pytest.mark.timeout(1800)

CALLS = Path(__file__).with_name("adapter_calls.py")
RANK, ALPHA = 8, 24.0
PROMPT = [2, 40, 41]
NAMES = ("first", "second")


@pytest.fixture(scope="module")
def adapter_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server of adapters on a small model with random weights."""
    folder = tmp_path_factory.mktemp("adapters")
    write_random_model(folder / "model")
    server = Server(
        folder,
        folder / "model",
        actor={"lora": {"rank": RANK, "alpha": ALPHA}},
        serve={"kept_steps": 1, "max_adapters": 4},
    )
    try:
        server.start()
        yield server
    finally:
        server.stop()


@pytest.fixture(scope="module")
def together(adapter_server: Server) -> dict[str, Any]:
    """Results of two models that train at the same time."""
    return result_of(adapter_server.client(CALLS, "together", *NAMES, cwd=adapter_server.folder))


def adapters_of(server: Server, path: str) -> dict[str, torch.Tensor]:
    return load_file(server.saved(path) / "adapter_model.safetensors")


def assert_same(first: Mapping[str, torch.Tensor], second: Mapping[str, torch.Tensor]) -> None:
    assert first.keys() == second.keys()
    for name in first:
        assert torch.equal(first[name], second[name]), name


def merged_log_probs(server: Server, adapters: Mapping[str, torch.Tensor], tokens: list[int]) -> list[float]:
    """Return log-probs of all tokens but the first by transformers, with the adapters added to the weights."""
    model = AutoModelForCausalLM.from_pretrained(server.folder.parent / "model", dtype=torch.float32)
    weights = model.state_dict()
    for name, factor_a in adapters.items():
        if name.endswith("lora_A.weight"):
            layer = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
            weights[f"{layer}.weight"] += ALPHA / RANK * adapters[name.replace("lora_A", "lora_B")] @ factor_a
    with torch.no_grad():
        logits = model(torch.tensor([tokens])).logits[0, :-1]
    return logits.log_softmax(-1).gather(1, torch.tensor(tokens[1:])[:, None])[:, 0].tolist()


def test_models_that_train_at_a_time_are_those_that_train_alone(
    adapter_server: Server, together: dict[str, Any]
) -> None:
    for name in NAMES:
        losses = together[name]["losses"]
        assert losses == sorted(losses, reverse=True)
        assert losses[-1] < 0.8 * losses[0]
        alone = result_of(adapter_server.client(CALLS, "together", name, cwd=adapter_server.folder))
        assert alone[name]["losses"] == losses
        saved = adapters_of(adapter_server, together[name]["path"])
        assert_same(saved, adapters_of(adapter_server, alone[name]["path"]))
        assert together[name]["info"] == {"first": 8, "second": 3}[name]
    used = {name: int((one.norm(dim=1) > 0).sum()) for name, one in saved.items() if "lora_A" in name}
    assert {rows for name, rows in used.items() if "mlp" in name} == {3}
    assert {rows for name, rows in used.items() if "attn" in name} == {0}


def test_samples_are_of_each_ones_adapters_and_of_the_base(
    adapter_server: Server, together: dict[str, Any]
) -> None:
    """All are drawn in one batch, which has as many adapters as the engine; transformers computes the same log-probs."""
    late = together["late"]
    for name in NAMES:
        assert late.pop(f"early {name}") == together["early"][name]
    for name, drawn in late.items():
        adapters = {} if name == "base" else adapters_of(adapter_server, together[name]["path"])
        for tokens, log_probs in zip(drawn["tokens"], drawn["logprobs"], strict=True):
            expected = merged_log_probs(adapter_server, adapters, [*PROMPT, *tokens])
            assert log_probs == pytest.approx(expected[len(PROMPT) - 1 :], abs=1e-4)
            assert drawn["prompt_logprobs"][1:] == pytest.approx(expected[: len(PROMPT) - 1], abs=1e-4)
    assert late["first"]["tokens"] != late["base"]["tokens"]
    assert late["first"]["logprobs"] != late["second"]["logprobs"]
    assert late["base"] == together["early"]["base"]
    for name in NAMES:
        assert together["early"][name]["logprobs"] != late[name]["logprobs"]


def test_a_state_is_continued_by_others_and_refused_where_it_does_not_fit(adapter_server: Server) -> None:
    found = result_of(adapter_server.client(CALLS, "states", cwd=adapter_server.folder))
    end = adapters_of(adapter_server, found["on"])
    assert found["rank"] == 3
    assert_same(end, adapters_of(adapter_server, found["with"]))
    assert_same(end, adapters_of(adapter_server, found["loaded"]))
    without = adapters_of(adapter_server, found["without"])
    assert any(not torch.equal(end[name], without[name]) for name in end)
    for refused, word in zip(
        found["refused"],
        ("rank=9 must be 1 to 8", "rank=0 must be 1 to 8", "lora_rank=3", "weights for training"),
        strict=True,
    ):
        assert word in refused


def test_models_go_on_after_kill_9_of_the_server(adapter_server: Server, together: dict[str, Any]) -> None:
    """Killed with its ranks after a step that no checkpoint has: final weights are those without the kill."""
    client = adapter_server.begin_client(CALLS, "together", *NAMES, cwd=adapter_server.folder)
    assert client.stdout is not None
    while client.stdout.readline() != "step 3\n":
        assert client.poll() is None, adapter_server.log.read_text()
    adapter_server.kill()
    adapter_server.start()
    resumed = result_of(finish(client, adapter_server.log))
    for name in NAMES:
        assert_same(
            adapters_of(adapter_server, together[name]["path"]),
            adapters_of(adapter_server, resumed[name]["path"]),
        )
        assert resumed["late"][f"early {name}"] == together["early"][name]
