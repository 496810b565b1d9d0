"""Tinker's messages (SDK 0.38) as rows and prompts, and results as the bytes that its SDK decodes."""

from __future__ import annotations

import io
import json
import math
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import pydantic
import zstandard
from google.protobuf.message import DecodeError
from tinker import types
from tinker.proto import tinker_public_pb2 as pb

from hybridengine.algorithms.losses.client_inputs import CLIENT_INPUTS, check_client_loss
from hybridengine.errors import RequestError, shown
from hybridengine.serving.ranks import LossRow, ModelFacts, Passed, Prompt, Sampled, TopLogProbs

PROTOBUF = "application/x-protobuf"
TARGETS = "target_tokens"
"""Column of the tokens whose log-probs the loss is of."""
MAX_BODY_BYTES = 64 * 2**20  # the SDK sends parts of about 5 MB
NUM_NAMED = 5
"""Largest number of problems that an error names."""

Message = TypeVar("Message", bound=pydantic.BaseModel)


_DTYPES = {pb.DTYPE_FLOAT32: np.dtype("<f4"), pb.DTYPE_INT64: np.dtype("<i8")}
_DTYPE_NAMES = {pb.DTYPE_FLOAT32: "float32", pb.DTYPE_INT64: "int64"}


@dataclass(frozen=True)
class ForwardBackward:
    """A decoded forward_backward request."""

    rows: tuple[LossRow, ...]
    loss: str
    settings: Mapping[str, float]
    backward: bool


def parse(message: type[Message], body: bytes) -> Message:
    """Return the JSON `body` as a message of the SDK; raise RequestError that names the first problems."""
    try:
        return message.model_validate_json(body)
    except pydantic.ValidationError as error:
        problems = "; ".join(
            f"{'.'.join(map(str, problem['loc'])) or 'body'}={shown(problem['input'])}: {problem['msg']}"
            for problem in error.errors(include_url=False, include_context=False)[:NUM_NAMED]
        )
        if error.error_count() > NUM_NAMED:
            problems += f"; and {error.error_count() - NUM_NAMED} others"
        raise RequestError(
            f"{message.__name__}: {problems}; send the fields of the tinker SDK 0.38"
        ) from None


def decompress(body: bytes, limit_bytes: int = MAX_BODY_BYTES) -> bytes:
    """Return a zstd body decompressed; raise RequestError if it is longer than `limit_bytes`, before it is in memory."""
    try:
        reader = zstandard.ZstdDecompressor(max_window_size=2**27).stream_reader(io.BytesIO(body))
        data = reader.read(limit_bytes + 1)
    except zstandard.ZstdError as error:
        raise RequestError(
            f"the body is not zstd ({error}); send it without Content-Encoding, or compressed as that says"
        ) from None
    if len(data) > limit_bytes:
        raise RequestError(
            f"the body has more than {limit_bytes} bytes when decompressed; send fewer rows per call"
        )
    return data


def read_forward_backward(body: bytes) -> pb.ForwardBackwardRequest:
    """Return the message in `body`, without a look at its rows."""
    message = pb.ForwardBackwardRequest()
    try:
        message.ParseFromString(body)
    except DecodeError as error:
        raise RequestError(
            f"the body of forward_backward is no ForwardBackwardRequest ({error}); send the tinker SDK's message"
        ) from None
    return message


def same_body(kind: str, one: bytes, other: bytes) -> bool:
    """Return True if the bodies of two requests of a kind have the same contents: a retry may be encoded anew."""
    if one == other:
        return True
    if kind in ("forward", "forward_backward"):
        return read_forward_backward(one) == read_forward_backward(other)
    return json.loads(one) == json.loads(other)


def decode_forward_backward(
    body: bytes, facts: ModelFacts, limit_bytes: int = MAX_BODY_BYTES
) -> ForwardBackward:
    """Return the rows, loss and settings of a request.

    Provenance spans are ignored: they matter to `stable_reinforce` alone, which is refused.

    Raises: RequestError that names the first row and column that cannot be used.
    """
    message = read_forward_backward(body)
    if not message.data:
        raise RequestError("data has no rows; send at least one")
    dense_bytes = sum(
        8 * abs(math.prod(tensor.shape)) for row in message.data for tensor in row.loss_fn_inputs.values()
    )
    if dense_bytes > 4 * limit_bytes:
        raise RequestError(
            f"the columns have {dense_bytes} bytes when dense, more than {4 * limit_bytes}; send fewer rows per call"
        )
    columns = [name for name in message.data[0].loss_fn_inputs if name != TARGETS]
    settings = check_client_loss(message.loss_fn, columns, _settings(message))
    return ForwardBackward(
        tuple(_row(number, row, message.loss_fn, facts) for number, row in enumerate(message.data)),
        message.loss_fn,
        settings,
        not message.forward_only,
    )


