"""A server's ranks on Ray: the reference answers what the actor would with borrowed weights, and lost ranks come back."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path

import numpy as np
import pytest
import ray
import yaml
from tinker.types import AdamParams

from hybridengine.config import load_config
from hybridengine.data.tokenizer import build_arithmetic_tokenizer
from hybridengine.errors import RanksLostError
from hybridengine.serving.engine_ranks import EngineRanks
from hybridengine.serving.rank_groups import RankGroups
from hybridengine.serving.ranks import LossRow, ModelFacts, Prompt
from tests.gloo.client_rows import SIZES
from tests.gloo.tiny_models import write_model

TOKENS = (9, 24, 50, 3, 17)
SCORED = Prompt(TOKENS, num_samples=1, seed=5, max_tokens=1, log_probs_from=0, top_prompt_log_probs=3)
LAST = Prompt(TOKENS[:3], num_samples=1, seed=6, max_tokens=1, log_probs_from=2)
DRAWN = Prompt(TOKENS, num_samples=2, seed=7, max_tokens=4, log_probs_from=0, top_log_probs=2)
PROMPTS = [SCORED, DRAWN, LAST]


def train_step(ranks: EngineRanks) -> None:
    columns = {"target_tokens": np.array([24, 50]), "weights": np.ones(2, np.float32)}
    ranks.forward_backward([LossRow(np.array([9, 24]), columns)], "cross_entropy", {}, backward=True)
    ranks.optim_step(AdamParams(learning_rate=1e-2))


@pytest.mark.timeout(600)
@pytest.mark.usefixtures("ray_cluster")
def test_the_reference_scores_as_borrowed_weights_do_and_lost_ranks_come_back(tmp_path: Path) -> None:
    write_model(tmp_path / "policy", "qwen3", tied=True, **SIZES)
    build_arithmetic_tokenizer().save_pretrained(tmp_path / "policy")
    sections = {
        "run": {"folder": str(tmp_path / "runs")},
        "cluster": {"ranks_per_node": [2]},
        "model": {"path": str(tmp_path / "policy")},
        "actor": {"parallel": "1-2-1", "generate": "1-1", "micro_batch_tokens": 64},
        "rollout": {"max_prompt_tokens": 16, "max_response_tokens": 8, "kv_cache_bytes": "16MiB"},
        "serve": {"reference": True},
        "timeouts": {"call_s": 120},
    }
    (tmp_path / "serve.yaml").write_text(yaml.safe_dump(sections))
    config = load_config(tmp_path / "serve.yaml", serves=True)
    facts = ModelFacts("tiny", str(tmp_path / "policy"), SIZES["vocab_size"], config.max_tokens)
    with contextlib.closing(RankGroups(config, ())) as groups:
        groups.start()
        ranks = EngineRanks(groups, facts)
        ranks.begin_model()
        train_step(ranks)
        (live,) = ranks.sample([SCORED], "live")
        of_reference = ranks.sample(PROMPTS, "base")
        reference, groups.reference = groups.reference, None
        borrowed = ranks.sample(PROMPTS, "base")
        groups.reference = reference
        for first, second in zip(of_reference, borrowed, strict=True):
            assert first.prompt_log_probs is not None
            assert second.prompt_log_probs is not None
            # of batches of other shapes, whose matrix products may differ in the last bit
            np.testing.assert_allclose(first.prompt_log_probs, second.prompt_log_probs, rtol=1e-6)
        for first, second in zip(of_reference[0].top_prompt or (), borrowed[0].top_prompt or (), strict=True):
            np.testing.assert_allclose(first, second, rtol=1e-6)
        scored = of_reference[0].prompt_log_probs
        assert scored is not None
        assert of_reference[0].top_prompt is not None
        assert live.prompt_log_probs is not None
        assert live.prompt_log_probs[1:] != pytest.approx(scored[1:], abs=1e-4)
        for first, second in zip(of_reference[1].samples, borrowed[1].samples, strict=True):
            assert first.tokens.tolist() == second.tokens.tolist()
            assert first.top is not None
            assert first.top.ids_Tk.shape == (len(first.tokens), 2)
        (drawn,) = of_reference[0].samples  # its log-prob is that of the same token in a longer prompt
        longer = Prompt(
            (*TOKENS, int(drawn.tokens[0])), num_samples=1, seed=0, max_tokens=1, log_probs_from=0
        )
        (found,) = ranks.sample([longer], "base")
        assert found.prompt_log_probs is not None
        assert drawn.log_probs[0] == pytest.approx(found.prompt_log_probs[-1], abs=1e-5)

        last = groups.actor.pool._processes[-1]
        os.kill(ray.get(last.__ray_call__.remote(lambda process: os.getpid()), timeout=60), signal.SIGKILL)
        with pytest.raises(RanksLostError, match="died on rank"):
            train_step(ranks)
        ranks.restart()
        ranks.begin_model()
        train_step(ranks)
        (again,) = ranks.sample([SCORED], "live")
        np.testing.assert_array_equal(again.prompt_log_probs, live.prompt_log_probs)
