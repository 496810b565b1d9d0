"""Requests in a vLLM engine: draws depend on seed and position, log-probs are of the truncated distribution."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import chi2
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from hybridengine.backends.engine import Request, Response, SamplingSettings
from hybridengine.backends.vllm.requests import _sampling_params
from hybridengine.errors import DataError
from hybridengine.topology.generation import GenerationGrid
from hybridengine.topology.grid import Grid
from hybridengine.topology.sizes import GenSizes, TrainSizes
from tests.full.engines.request_ranks import (
    NEW_TOKENS,
    NUM_DRAWS,
    PROMPTS,
    STRUCTURE,
    TRUNCATED,
    Seen,
    exercise_engine,
    word,
)
from tests.gloo.ranks import RankLauncher
from tests.gloo.tiny_models import write_model

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("requests") / "model"
    sizes: dict[str, Any] = {
        "hidden_size": 64,
        "head_dim": 32,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "eos_token_id": None,
    }
    config = write_model(folder, "qwen3", True, **sizes).config
    words = Tokenizer(WordLevel({word(token): token for token in range(config.vocab_size)}))
    words.add_special_tokens([word(token) for token in range(1, config.vocab_size, 2)])
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module", params=["1-2", "2-1"])
def ranks(request: pytest.FixtureRequest, model: Path, run_ranks: RankLauncher) -> list[Seen]:
    train = "2-1-1" if request.param == "2-1" else "1-2-1"
    generation = GenerationGrid(Grid(TrainSizes.parse(train)), GenSizes.parse(request.param))
    return run_ranks(2, exercise_engine, model, generation)


def tokens_of(responses: list[Response]) -> list[list[int]]:
    return [response.token_ids for response in responses]


def test_a_draw_depends_on_seed_and_position_alone(ranks: list[Seen]):
    for seen in ranks:
        expected = tokens_of(seen.sampled)
        assert expected == tokens_of(ranks[0].sampled)
        assert all(len(tokens) == NEW_TOKENS for tokens in expected)
        assert expected[0] != expected[3], "the same prompt, another seed"
        for way in ("alone", "coming_and_going", "over_a_switch", "kept", "continued", "crowded"):
            assert tokens_of(getattr(seen, way)) == expected, way


def test_tokens_carry_the_version_that_drew_them(ranks: list[Seen]):
    for seen in ranks:
        assert {tuple(response.versions) for response in seen.sampled} == {(0,) * NEW_TOKENS}
        for old, responses in ((0, seen.over_a_switch), (1, seen.kept)):
            for response in responses:
                first = response.versions.count(old)
                assert 0 < first <= 7
                assert response.versions == [old] * first + [old + 1] * (NEW_TOKENS - first)


def test_log_probs_are_those_of_the_distribution_that_was_drawn_from(ranks: list[Seen], model: Path):
    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    compared = [(SamplingSettings(NEW_TOKENS, 0.8), ranks[0].sampled)]
    for sampling, responses in [*compared, *zip(TRUNCATED, ranks[0].truncated, strict=True)]:
        for prompt, response in zip(PROMPTS, responses, strict=True):
            expected = log_probs_by_hand(reference, prompt, response, sampling)
            torch.testing.assert_close(torch.tensor(response.log_probs).double(), expected, rtol=0, atol=5e-5)


def log_probs_by_hand(
    model: PreTrainedModel, prompt: list[int], response: Response, sampling: SamplingSettings
) -> torch.Tensor:
    """Return log-probabilities of the response's tokens in float64."""
    whole = truncated_by_hand(model, prompt, response, sampling)
    return whole.gather(1, torch.tensor(response.token_ids)[:, None])[:, 0]


def truncated_by_hand(
    model: PreTrainedModel, prompt: list[int], response: Response, sampling: SamplingSettings
) -> torch.Tensor:
    """Return log-probabilities of all tokens, with minus infinity for those that the sampling cuts off."""
    tokens = torch.tensor([prompt + response.token_ids])
    with torch.no_grad():
        logits = model(tokens).logits[0, len(prompt) - 1 : -1].double() / sampling.temperature
    probs, order = logits.softmax(-1).sort(-1, descending=True)
    kept = torch.ones_like(probs, dtype=torch.bool)
    if sampling.top_k:
        kept[:, sampling.top_k :] = False
    kept &= probs.cumsum(-1) - probs < sampling.top_p
    kept &= probs >= sampling.min_p * probs[:, :1]
    truncated = torch.full_like(logits, -torch.inf).scatter(1, order, (probs * kept).log())
    return truncated.log_softmax(-1)


def test_supports_are_the_tokens_that_the_settings_keep(ranks: list[Seen], model: Path):
    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    for sampling, responses in zip(TRUNCATED, ranks[0].truncated, strict=True):
        sizes = set[int]()
        for prompt, response in zip(PROMPTS, responses, strict=True):
            expected = truncated_by_hand(reference, prompt, response, sampling).exp()
            assert response.supports is not None
            for probs, support in zip(expected, response.supports, strict=True):
                found = tokens_in(support, len(probs))
                others = found ^ set(probs.nonzero().flatten().tolist())
                # Those at the border are kept in one precision, and not in the other.
                assert all(probs[token] < (1 + 1e-4) * probs[probs > 0].min() for token in others)
                assert probs[[*found]].sum() > 1 - 1e-3
                sizes.add(len(found))
        assert sizes == {5} if sampling.top_k else len(sizes) > 3
    for responses in (ranks[0].sampled, ranks[0].greedy):
        assert not any(len(support) for one in responses for support in one.supports or ())
    for seen in ranks:
        for one, other in zip(seen.truncated, ranks[0].truncated, strict=True):
            for mine, theirs in zip(one, other, strict=True):
                assert [*map(list, mine.supports or ())] == [*map(list, theirs.supports or ())]