def _settings(message: pb.ForwardBackwardRequest) -> dict[str, float]:
    """Return the client's settings; `loss_fn_config_v2` supersedes `loss_fn_config`."""
    settings: dict[str, float] = dict(message.loss_fn_config)
    for name, value in message.loss_fn_config_v2.items():
        if value.WhichOneof("value") != "number":
            raise RequestError(f"loss_fn_config {name}={value.text!r} must be a number")
        settings[name] = value.number
    return settings


def _row(number: int, row: pb.Datum, loss: str, facts: ModelFacts) -> LossRow:
    inputs = CLIENT_INPUTS[loss]
    wanted = {TARGETS, *inputs.columns}
    place = f"data[{number}]"
    tokens_T = _tokens(place, row)
    check_ids(f"{place}.model_input", tokens_T, facts)
    if not 1 <= len(tokens_T) <= facts.context_tokens:
        raise RequestError(
            f"{place} has {len(tokens_T)} tokens, which must be 1 to {facts.context_tokens}; shorten or drop the row"
        )
    if set(row.loss_fn_inputs) != wanted:
        raise RequestError(
            f"{place}.loss_fn_inputs has {', '.join(sorted(row.loss_fn_inputs)) or 'nothing'}, and {loss} takes"
            f" {', '.join(sorted(wanted))}; send these and no others"
        )
    columns = {
        name: _column(f"{place}.{name}", name, tensor, len(tokens_T), inputs.is_wide)
        for name, tensor in sorted(row.loss_fn_inputs.items())  # a map of protobuf has no order
    }
    shape = columns[TARGETS].shape
    for name, column in columns.items():
        if column.shape != shape:
            raise RequestError(
                f"{place}.{name} has the shape {[*column.shape]}, which must be that of target_tokens, {[*shape]}"
            )
    check_ids(f"{place}.target_tokens", columns[TARGETS], facts)
    return LossRow(tokens_T, columns)


def _tokens(place: str, row: pb.Datum) -> np.ndarray:
    parts = []
    for chunk in row.model_input:
        kind = chunk.WhichOneof("chunk")
        if kind != "encoded_text":
            raise RequestError(
                f"{place}.model_input has a chunk of {kind or 'nothing'}; send encoded_text chunks alone"
            )
        parts.append(_array(f"{place}.model_input", chunk.encoded_text.tokens, np.dtype("<i4")))
    return np.concatenate(parts).astype(np.int64) if parts else np.zeros(0, np.int64)


def check_ids(place: str, ids: np.ndarray, facts: ModelFacts) -> None:
    """Raise RequestError that begins with `place` if the model has no such token id."""
    outside = ids[(ids < 0) | (ids >= facts.vocabulary_size)]
    if outside.size:
        raise RequestError(
            f"{place} has the token id {outside[0]}, outside of 0 to {facts.vocabulary_size - 1}; use the tokenizer of"
            f" {facts.name}"
        )


def _column(place: str, name: str, tensor: pb.Tensor, num_tokens: int, wide: bool) -> np.ndarray:
    wanted = pb.DTYPE_INT64 if name == TARGETS else pb.DTYPE_FLOAT32
    if tensor.dtype != wanted:
        raise RequestError(
            f"{place} has the dtype {_DTYPE_NAMES.get(tensor.dtype, tensor.dtype)}, which must be {_DTYPE_NAMES[wanted]}"
        )
    values = decode_tensor(place, tensor)
    if values.ndim not in ((1, 2) if wide else (1,)) or len(values) != num_tokens or 0 in values.shape:
        rule = f"[{num_tokens}]{f' or [{num_tokens}, K] with K of at least 1' if wide else ''}"
        raise RequestError(
            f"{place} has the shape {[*values.shape]}, which must be {rule}: a value for each token of model_input"
        )
    if not np.isfinite(values).all():
        raise RequestError(f"{place} has a value that is not finite; mask such positions with 0")
    return values


