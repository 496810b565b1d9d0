"""Responses whose text matters to the engine, which ends them at stop strings and draws only what their form allows.

vLLM begins both with a request. For a response that goes on in a new request, after a move, a fault or a resume, they are
taken to where its earlier tokens have led.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from hybridengine.backends.engine import Request
from hybridengine.config.sections import StructureSection
from hybridengine.data.tokenizer import load_tokenizer
from hybridengine.errors import ConfigError, DataError, shown


def structured_params(structure: StructureSection) -> Any:
    """Return vLLM's parameters for the form of a response."""
    from vllm.sampling_params import StructuredOutputsParams

    return StructuredOutputsParams(
        regex=structure.regex or None,
        json=json.dumps(structure.json_schema) if structure.json_schema else None,
        choice=list(structure.choices) or None,
    )


def check_structure(
    structure: StructureSection,
    tokenizer: str | Path,
    vocab_size: int,
    stop_token_ids: Sequence[int],
    key: str = "rollout.structure",
) -> None:
    """Raise ConfigError unless vLLM takes the form of responses, the value of `key`, and some token may begin one."""
    from vllm import SamplingParams
    from vllm.exceptions import VLLMValidationError
    from vllm.v1.structured_output.backend_xgrammar import XgrammarBackend, validate_xgrammar_grammar
    from vllm.v1.structured_output.request import get_structured_output_key

    settings = SimpleNamespace(
        structured_outputs_config=SimpleNamespace(disable_any_whitespace=False),
        model_config=None,
        speculative_config=None,
    )
    params = SamplingParams(structured_outputs=structured_params(structure))
    try:
        assert params.structured_outputs is not None
        validate_xgrammar_grammar(params)
        backend: Any = XgrammarBackend(settings, load_tokenizer(tokenizer), vocab_size)  # pyright: ignore[reportArgumentType]
        kind, text = get_structured_output_key(params.structured_outputs)
        grammar = backend.compile_grammar(kind, text, stop_token_ids=set(stop_token_ids))
        mask = backend.allocate_token_bitmask(1)
        grammar.fill_bitmask(mask, 0)
    except (VLLMValidationError, ValueError, RuntimeError) as error:
        why = " ".join(re.sub(r"\[\S+\] \S+:\d+: ", "", str(error)).split())  # without xgrammar's own lines
        raise ConfigError(
            f"{key}={_shown(structure)} is refused by the engine: {why}; write another form, or leave {key} out"
        ) from None
    if not mask.any():
        raise ConfigError(
            f"{key}={_shown(structure)} cannot be met: no token of {tokenizer} begins such a response; write"
            " a form with at least one text"
        )


def _shown(structure: StructureSection) -> str:
    return shown({name: value for name, value in structure if value})


def go_on(engine: Any, name: str, request: Request, params: Any) -> None:
    """Take a new request to where the earlier tokens of its response have led (`Request.num_read`).

    Args:
        name: vLLM's name of the request.

    Raises:
        DataError: the earlier tokens do not have the form of the response.
    """
    num_read = request.first_position if request.num_read is None else request.num_read
    if not num_read:
        return
    begin = len(request.prompt_token_ids) - num_read
    prompt, drawn = list(request.prompt_token_ids[:begin]), list(request.prompt_token_ids[begin:])
    if params.stop:
        from vllm.v1.engine.detokenizer import IncrementalDetokenizer

        processor = engine.output_processor
        whole: Any = SimpleNamespace(
            request_id=name, sampling_params=params, prompt_token_ids=prompt, prompt_embeds=None
        )
        detokenizer = IncrementalDetokenizer.from_new_request(processor.tokenizer, whole)
        detokenizer.update(drawn, stop_terminated=False)
        processor.request_states[name].detokenizer = detokenizer
    if params.structured_outputs is not None:
        core_request = engine.engine_core.engine_core.scheduler.requests[name]
        if not core_request.structured_output_request.grammar.accept_tokens(name, drawn):
            raise DataError(
                f"the first {len(drawn)} tokens of response {request.request_id} do not have the form that is asked of"
                " it; resume with the rollout.structure with which they were drawn"
            )
