"""Forms of responses that vLLM refuses, or that no text has, are named before a run starts."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import xgrammar

from hybridengine.backends.vllm.structures import check_structure
from hybridengine.config.sections import StructureSection
from hybridengine.config.structure_checks import structure_conflicts
from hybridengine.data.tokenizer import build_arithmetic_tokenizer
from hybridengine.errors import ConfigError


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Digits, letters, and neither quotes nor braces."""
    folder = tmp_path_factory.mktemp("tokenizer")
    build_arithmetic_tokenizer().save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("structure", "why"),
    [
        (StructureSection(regex="(["), r"refused by the engine: .* Unclosed '\['"),
        (StructureSection(regex=r"[^\s\S]"), "cannot be met: no token of"),
        (StructureSection(json_schema={"type": "nonsense"}), 'Unsupported type "nonsense"'),
        (StructureSection(json_schema={"enum": []}), "enum array must not be empty"),
        (
            StructureSection(json_schema={"type": "integer", "minimum": 5, "maximum": 3}),
            "minimum greater than maximum",
        ),
        (StructureSection(json_schema={"$ref": "#/nowhere"}), "Cannot find field nowhere"),
        (StructureSection(json_schema={"type": "integer", "multipleOf": 3}), "features not supported"),
        (StructureSection(json_schema={"type": "object"}), "cannot be met: no token of"),
    ],
)
def test_forms_that_cannot_be_met_are_refused(structure: StructureSection, why: str, tokenizer: Path) -> None:
    with pytest.raises(ConfigError, match=rf"^rollout\.structure={{.*{why}"):
        check_structure(structure, tokenizer, 57, (3,))


@pytest.mark.parametrize(
    "structure",
    [
        StructureSection(regex="[0-9]+"),
        StructureSection(choices=("yes", "no")),
        StructureSection(json_schema={"type": "integer"}),
    ],
)
def test_forms_that_can_be_met_are_taken(structure: StructureSection, tokenizer: Path) -> None:
    check_structure(structure, tokenizer, 57, (3,))


CHARACTERS = [chr(code) for code in range(32, 127)] + ["\n", "\t"]
END = len(CHARACTERS)
OBJECT, INTEGER, STRING, ARRAY = ({"type": one} for one in ("object", "integer", "string", "array"))
POINT = {**OBJECT, "properties": {"a": INTEGER, "b": INTEGER}, "additionalProperties": False}


@pytest.fixture(scope="module")
def compiler() -> xgrammar.GrammarCompiler:
    """A compiler for tokens of one character each."""
    kind = xgrammar.VocabType.RAW
    tokens = xgrammar.TokenizerInfo([*CHARACTERS, "<end>"], vocab_type=kind, stop_token_ids=[END])
    return xgrammar.GrammarCompiler(tokens)


