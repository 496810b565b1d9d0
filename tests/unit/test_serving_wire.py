"""Tinker's messages: encoded by the SDK and decoded here, encoded here and decoded by the SDK."""

from __future__ import annotations

import itertools
import json
from typing import Any

import numpy as np
import pytest
import torch
import zstandard
from hypothesis import given
from hypothesis import strategies as st
from tinker import types
from tinker.proto import tinker_public_pb2 as pb
from tinker.proto.request_conv import forward_backward_request_to_proto
from tinker.proto.response_conv import deserialize_forward_backward_output, deserialize_sample_response

from hybridengine.errors import RequestError
from hybridengine.serving.ranks import ModelFacts, Passed, Sample, Sampled, TopLogProbs
from hybridengine.serving.tinker_wire import (
    decode_forward_backward,
    decode_prompt,
    decode_tensor,
    decompress,
    encode_passed,
    encode_sampled,
    parse,
)

FACTS = ModelFacts("tiny", "tiny", vocabulary_size=32, context_tokens=16)
POLICY = {"target_tokens": [2, 3, 4], "logprobs": [0.0, -1.0, -2.0], "advantages": [0.0, 1.0, 1.0]}


def datum(tokens: list[int], **columns) -> types.Datum:
    return types.Datum(model_input=types.ModelInput.from_ints(tokens), loss_fn_inputs=columns)


def encoded(
    data: list[types.Datum], loss: Any = "cross_entropy", forward_only: bool = False, **settings
) -> bytes:
    message = forward_backward_request_to_proto(
        types.ForwardBackwardRequest(
            forward_backward_input=types.ForwardBackwardInput(
                data=data, loss_fn=loss, loss_fn_config=settings or None
            ),
            model_id="s:train:0",
            seq_id=7,
        )
    )
    message.forward_only = forward_only
    return message.SerializeToString()


def test_rows_of_the_sdk_arrive() -> None:
    first = datum([1, 2, 3], target_tokens=[2, 3, 4], weights=[0.0, 1.0, -0.5])
    parts = types.ModelInput(
        chunks=[types.EncodedTextChunk(tokens=[5]), types.EncodedTextChunk(tokens=[6, 7])]
    )
    second = types.Datum(model_input=parts, loss_fn_inputs={"target_tokens": [6, 7, 0], "weights": [1, 1, 0]})  # type: ignore[arg-type]
    decoded = decode_forward_backward(encoded([first, second]), FACTS)
    assert (decoded.loss, decoded.settings, decoded.backward) == ("cross_entropy", {}, True)
    assert [row.tokens_T.tolist() for row in decoded.rows] == [[1, 2, 3], [5, 6, 7]]
    assert decoded.rows[0].columns["weights"].tolist() == [0.0, 1.0, -0.5]
    assert decoded.rows[0].columns["weights"].dtype == np.float32
    assert decoded.rows[1].columns["target_tokens"].tolist() == [6, 7, 0]
    assert decoded.rows[1].columns["target_tokens"].dtype == np.int64


def test_settings_and_forward_only_arrive() -> None:
    body = encoded([datum([1, 2, 3], **POLICY)], "ppo", forward_only=True, clip_low_threshold=0.75)
    decoded = decode_forward_backward(body, FACTS)
    assert (decoded.loss, decoded.settings, decoded.backward) == (
        "ppo",
        {"clip_low_threshold": 0.75, "clip_high_threshold": 1.2},
        False,
    )


@given(st.integers(1, 6), st.integers(1, 8), st.data())
def test_sparse_columns_are_dense_here(num_rows: int, num_columns: int, data: st.DataObject) -> None:
    cells = st.lists(st.sampled_from([0, 0, 0, 1, 31]), min_size=num_columns, max_size=num_columns)
    dense = np.array(data.draw(st.lists(cells, min_size=num_rows, max_size=num_rows)))
    row = datum(
        [1] * num_rows,
        target_tokens=torch.tensor(dense),
        weights=torch.tensor(dense / 4, dtype=torch.float32),
    )
    decoded = decode_forward_backward(encoded([row]), FACTS).rows[0].columns
    assert (decoded["target_tokens"] == dense).all()
    assert (decoded["weights"] == dense / 4).all()


@given(
    crow=st.lists(st.integers(-1, 5), min_size=2, max_size=4),
    columns=st.lists(st.integers(-1, 4), max_size=5),
    shape=st.tuples(st.integers(0, 3), st.integers(0, 4)),
)
def test_a_sparse_tensor_is_as_torch_reads_it_or_refused(crow, columns, shape) -> None:
    values = np.arange(1, len(columns) + 1, dtype=np.float32)
    message = pb.Tensor(
        dtype=pb.DTYPE_FLOAT32,
        shape=shape,
        sparse_csr=pb.SparseCsr(
            values=values.tobytes(),
            crow_indices=np.array(crow, np.int64).tobytes(),
            col_indices=np.array(columns, np.int64).tobytes(),
        ),
    )
    try:
        expected = torch.sparse_csr_tensor(
            torch.tensor(crow),
            torch.tensor(columns, dtype=torch.int64),
            torch.tensor(values),
            shape,
            check_invariants=True,
        ).to_dense()
    except RuntimeError:
        with pytest.raises(RequestError, match="is not a sparse CSR tensor"):
            decode_tensor("x", message)
    else:
        assert (decode_tensor("x", message) == expected.numpy()).all()


