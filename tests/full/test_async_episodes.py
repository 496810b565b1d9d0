"""Episodes of asynchronous runs: over new weights, an engine that dies, and a run that is killed and resumed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from hybridengine.report import keys
from tests.full.test_async_runs import ASYNCHRONOUS, COMMAND, STEPS, Outcome, Runs, wait_for_rows
from tests.full.test_faults import killed_at_the_end
from tests.full.tiny_runs import SECTIONS, value
from tests.warm_workers import warm_program

pytestmark = pytest.mark.timeout(900)

LOST_IN, KILLED_AFTER = 5, 4
EPISODE = {
    "function": "tests.full.async_episodes:asks_at_random",
    "metrics": ["asked", "drawn"],
    "on_failure": "fail",
}


@pytest.fixture(scope="module")
def batches(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("batches")


@pytest.fixture(scope="module")
def resumed(
    tmp_path_factory: pytest.TempPathFactory, ray_cluster: int, warm_ray: dict[str, str], batches: Path
) -> Outcome:
    """A run that is killed with everything after a few steps, resumed, and then loses one of its two engines."""
    runs = Runs(tmp_path_factory.mktemp("episodes"))
    sections = {
        "algorithm": ASYNCHRONOUS["algorithm"]
        | {
            "name": "tests.full.async_episodes:WritesEpisodes",
            "folder": str(batches),
            "dies_in": str(LOST_IN),
        },
        "reward": {"kind": "episode"},
        "rollout": ASYNCHRONOUS["rollout"] | {"max_response_tokens": 24, "episode": EPISODE},
    }
    config = runs.config("killed", **sections)
    with killed_at_the_end(warm_program(COMMAND, "train", config), warm_ray):
        wait_for_rows(config.parent / "runs/killed/metrics.jsonl", KILLED_AFTER + 1)
    outcome = runs("killed", "resume=auto", **sections)
    assert outcome.status == 0, outcome.errors + outcome.console
    return outcome


def test_every_step_is_trained_and_no_episode_fails(resumed: Outcome) -> None:
    assert re.search(r"resuming after step [24]\b", resumed.console), resumed.console
    assert "has ended; the other 1 go on with its" in resumed.console
    assert [row[keys.STEP] for row in resumed.rows] == [*range(1, STEPS + 1)]
    assert max(value(row, "staleness/age_max") for row in resumed.rows) > 0, "new weights came in between"


def test_log_probs_are_those_that_the_engine_drew_with(resumed: Outcome) -> None:
    """Tokens, texts between them and sets of tokens are those of the turns, also where an episode began again."""
    diffs = [value(row, keys.LOG_PROB_ABS_DIFF_MAX) for row in resumed.rows]
    fresh = [
        diff for diff, row in zip(diffs, resumed.rows, strict=True) if not value(row, "staleness/age_max")
    ]
    assert fresh and max(fresh) < 1e-4


def test_what_is_trained_is_what_the_episode_has_drawn(resumed: Outcome, batches: Path) -> None:
    """Also of those that began again, and played on otherwise."""
    num_rows = SECTIONS["data"]["batch_size"] * SECTIONS["rollout"]["samples_per_prompt"]
    for step in range(1, STEPS + 1):
        columns = torch.load(batches / f"{step}.pt")
        assert len(columns["scores"]) == num_rows
        assert columns["episode/turns"].tolist() == columns["episode/asked"].tolist()
        assert columns["response_mask"].sum(1).tolist() == columns["episode/drawn"].tolist()
        assert columns["scores"].tolist() == columns["episode/drawn"].tolist()