def drawn(grammar: xgrammar.CompiledGrammar, chance: random.Random) -> str | None:
    """Return a text that a grammar lets an engine draw; None for one that has not ended after 60 tokens."""
    matcher, mask = xgrammar.GrammarMatcher(grammar), xgrammar.allocate_token_bitmask(1, END + 1)
    text = ""
    for _ in range(60):
        matcher.fill_next_token_bitmask(mask, 0)
        allowed = [one for one in range(END + 1) if (int(mask[0, one // 32]) >> one % 32) & 1]
        assert allowed, f"a dead end after {text!r}"
        if END in allowed and (len(allowed) == 1 or chance.random() < 0.5):
            return text
        frequent = [one for one in allowed if one != END and CHARACTERS[one] in '"}]{[:,ab019-.']
        token = chance.choice(frequent or [one for one in allowed if one != END])
        assert matcher.accept_token(token)
        text += CHARACTERS[token]
    return None


def takes(grammar: xgrammar.CompiledGrammar, text: str) -> bool:
    matcher = xgrammar.GrammarMatcher(grammar, terminate_without_stop_token=True)
    return matcher.accept_string(text) and matcher.is_terminated()


TAKEN: list[dict[str, Any]] = [
    {"title": "any", "description": "nothing is restricted"},
    OBJECT,
    {**POINT, "required": ["a"], "minProperties": 1, "maxProperties": 2},
    {**OBJECT, "properties": {"a": STRING, "b": True}, "required": ["b"]},
    {**OBJECT, "additionalProperties": INTEGER, "maxProperties": 1},
    {"type": ["object", "null"], "properties": {"a": INTEGER}, "required": ["a"]},
    {**ARRAY, "items": INTEGER, "minItems": 2, "maxItems": 3},
    {**ARRAY, "prefixItems": [INTEGER, STRING], "items": {"type": "null"}, "minItems": 3},
    {**STRING, "minLength": 2, "maxLength": 3},
    {**STRING, "pattern": r"^(?:a|b)+[^a]\d{2}\.?$"},
    {**STRING, "pattern": r"^[^\"\\]\s[ -~]$"},
    {**STRING, "format": "ipv6"},
    {**INTEGER, "minimum": -3, "exclusiveMaximum": 12},
    {"type": "number", "exclusiveMinimum": -0.5, "maximum": 1.25},
    {"type": ["integer", "string"], "minimum": 5, "minLength": 2},
    {"type": ["string", "null"], "enum": ["a", None]},
    {"type": "integer", "const": 1.0},
    {"enum": [1, "a", True, [1, {"b": 2}], {"a": 1.5}]},
    {"anyOf": [{**POINT, "required": ["a"]}, {**OBJECT, "properties": {"c": STRING}, "required": ["c"]}]},
    {"allOf": [{"$ref": "#/$defs/p"}], "default": 1, "$defs": {"p": {**INTEGER, "minimum": 5}}},
    {
        **OBJECT,
        "properties": {"v": INTEGER, "c": {"$ref": "#", "description": "the next one"}},
        "required": ["v"],
    },
]


@pytest.mark.parametrize("schema", TAKEN, ids=json.dumps)
def test_every_text_of_a_schema_that_is_taken_is_valid(
    schema: dict[str, Any], compiler: xgrammar.GrammarCompiler
) -> None:
    """The validator of the package jsonschema agrees with each text that an engine draws."""
    assert not list(structure_conflicts("s", StructureSection(json_schema=schema)))
    grammar, validator = (
        compiler.compile_json_schema(json.dumps(schema)),
        jsonschema.Draft202012Validator(schema),
    )
    chance = random.Random(0)
    texts = [one for one in (drawn(grammar, chance) for _ in range(80)) if one is not None]
    assert len(texts) > 10
    for text in texts:
        validator.validate(json.loads(text))


@pytest.mark.parametrize(
    ("schema", "invalid"),
    [
        ({**POINT, "anyOf": [{"required": ["a"]}, {"required": ["b"]}]}, '{"zzz": 5}'),
        ({"anyOf": [POINT, INTEGER], "type": "object"}, "1"),
        ({**POINT, "required": ["c"]}, '{"a": 1}'),
        ({**OBJECT, "required": ["a"], "additionalProperties": False}, "{}"),
        ({**OBJECT, "required": ["a"], "additionalProperties": True}, "{}"),
        ({**OBJECT, "properties": {"a": INTEGER}, "additionalProperties": STRING}, r'{"\u0061": "x"}'),
        ({**OBJECT, "additionalProperties": INTEGER, "minProperties": 2}, '{"a": 1, "a": 2}'),
        ({**OBJECT, "patternProperties": {"^x+$": INTEGER, "^xx$": STRING}}, '{"xx": 1}'),
        ({**OBJECT, "propertyNames": {"pattern": "^a+$"}, "minProperties": 2}, '{"a": 1, "a": 2}'),
        ({**POINT, "dependentRequired": {"a": ["b"]}}, '{"a": 1}'),
        ({"required": ["a"]}, "{}"),
        ({"minimum": 5}, "4"),
        ({"maxLength": 1}, '"aa"'),
        ({"items": INTEGER, "uniqueItems": True}, "[1, 1]"),
        ({"type": []}, "1"),
        ({"$ref": "#/$defs/p", "maximum": 10, "$defs": {"p": INTEGER}}, "99"),
        ({"$ref": "#p", "$defs": {"p": {"$anchor": "p", **INTEGER}}}, '"a"'),
        ({"oneOf": [INTEGER, {"type": "number"}]}, "1"),
        ({"anyOf": [INTEGER], "oneOf": [STRING]}, "1"),
        ({"allOf": [INTEGER, {"minimum": 5}]}, "1"),
        ({"allOf": [INTEGER], "maximum": 5}, "9"),
        ({"enum": ["a", "b"], "minLength": 5}, '"a"'),
        ({"enum": [1, 2, 3], "maximum": 2}, "3"),
        ({"const": 1, "type": "string"}, "1"),
        ({"enum": [1, True], "type": "integer"}, "true"),
        ({"const": 1, "enum": [2]}, "1"),
        ({**STRING, "pattern": "(?=b)a"}, '"a"'),
        ({**STRING, "pattern": "a$b"}, '"ab"'),
        ({**STRING, "pattern": r"a\Z"}, '"aZ"'),
        ({**STRING, "pattern": '^a"b$'}, '"a"b"'),
        ({**STRING, "pattern": r"^a\\b$"}, r'"a\b"'),
        ({**STRING, "pattern": r"^a\tb$"}, '"a\tb"'),
        ({**STRING, "pattern": r"^[\x22]$"}, '"""'),
        ({**STRING, "format": "json-pointer"}, '"/""'),
        ({**STRING, "format": "unheard"}, None),
    ],
)
def test_a_schema_whose_grammar_takes_an_invalid_text_is_refused(
    schema: dict[str, Any], invalid: str | None, compiler: xgrammar.GrammarCompiler
) -> None:
    found = [one.message for one in structure_conflicts("s", StructureSection(json_schema=schema))]
    assert found and all(one.startswith("s.json_schema: #") for one in found)
    if invalid is None:
        return
    assert takes(compiler.compile_json_schema(json.dumps(schema)), invalid)
    try:
        value = json.loads(invalid)
    except ValueError:
        return
    assert not jsonschema.Draft202012Validator(schema).is_valid(value)


@pytest.mark.parametrize("regex", [r"^(?:a|b)+\d$", r"a*?[\w.]{2}|\$", r"[$^]\x41\.[^a]", r"\"\\\n\s"])
def test_every_text_of_a_regular_expression_that_is_taken_matches_it(
    regex: str, compiler: xgrammar.GrammarCompiler
) -> None:
    assert not list(structure_conflicts("s", StructureSection(regex=regex)))
    grammar, chance = compiler.compile_regex(regex), random.Random(0)
    texts = {drawn(grammar, chance) for _ in range(80)} - {None}
    assert texts
    assert [one for one in texts if not re.fullmatch(regex, one or "")] == []


@pytest.mark.parametrize(
    ("regex", "part", "wrong"),
    [
        ("a$b", "$", "ab"),
        ("a^b", "^", "ab"),
        (r"x\Z", r"\Z", "xZ"),
        (r"\Ax", r"\A", "Ax"),
        (r"[\^a]", r"[\^a]", "b"),
        ("a(?=b)", "(?=", None),
        ("a(?!b)", "(?!", None),
        ("(?<!a)b", "(?<!", None),
        (r"\bx", r"\b", None),
    ],
)
def test_parts_of_a_regular_expression_that_the_grammar_reads_otherwise_are_refused(
    regex: str, part: str, wrong: str | None, compiler: xgrammar.GrammarCompiler
) -> None:
    (found,) = structure_conflicts("s", StructureSection(regex=regex))
    assert found.message.startswith(f"s.regex={regex!r} has {part!r} as part ")
    if wrong is not None:
        assert takes(compiler.compile_regex(regex), wrong)
        assert not re.fullmatch(regex, wrong)