@pytest.mark.parametrize(
    ("row", "loss", "message"),
    [
        (
            datum([1, 2], target_tokens=[2, 3, 4], weights=[1, 1, 1]),
            "cross_entropy",
            r"has the shape \[3\], which must be \[2\]",
        ),
        (
            datum([1, 40], target_tokens=[2, 3], weights=[1, 1]),
            "cross_entropy",
            "token id 40, outside of 0 to 31",
        ),
        (
            datum([1, 2], target_tokens=[2, -1], weights=[1, 1]),
            "cross_entropy",
            r"target_tokens has the token id -1",
        ),
        (
            datum([1, 2], target_tokens=[2, 3]),
            "cross_entropy",
            "has nothing beside the targets, and cross_entropy takes weights",
        ),
        (
            datum([1, 2], target_tokens=[2, 3], weights=[1, 1], mask=torch.ones(2)),
            "cross_entropy",
            "has mask, weights beside the targets",
        ),
        (
            datum([1, 2], target_tokens=[2, 3], weights=np.array([1, 1])),
            "cross_entropy",
            "dtype int64, which must be float32",
        ),
        (
            datum([1, 2], target_tokens=[2, 3], weights=[1, float("nan")]),
            "cross_entropy",
            "not finite",
        ),
        (datum([1] * 17, target_tokens=[2] * 17, weights=[1] * 17), "cross_entropy", "has 17 tokens"),
        (datum([], target_tokens=[2], weights=[1]), "cross_entropy", "has 0 tokens"),
        (datum([1, 2, 3], **POLICY), "stable_reinforce", "'stable_reinforce' is not built here; choose"),
        (
            datum([1], target_tokens=torch.ones(1, 2, dtype=torch.int64), weights=[1]),
            "cross_entropy",
            "weights has the shape",
        ),
        (
            datum([1, 2], target_tokens=torch.ones(2, 0, dtype=torch.int64), weights=torch.ones(2, 0)),
            "cross_entropy",
            r"target_tokens has the shape \[2, 0\], which must be \[2\] or \[2, K\] with K of at least 1",
        ),
        (
            types.Datum(
                model_input=types.ModelInput(
                    chunks=[types.ImageChunk(data=b"x", format="png", expected_tokens=1)]
                ),
                loss_fn_inputs=datum([1], target_tokens=[2], weights=[1]).loss_fn_inputs,
            ),
            "cross_entropy",
            "a chunk of image",
        ),
    ],
)
def test_a_row_that_cannot_be_used_is_refused(row: types.Datum, loss: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        decode_forward_backward(encoded([row], loss), FACTS)


def test_settings_that_a_loss_lacks_are_refused() -> None:
    row = datum([1, 2, 3], **POLICY)
    with pytest.raises(RequestError, match=r"loss_fn_config has kl, and importance_sampling takes nothing"):
        decode_forward_backward(encoded([row], "importance_sampling", kl=0.5), FACTS)
    with pytest.raises(RequestError, match="clip_low_threshold='low' must be a number"):
        decode_forward_backward(encoded([row], "ppo", clip_low_threshold="low"), FACTS)
    with pytest.raises(RequestError, match="data has no rows"):
        decode_forward_backward(encoded([]), FACTS)
    with pytest.raises(RequestError, match="is no ForwardBackwardRequest"):
        decode_forward_backward(b"\xff\xff", FACTS)


def test_a_small_body_cannot_ask_for_much_memory() -> None:
    message = pb.ForwardBackwardRequest(loss_fn="cross_entropy")
    tensor = message.data.add().loss_fn_inputs["weights"]
    tensor.shape.extend([1, 2**60])
    with pytest.raises(RequestError, match="bytes when dense"):
        decode_forward_backward(message.SerializeToString(), FACTS)
    with pytest.raises(RequestError, match="more than 1000 bytes when decompressed"):
        decompress(zstandard.ZstdCompressor().compress(bytes(10**6)), 1000)
    with pytest.raises(RequestError, match="is not zstd"):
        decompress(b"plain")
    assert decompress(zstandard.ZstdCompressor().compress(b"abc" * 99)) == b"abc" * 99


def test_results_of_a_forward_pass_arrive_at_the_sdk() -> None:
    shapes = [(3,), (2,), (2, 4), (1, 4), (5,), (0,)]
    outputs = [
        {"logprobs": np.random.default_rng(0).normal(size=shape).astype(np.float32)} for shape in shapes
    ]
    result = deserialize_forward_backward_output(encode_passed(Passed(outputs, {"loss:sum": 1.5})))
    assert result.metrics == {"loss:sum": 1.5}
    for given_, received in itertools.zip_longest(outputs, result.loss_fn_outputs):
        assert (received["logprobs"].to_numpy() == given_["logprobs"]).all()
        assert received["logprobs"].to_numpy().shape == given_["logprobs"].shape


def test_results_of_sampling_arrive_at_the_sdk() -> None:
    top = TopLogProbs(np.array([[1, 2], [3, 0]]), np.array([[-1.0, -2.0], [-0.5, -99999.0]]))
    sample = Sample(np.array([4, 5]), np.array([-0.25, -0.5]), "stop", top)
    result = deserialize_sample_response(
        encode_sampled(
            Sampled(
                [sample, sample._replace(stop_reason="length", top=None)],
                np.array([np.nan, -1.5]),
                top,
            )
        )
    )
    assert [sequence.stop_reason for sequence in result.sequences] == ["stop", "length"]
    assert result.sequences[0].tokens == [4, 5]
    assert result.sequences[0].logprobs == [-0.25, -0.5]
    assert result.sequences[0].topk_logprobs == [[(1, -1.0), (2, -2.0)], [(3, -0.5)]]
    assert result.sequences[1].topk_logprobs is None
    assert result.prompt_logprobs == [None, -1.5]
    assert result.topk_prompt_logprobs == [[(1, -1.0), (2, -2.0)], [(3, -0.5)]]


def sample_request(prompt: list[int], **settings) -> types.SampleRequest:
    params = {name: settings.pop(name) for name in [*settings] if name in types.SamplingParams.model_fields}
    request = types.SampleRequest(
        prompt=types.ModelInput.from_ints(prompt), sampling_params=types.SamplingParams(**params), **settings
    )
    return parse(types.SampleRequest, request.model_dump_json(exclude_none=True).encode())


def test_a_token_that_no_integer_holds_is_refused() -> None:
    with pytest.raises(RequestError, match=f"prompt has the token id {2**64 - 1}, outside of 0 to"):
        decode_prompt(sample_request([1, 2**64 - 1]), FACTS, "a")


def test_a_prompt_arrives() -> None:
    prompt = decode_prompt(sample_request([1, 2], stop=[7, 8], max_tokens=3, seed=5, top_k=4), FACTS, "a")
    assert (prompt.tokens, prompt.stop_ids, prompt.stop_at_end) == ((1, 2), (7, 8), True)
    assert (prompt.max_tokens, prompt.seed, prompt.top_k, prompt.log_probs_from) == (3, 5, 4, None)
    texts = decode_prompt(sample_request([1, 2], stop="\n\n"), FACTS, "a")
    assert (texts.stop_texts, texts.stop_ids, texts.max_tokens) == (("\n\n",), (), 14)
    assert not decode_prompt(sample_request([1], stop=[]), FACTS, "a").stop_at_end
    assert decode_prompt(sample_request([1], prompt_logprobs=True), FACTS, "a").log_probs_from == 0
    last = sample_request([1, 2, 3], prompt_logprobs=True, prompt_logprobs_last_n=2)
    assert decode_prompt(last, FACTS, "a").log_probs_from == 1


def test_prompts_without_a_seed_have_seeds_of_their_own() -> None:
    request = sample_request([1])
    seeds = {decode_prompt(request, FACTS, name).seed for name in ("a", "b", "a")}
    assert len(seeds) == 2


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_tokens": 15}, "both together have room for 16"),
        ({"temperature": -1.0}, "temperature=-1.0 must be 0 or greater"),
        ({"top_p": 0.0}, "top_p=0.0 must be above 0"),
        ({"top_k": 0}, "top_k=0 must be -1 or positive"),
        ({"num_samples": 0}, "num_samples=0 must be 1 to 4096"),
        ({"stop": [1, 10**9]}, "sampling_params.stop has the token id 1000000000, outside of 0 to"),
        ({"stop": [-1]}, "sampling_params.stop has the token id -1, outside of 0 to"),
        ({"prompt_alt_tokens_k": 2}, "prompt_alt_tokens_k=2 is not served"),
        (
            {"record_stability_info": True},
            "record_stability_info=true, which the loss stable_reinforce needs, is not",
        ),
        (
            {"prompt_logprobs": True, "prompt_logprobs_last_n": 2},
            "prompt_logprobs_last_n=2 must be 1 to 1",
        ),
    ],
)
def test_sampling_settings_that_cannot_be_honoured_are_refused(settings: dict, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        decode_prompt(sample_request([1, 2], **settings), FACTS, "a")


def test_a_field_that_the_schema_lacks_is_refused() -> None:
    with pytest.raises(RequestError, match="OptimStepRequest: speed=2: Extra inputs are not permitted"):
        parse(types.OptimStepRequest, b'{"model_id": "m", "adam_params": {}, "speed": 2}')


def test_an_error_names_the_first_problems_alone() -> None:
    tags = [*range(100)]
    body = json.dumps({"tags": tags, "user_metadata": {}, "sdk_version": "0.38"}).encode()
    with pytest.raises(RequestError, match=r"tags\.0=0: .*tags\.4=4: [^;]*; and 95 others; send") as caught:
        parse(types.CreateSessionRequest, body)
    assert "tags.5" not in str(caught.value)