def test_tokens_are_drawn_with_their_renormalized_probabilities(ranks: list[Seen], model: Path):
    """Pearson's chi-square of the first tokens of many responses; seeds are fixed."""
    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    for sampling, drawn in zip(TRUNCATED, ranks[0].first_tokens, strict=True):
        response = Response("", token_ids=drawn[:1])
        probs = truncated_by_hand(reference, PROMPTS[1], response, sampling)[0].exp().numpy()
        counts = np.bincount(drawn, minlength=len(probs))
        assert not counts[probs == 0].any()
        common = probs * NUM_DRAWS >= 5  # the others count together
        observed = np.append(counts[common], counts[~common].sum())
        expected = np.append(probs[common], probs[~common].sum()) * NUM_DRAWS
        kept = expected > 0
        statistic = float(((observed - expected)[kept] ** 2 / expected[kept]).sum())
        assert chi2.sf(statistic, kept.sum() - 1) > 1e-3


def tokens_in(support: np.ndarray, vocab_size: int) -> set[int]:
    """Return the tokens of a support, bit by bit."""
    if not len(support):
        return {*range(vocab_size)}
    if len(support) < (vocab_size + 31) // 32:
        return {*support.tolist()}
    words = [int(word) % 2**32 for word in support]
    return {token for token in range(vocab_size) if words[token // 32] >> token % 32 & 1}


def test_responses_have_the_form_of_a_structure(ranks: list[Seen]):
    for seen in ranks:
        for response, continued in zip(seen.structured, seen.continued_in_structure, strict=True):
            *words, end = response.token_ids
            assert (end, response.finish_reason) == (4, "stop")
            assert re.fullmatch(STRUCTURE.regex, "".join(map(word, words)))
            assert response.supports is not None
            first = tokens_in(response.supports[0], 131)
            assert first <= {1, 2, 13}
            assert tokens_in(response.supports[-1], 131) >= {4}
            assert continued.token_ids == response.token_ids
        assert len({len(response.token_ids) for response in seen.structured}) > 1


def test_a_response_that_goes_on_ends_with_a_stop_string_that_began_before(ranks: list[Seen]):
    for seen in ranks:
        assert tokens_of(seen.continued_to_text) == tokens_of(seen.stopped_by_text)


def test_a_response_ends_with_its_first_stop_token(ranks: list[Seen]):
    for seen in ranks:
        lengths = []
        for whole, cut in zip(seen.greedy, seen.stopped, strict=True):
            ends = [place for place, token in enumerate(whole.token_ids) if token in seen.stop_token_ids]
            length = ends[0] + 1 if ends else NEW_TOKENS
            assert cut.token_ids == whole.token_ids[:length]
            assert len(cut.log_probs) == length
            assert (whole.finish_reason, cut.finish_reason) == ("length", "stop" if ends else "length")
            lengths.append(length)
        assert 1 in lengths
        assert len(set(lengths)) > 1


def test_a_response_ends_with_its_first_stop_string(ranks: list[Seen]):
    for seen in ranks:
        lengths = []
        for whole, cut in zip(seen.greedy, seen.stopped_by_text, strict=True):
            texts = [" ".join(map(word, whole.token_ids[:length])) for length in range(NEW_TOKENS + 1)]
            ends = [length for length, text in enumerate(texts) if seen.stop_strings[0] in text]
            length = ends[0] if ends else NEW_TOKENS
            assert cut.token_ids == whole.token_ids[:length]
            lengths.append(length)
        assert lengths[1] <= 5 < max(lengths)


@pytest.mark.parametrize(
    "wrong",
    [
        *({"max_tokens": value} for value in (0, True, 1.0, -(10**5000))),
        *({"temperature": value} for value in (-1.0, 0.0099, 2.1, math.nan, math.inf, "1", None, True)),
        *({"top_p": value} for value in (0.0, None)),
        {"top_k": -1},
        *({"min_p": value} for value in (1.5, "0")),
        *({"stop_token_ids": value} for value in (None, 5, [1], (1.0,))),
        *({"stop_strings": value} for value in ("end", ("",), (5,), None)),
    ],
    ids=list,  # for the name: a number of 5000 digits has no text
)
def test_sampling_out_of_range_is_refused(wrong: dict[str, Any]):
    (name,) = wrong
    with pytest.raises(DataError, match=rf"^{name}(\[\d\])?=.* of the sampling settings must be"):
        SamplingSettings(**{"max_tokens": 1, **wrong})


def test_sampling_at_the_ends_of_its_ranges_is_taken_by_vllm_as_it_is():
    for temperature in (0, 0.01, 2, 2.0):
        params = _sampling_params(SamplingSettings(1, temperature), seed=1)
        assert params.temperature == temperature


@pytest.mark.parametrize(
    "wrong",
    [
        *({"seed": value} for value in (None, 1.0, True, 2**63, -(2**63) - 1)),
        *({"request_id": value} for value in (None, 7, b"x")),
        *({"prompt_token_ids": value} for value in (None, [1], "text", ("1",), (1.5,), (1, True))),
        *({"first_position": value} for value in (-1, 0.0, None, 2**63)),
        {"sampling": None},
    ],
    ids=str,
)
def test_a_request_of_wrong_values_is_refused(wrong: dict[str, Any]):
    (name,) = wrong
    right = {"request_id": "x", "prompt_token_ids": (1,), "seed": 1, "sampling": SamplingSettings(1)}
    assert Request(**right)
    with pytest.raises(DataError, match=rf"^{name}(\[\d\])?=.* of request .* must be"):
        Request(**{**right, **wrong})
