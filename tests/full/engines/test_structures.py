"""Forms of responses that vLLM refuses, or that no text has, are named before a run starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from hybridengine.backends.vllm.structures import check_structure
from hybridengine.config.sections import StructureSection
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