def decode_tensor(place: str, tensor: pb.Tensor) -> np.ndarray:
    """Return a float32 or int64 tensor as an array; unlisted entries of a CSR tensor are 0.

    Raises: RequestError that begins with `place`.
    """
    dtype = _DTYPES[tensor.dtype]
    shape = tuple(tensor.shape)
    if any(size < 0 for size in shape):
        raise RequestError(f"{place} has the shape {[*shape]}; sizes must be 0 or greater")
    if tensor.WhichOneof("encoding") != "sparse_csr":
        values = _array(place, tensor.dense, dtype)
        if shape and math.prod(shape) != values.size:
            raise RequestError(f"{place} has {values.size} values, but the shape {[*shape]}; both must agree")
        return values.reshape(shape) if shape else values
    values = _array(place, tensor.sparse_csr.values, dtype)
    crow = _array(place, tensor.sparse_csr.crow_indices, np.dtype("<i8"))
    columns = _array(place, tensor.sparse_csr.col_indices, np.dtype("<i8"))
    if len(shape) != 2:
        raise RequestError(
            f"{place} is sparse with the shape {[*shape]}, which must be [rows, columns]; send it dense"
        )
    num_rows, num_columns = shape
    sound = (
        len(crow) == num_rows + 1
        and crow[0] == 0
        and crow[-1] == len(columns) == len(values)
        and bool((np.diff(crow) >= 0).all())
        and bool(((columns >= 0) & (columns < num_columns)).all())
    )
    rows = np.repeat(np.arange(num_rows), np.diff(crow)) if sound else crow
    if not sound or (np.diff(rows * num_columns + columns) <= 0).any():
        raise RequestError(
            f"{place} is not a sparse CSR tensor of the shape {[*shape]}: row pointers must rise from 0 to the number of"
            " values, and columns rise within each row; send it dense"
        )
    dense = np.zeros(shape, dtype)
    dense[rows, columns] = values
    return dense


def _array(place: str, data: bytes, dtype: np.dtype) -> np.ndarray:
    if len(data) % dtype.itemsize:
        raise RequestError(
            f"{place} has {len(data)} bytes, which must be a multiple of {dtype.itemsize} ({dtype.name})"
        )
    return np.frombuffer(data, dtype)


def decode_prompt(request: types.SampleRequest, facts: ModelFacts, request_id: str) -> Prompt:
    """Return the prompt of a sampling request; its seed is drawn from `request_id` if none is given.

    Raises: RequestError for settings that are not served, or that no engine can honour.
    """
    params = request.sampling_params
    for name, unset in (
        ("target_prompt_logprobs", None),
        ("prompt_alt_tokens_k", 0),
    ):
        if (value := getattr(request, name)) != unset:
            raise RequestError(f"{name}={shown(value)} is not served; leave it out")
    if request.record_stability_info:
        raise RequestError(
            "record_stability_info=true, which the loss stable_reinforce needs, is not served; leave it out, and in"
            " tinker-cookbook choose another loss, such as loss_fn=importance_sampling"
        )
    if not all(isinstance(chunk, types.EncodedTextChunk) for chunk in request.prompt.chunks):
        raise RequestError("prompt has a chunk that is not text; send encoded_text chunks alone")
    tokens = tuple(request.prompt.to_ints())
    check_ids("prompt", np.asarray(tokens, object), facts)
    room = facts.context_tokens - len(tokens)
    max_tokens = room if params.max_tokens is None else params.max_tokens
    if not tokens or not 1 <= max_tokens <= room:
        raise RequestError(
            f"the prompt has {len(tokens)} tokens and max_tokens={params.max_tokens}; the prompt needs at least 1,"
            f" max_tokens at least 1, and both together have room for {facts.context_tokens}"
        )
    for name, value, sound, rule in (
        ("num_samples", request.num_samples, 1 <= request.num_samples <= 4096, "1 to 4096"),
        ("temperature", params.temperature, 0 <= params.temperature < math.inf, "0 or greater"),
        ("top_k", params.top_k, params.top_k == -1 or params.top_k > 0, "-1 or positive"),
        ("top_p", params.top_p, 0 < params.top_p <= 1, "above 0 and at most 1"),
        (
            "topk_prompt_logprobs",
            request.topk_prompt_logprobs,
            0 <= request.topk_prompt_logprobs <= 1024,
            "0 to 1024",
        ),
        (
            "topk_sample_logprobs",
            request.topk_sample_logprobs,
            0 <= request.topk_sample_logprobs <= 1024,
            "0 to 1024",
        ),
    ):
        if not sound:
            raise RequestError(f"{name}={value} must be {rule}")
    stops = [params.stop] if isinstance(params.stop, str) else params.stop
    stop_ids = tuple(stop for stop in stops or () if isinstance(stop, int))
    check_ids("sampling_params.stop", np.asarray(stop_ids, object), facts)
    return Prompt(
        tokens=tokens,
        num_samples=request.num_samples,
        seed=zlib.crc32(request_id.encode()) if params.seed is None else params.seed,
        max_tokens=max_tokens,
        temperature=params.temperature,
        top_k=params.top_k,
        top_p=params.top_p,
        stop_ids=stop_ids,
        stop_texts=tuple(stop for stop in stops or () if isinstance(stop, str)),
        stop_at_end=stops is None or len(stops) > 0,
        log_probs_from=_log_probs_from(request, len(tokens)),
        top_prompt_log_probs=request.topk_prompt_logprobs,
        top_log_probs=request.topk_sample_logprobs,
    )


