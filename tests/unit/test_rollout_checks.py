"""How responses are drawn: values that no engine takes, keys that exclude one another, and what a server leaves out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from hybridengine.backends.engine import SamplingSettings
from hybridengine.config import RunConfig, load_config
from hybridengine.config.sections import RolloutSection, StructureSection
from hybridengine.config.structure_checks import structure_conflicts
from hybridengine.errors import ConfigError
from hybridengine.training.files import config_text

BASE = "configs/arithmetic.yaml"
SCHEMA = {"type": "object", "properties": {"sum": {"type": "integer"}}, "required": ["sum"]}


@pytest.mark.parametrize(
    ("override", "rule"),
    [
        ("rollout.top_p=0", "greater than 0"),
        ("rollout.top_p=1.01", "at most 1"),
        ("rollout.top_p=.nan", "finite"),
        ("rollout.top_k=-1", "at least 0"),
        ("rollout.top_k=2.5", "integer"),
        ("rollout.min_p=1.5", "at most 1"),
        ('rollout.stop=[""]', "not empty"),
        ("rollout.stop=end", "must be a list"),
        ('rollout.structure.choices=["yes",""]', "not empty"),
        ("rollout.structure.json_schema=integer", "a section with keys"),
        ("rollout.structure.grammar=x", "unknown key"),
    ],
)
def test_values_out_of_range_are_refused(override: str, rule: str) -> None:
    with pytest.raises(ConfigError) as found:
        load_config(BASE, [override])
    assert override.partition("=")[0] in str(found.value)
    assert rule in str(found.value)


def test_temperature_0_is_refused_with_and_without_a_truncation() -> None:
    for more in ([], ["rollout.top_p=0.9"]):
        with pytest.raises(ConfigError, match=r"rollout\.temperature.* 0\.01"):
            load_config(BASE, ["rollout.temperature=0", *more])


@pytest.mark.parametrize("override", ["rollout.top_k=1", "rollout.min_p=1"])
def test_a_truncation_to_the_likeliest_token_is_refused(override: str) -> None:
    with pytest.raises(ConfigError, match=rf"{override} leaves the most likely token alone to draw"):
        load_config(BASE, [override])
    load_config(BASE, ["rollout.top_k=2", "rollout.min_p=0.99"])


@pytest.mark.parametrize(
    ("overrides", "found"),
    [
        (["rollout.structure={}"], "found none; add one"),
        (
            ["rollout.structure.regex=x+", 'rollout.structure.choices=["1"]'],
            "found regex and choices; leave out all but one",
        ),
        (['rollout.structure.regex=""', "rollout.structure.choices=[]"], "found none"),
    ],
)
def test_a_structure_is_given_in_one_way(overrides: list[str], found: str) -> None:
    with pytest.raises(ConfigError, match="must be given by exactly one of regex, json_schema, choices") as e:
        load_config(BASE, overrides)
    assert found in str(e.value)


@pytest.mark.parametrize(
    ("schema", "problem"),
    [
        ({"not": {}}, "# has not without a type, "),
        (
            {
                "type": "array",
                "items": {"anyOf": [{"type": "null"}, {"type": "string", "if": {}, "not": {}}]},
            },
            "#/items/anyOf/1 has if, not, ",
        ),
        (
            {"$defs": {"not": {"dependentRequired": {}}}, "$ref": "#/$defs/not"},
            "#/$defs/not has dependentRequired",
        ),
        ({"type": "object", "anyOf": [{"const": 1}]}, "# has type beside anyOf, "),
        (
            {"$ref": "#/$defs/p", "maximum": 9, "$defs": {"p": {"type": "integer"}}},
            "# has maximum beside $ref, ",
        ),
        ({"type": "integer", "enum": [1, "a"]}, "# has enum with values that are not of its type"),
        ({"type": "object", "required": ["a"]}, "# has required=['a'], which its properties lack"),
        ({"anyOf": [{"$ref": "#/x"}]}, "#/anyOf/0 has $ref='#/x', which names no schema in it"),
        ({"$ref": "#"}, "# cannot be met: "),
        (
            {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]},
            "# cannot be met: each of its texts would contain another one",
        ),
    ],
)
@pytest.mark.parametrize("key", ["rollout.structure", "reward.judge.structure"])
def test_keywords_that_no_grammar_reads_are_refused_at_their_place(
    schema: dict[str, Any], problem: str, key: str
) -> None:
    (found,) = structure_conflicts(key, StructureSection(json_schema=schema))
    assert found.keys == (f"{key}.json_schema",)
    assert found.message.startswith(f"{key}.json_schema: {problem}")


@pytest.mark.parametrize(
    "schema",
    [
        SCHEMA,
        {
            "type": "object",
            "properties": {"not": {"enum": [{"not": 1}]}, "if": {"const": 1, "default": {"if": 1}}},
        },
        {
            "type": "object",
            "properties": {"next": {"$ref": "#"}, "n": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}},
        },
        {"type": "object", "required": "a", "properties": []},
        {"type": [["object"]], "required": [["a"]], "properties": 5, "minItems": "1"},
    ],
)
def test_names_like_keywords_and_optional_cycles_are_taken_and_other_types_left_to_the_engine(
    schema: dict[str, Any],
) -> None:
    found = [one.message for one in structure_conflicts("s", StructureSection(json_schema=schema))]
    assert not [one for one in found if "cannot be met" in one]
    assert not found or not isinstance(schema["properties"], dict)


def test_a_configuration_with_a_structure_is_written_and_read(tmp_path: Path) -> None:
    overrides = [f"rollout.structure.json_schema={json.dumps(SCHEMA)}", 'rollout.stop=["</s>", "\\n\\n"]']
    config = load_config(BASE, overrides)
    assert config.rollout.structure == StructureSection(json_schema=SCHEMA)
    assert RunConfig.model_validate(yaml.safe_load(config_text(config))).rollout == config.rollout


@pytest.mark.parametrize(
    ("override", "restricts", "reads_text"),
    [
        ("top_p=1.0", False, False),
        ("top_p=0.9", True, False),
        ("top_k=5", True, False),
        ("min_p=0.1", True, False),
        ('stop=["x"]', False, True),
        ("structure.regex=x", True, True),
    ],
)
def test_supports_and_tokenizers_are_where_settings_need_them(
    override: str, restricts: bool, reads_text: bool
) -> None:
    rollout = load_config(BASE, [f"rollout.{override}"]).rollout
    assert (rollout.restricts, rollout.reads_text) == (restricts, reads_text)


@pytest.mark.parametrize("override", ["top_p=0.9", "top_k=5", "min_p=0.1", 'stop=["x"]', "structure.regex=x"])
def test_a_server_leaves_sampling_to_its_clients(override: str) -> None:
    served = ["model.path=absent", "model.hf_config=llama3-70b", "model.dtype=bfloat16"]
    load_config("configs/serve.yaml", served, dry_run=True, serves=True)
    with pytest.raises(ConfigError, match="is not read by a server, whose clients choose it"):
        load_config("configs/serve.yaml", [*served, f"rollout.{override}"], dry_run=True, serves=True)


def test_greedy_responses_keep_ends_and_form_alone() -> None:
    rollout = RolloutSection(
        temperature=0.7, top_p=0.9, top_k=5, min_p=0.1, stop=("x",), structure=StructureSection(regex="y")
    )
    same: dict[str, Any] = {"stop_token_ids": (3,), "stop_strings": ("x",), "structure": rollout.structure}
    drawn = SamplingSettings.of(rollout, 8, (3,))
    assert drawn == SamplingSettings(8, 0.7, top_p=0.9, top_k=5, min_p=0.1, **same)
    assert SamplingSettings.of(rollout, 8, (3,), greedy=True) == SamplingSettings(8, 0.0, **same)
