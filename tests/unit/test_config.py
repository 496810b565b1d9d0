"""Loading of configurations: YAML, overrides, types, unknown keys, and error messages."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml
from pydantic import ValidationError

from hybridengine.config import RunConfig, load_config, model_holders, model_shape
from hybridengine.config.loading import known_fields
from hybridengine.config.run_config import ROLES
from hybridengine.drivers.grpo import Grpo
from hybridengine.drivers.ppo import Ppo
from hybridengine.errors import ConfigError
from hybridengine.topology.generation import GenerationGrid, Grouping
from hybridengine.topology.grid import Grid, RankOrder
from hybridengine.topology.sizes import GenSizes, TrainSizes

ROOT = Path(__file__).parents[2]


SMALL = "model: {build: {}}\ndata: {task: {}}\n"


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """The shortest valid configuration."""
    path = tmp_path / "small.yaml"
    path.write_text(SMALL)
    return path


def problems_of(path: Path, *overrides: str, dry_run: bool = False) -> list[str]:
    """Return the messages of the error that these overrides cause."""
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides, dry_run=dry_run)
    text = str(caught.value)
    if not re.match(r"\d+ problems:\n", text):
        return [text]
    return [re.sub(r"^  \d+\. ", "", line) for line in text.splitlines()[1:]]


CONFIGS = sorted(file for file in ROOT.glob("configs/*.yaml") if file.stem != "serve")


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_committed_configuration_loads(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    config = load_config(path, dry_run=True)
    assert config.run.name == path.stem
    for role in config.model_roles:
        assert config.grid(role).sizes.num_ranks == config.pools[config.pool_of(role)].num_ranks


ON_THE_TASK = {  # of the demo, on top of arithmetic.yaml: prompts and samples per prompt of a step
    "dr-grpo": (32, 8),
    "grpo": (32, 8),
    "grpo-from-engine": (32, 8),
    "online-dpo": (64, 4),
    "reinforce-plus-plus": (256, 1),
    "remax": (256, 1),
    "rloo": (64, 4),
    "safe-rlhf": (256, 1),
}


@pytest.mark.parametrize("name", ON_THE_TASK)
def test_algorithms_on_the_demos_task(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    config, base = load_config(f"configs/{name}.yaml"), load_config("configs/arithmetic.yaml")
    assert (config.data.batch_size, config.rollout.samples_per_prompt) == ON_THE_TASK[name]
    assert config.algorithm.name == {"dr-grpo": "grpo"}.get(name, name.replace("-", "_"))
    as_dr_grpo = (
        getattr(config.algorithm, "normalize_std", True) is False
        and config.actor.loss_aggregation == "sequence_sum"
    )
    assert as_dr_grpo == (name == "dr-grpo")
    assert config.rows_per_step == base.rows_per_step
    assert config.warmup == base.warmup
    assert config.actor.parallel == base.actor.parallel


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (
            {"one": "base: two.yaml", "two": "base: one.yaml"},
            r"is its own base \(one.yaml -> two.yaml -> .*one.yaml\)",
        ),
        ({"one": "base: none.yaml"}, "none.yaml does not exist; name a run"),
        (
            {
                "one": "base: two.yaml\nrun: {name: x}\nreward: {functions: {c: d}}",
                "two": "run: {steps: 1}\nreward: {functions: [c]}",
            },
            r"one.yaml cannot be merged with its base two.yaml \(Cannot merge incompatible container types\); write",
        ),
        (
            {"one": "run:\n  seed: " + "[\n   " * 2_000},
            r"one.yaml: not valid YAML \(nested too deeply\)",
        ),
        ({"one": "base: [two.yaml]"}, r"base=\['two.yaml'\] must be the name of a file; write one"),
        (
            {"one": "base: two.yaml", "two": "run: {stepz: 5}"},
            "unknown key run.stepz; did you mean run.steps",
        ),
    ],
)
def test_bases_that_cannot_be(files: dict[str, str], message: str, tmp_path: Path) -> None:
    for name, text in files.items():
        (tmp_path / f"{name}.yaml").write_text(text)
    with pytest.raises(ConfigError, match=message):
        load_config(tmp_path / "one.yaml")


def test_the_committed_configurations_are_those_that_the_readme_names(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(ROOT)
    known = {  # parameters, counted by hand from the model cards
        "arithmetic": (4, None),
        "async-70b": (128, 70_553_706_496),
        "async-grpo": (4, None),
        "async-ppo": (4, None),
        "bench-small": (4, 699_328),
        "dapo": (4, None),
        "deepseek-v3": (512, 671_026_419_200),
        "dpo": (4, None),
        "fp8-rollouts": (4, 408_704),
        "hybridflow-ppo": (8, 13_015_864_320),
        "distill": (4, 89_920),
        "llama3-70b-16nodes": (128, 70_553_706_496),
        "lora": (4, 310_656 + 53_248),
        "moe": (4, 902_144),
        "planner-check": (4, 2_982_656),
        "qwen2.5-7b-8gpu": (8, 7_615_616_512),
        "qwen2.5-vl-7b-8gpu": (8, 7_615_616_512),
        "qwen3-235b": (256, 235_093_634_560),
        "sft": (2, 310_656),
        "smollm2": (6, 134_515_008),
    }
    assert sorted(path.stem for path in CONFIGS) == sorted(known | ON_THE_TASK)
    for path in (path for path in CONFIGS if path.stem in known):
        config = load_config(path, dry_run=True)
        num_ranks, num_parameters = known[path.stem]
        assert config.num_ranks == num_ranks
        if num_parameters:
            assert model_shape(config).num_parameters == num_parameters


@pytest.mark.parametrize(
    "name", ["arithmetic", "dpo", "hybridflow-ppo", "online-dpo", "safe-rlhf", "sft", "smollm2"]
)
def test_a_configuration_with_all_defaults_written_out_is_the_same(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run stores its configuration with its name, which would otherwise be the name of the file."""
    monkeypatch.chdir(ROOT)
    config = load_config(f"configs/{name}.yaml", dry_run=True)
    written = tmp_path / "config.yaml"
    written.write_text(yaml.safe_dump(config.model_dump(mode="json")))
    assert config.run.name == name
    assert load_config(written, dry_run=True) == config


