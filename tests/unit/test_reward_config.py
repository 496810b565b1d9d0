"""Sections that score responses: one scorer or several terms, rewards and costs, and their errors."""

from __future__ import annotations

from pathlib import Path

import pytest

from hybridengine.config import check_run, load_config
from hybridengine.config.loading import known_fields
from hybridengine.config.reward_sections import scorer_key
from hybridengine.config.run_config import reward_sections
from tests.unit.test_checkpoint_files import CONFIG, write_checkpoint
from tests.unit.test_config import problems_of

TERMS = """
reward:
  on_failure: drop
  terms:
    right: {function: "a.b:right"}
    short: {function: "a.b:short", weight: -0.5}
    liked: {kind: model, path: PATH, weight: 2, parallel: 1-2-2}
"""


@pytest.fixture
def with_terms(built: Path, tmp_path: Path) -> Path:
    """Two functions and a model on 4 ranks."""
    scorer = CONFIG | {
        "architectures": ["LlamaForSequenceClassification"],
        "num_labels": 1,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
    }
    folder = write_checkpoint(tmp_path / "liked", scorer)
    built.write_text(built.read_text() + TERMS.replace("PATH", str(folder)))
    return built


def test_one_scorer_is_what_the_section_itself_says(built: Path) -> None:
    reward = load_config(built).reward
    assert reward.functions == {"": "hybridengine.data.tasks:arithmetic_reward"}
    assert (reward.models, reward.weights) == ({}, {})
    assert (reward.timeout_s, reward.rows_per_call, reward.num_processes) == (60.0, 64, 1)
    assert (reward.on_failure, reward.num_retries, reward.memory_bytes) == ("fail", 0, None)
    other = load_config(built, ["reward.function=a.b:c", "reward.memory_bytes=2GiB", "reward.timeout_s=0.5"])
    assert other.reward.functions == {"": "a.b:c"}
    assert (other.reward.memory_bytes, other.reward.timeout_s) == (2**31, 0.5)


def test_several_terms(with_terms: Path, tmp_path: Path) -> None:
    config = load_config(with_terms, ["reward.terms.short.weight=-0.25"])
    reward = config.reward
    assert reward.functions == {"right": "a.b:right", "short": "a.b:short"}
    assert {name: model.path for name, model in reward.models.items()} == {"liked": str(tmp_path / "liked")}
    assert reward.weights == {"right": 1.0, "short": -0.25, "liked": 2.0}
    assert [scorer_key("cost", name) for name in ("", "liked")] == ["cost", "cost.terms.liked"]
    assert check_run(config) == []


@pytest.mark.parametrize(
    ("overrides", "retries"),
    [
        ([], 0),
        (["reward.on_failure=drop"], 0),
        (["reward.on_failure=drop", "reward.retries=3"], 3),
        (["reward.on_failure=retry"], 2),
        (["reward.on_failure=retry", "reward.retries=1"], 1),
        (["reward.retries=0"], 0),
        (["reward.retries=1"], 1),
    ],
)
def test_retries(built: Path, overrides: list[str], retries: int) -> None:
    assert load_config(built, overrides).reward.num_retries == retries


