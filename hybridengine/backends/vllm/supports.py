"""Supports of an engine's draws: the tokens whose processed log-probabilities are finite, as the sampler sees them.

vLLM carries them from a step's output to the request as its "sampling masks". Its second model runner finds them; its
first, on a CPU and with pipeline stages, does not, so that they are taken here where it gathers log-probabilities. Every
rank of an engine samples, also on the other pipeline stages, and so has the supports.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
from torch import Tensor

from hybridengine.rows.supports import WHOLE, support_of


class RequestSupports:
    """Supports of the tokens that the last step has drawn, by vLLM's names of the requests."""

    def __init__(self, engine: Any, runner: Any, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._drawn: dict[str, list[np.ndarray]] = {}
        engine.engine_core.engine_core.scheduler.return_sampling_mask = True
        if hasattr(runner.sampler, "return_sampling_mask"):
            # vLLM's own setting refuses temperature 0, and requests without top_k.
            runner.sampler.return_sampling_mask = True
        else:
            _tell_masks(runner)
        get_output = engine.engine_core.get_output

        def without_masks() -> Any:
            """Take the masks of a step before vLLM makes lists of them."""
            outputs = get_output()
            self._drawn = {}
            for output in outputs.outputs:
                if (masks := output.new_sampling_mask) is not None:
                    ids, output.new_sampling_mask = masks.token_ids, None
                    bounds = [0, len(ids)] if masks.offsets is None else masks.offsets.tolist()
                    parts = [ids[begin:end] for begin, end in pairwise(bounds)]
                    self._drawn[output.request_id] = [self._support(part) for part in parts]
            return outputs

        engine.engine_core.get_output = without_masks

    def _support(self, ids: np.ndarray) -> np.ndarray:
        return support_of(ids, self._vocab_size) if len(ids) else WHOLE

    def of(self, name: str, num_tokens: int) -> list[np.ndarray]:
        """Return the supports of the tokens that the last step has drawn for a request."""
        drawn = self._drawn.get(name, [])
        assert len(drawn) >= num_tokens, f"{num_tokens} tokens have {len(drawn)} supports"
        return drawn[:num_tokens]


def _tell_masks(runner: Any) -> None:
    """Let a first model runner give its outputs the masks of their tokens; an empty one stands for all tokens."""
    from vllm.v1.outputs import SamplingMaskLists

    sampler, found = runner.sampler, list[SamplingMaskLists]()
    gather, sample = sampler.gather_logprobs, runner.sample_tokens

    def gather_logprobs(logprobs: Tensor, num_logprobs: int, token_ids: Tensor) -> Any:
        drawable = logprobs > float("-inf")
        drawable[drawable.all(-1)] = False
        counts = drawable.sum(-1).cpu().numpy()
        ids = drawable.nonzero()[:, 1].int().cpu().numpy()
        found[:] = [SamplingMaskLists(ids, np.concatenate([[0], counts.cumsum()]))]
        return gather(logprobs, num_logprobs, token_ids)

    def sample_tokens(*args: Any, **kwargs: Any) -> Any:
        found.clear()
        output = sample(*args, **kwargs)
        if found:
            output.sampling_masks = found[0]
        return output

    sampler.gather_logprobs, runner.sample_tokens = gather_logprobs, sample_tokens
