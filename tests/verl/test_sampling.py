"""The sampling parameters of verl's requests as settings of the engine."""

# pyright: reportMissingImports=false
from __future__ import annotations

from typing import Any

import pytest

from hybridengine.errors import DataError
from hybridengine.integrations.verl.replica import sampling_of
from hybridengine.integrations.verl.rollout import Place
from tests.verl.test_settings import rollout_config

PLACE = Place(replica=0, position=0, node_id="node", stop_token_ids=(7,), max_model_tokens=20, vocab_size=100)


def test_sampling_settings_of_verls_parameters():
    params = {
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": -1,
        "logprobs": True,
        "repetition_penalty": 1.0,
        "seed": 4,
    }
    found = sampling_of({**params, "min_p": None}, 10, PLACE, rollout_config())
    assert (found.temperature, found.top_p, found.top_k, found.min_p) == (0.7, 0.9, 0, 0.0)
    assert (found.max_tokens, found.stop_token_ids) == (8, (7,))
    # A prompt that is longer than the configuration foresees leaves fewer tokens; a request may ask for fewer, too.
    assert sampling_of(params, 15, PLACE, rollout_config()).max_tokens == 5
    assert sampling_of({"max_tokens": 3, "stop_token_ids": [9]}, 10, PLACE, rollout_config()).max_tokens == 3
    assert sampling_of({"max_new_tokens": 99}, 10, PLACE, rollout_config()).max_tokens == 10
    found = sampling_of({"top_k": 5, "stop_token_ids": [9]}, 10, PLACE, rollout_config())
    assert (found.top_k, found.stop_token_ids) == (5, (7, 9))


@pytest.mark.parametrize(
    ("params", "prompt_tokens", "message"),
    [
        (
            {"repetition_penalty": 1.1},
            10,
            "repetition_penalty=1.1 is not supported by this rollout; set 1.0",
        ),
        (
            {"presence_penalty": 0.5},
            10,
            "the sampling parameter 'presence_penalty' is not supported by this rollout; leave it out",
        ),
        (
            {},
            20,
            "a prompt of 20 tokens leaves no room in rollout.max_model_len=20; raise it, or shorten prompts"
            " (data.max_prompt_length)",
        ),
    ],
)
def test_requests_that_are_refused(params: dict[str, Any], prompt_tokens: int, message: str):
    with pytest.raises(DataError) as raised:
        sampling_of(params, prompt_tokens, PLACE, rollout_config())
    assert str(raised.value) == message