@pytest.mark.parametrize(
    ("overrides", "messages"),
    [
        (
            ["reward.on_failure=retry", "reward.timeout_s=700"],
            [
                "reward.timeout_s=700 and 3 calls for the same rows make 2100 s, which must be less than"
                " timeouts.call_s=1800; lower the one or raise the other"
            ],
        ),
        (["reward.on_failure=retry", "reward.timeout_s=599"], []),
        (  # 64 rows on 4 ranks: 16 each, 4 calls of 4 rows, two at a time
            [
                "reward.on_failure=drop",
                "data.batch_size=64",
                "reward.rows_per_call=4",
                "reward.num_processes=2",
                "reward.timeout_s=900",
            ],
            [
                "reward.timeout_s=900 and 1 call for the same rows, 2 after one another on a rank, make 1800 s, which"
                " must be less than timeouts.call_s=1800; lower the one or raise the other, or raise reward.rows_per_call"
            ],
        ),
        (
            ["reward.function=null"],
            [
                "reward names no function; give reward.function as package.module:function, or reward.kind=model with"
                " reward.path"
            ],
        ),
        (
            ["reward.terms.one.weight=2"],
            [
                "reward.terms.one names no function; give reward.terms.one.function as package.module:function, or"
                " reward.terms.one.kind=model with reward.terms.one.path"
            ],
        ),
        (
            ["reward.terms.one.kind=model"],
            [
                "reward.terms.one.kind=model needs a checkpoint; give reward.terms.one.path, or"
                " reward.terms.one.kind=function"
            ],
        ),
        (
            ["reward.terms.one.function=a:b", "reward.function=a:b", "reward.kind=function"],
            [
                "reward.terms gives several scorers, so that nothing reads reward.function; write such keys beneath a"
                " term and null here, or leave reward.terms out"
            ],
        ),
        (
            ["reward.terms.one.function=a:b", "reward.kind=episode"],
            [
                "reward.terms gives several scorers, so that nothing reads reward.kind; write such keys beneath a term"
                " and reward.kind=function here, or leave reward.terms out",
            ],
        ),
        (
            ["reward.terms.two-three.function=a:b"],
            ["reward.terms: 'two-three' cannot be the name of a term, which is part of a column's name; use"],
        ),
        (
            ["reward.terms.one.function=a.b"],
            [
                "reward.terms.one.function: 'a.b' is not a function's import path; write package.module:function"
            ],
        ),
        (
            ["reward.terms.one.wieght=1", "reward.terms.one.function=a:b"],
            ["unknown key reward.terms.one.wieght; did you mean reward.terms.one.weight?"],
        ),
        (
            ["reward.terms.one.zzz=1", "reward.terms.one.function=a:b"],
            ["unknown key reward.terms.one.zzz; keys here are kind, function, service, judge, path, "],
        ),
        (
            ["weight=1"],
            ["unknown key weight; did you mean reward.terms.NAME.weight or cost.terms.NAME.weight?"],
        ),
        (
            ["reward.terms.one.weight=heavy", "reward.terms.one.function=a:b"],
            [
                'reward.terms.one.weight="heavy" must be a number; correct it, or leave it out for the default 1.0 ('
                "Factor of the term's score;"
            ],
        ),
        (
            ["reward.terms.one.weight=.inf", "reward.terms.one.function=a:b"],
            ["reward.terms.one.weight=Infinity must be a finite number; "],
        ),
        (
            [
                "reward.terms.one.weight=0",
                "reward.terms.one.function=a:b",
                "reward.terms.two.weight=0",
                "reward.terms.two.function=a:b",
            ],
            [
                "reward.terms have weights of 0 only, so that every score is 0; give one of them another weight"
            ],
        ),
        (
            ["reward.terms.one=3"],
            [
                "reward.terms.one=3 must be a section with keys of its own; write them beneath reward.terms.one"
            ],
        ),
        (["reward.terms=3"], ["reward.terms=3 must be a section with keys of its own; write them beneath"]),
        (["reward.terms=[a]"], ['reward.terms=["a"] must be a section with keys of its own; write them']),
        (
            ["reward.on_failure=skip"],
            ["reward.on_failure=\"skip\" must be 'fail', 'retry' or 'drop'; choose one of these"],
        ),
        (["reward.timeout_s=0"], ["reward.timeout_s=0 must be greater than 0; correct it, or leave it out"]),
        (["reward.rows_per_call=0"], ["reward.rows_per_call=0 must be at least 1; "]),
        (["reward.memory_bytes=1GB"], ["reward.memory_bytes: '1GB' is not a size in bytes; write"]),
    ],
)
def test_bad_sections(built: Path, overrides: list[str], messages: list[str]) -> None:
    if not messages:
        load_config(built, overrides)
        return
    found = problems_of(built, *overrides)
    assert len(found) == len(messages), found
    for text, message in zip(found, messages, strict=True):
        assert text.startswith(message)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "parallel=1-2-1",
            "reward.terms.liked.parallel=1-2-1 takes p·t·d = 1·2·1 = 2 ranks, which must equal the 4 of",
        ),
        (
            "parallel=1-4-1",
            "reward.terms.liked.parallel=1-4-1: t=4 does not divide num_kv_heads=2; choose 1 or 2",
        ),
        (
            "parallel=4-1-1",
            "reward.terms.liked.parallel=4-1-1: p=4 pipeline stages need as many layers, the model has",
        ),
        (
            "micro_batch_tokens=100",
            "reward.terms.liked.micro_batch_tokens=100 must hold one row of 128 tokens (prompt and response); raise",
        ),
        ("path=/no/model", "reward.terms.liked.path=/no/model is not a folder; name one that exists"),
        (
            "parallel=1-1-4,data.batch_size=2",
            "the d = 4 replicas of reward.terms.liked.parallel=1-1-4; choose at least 4",
        ),
    ],
)
def test_models_among_the_terms_keep_the_rules_of_roles(
    with_terms: Path, override: str, message: str
) -> None:
    first, *others = override.split(",")
    found = problems_of(with_terms, f"reward.terms.liked.{first}", *others)
    assert any(message in text for text in found), found
    rest = [text for text in found if "reward.terms.liked" not in text]
    assert bool(rest) == bool(others)  # fewer rows than ranks are also an error of the ranks
    assert all(text.startswith("each of the 4 ranks") for text in rest)


