"""Special tokens in texts of others, also those that form anew where one is removed."""

from __future__ import annotations

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
def test_no_special_token_is_left_and_nothing_else_is_lost(special: SpecialTokens, parts: list[str]) -> None:
    text = "".join(parts)
    left = special.removed(text)
    assert not any(token in left for token in special.texts)
    again = text
    while found := [token for token in special.texts if token in again]:
        again = again.replace(found[0], "")
    assert sorted(left) == sorted(again)


def test_tokens_that_are_nested_in_each_other_are_removed_in_one_pass(special: SpecialTokens) -> None:
    """A loop over the text for each of them takes minutes, in which no episode goes on."""
    depth = 2**15
    assert special.removed(f"a{'<|im_e' * depth}<|im_end|>{'nd|>' * depth}b") == "ab"