@pytest.mark.parametrize("name", ["arithmetic", "smollm2"])
def test_the_cpu_configurations_load_for_a_real_run(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    load_config(Path("configs") / f"{name}.yaml")


def test_defaults_and_derived_values(small: Path) -> None:
    config = load_config(small)
    assert config.run.name == "small"
    assert (config.num_ranks, config.max_tokens, config.rows_per_step) == (1, 128, 32)
    assert config.model_roles == ("actor", "critic", "reference")
    assert config.run_folder == Path("runs/small")
    assert config.model_folder == config.start_folder == Path("runs/small/model")
    assert {holder.folder for holder in model_holders(config)} == {config.model_folder}
    assert config.train_file == Path("runs/small/data/train.jsonl")
    assert config.eval_file == Path("runs/small/data/held_out.jsonl")
    assert config.demonstrations_file is None


def test_a_warmup_moves_the_starting_point(small: Path) -> None:
    config = load_config(small, ["warmup.steps=3"])
    assert config.model_folder == Path("runs/small/model")
    assert config.start_folder == Path("runs/small/warmup")
    assert {holder.folder for holder in model_holders(config)} == {config.start_folder}
    assert config.demonstrations_file == Path("runs/small/data/train.jsonl")


def test_overrides_reach_every_kind_of_value(small: Path) -> None:
    config = load_config(
        small,
        [
            "cluster.ranks_per_node=[4,4]",
            "actor.parallel=2-2-2",
            "actor.generate=1-2",
            "critic.parallel=1-2-4",
            "actor.optimizer.lr=3e-4",
            "actor.optimizer.betas=[0.8, 0.9]",
            "actor.bucket_bytes=1.5MiB",
            "algorithm.whiten_advantages=false",
            "cluster.rank_order=megatron",
            'cluster.address="[fd77::1]:6379"',
            "run.steps=7",
            "run.steps=8",
        ],
    )
    assert config.num_ranks == 8
    assert config.actor.parallel == TrainSizes(2, 2, 2)
    assert config.grid("reference").sizes == TrainSizes(2, 2, 2)
    assert config.grid("critic").sizes == TrainSizes(1, 2, 4)
    grid = Grid(TrainSizes(2, 2, 2), RankOrder.MEGATRON)
    assert config.grid("actor") == grid
    assert config.generation_grid == GenerationGrid(grid, GenSizes(1, 2), Grouping.INTERVAL)
    assert (config.actor.optimizer.lr, config.actor.optimizer.betas) == (3e-4, (0.8, 0.9))
    assert config.actor.bucket_bytes == 1_572_864
    assert isinstance(config.algorithm, Ppo) and config.algorithm.whiten_advantages is False
    assert config.cluster.address == "[fd77::1]:6379"
    assert config.run.steps == 8  # the last one counts


def test_nothing_can_be_changed(small: Path) -> None:
    config = load_config(small)
    with pytest.raises(ValidationError, match="frozen"):
        config.actor.parallel = "1-1-2"  # type: ignore[misc]
    with pytest.raises(ValidationError, match="frozen"):
        config.critic = config.critic  # type: ignore[misc]


def test_every_key_is_described() -> None:
    def undescribed(model, prefix=""):
        for name, field in model.model_fields.items():
            kinds = (field.annotation, *getattr(field.annotation, "__args__", ()))
            sections = [kind for kind in kinds if hasattr(kind, "model_fields")]
            if not field.description and not any(section.__doc__ for section in sections):
                yield prefix + name
            for kind in sections:
                yield from undescribed(kind, f"{prefix}{name}.")

    assert list(undescribed(RunConfig)) == []
    known = known_fields(Ppo)
    assert {f"{role}.parallel" for role in ROLES} < known.keys()
    assert {"actor.optimizer.lr", "model.build.vocab_size", "warmup.lr"} < known.keys()
    assert {"cluster.pools.NAME.roles", "algorithm.gamma"} < known.keys()
    assert "algorithm.gamma" not in known_fields(Grpo)


def test_empty_sections_mean_defaults(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text(SMALL + "critic:\nwarmup:\n")
    config = load_config(path)
    assert config.critic.value_clip == 0.2
    assert config.warmup is None


@pytest.mark.parametrize(
    ("override", "messages"),
    [
        ("actor.paralel=1-1-1", ["unknown key actor.paralel; did you mean actor.parallel?"]),
        ("modle.path=x", ["unknown key modle; did you mean model?"]),
        (
            "actor.optimizer.momentum=1",
            ["unknown key actor.optimizer.momentum; keys here are lr, min_lr, "],
        ),
        ("kl_coef=0.1", ["unknown key kl_coef; did you mean algorithm.kl_coef?"]),
        ("batch_size=4", ["unknown key batch_size; did you mean data.batch_size or warmup.batch_size?"]),
        ("rollout.temprature=1", ["unknown key rollout.temprature; did you mean rollout.temperature?"]),
        ("foo", ["override 'foo' is not key=value; write for instance actor.parallel=2-2-1"]),
        ("=3", ["override '=3' is not key=value"]),
        ("a..b=3", ["override 'a..b=3' is not key=value"]),
        ("run.seed=[1", ['override "run.seed=[1" cannot be applied (']),
        (
            "cluster.address=[fd77::1]:6379",
            [
                'override "cluster.address=[fd77::1]:6379" cannot be applied (YAML takes brackets for a list, after which'
                " nothing may follow); write cluster.address='\"[fd77::1]:6379\"'"
            ],
        ),
        (
            "rollout.episode.addresses=[[::1]:80,[::2]:80]",
            ["""; write rollout.episode.addresses='["[::1]:80","[::2]:80"]'"""],
        ),
        ("model=3", ["model=3 must be a section with keys of its own; write them beneath model"]),
        ("actor=3", ["actor=3 must be a section with keys of its own; write them beneath actor"]),
        ("run.steps=0", ["run.steps=0 must be at least 1; correct it, or leave it out for the default 100"]),
        ("run.steps=many", ['run.steps="many" must be an integer; ']),
        ("run.steps=1.5", ["run.steps=1.5 must be an integer; "]),
        ("run.steps=true", ["run.steps=true must be an integer; "]),
        ("run.seed=-1", ["run.seed=-1 must be at least 0; "]),
        ("rollout.temperature=0.009", ["rollout.temperature=0.009 must be at least 0.01; "]),
        ("rollout.temperature=2.1", ["rollout.temperature=2.1 must be at most 2; "]),
        *(
            (f"timeouts.{name}=1e300", [f"timeouts.{name}=1e+300 must be at most 1000000; "])
            for name in ("start_s", "call_s", "save_s")
        ),
        ("reward.timeout_s=1e7", ["reward.timeout_s=10000000.0 must be at most 1000000; "]),
        ("actor.bucket_bytes=3", ["actor.bucket_bytes=3 must be at least 4; "]),
        ("algorithm.gamma=1.5", ["algorithm.gamma=1.5 must be at most 1; "]),
        ("actor.optimizer.lr=fast", ['actor.optimizer.lr="fast" must be a number; ']),
        ("actor.optimizer.lr=.inf", ["actor.optimizer.lr=Infinity must be a finite number; "]),
        ("actor.optimizer.betas=[0.9]", ["actor.optimizer.betas[1] is missing; "]),
        ("actor.optimizer.betas=[0.9,1.0]", ["actor.optimizer.betas[1]=1.0 must be less than 1; "]),
        (
            "cluster.ranks_per_node=[]",
            ["cluster.ranks_per_node=[] must be a list of at least 1 item, not 0; "],
        ),
        ("cluster.ranks_per_node=4", ["cluster.ranks_per_node=4 must be a list; "]),
        ("cluster.ranks_per_node=[-1]", ["cluster.ranks_per_node[0]=-1 must be at least 1; "]),
        ("cluster.ranks_per_node=[2,-1]", ["cluster.ranks_per_node[1]=-1 must be at least 1; "]),
        ("algorithm.kl_estimator=k4", ["algorithm.kl_estimator=\"k4\" must be 'k1', 'k2', 'k3' or 'abs'; "]),
        ("cluster.rank_order=papre", ["'paper' or 'megatron'; did you mean 'paper'?"]),
        (
            "actor.parallel=2-2",
            ["actor.parallel: '2-2' is not a parallel size; write p-t-d such as \"2-2-1\""],
        ),
        ("actor.parallel=0-1-1", ["actor.parallel: pp_size=0 must be a positive integer"]),
        ("actor.generate=1-1-1", ["actor.generate: '1-1-1' is not a parallel size; write p_g-t_g such as"]),
        ("critic.parallel=two", ["critic.parallel: 'two' is not a parallel size; write p-t-d"]),
        (
            "actor.bucket_bytes=64MB",
            ["actor.bucket_bytes: '64MB' is not a size in bytes; write an integer or a unit"],
        ),
        (
            "reward.function=tasks.reward",
            ["reward.function: 'tasks.reward' is not a function's import path; write"],
        ),
        (f"run.name={'a' * 201}", ["aaa' cannot be the name of a folder; use up to 200 letters"]),
        ("run.seed=" + "[\n" * 2_000, ["... cannot be applied (nested too deeply)"]),
        ("run.name=a/b", ["run.name: 'a/b' cannot be the name of a folder"]),
        ("run.name=007", ["run.name=7 must be a string"]),
        ("run.name=${nothing}", ["Interpolation key 'nothing' not found"]),
        ("run.folder=' '", ["run.folder: ' ' is an empty path; name"]),
        ("run.folder=", ["run.folder=null must be a string; "]),
        ("resume=", ["resume=null must be a string; "]),
    ],
)
def test_bad_overrides(small: Path, override: str, messages: list[str]) -> None:
    found = problems_of(small, override)
    assert len(found) == len(messages), found
    for text, message in zip(found, messages, strict=True):
        assert message in text


def test_all_kinds_of_problems_come_at_once(small: Path) -> None:
    found = problems_of(
        small,
        "nonsense",
        "actor.paralel=2-1-1",
        "run.seed=x",
        "rollout.max_prompt_tokens=500",
        "critic.parallel=1-2-1",
    )
    assert sorted(text.split(" ")[0] for text in found) == [
        "critic.parallel=1-2-1",
        "override",
        "rollout.max_prompt_tokens=500",
        'run.seed="x"',
        "unknown",
    ]


def test_no_rule_is_checked_on_a_value_in_question(small: Path) -> None:
    # With the default 1-1-1 in place of the misspelt sizes, the ranks would be reported as wrong as well.
    found = problems_of(small, "cluster.ranks_per_node=[4]", "actor.paralel=2-2-1", "critic.parallel=4-1-1")
    assert found == ["unknown key actor.paralel; did you mean actor.parallel?"]
    found = problems_of(small, "cluster.ranks_per_node=[4,x]", "actor.parallel=2-2-1")
    assert len(found) == 1
    assert found[0].startswith('cluster.ranks_per_node[1]="x" must be an integer')