def test_a_model_among_the_terms_has_one_label(with_terms: Path, tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "chatty", CONFIG | {"num_key_value_heads": 2, "max_position_embeddings": 128})
    (problem,) = problems_of(with_terms, f"reward.terms.liked.path={tmp_path / 'chatty'}")
    assert problem.startswith(
        f"reward.terms.liked.path={tmp_path / 'chatty'} has no score head, a reward model gives"
    )


URL = "http://scorer:8080/score?kind=maths"


def test_services(built: Path) -> None:
    given = ["reward.kind=service", f"reward.service.urls=['{URL}','https://[::1]/']"]
    reward = load_config(built, given).reward
    assert (reward.functions, list(reward.services), reward.are_called) == ({}, [""], True)
    assert reward.services[""].urls == (URL, "https://[::1]/")
    assert (reward.num_service_retries, reward.num_retries) == (4, 0)
    assert load_config(built, [*given, "reward.retries=1"]).reward.num_service_retries == 1
    (path,) = (
        path
        for key, path in load_config(built, [*given, "reward.service.key_file=a/key"]).paths_to_read.items()
        if key == "reward.service.key_file"
    )
    assert path == Path("a/key").resolve()


@pytest.mark.parametrize(
    ("overrides", "messages"),
    [
        (["reward.kind=service"], ["reward.kind=service needs reward.service; give reward.service.urls, or"]),
        (
            [f"reward.service.urls=['{URL}']"],
            [
                "reward.kind=function does not read reward.service; leave out reward.service.urls, or choose reward.kind"
            ],
        ),
        (["reward.kind=service", "reward.service.max_in_flight=2"], ["reward.service.urls"]),
        (["reward.kind=service", "reward.service.urls=[]"], ["reward.service.urls"]),
        (
            ["reward.kind=service", "reward.service.urls=['ftp://scorer/']"],
            [
                "reward.service.urls: 'ftp://scorer/' is not the address of a service; write http://HOST:PORT/PATH or"
            ],
        ),
        (
            ["reward.kind=service", "reward.service.urls=['http://me:word@scorer/']"],
            [
                "is not the address of a service; write http://HOST:PORT/PATH or https://..., without a user name"
            ],
        ),
        (
            ["reward.kind=service", f"reward.service.urls=['{URL}']", "reward.service.columns=[tokens]"],
            ["reward.service.columns"],
        ),
        (
            ["reward.kind=service", f"reward.service.urls=['{URL}']", "reward.timeout_s=200"],
            [
                "reward.timeout_s=200 and 5 calls for the same rows and pauses of up to 200 s make 1800 s, which must be"
                " less than timeouts.call_s=1800; lower the one or raise the other"
            ],
        ),
        (  # 64 rows on 4 ranks: 16 each, 8 calls of 2 rows, 3 at a time
            [
                "reward.kind=service",
                f"reward.service.urls=['{URL}']",
                "reward.service.max_in_flight=3",
                "reward.on_failure=drop",
                "reward.retries=0",
                "data.batch_size=64",
                "reward.rows_per_call=2",
                "reward.timeout_s=600",
            ],
            [
                "and 1 call for the same rows, 3 after one another on a rank, make 1800 s, which must be less than"
            ],
        ),
        (
            ["reward.terms.one.kind=service", f"reward.service.urls=['{URL}']"],
            [
                "so that nothing reads reward.service",
                "reward.terms.one.kind=service needs reward.terms.one.service",
            ],
        ),
    ],
)
def test_invalid_services(built: Path, overrides: list[str], messages: list[str]) -> None:
    found = problems_of(built, *overrides)
    assert len(found) == len(messages), found
    for message in messages:
        assert any(message in text for text in found), found


def test_a_cost_has_the_rules_of_a_reward_but_no_function_by_default(built: Path) -> None:
    assert problems_of(built, "algorithm.name=safe_rlhf") == [
        "cost names no function; give cost.function as package.module:function, or cost.kind=model with cost.path",
    ]
    config = load_config(built, ["algorithm.name=safe_rlhf", "cost.function=a.b:c"])
    assert list(reward_sections(config)) == ["reward", "cost"]
    assert list(reward_sections(load_config(built))) == ["reward"]


def test_keys_of_terms_are_listed() -> None:
    keys = list(known_fields())
    assert {
        "reward.terms",
        "reward.terms.NAME.weight",
        "reward.terms.NAME.function",
        "reward.timeout_s",
    } < set(keys)
    assert "reward.terms.weight" not in keys


def test_terms_take_the_place_of_a_bases_function(built: Path, tmp_path: Path) -> None:
    built.write_text(built.read_text() + "\nreward: {kind: model, path: some, function: 'a.b:whole'}\n")
    upon = tmp_path / "upon.yaml"
    upon.write_text(
        "base: built.yaml\nreward: {kind: function, path: null, function: null, terms: {one: {function: 'a.b:part'}}}\n"
    )
    assert load_config(upon).reward.functions == {"one": "a.b:part"}