def _log_probs_from(request: types.SampleRequest, num_tokens: int) -> int | None:
    last = request.prompt_logprobs_last_n
    if last is None:
        return 0 if request.prompt_logprobs or request.topk_prompt_logprobs else None
    if not request.prompt_logprobs or not 1 <= last < num_tokens:
        raise RequestError(
            f"prompt_logprobs_last_n={last} must be 1 to {num_tokens - 1}, with prompt_logprobs=true"
        )
    return num_tokens - last


def encode_passed(passed: Passed) -> bytes:
    """Return the results of a forward pass as the SDK decodes them."""
    message = pb.ForwardBackwardOutput(loss_fn_output_type="ArrayRecord", metrics=passed.metrics)
    start = 0
    while start < len(passed.outputs):  # rows of equal K share a record
        trailing = {name: column.shape[1:] for name, column in passed.outputs[start].items()}
        end = start
        while end < len(passed.outputs) and trailing == {
            name: column.shape[1:] for name, column in passed.outputs[end].items()
        }:
            end += 1
        rows = passed.outputs[start:end]
        record = message.loss_fn_outputs.add(type_tag="ArrayRecord", num_datums=len(rows))
        for name, shape in trailing.items():
            parts = [np.ascontiguousarray(row[name], "<f4") for row in rows]
            record.fields[name].CopyFrom(
                pb.BatchedTensor(
                    data=b"".join(part.tobytes() for part in parts),
                    offsets=np.cumsum([0, *(part.nbytes for part in parts)], dtype="<i8").tobytes(),
                    dtype=pb.DTYPE_FLOAT32,
                    trailing_shape=shape,
                )
            )
        start = end
    return message.SerializeToString()


def encode_sampled(sampled: Sampled) -> bytes:
    """Return the results of a sampling request as the SDK decodes them."""
    message = pb.SampleResponse()
    for sample in sampled.samples:
        message.sequences.add(
            stop_reason=pb.STOP_REASON_STOP if sample.stop_reason == "stop" else pb.STOP_REASON_LENGTH,
            tokens=np.asarray(sample.tokens, "<i4").tobytes(),
            logprobs=np.asarray(sample.log_probs, "<f4").tobytes(),
            topk_sampled_logprobs=None if sample.top is None else _top(sample.top),
        )
    if sampled.prompt_log_probs is not None:
        message.prompt_logprobs = np.asarray(sampled.prompt_log_probs, "<f4").tobytes()
    if sampled.top_prompt is not None:
        message.topk_prompt_logprobs.CopyFrom(_top(sampled.top_prompt))
    return message.SerializeToString()


def _top(top: TopLogProbs) -> pb.TopkLogprobs:
    length, k = top.ids_Tk.shape
    return pb.TopkLogprobs(
        token_ids=np.ascontiguousarray(top.ids_Tk, "<i4").tobytes(),
        logprobs=np.ascontiguousarray(top.log_probs_Tk, "<f4").tobytes(),
        k=k,
        length=length,
    )
