"""The Tinker SDK, as published, against a server on real ranks."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from tests.clients.sdk_calls import LOSSES
from tests.clients.servers import ROOT, START_S, Server, finish, result_of

pytestmark = pytest.mark.timeout(1800)

CALLS = Path(__file__).with_name("sdk_calls.py")
STEPS = 6
END = 3


def saved_weights(server: Server, path: str) -> dict[str, torch.Tensor]:
    """Return the weights that a server has saved under a tinker:// path."""
    return load_file(server.saved(path) / "model.safetensors")


def assert_same(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> None:
    assert first.keys() == second.keys()
    for name in first:
        assert torch.equal(first[name], second[name]), name


def test_a_step_through_the_server_equals_one_on_ranks_driven_in_process(
    server: Server, tmp_path: Path
) -> None:
    """All losses are summed into the step, and the client samples between their gradients and the step."""
    found = result_of(server.client(CALLS, "losses", cwd=tmp_path))
    subprocess.run(
        [sys.executable, "-m", "tests.clients.step_on_ranks", server.config, tmp_path],
        cwd=ROOT,
        check=True,
        timeout=START_S,
    )
    passed = np.load(tmp_path / "passed.npz")
    for loss in LOSSES:
        for number, row in enumerate(found[loss]["logprobs"]):
            assert np.array_equal(np.float32(row), passed[f"{loss}-{number}"]), loss
    assert found["forward"]["logprobs"] == found["cross_entropy"]["logprobs"]
    weights = np.concatenate(
        [np.linspace(-0.5, 1.0, len(row), dtype=np.float32) for row in found["forward"]["logprobs"]]
    )
    log_probs = np.concatenate(found["forward"]["logprobs"])
    assert found["forward"]["metrics"]["loss:sum"] == pytest.approx(-(weights * log_probs).sum(), rel=1e-5)
    assert_same(
        saved_weights(server, found["sampler_weights"]), load_file(tmp_path / "stepped/model.safetensors")
    )


def test_a_loss_of_the_clients_own_gives_the_step_of_the_same_loss_of_the_server(
    server: Server, tmp_path: Path
) -> None:
    found = result_of(server.client(CALLS, "custom", cwd=tmp_path))
    assert found["custom"]["metrics"]["own:sum"] == pytest.approx(
        found["built_in"]["metrics"]["loss:sum"], rel=1e-5
    )
    assert found["after_custom"]["logprobs"] == found["after_built_in"]["logprobs"]
    assert found["after_custom"]["metrics"]["loss:sum"] < found["built_in"]["metrics"]["loss:sum"]


def test_samples_are_of_the_weights_that_were_asked_for(server: Server, tmp_path: Path) -> None:
    found = result_of(server.client(CALLS, "sampling", cwd=tmp_path))
    base = found["base"]
    assert found["before"] == base
    assert found["base_again"]["tokens"] == base["tokens"]
    assert found["after"]["prompt_logprobs"] != base["prompt_logprobs"]
    assert found["saved"]["tokens"] == found["loaded"]["tokens"] == found["after"]["tokens"]
    for drawn in (base, found["after"]):
        for tokens, log_probs in zip(drawn["tokens"], drawn["logprobs"], strict=True):
            assert len(tokens) == len(log_probs) <= 4
            assert END not in tokens[:-1]
        assert drawn["prompt_logprobs"][0] is None
        for (first, second), log_prob in zip(drawn["top"][1:], drawn["prompt_logprobs"][1:], strict=True):
            assert first[1] >= second[1]
            assert log_prob <= first[1] + 1e-6
    assert found["computed"][:4] == pytest.approx(base["prompt_logprobs"])
    assert found["computed"][4:] == pytest.approx(base["logprobs"][0], abs=1e-4)


@pytest.fixture
def own_server(warm_model: Path, tmp_path: Path) -> Iterator[Server]:
    """A server that the test kills."""
    server = Server(tmp_path, warm_model)
    try:
        server.start()
        yield server
    finally:
        server.kill()


def test_a_client_goes_on_after_kill_9_of_the_server(
    own_server: Server, server: Server, tmp_path: Path
) -> None:
    """Killed with its ranks after a step that no checkpoint has: the final weights are those without the kill."""
    undisturbed = result_of(server.client(CALLS, "steps", STEPS, cwd=tmp_path))
    client = own_server.begin_client(CALLS, "steps", STEPS, cwd=tmp_path)
    assert client.stdout is not None
    while client.stdout.readline() != "step 3\n":
        assert client.poll() is None, own_server.log.read_text()
    own_server.kill()
    own_server.start()
    resumed = result_of(finish(client, own_server.log))
    assert_same(saved_weights(server, undisturbed["path"]), saved_weights(own_server, resumed["path"]))


def test_a_client_goes_on_after_kill_9_of_a_rank(own_server: Server, server: Server, tmp_path: Path) -> None:
    """The server starts its ranks again, while its process and its address stay."""
    undisturbed = result_of(server.client(CALLS, "steps", STEPS, cwd=tmp_path))
    client = own_server.begin_client(CALLS, "steps", STEPS, cwd=tmp_path)
    assert client.stdout is not None
    while client.stdout.readline() != "step 3\n":
        assert client.poll() is None, own_server.log.read_text()
    own_server.kill_rank()
    resumed = result_of(finish(client, own_server.log))
    assert "the server starts its ranks again (1 of at most 3 times)" in own_server.log.read_text()
    assert_same(saved_weights(server, undisturbed["path"]), saved_weights(own_server, resumed["path"]))
