"""A server's engines on ranks of their own: they sample what the actor would in place, and while it trains."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import ray
import yaml

from hybridengine.config import load_config
from hybridengine.controller.call_log import CallRecord, call_log
from hybridengine.data.tokenizer import build_arithmetic_tokenizer
from hybridengine.errors import RanksLostError
from hybridengine.serving.engine_ranks import EngineRanks
from hybridengine.serving.pool_engines import PoolEngines
from hybridengine.serving.rank_groups import RankGroups
from hybridengine.serving.ranks import ModelFacts, Prompt, Sampled, Weights
from tests.full.test_served_ranks import SCORED, TOKENS, train_step
from tests.gloo.client_rows import SIZES
from tests.gloo.tiny_models import write_model

PROMPTS = [
    Prompt(TOKENS, num_samples=3, seed=7, max_tokens=8),
    Prompt(TOKENS[:2], num_samples=1, seed=9, max_tokens=5, temperature=0.7, top_p=0.9),
    Prompt(TOKENS[1:], num_samples=1, seed=1, max_tokens=8, temperature=0.0, stop_texts=("+",)),
    # longer than a block of the KV cache, which would survive a push as a cached prefix
    Prompt(TOKENS * 30, num_samples=2, seed=3, max_tokens=8),
]


@pytest.fixture
def groups(ray_cluster: int, tmp_path: Path) -> Iterator[RankGroups]:
    """An actor of two ranks, and two engines of one rank each."""
    write_model(tmp_path / "policy", "qwen3", tied=True, max_position_embeddings=512, **SIZES)
    build_arithmetic_tokenizer().save_pretrained(tmp_path / "policy")
    sections = {
        "run": {"folder": str(tmp_path / "runs")},
        "cluster": {
            "ranks_per_node": [2],
            "pools": {"engines": {"roles": ["generation"], "ranks_per_node": [2]}},
        },
        "model": {"path": str(tmp_path / "policy")},
        "actor": {"parallel": "1-2-1", "generate": "1-1", "micro_batch_tokens": 320},
        "rollout": {"max_prompt_tokens": 200, "max_response_tokens": 100, "kv_cache_bytes": "16MiB"},
        "timeouts": {"call_s": 120},
    }
    (tmp_path / "serve.yaml").write_text(yaml.safe_dump(sections))
    config = load_config(tmp_path / "serve.yaml", serves=True)
    with contextlib.closing(RankGroups(config, ())) as groups:
        groups.start()
        yield groups


def drawn(found: list[Sampled]) -> list[tuple[list[int], str]]:
    return [(sample.tokens.tolist(), sample.stop_reason) for sampled in found for sample in sampled.samples]


def sample(engines: PoolEngines, ranks: EngineRanks, weights: Weights, name: str) -> list[Sampled]:
    """Return samples of engines; they equal those that the actor draws in place."""
    engines.push(weights, name)
    assert engines.held == name
    found = list(engines.sample(PROMPTS))
    in_place = list(ranks.sample(PROMPTS, weights))
    assert drawn(found) == drawn(in_place)
    for one, other in zip(found, in_place, strict=True):
        for first, second in zip(one.samples, other.samples, strict=True):
            np.testing.assert_allclose(first.log_probs, second.log_probs, atol=2e-5)
    return found


@pytest.mark.timeout(600)
def test_engines_sample_as_the_actor_does_and_while_it_trains(groups: RankGroups, tmp_path: Path) -> None:
    config = groups.config
    facts = ModelFacts("tiny", str(config.model_folder), SIZES["vocab_size"], config.max_tokens)
    ranks = EngineRanks(groups, facts)
    engines = ranks.engines
    assert engines is not None
    assert engines.held is None
    ranks.begin_model()
    first = sample(engines, ranks, "live", "model:0")
    train_step(ranks)
    ranks.save_sampler(tmp_path / "saved")
    trained = sample(engines, ranks, "live", "model:1")
    assert drawn(trained) != drawn(first)
    train_step(ranks)
    # weights that the actor borrows for the push; its own ones come back
    assert drawn(sample(engines, ranks, tmp_path / "saved", "model:1")) == drawn(trained)
    assert drawn(sample(engines, ranks, "base", "base")) == drawn(first)
    (scored,) = ranks.sample([SCORED], "live")
    ranks.save_sampler(tmp_path / "again")
    (again,) = ranks.sample([SCORED], tmp_path / "again")
    np.testing.assert_array_equal(scored.prompt_log_probs, again.prompt_log_probs)

    call_log().take_records()
    long = [Prompt(TOKENS, num_samples=16, seed=0, max_tokens=100)]
    with ThreadPoolExecutor(1) as threads:
        drawing = threads.submit(engines.sample, long)
        while not drawing.done():
            train_step(ranks)
    assert len(drawing.result()[0].samples) == 16
    records = call_log().take_records()
    drew, passed = spans(records, "sample"), spans(records, "pass_rows")
    assert len(drew) == 2  # one of each engine
    assert any(begin < end_of and begin_of < end for begin, end in drew for begin_of, end_of in passed)

    engine = groups.engines[1].group.pool._processes[0]
    os.kill(ray.get(engine.__ray_call__.remote(lambda process: os.getpid()), timeout=60), signal.SIGKILL)
    with pytest.raises(RanksLostError, match=r"generation\.sample died on rank 0"):
        engines.sample(PROMPTS)
    ranks.restart()
    assert engines.held is None
    assert drawn(sample(engines, ranks, "live", "model:0")) == drawn(first)


def spans(records: list[CallRecord], method: str) -> list[tuple[float, float]]:
    """Return the begin and end of the calls of a method on its first rank."""
    return [record.spans[0] for record in records if record.method == method]
