"""The `openai` package, as published, against a server on real ranks."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.clients.openai_calls import TRAINED_ANSWER
from tests.clients.servers import CLIENT_PYTHON, Server, result_of
from tests.clients.warm_model import NAME

pytestmark = pytest.mark.timeout(1800)

CALLS = Path(__file__).with_name("openai_calls.py")
PYTHONS = pytest.mark.parametrize("python", [CLIENT_PYTHON, Path(sys.executable)], ids=["openai2", "openai3"])
"""The clients' Python has the version that verifiers asks for, the project's has the newest one."""
NUM_SAMPLES, MAX_TOKENS = 3, 4


@PYTHONS
def test_every_endpoint_answers(server: Server, tmp_path: Path, python: Path) -> None:
    found = result_of(server.client(CALLS, "answers", cwd=tmp_path, python=python))
    assert found["version"].startswith({CLIENT_PYTHON: "2."}.get(python, "3."))
    (model,) = found["models"]["data"]
    assert (model["id"], model["max_model_len"]) == (NAME, 320)

    chat = found["chat"]
    assert [choice["index"] for choice in chat["choices"]] == [*range(NUM_SAMPLES)]
    assert found["again"] == [choice["message"]["content"] for choice in chat["choices"]]
    for choice in chat["choices"]:
        ids, entries = choice["token_ids"], choice["logprobs"]["content"]
        assert 1 <= len(ids) == len(entries) <= MAX_TOKENS
        assert choice["finish_reason"] == ("length" if len(ids) == MAX_TOKENS else "stop")
        for entry in entries:
            first, second = entry["top_logprobs"]
            assert first["logprob"] >= max(second["logprob"], entry["logprob"] - 1e-4)
            assert bytes(entry["bytes"]).decode() == entry["token"]
    lengths = sum(len(choice["token_ids"]) for choice in chat["choices"])
    assert (chat["usage"]["prompt_tokens"], chat["usage"]["completion_tokens"]) == (
        len(chat["prompt_token_ids"]),
        lengths,
    )

    (greedy,) = found["completion"]["choices"]
    assert found["greedy"] == [greedy["text"]] * 2
    assert greedy["prompt_token_ids"] == chat["prompt_token_ids"]
    for value, top in zip(
        greedy["logprobs"]["token_logprobs"], greedy["logprobs"]["top_logprobs"], strict=True
    ):
        assert value == pytest.approx(max(top.values()), abs=1e-4)
    assert found["several"][0] == found["several"][1]
    assert found["several"][2] == found["several"][3]
    assert greedy["text"].startswith(found["several"][0])


REFUSALS: dict[str, tuple[str, int, str]] = {
    "key": ("AuthenticationError", 401, "the API key is not this server's; set OPENAI_API_KEY"),
    "model": ("NotFoundError", 404, f"model='gpt-6' is not served; this server has {NAME!r}"),
    "endpoint": ("NotFoundError", 404, "POST /v1/embeddings is not served; served are /v1/models, "),
    "tools": ("BadRequestError", 400, "is not served by this endpoint; leave it out, or send []"),
    "stream": (
        "BadRequestError",
        400,
        "stream=true is not served by this endpoint; leave it out, or send false",
    ),
    "echo": ("BadRequestError", 400, "echo=true is not served by this endpoint; leave it out, or send false"),
    "length": ("BadRequestError", 400, "exceed the model's context length of 320; shorten the prompt"),
    "max_tokens": ("BadRequestError", 400, "max_tokens=0: Input should be greater than or equal to 1"),
    "temperature": ("BadRequestError", 400, "temperature=-1.0: Input should be greater than or equal to 0"),
    "token_id": ("BadRequestError", 400, "the prompt has the token id 1000000, outside of 0 to "),
}


@PYTHONS
def test_a_call_that_is_refused_raises_the_clients_own_exception(
    server: Server, tmp_path: Path, python: Path
) -> None:
    found = result_of(server.client(CALLS, "refusals", cwd=tmp_path, python=python))
    for problem, (name, status, message) in REFUSALS.items():
        error: dict[str, Any] = found[problem]
        assert (error["class"], error["status"]) == (name, status), problem
        assert message in error["message"], problem
    assert found["key"]["code"] == "invalid_api_key"
    assert found["length"]["code"] == "context_length_exceeded"
    assert found["stream"]["param"] == "stream"
    assert found["good"] in ("stop", "length")


def test_the_weights_that_answer_are_those_in_training(server: Server, tmp_path: Path) -> None:
    found = result_of(server.client(CALLS, "training", cwd=tmp_path))
    assert found["before"] != found["after"] == TRAINED_ANSWER
    assert found["stopped"] == [TRAINED_ANSWER[:1], "stop"]
    assert found["short"] == [TRAINED_ANSWER, "length"]
    assert len({tuple(tokens) for tokens in found["tokens"]}) > 1
    for drawn, computed in zip(found["drawn"], found["computed"], strict=True):
        assert drawn == pytest.approx(computed, abs=1e-4)
    assert -math.log(0.5) > found["losses"][-1]
