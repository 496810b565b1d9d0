"""Special tokens in texts of others, also those that form anew where one is removed."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridengine.data.special_tokens import SpecialTokens
from hybridengine.data.tokenizer import build_arithmetic_tokenizer


@pytest.fixture(scope="module")
def special() -> SpecialTokens:
    return SpecialTokens(build_arithmetic_tokenizer())


PARTS = ["<|im_", "<|im", "_end|>", "end|>", "|>", "<|im_start|>", "<|im_end|>", "1 + 2", "<", "|", ">", "ü"]


@given(parts=st.lists(st.sampled_from(PARTS), max_size=30))
def test_tokens_are_removed_until_there_are_none(special: SpecialTokens, parts: list[str]) -> None:
    left = text = "".join(parts)
    while found := [token for token in special.texts if token in left]:
        left = left.replace(found[0], "")
    assert special.removed(text) == left


def test_a_tokenizer_may_have_no_special_tokens() -> None:
    none = SpecialTokens(SimpleNamespace(added_tokens_decoder={}, all_special_tokens=["", ""]))
    assert (none.texts, none.removed("<|im_end|>"), none.up_to_first("a")) == ([], "<|im_end|>", "")


@pytest.mark.parametrize(("text", "left"), [("xabcx", "xx"), ("aabcbc", ""), ("abab", ""), ("aabbc", "")])
def test_of_tokens_that_begin_alike_the_longest_is_removed(text: str, left: str) -> None:
    alike = SpecialTokens(SimpleNamespace(added_tokens_decoder={}, all_special_tokens=["ab", "abc"]))
    assert alike.removed(text) == left
