"""Special tokens in texts of others, also those that form anew where one is removed."""

from __future__ import annotations

import time
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


@pytest.mark.parametrize("depth", [1, 2, 1000])
def test_tokens_may_be_nested_in_each_other(special: SpecialTokens, depth: int) -> None:
    assert special.removed(f"a{'<|im_e' * depth}<|im_end|>{'nd|>' * depth}b") == "ab"


def test_hostile_texts_take_little_time(special: SpecialTokens) -> None:
    """Texts that take a loop over all of it, or over all tokens, for each letter or token minutes."""
    many = [f"<|token {number}|>" for number in range(1000)]
    other = SpecialTokens(SimpleNamespace(added_tokens_decoder={}, all_special_tokens=many))
    begun = time.process_time()
    special.removed(f"{'<|im_e' * 2**15}<|im_end|>{'nd|>' * 2**15}")
    special.removed(("a" * 40 + "<|im_end|>") * 2**15)
    other.removed(many[0] + ">" * 2**16)
    assert time.process_time() - begun < 5, "seconds of this process's CPU, not of the clock: 0.5 here"


def test_a_tokenizer_may_have_no_special_tokens() -> None:
    none = SpecialTokens(SimpleNamespace(added_tokens_decoder={}, all_special_tokens=["", ""]))
    assert (none.texts, none.removed("<|im_end|>"), none.up_to_first("a")) == ([], "<|im_end|>", "")


@pytest.mark.parametrize(("text", "left"), [("xabcx", "xx"), ("aabcbc", ""), ("abab", ""), ("aabbc", "")])
def test_of_tokens_that_begin_alike_the_longest_is_removed(text: str, left: str) -> None:
    alike = SpecialTokens(SimpleNamespace(added_tokens_decoder={}, all_special_tokens=["ab", "abc"]))
    assert alike.removed(text) == left
