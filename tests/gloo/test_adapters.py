"""Training of low-rank adapters at parallel sizes, compared with plain PyTorch in one process."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tensordict import TensorDict

from hybridengine.backends.megatron.checkpoint import BackgroundSave, load_checkpoint
from hybridengine.backends.megatron.trainer import MegatronTrainer
from hybridengine.backends.megatron.weights import save_weights, start_adapters
from hybridengine.checkpoints.conversion import export_role
from hybridengine.checkpoints.folders import Checkpoint
from hybridengine.checkpoints.peft_files import PeftFolder
from hybridengine.checkpoints.tensors import TensorFolder
from hybridengine.config import RunConfig
from hybridengine.config.role_sections import MegatronSettings
from hybridengine.errors import CheckpointError
from hybridengine.families.adapters import is_of_adapter
from hybridengine.models.checkpoint_files import ADAPTER_CONFIG, ADAPTER_FILE
from hybridengine.models.shapes import PEFT_PREFIX, ModelShape
from hybridengine.rows.protocols import GroupTopology, RankContext
from hybridengine.topology.grid import Grid
from hybridengine.topology.sizes import TrainSizes
from hybridengine.weights.process_groups import ProcessGroups
from tests.gloo import training_reference as reference
from tests.gloo.adapters_by_hand import ADAPTERS, adapt, write_peft
from tests.gloo.checkpoint_ranks import differing, empty_folder, ended, state_of
from tests.gloo.megatron_training import Outcome, check_steps, copy_weights, make_trainer, mean_loss, step
from tests.gloo.ranks import RankLauncher
from tests.gloo.tiny_models import write_model
from workers.policy import PolicyWorker

NUM_STEPS = 5
PLAIN, FULL = MegatronSettings(), MegatronSettings(recompute="full")
CASES: dict[int, list[tuple[str, MegatronSettings]]] = {
    1: [("1-1-1", PLAIN), ("1-1-1", FULL), ("1-1-1", MegatronSettings(recompute="selective"))],
    2: [
        ("1-2-1", MegatronSettings(sequence_parallel=False)),
        ("1-2-1", PLAIN),
        ("1-2-1", FULL),
        ("1-1-2", PLAIN),
        ("2-1-1", FULL),
        ("2-1-1 v=2", PLAIN),
        ("1-1-1 c=2", PLAIN),
    ],
    4: [("2-2-1", FULL), ("1-2-2", PLAIN)],
}
"""Number of ranks -> sizes with features of Megatron-core."""
MIXTURE: dict[int, list[tuple[str, MegatronSettings]]] = {
    2: [("1-1-2 e=2", PLAIN), ("1-2-1 e=2 etp=1", FULL), ("1-1-2", PLAIN)]
}
LATENT: dict[int, list[tuple[str, MegatronSettings]]] = {
    2: [("1-2-1 e=2 etp=1", PLAIN), ("1-2-1 e=2 etp=1", FULL), ("1-1-2 e=2", PLAIN), ("2-1-1", PLAIN)]
}
NORMED: dict[int, list[tuple[str, MegatronSettings]]] = {2: [("1-2-1", PLAIN), ("2-1-1", FULL)]}
MODELS = [
    ("qwen2", True, CASES),
    ("phi3", False, CASES),
    ("gemma3_text", False, NORMED),
    ("glm4", False, NORMED),
    ("granite", True, NORMED),
    ("qwen3_moe", False, MIXTURE),
    ("deepseek_v3", False, LATENT),
]
"""Families with three tensors and with one for q, k and v, and for gate and up; tied and untied embeddings; norms of
outputs; experts; latent attention beside a shared expert."""


def adapted_trainer(
    rank: int, folder: Path, adapters: Path, sizes: str, settings: MegatronSettings, registry: ProcessGroups
) -> MegatronTrainer:
    """Return a trainer of the adapters of a folder."""
    shape = ModelShape.from_folder(folder).with_adapters(ADAPTERS)
    trainer = make_trainer(shape, Grid(TrainSizes.parse(sizes)), rank, registry, folder, features=settings)
    start_adapters(trainer, 0, adapters)
    trainer.restart_optimizer()
    return trainer


def train_adapters(
    rank: int, folder: Path, adapters: Path, cases: list[tuple[str, MegatronSettings]], out: Path
) -> list[tuple[list[Outcome], bool, int]]:
    """Return each case's steps, whether the frozen weights are bitwise the same, and the number of trained elements."""
    registry, found = ProcessGroups(), []
    for number, (sizes, settings) in enumerate(cases):
        trainer = adapted_trainer(rank, folder, adapters, sizes, settings, registry)
        before = copy_weights(trainer)
        records = [step(trainer, index) for index in range(NUM_STEPS)]
        outcomes = [(norm, mean_loss(losses) if losses else None) for norm, _, losses in records]
        after = copy_weights(trainer)
        kept = all(torch.equal(after[name], before[name]) for name in before if not is_of_adapter(name))
        save_weights(trainer, registry, out / str(number), base=folder)
        found.append((outcomes, kept, trainer.gradient_bytes // 4))
    return found


@pytest.mark.parametrize(
    ("family", "tied", "num_ranks", "cases"),
    [(family, tied, *each) for family, tied, cases in MODELS for each in cases.items()],
    ids=lambda value: "" if isinstance(value, list) else str(value),
)
def test_steps_of_adapters_equal_plain_pytorch(
    family: str, tied: bool, num_ranks: int, cases: Any, tmp_path: Path, run_ranks: RankLauncher
):
    sizes: dict[str, Any] = {"num_hidden_layers": 4, "hidden_size": 128}
    model: Any = write_model(tmp_path / "model", family, tied=tied, **sizes)
    adapters = adapt(model)
    write_peft(tmp_path / "adapters", adapters)
    expected = reference.train(model, reference.language_loss, NUM_STEPS)
    by_rank = run_ranks(
        num_ranks,
        train_adapters,
        tmp_path / "model",
        tmp_path / "adapters",
        cases,
        tmp_path / "trained",
        timeout_s=300,
    )
    each = [TrainSizes.parse(text) for text, _ in cases]
    check_steps([[steps for steps, _, _ in outcomes] for outcomes in by_rank], each, expected)
    assert all(kept for outcomes in by_rank for _, kept, _ in outcomes)
    for number in range(len(cases)):
        trained = load_file(tmp_path / "trained" / str(number) / ADAPTER_FILE)
        assert trained.keys() == adapters.keys()
        for name, tensor in trained.items():
            torch.testing.assert_close(tensor, adapters[name].detach(), rtol=1e-4, atol=2e-5)


def resume_adapters(rank: int, folder: Path, adapters: Path, checkpoint: Path, out: Path) -> list[list[str]]:
    """Save between two steps; return the differences after the second one of what loads it at the same sizes."""
    registry = ProcessGroups()
    trainer = adapted_trainer(rank, folder, adapters, "1-2-1", PLAIN, registry)
    step(trainer, 0)
    ended(BackgroundSave(trainer, empty_folder(checkpoint), {"base": str(folder)}))
    step(trainer, 1)
    found = []
    for sizes in ("1-2-1", "2-1-1"):
        resumed = adapted_trainer(rank, folder, adapters, sizes, PLAIN, registry)
        load_checkpoint(resumed, checkpoint)
        step(resumed, 1)
        if sizes == "1-2-1":
            found.append(differing(state_of(trainer), state_of(resumed)))
        save_weights(resumed, registry, out / sizes)
    return found


def test_checkpoints_have_adapters_alone_and_resume_bitwise(tmp_path: Path, run_ranks: RankLauncher):
    model: Any = write_model(tmp_path / "model", "qwen3", num_hidden_layers=4)
    write_peft(tmp_path / "adapters", adapters := adapt(model))
    checkpoint = tmp_path / "checkpoints" / "actor"
    paths = tmp_path / "model", tmp_path / "adapters", checkpoint, tmp_path / "trained"
    assert run_ranks(2, resume_adapters, *paths, timeout_s=120) == [[[]], [[]]]
    assert all(".lora_" in name for name in TensorFolder(checkpoint).shapes)
    one, other = (load_file(tmp_path / "trained" / sizes / ADAPTER_FILE) for sizes in ("1-2-1", "2-1-1"))
    assert one.keys() == adapters.keys()
    for name, tensor in one.items():
        torch.testing.assert_close(other[name], tensor, rtol=1e-5, atol=1e-6)
    export_role(Checkpoint(checkpoint.parent, 1), "actor", tmp_path / "exported")
    exported = load_file(tmp_path / "exported" / ADAPTER_FILE)
    config = json.loads((tmp_path / "exported" / ADAPTER_CONFIG).read_text())
    assert exported.keys() == adapters.keys()
    assert (config["r"], config["base_model_name_or_path"]) == (8, str(tmp_path / "model"))


LENGTHS = (3, 4), (5, 2)
"""Prompt and response of each row."""


def actor_of(folder: Path, adapters: Path | None) -> PolicyWorker:
    """Return the actor's worker on one rank."""
    run = RunConfig.model_validate(
        {
            "model": {"path": str(folder)},
            "actor": {"lora": {"rank": 8, "alpha": 12.0, "path": adapters and str(adapters)}},
            "rollout": {"max_prompt_tokens": 5, "max_response_tokens": 4},
            "algorithm": {"name": "grpo"},
        }
    )
    topology = GroupTopology(run.grid("actor"))
    actor = PolicyWorker(
        RankContext("actor", 0, 1, topology, topology.grid.coordinate(0), "127.0.0.1"), run, folder
    )
    actor.start_optimizer()
    return actor


def work_as_reference(
    rank: int, folder: Path, other: Path, adapters: Path, rows: TensorDict, checkpoint: Path
) -> tuple[Any, Any, str]:
    """Return log-probs with and without adapters, and the error of a checkpoint on other weights of the same sizes."""
    actor = actor_of(folder, adapters)
    found: list[Any] = [actor.compute_log_probs(rows), actor.compute_base_log_probs(rows)]
    checkpoint.mkdir(parents=True)
    assert actor.begin_save(str(checkpoint)) is None
    while not actor.copy_save() or actor.end_save(last=False) is False:
        time.sleep(0.01)
    assert actor.end_save(last=False) is True
    again: Any = actor_of(folder, None)
    again.load_checkpoint(str(checkpoint))
    assert torch.equal(again.compute_log_probs(rows)["log_probs"], found[0]["log_probs"])
    with pytest.raises(CheckpointError) as error:
        actor_of(other, None).load_checkpoint(str(checkpoint))
    return found[0]["log_probs"], found[1]["ref_log_probs"], str(error.value)


def test_the_actor_without_adapters_is_the_reference(tmp_path: Path, run_ranks: RankLauncher):
    model: Any = write_model(tmp_path / "model", "qwen3")
    other: Any = write_model(tmp_path / "other", "qwen3")
    other.model.norm.weight.data[0] += 1e-3
    other.save_pretrained(tmp_path / "other")
    tokens = torch.randint(131, (2, 9), generator=torch.Generator().manual_seed(7))
    lengths = {"prompt_lengths": torch.tensor([3, 5]), "response_lengths": torch.tensor([4, 2])}
    rows = TensorDict({"tokens": tokens, **lengths}, batch_size=[2])
    base = row_log_probs(model, tokens)
    write_peft(tmp_path / "adapters", adapt(model))
    adapted = row_log_probs(model, tokens)
    paths = tmp_path / "model", tmp_path / "other", tmp_path / "adapters"
    (found,) = run_ranks(1, work_as_reference, *paths, rows, tmp_path / "checkpoint" / "actor", timeout_s=90)
    for (with_adapters, without), row, (prompt, response) in zip(
        zip(*found[:2], strict=True), range(2), LENGTHS, strict=True
    ):
        part = slice(prompt - 1, prompt - 1 + response)
        torch.testing.assert_close(with_adapters[:response], adapted[row, part], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(without[:response], base[row, part], rtol=1e-4, atol=1e-4)
        assert (adapted[row, part] - base[row, part]).abs().min() > 0.01
    assert "adapters of other weights than those of" in found[2]


def row_log_probs(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    """Return the log-probability of each token but the first, given those before it."""
    with torch.no_grad():
        log_probs = model(tokens).logits[:, :-1].log_softmax(-1)
    return log_probs.gather(-1, tokens[:, 1:, None])[..., 0]


def load_wrong_adapters(rank: int, folder: Path, adapters: list[Path]) -> list[str]:
    """Return the errors of loading folders."""
    shape, errors = ModelShape.from_folder(folder).with_adapters(ADAPTERS), []
    for path in adapters:
        with pytest.raises(CheckpointError) as error:
            PeftFolder(path, shape)
        errors.append(str(error.value))
    return errors


def test_adapters_of_another_model_are_refused(tmp_path: Path):
    model: Any = write_model(tmp_path / "model", "qwen3")
    other: Any = write_model(tmp_path / "other", "qwen3", intermediate_size=128)
    own = adapt(model)
    cases: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
        "other": (adapt(other), {}, "of another base model"),
        "rank": (own, {"r": 16}, "r=16 differs from actor.lora.rank=8"),
        "scaled": (own, {"use_rslora": True}, "use_rslora=True is not supported"),
        "pissa": (
            own,
            {"init_lora_weights": "pissa_niter_4"},
            "init_lora_weights='pissa_niter_4' is not supported",
        ),
        "orthogonal": (own, {"init_lora_weights": "orthogonal", "r": 16}, "r=16 differs"),
        "own_a": (
            {**own, (name := PEFT_PREFIX + "model.layers.0.self_attn.v_proj.lora_A.weight"): own[name] + 1},
            {},
            "share one A",
        ),
    }
    folders = [tmp_path / case for case in cases]
    (tmp_path / "other").rename(tmp_path / "other_model")
    for folder, (adapters, more, _) in zip(folders, cases.values(), strict=True):
        write_peft(folder, adapters, **more)
    errors = load_wrong_adapters(0, tmp_path / "model", folders)
    for error, (_, _, expected) in zip(errors, cases.values(), strict=True):
        assert expected in error
