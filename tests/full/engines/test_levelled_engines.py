"""Engines that draw together: tokens as alone, and steps counted, with rows of very different lengths."""

from __future__ import annotations

import heapq
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from hybridengine.backends.engine import Response
from hybridengine.topology.generation import GenerationGrid
from hybridengine.topology.grid import Grid
from hybridengine.topology.sizes import GenSizes, TrainSizes
from tests.full.engines.levelled_ranks import LENGTHS, SLOTS, Seen, draw, stop_string
from tests.gloo.ranks import RankLauncher
from tests.gloo.tiny_models import write_model

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("levelled") / "model"
    sizes: dict[str, Any] = {"head_dim": 32, "max_position_embeddings": 256, "eos_token_id": None}
    config = write_model(folder, "qwen3", True, num_key_value_heads=2, **sizes).config
    words = Tokenizer(WordLevel({f"word{token}": token for token in range(config.vocab_size)}))
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def by_sizes(model: Path, run_ranks: RankLauncher) -> dict[str, list[Seen]]:
    """Return what each rank has seen: two engines of one rank, of two tensor shards, and of two stages."""
    found = {}
    for train, gen in (("1-1-2", "1-1"), ("1-2-2", "1-2"), ("2-1-2", "2-1")):
        generation = GenerationGrid(Grid(TrainSizes.parse(train)), GenSizes.parse(gen))
        found[gen] = run_ranks(generation.train.num_ranks, draw, model, generation)
    return found


@pytest.fixture(params=["1-1", "1-2", "2-1"])
def ranks(request: pytest.FixtureRequest, by_sizes: dict[str, list[Seen]]) -> list[Seen]:
    return by_sizes[request.param]


def drawn(responses: list[Response]) -> list[tuple[list[int], list[int], str | None]]:
    return [(one.token_ids, one.versions, one.finish_reason) for one in responses]


def test_tokens_are_those_that_each_engine_draws_alone(ranks: list[Seen]):
    for seen in ranks:
        assert [len(one.token_ids) for one in seen.alone] == LENGTHS[seen.place]
        for shared in (seen.together, seen.crowded):
            assert drawn(shared) == drawn(seen.alone)
            for one, other in zip(shared, seen.alone, strict=True):
                assert one.log_probs == pytest.approx(other.log_probs, abs=1e-4)
        assert drawn(seen.few) == drawn(seen.alone[:SLOTS])
    by_place = {seen.place: drawn(seen.together) for seen in ranks}
    assert all(drawn(seen.together) == by_place[seen.place] for seen in ranks), "all ranks of an engine agree"


def test_rows_that_move_end_with_stop_strings_that_began_before(ranks: list[Seen]):
    for seen in ranks:
        for whole, cut in zip(seen.alone, seen.with_strings, strict=True):
            texts = [f"word{token}" for token in whole.token_ids]
            ends = [end for end in range(len(texts) + 1) if stop_string(whole) in " ".join(texts[:end])]
            assert cut.token_ids == whole.token_ids[: ends[0]]
            assert cut.finish_reason == "stop"
    if ranks[0].num_stages == 1:
        assert any(any(seen.moved_with_strings) for seen in ranks), "with tokens that were drawn before"


def test_rows_that_move_keep_their_supports(ranks: list[Seen]):
    for seen in ranks:
        for one, other in zip(seen.crowded, seen.alone, strict=True):
            assert one.supports is not None and other.supports is not None
            assert len(one.supports) == len(one.token_ids)
            assert [*map(list, one.supports)] == [*map(list, other.supports)]
            assert any(map(len, one.supports))


def test_engines_with_and_without_stages_draw_the_same_tokens(by_sizes: dict[str, list[Seen]]):
    """Both have vLLM's first model runner here; on a GPU, only engines with stages have it."""
    found = [{seen.place: drawn(seen.alone) for seen in ranks} for ranks in by_sizes.values()]
    assert found[0] == found[1] == found[2]


def test_the_engine_with_short_rows_takes_waiting_ones_of_the_other(ranks: list[Seen]):
    long, short = (next(seen for seen in ranks if seen.place == place) for place in (0, 1))
    assert len(short.moved) > 0
    together = max(long.steps_together, short.steps_together)
    assert together < 0.8 * long.steps_alone
    if ranks[0].num_stages == 1:
        assert long.steps_alone == steps_of(LENGTHS[0])
        at_best = steps_of([*LENGTHS[0], *LENGTHS[1]], num_slots=2 * SLOTS)
        assert at_best <= together <= at_best + 16, "two times the steps between comparisons"
        assert (long.steps_few, short.steps_few) == tuple(max(lengths[:SLOTS]) for lengths in LENGTHS)


def test_a_request_that_the_full_cache_has_preempted_goes_on_after_its_tokens(ranks: list[Seen]):
    if ranks[0].num_stages == 1:  # batches of stages end at other steps, after which none waits with tokens
        assert any(next(seen for seen in ranks if seen.place == 1).moved_crowded)


def steps_of(lengths: list[int], num_slots: int = SLOTS) -> int:
    """Return the steps in which slots draw rows in order, each as soon as a slot is free."""
    slots = [0] * num_slots
    for length in lengths:
        heapq.heapreplace(slots, slots[0] + length)
    return max(slots)
