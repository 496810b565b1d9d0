"""The server as OpenAI's client and vLLM's token endpoint see it: a real client over HTTP, and ranks in memory."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from tinker import types
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests.unit.serving_http import KEY, HttpServer
from tests.unit.serving_ranks import TableRanks, log_softmax

TOKENS = ["<|x|>", "<|user|>", "a", "b", "c", "d", "e", "Ġ"]
"""Token ids 0 to 7; Ġ is the byte-level alphabet's space."""


TEMPLATE = (
    "{% for message in messages %}<|user|>{{ message.content }}{% endfor %}"
    "{% if suffix %}{{ suffix }}{% endif %}{% if add_generation_prompt %}<|x|>{% endif %}"
)


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE({token: number for number, token in enumerate(TOKENS)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(TOKENS[:2])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=TOKENS[0],
        extra_special_tokens=[TOKENS[1]],
        chat_template=TEMPLATE,
    )


class Server(HttpServer):
    """A server whose ranks continue a with b, b with c and so on, once a model has been trained."""

    def __init__(self, folder: Path, wait_s: float = 600.0) -> None:
        self.ranks = TableRanks(texts=["", "", "a", "b", "c", "d", "e", " "])
        super().__init__(folder, self.ranks, quiet_s=0.05, tokenizer=tiny_tokenizer(), wait_s=wait_s)
        self.client = self.client_with(KEY)

    def client_with(self, key: str) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0)

    def train(self) -> None:
        """Begin a model and give the ranks its table."""
        message = types.CreateModelRequest(
            session_id=self.room.create_session({}), model_seq_id=0, base_model="tiny"
        )
        self.room.results.done(self.room.create_model(message, message.model_dump_json().encode())).result(10)
        self.ranks.table += 20 * np.eye(len(TOKENS), k=1)

    def generate(self, **body: Any) -> dict[str, Any]:
        headers = {"Authorization": f"Bearer {KEY}"}
        return httpx.post(f"{self.url}/inference/v1/generate", json=body, headers=headers).json()

    def stop(self) -> None:
        self.client.close()
        super().stop()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    server = Server(tmp_path)
    yield server
    server.stop()


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server whose model has been trained, for tests that leave it as it is."""
    server = Server(tmp_path_factory.mktemp("server"))
    server.train()
    yield server
    server.stop()


def test_the_model_in_training_answers(server: Server) -> None:
    assert server.client.completions.create(model="tiny", prompt="a", temperature=0).choices[0].text == ""
    server.train()
    response = server.client.completions.create(model="tiny", prompt="a", temperature=0, max_tokens=3)
    assert (response.choices[0].text, response.choices[0].finish_reason) == ("bcd", "length")
    assert response.usage is not None
    assert (response.usage.prompt_tokens, response.usage.completion_tokens, response.usage.total_tokens) == (
        1,
        3,
        4,
    )
    assert server.ranks.calls == ["sample 1 base", "begin_model", "sample 1 live"]


def test_completions_of_several_prompts_with_log_probs(trained: Server) -> None:
    response = trained.client.completions.create(
        model="tiny",
        prompt=["a", "c"],
        n=2,
        max_tokens=2,
        temperature=0,
        logprobs=2,
        extra_body={"return_token_ids": True, "prompt_logprobs": 0},
    )
    assert [choice.text for choice in response.choices] == ["bc", "bc", "de", "de"]
    assert [choice.index for choice in response.choices] == [0, 1, 2, 3]
    last = response.choices[3].model_dump()
    assert (last["prompt_token_ids"], last["token_ids"], last["prompt_logprobs"]) == ([4], [5, 6], [None])
    assert last["logprobs"]["tokens"] == ["d", "e"]
    assert last["logprobs"]["text_offset"] == [0, 1]
    row = log_softmax(trained.ranks.table[4])
    assert last["logprobs"]["token_logprobs"][0] == pytest.approx(row[5], abs=1e-6)
    assert last["logprobs"]["top_logprobs"][0].keys() == {"d", "<|x|>"}
    assert last["logprobs"]["top_logprobs"][0]["<|x|>"] == pytest.approx(row[0], rel=1e-5)
    assert trained.ranks.calls[-1] == "sample 2 live"
    (of_ids,) = trained.client.completions.create(
        model="tiny", prompt=[2, 4], max_tokens=1, temperature=0, logprobs=0
    ).choices
    assert of_ids.logprobs is not None
    assert of_ids.logprobs.top_logprobs == [{"d": pytest.approx(row[5], abs=1e-6)}]
    several = trained.client.completions.create(model="tiny", prompt=[[2], [4]], max_tokens=1, temperature=0)
    assert [choice.text for choice in several.choices] == ["b", "d"]


def test_chat_uses_the_template(trained: Server) -> None:
    response = trained.client.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": [{"type": "text", "text": "ab"}]}],
        temperature=0,
        max_completion_tokens=2,
        logprobs=True,
        top_logprobs=1,
        user="someone",
        tool_choice="none",
        extra_body={
            "add_generation_prompt": False,
            "chat_template_kwargs": {"suffix": "c"},
            "return_token_ids": True,
            "min_p": 0.0,
        },
    )
    choice = response.choices[0]
    assert choice.message.content == "de"
    assert response.model_dump()["prompt_token_ids"] == [1, 2, 3, 4]
    assert choice.model_dump()["token_ids"] == [5, 6]
    assert choice.logprobs is not None
    assert choice.logprobs.content is not None
    first = choice.logprobs.content[0]
    assert (first.token, first.bytes, first.top_logprobs[0].token) == ("d", [ord("d")], "d")
    assert first.logprob == first.top_logprobs[0].logprob == pytest.approx(0, abs=1e-6)
    (rest,) = trained.client.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": "a"}], temperature=0
    ).choices
    assert rest.finish_reason == "length"  # to the end of the context
    assert len(rest.message.content or "") < 29  # special tokens are skipped


@pytest.mark.parametrize(
    ("settings", "text", "tokens", "reason"),
    [
        ({"stop": "d"}, "bc", [3, 4, 5], "stop"),
        ({"stop": ["x", "cd"]}, "b", [3, 4, 5], "stop"),
        ({"stop_token_ids": [4]}, "b", [3, 4], "stop"),
        ({"stop_token_ids": [4], "stop": "bc"}, "", [3, 4], "stop"),
        ({"stop": "z"}, "bcde", [3, 4, 5, 6], "length"),
    ],
)
def test_stops_are_cut_off(
    trained: Server, settings: dict[str, Any], text: str, tokens: list[int], reason: str
) -> None:
    extra = {"return_token_ids": True} | settings
    (choice,) = trained.client.completions.create(
        model="tiny", prompt="a", max_tokens=4, temperature=0, extra_body=extra
    ).choices
    assert (choice.text, choice.model_dump()["token_ids"], choice.finish_reason) == (text, tokens, reason)


def test_special_tokens_before_a_stop_are_skipped(server: Server) -> None:
    server.train()
    server.ranks.table[3, 4], server.ranks.table[3, 0], server.ranks.table[0, 4] = (
        0,
        20,
        30,
    )  # a b <|x|> c d
    drawn = {
        skip: server.client.completions.create(
            model="tiny",
            prompt="a",
            max_tokens=9,
            temperature=0,
            stop="d",
            extra_body={"skip_special_tokens": skip},
        )
        for skip in (True, False)
    }
    assert [drawn[skip].choices[0].text for skip in (True, False)] == ["bc", "b<|x|>c"]


def test_a_seed_repeats_samples(trained: Server) -> None:
    def texts(**settings: Any) -> list[str]:
        response = trained.client.completions.create(model="tiny", prompt="a", max_tokens=8, n=4, **settings)
        return [choice.text for choice in response.choices]

    assert texts(seed=3) == texts(seed=3)
    assert len(set(texts(seed=3))) > 1
    assert texts() != texts()


def test_calls_at_the_same_time_are_one_call_of_the_ranks(server: Server) -> None:
    server.train()
    server.ranks.free.clear()
    answers: list[str] = []

    def call() -> None:
        response = server.client.completions.create(model="tiny", prompt="a", max_tokens=1, temperature=0)
        answers.append(response.choices[0].text)

    threads = [threading.Thread(target=call) for _ in range(8)]
    blocking = threading.Thread(target=call)
    blocking.start()
    while "sample 1 live" not in server.ranks.asked:
        time.sleep(0.01)
    for thread in threads:
        thread.start()
    while len(server.store.queued()) < 9:
        time.sleep(0.01)
    server.ranks.free.set()
    for thread in (*threads, blocking):
        thread.join()
    assert answers == ["b"] * 9
    assert server.ranks.calls[-2:] == ["sample 1 live", "sample 8 live"]


def test_nothing_is_drawn_for_a_client_that_has_left(server: Server) -> None:
    server.train()
    server.ranks.free.clear()
    with ThreadPoolExecutor(1) as others:
        settings: Any = {"model": "tiny", "max_tokens": 1, "temperature": 0}
        first = others.submit(server.client.completions.create, prompt="a", **settings)
        while "sample 1 live" not in server.ranks.asked:
            time.sleep(0.01)
        with pytest.raises(openai.APITimeoutError):
            server.client.completions.create(prompt="b", timeout=0.3, **settings)
        while len(server.store.queued()) > 1:
            time.sleep(0.01)
        server.ranks.free.set()
        assert first.result().choices[0].text == "b"
    assert server.client.completions.create(prompt="c", **settings).choices[0].text == "d"
    assert server.ranks.calls[-2:] == ["sample 1 live", "sample 1 live"]


def test_generate_takes_and_returns_token_ids(trained: Server) -> None:
    # what renderers 0.1.12, and with it the TrainClient of verifiers 0.4, sends
    sent = {
        "temperature": 0.0,
        "max_tokens": 3,
        "stop_token_ids": [5],
        "logprobs": 1,
        "skip_special_tokens": False,
    }
    response = trained.generate(
        model="tiny", token_ids=[2, 3], sampling_params=sent | {"routed_experts_prompt_start": 1}, priority=1
    )
    (choice,) = response["choices"]
    assert (choice["token_ids"], choice["finish_reason"], choice["index"]) == ([4, 5], "stop", 0)
    assert [entry["token"] for entry in choice["logprobs"]["content"]] == ["token_id:4", "token_id:5"]
    assert [entry["token_id"] for entry in choice["logprobs"]["content"]] == [4, 5]
    assert choice["logprobs"]["content"][0]["top_logprobs"] == []
    assert (response["usage"]["total_tokens"], response["prompt_logprobs"]) == (4, None)
    wider = trained.generate(
        token_ids=[2, 4],
        request_id="mine",
        return_token_ids=True,
        sampling_params={"temperature": 0.0, "n": 2, "max_tokens": 1, "logprobs": 2, "prompt_logprobs": 1},
    )
    assert (wider["request_id"], wider["prompt_token_ids"], len(wider["choices"])) == ("mine", [2, 4], 2)
    assert len(wider["choices"][1]["logprobs"]["content"][0]["top_logprobs"]) == 2
    nothing, second = wider["prompt_logprobs"]
    assert nothing is None
    row = log_softmax(trained.ranks.table[2])
    assert second["4"] == {"logprob": pytest.approx(row[4], rel=1e-5), "rank": None}
    assert second["3"] == {"logprob": pytest.approx(row[3], abs=1e-6), "rank": 1}
    rest = trained.generate(token_ids=[2], sampling_params={"temperature": 0.0})
    assert len(rest["choices"][0]["token_ids"]) == 31
    assert rest["choices"][0]["logprobs"] is None


def test_models_are_listed(trained: Server) -> None:
    (model,) = trained.client.models.list().data
    assert (model.id, model.model_dump()["max_model_len"]) == ("tiny", 32)
