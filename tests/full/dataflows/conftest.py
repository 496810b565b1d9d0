"""The groups that all tests of this folder share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from hybridengine.config import RunConfig, load_config
from hybridengine.config.role_sections import TeacherSection
from hybridengine.controller.worker_group import WorkerGroup
from hybridengine.drivers.roles import Roles
from hybridengine.training.files import build_model, claim_run, prepare_files
from hybridengine.training.launch import RunPools
from tests.full.dataflows.shared import COST_LIMIT, MULTIPLIER_LR, Started
from tests.full.tiny_runs import SECTIONS


@pytest.fixture(scope="package")
def started(tmp_path_factory: pytest.TempPathFactory, ray_cluster: int) -> Iterator[Started]:
    folder = tmp_path_factory.mktemp("dataflows")
    changes = {
        "run": {"steps": 1, "seed": 3, "folder": str(folder / "runs")},
        "warmup": None,
        "algorithm": {"name": "safe_rlhf", "cost_limit": COST_LIMIT, "multiplier_lr": MULTIPLIER_LR},
        # An untrained model gives no right answers, but responses of several lengths; short ones get a better score.
        "reward": {"terms": {"short": {"function": "hybridengine.data.tasks:length_cost", "weight": -1.0}}},
        "cost": {"terms": {"tokens": {"function": "hybridengine.data.tasks:length_cost", "weight": 2.0}}},
        "cost_critic": SECTIONS["critic"],
        "actor": SECTIONS["actor"] | {"kl_loss_coef": 0.01},
        "rollout": SECTIONS["rollout"]
        | {
            "top_p": 0.9,
            "top_k": 12,
            "min_p": 0.01,
            "stop": ["qu"],
            "structure": {"regex": "[0-9a-z]{2,10}"},  # with an end token, less than the longest response
        },
    }
    (folder / "all.yaml").write_text(yaml.safe_dump(SECTIONS | changes))
    config, _ = claim_run(load_config(folder / "all.yaml"))
    files = prepare_files(config)
    with RunPools(config) as pools:
        pools.start()
        actor = pools.start_model("actor", folder=config.model_folder, stop_token_ids=files.stop_token_ids)
        actor.start_training()
        groups: dict[str, Any] = {**pools.start_roles(actor).__dict__, "teacher": teacher_of(config, actor)}
        yield Started(config, files, pools, Roles(**groups))


def teacher_of(config: RunConfig, actor: WorkerGroup) -> WorkerGroup:
    """Return the teacher, a model with weights of its own: no run has it and all other roles as well."""
    seeded = config.run.model_copy(update={"name": "teacher", "seed": 4})
    folder = config.model_copy(update={"run": seeded}).model_folder
    build_model(config.model_copy(update={"run": seeded}))
    run = config.model_copy(update={"teacher": TeacherSection(path=str(folder))})
    arguments = {"run": run, "folder": folder}
    return WorkerGroup(
        actor.pool, "workers.teacher.TeacherWorker", role="teacher", parallel="1-2-2", config=arguments
    )
