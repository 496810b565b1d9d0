"""Digests of tokenizers: those that give other tokens or texts differ, in the part that the digest is named after."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import AddedToken, AutoTokenizer, ByT5Tokenizer, PreTrainedTokenizerFast

from hybridengine.data.chat import Chat
from hybridengine.data.tokenizer import build_arithmetic_tokenizer, load_tokenizer

ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())


def differing(one: Any, other: Any) -> list[str]:
    digests, others = Chat(one).digests(), Chat(other).digests()
    assert [*digests] == [*others]
    return [name for name, digest in digests.items() if digest != others[name]]


def byte_tokenizer(**changed: Any) -> PreTrainedTokenizerFast:
    """Return a tokenizer of single bytes and some pairs of them."""
    merges = [("Ġ", "Ġ"), ("1", "2"), ("Ġ", "a")]
    vocabulary = {token: number for number, token in enumerate([*ALPHABET, *map("".join, merges)])}
    backend = Tokenizer(models.BPE(vocabulary, merges))
    backend.pre_tokenizer = changed.pop("pre_tokenizer", pre_tokenizers.ByteLevel(add_prefix_space=False))
    backend.decoder = changed.pop("decoder", decoders.ByteLevel())
    if "normalizer" in changed:
        backend.normalizer = changed.pop("normalizer")
    values = {"eos_token": "<e>", "pad_token": "<p>", "chat_template": "{{ messages }}", **changed}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, **values)
    tokenizer.add_tokens(["<t>"])
    return tokenizer


def of_one_byte(text: str) -> Any:
    return pre_tokenizers.Sequence(
        [pre_tokenizers.Split(text, "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({}, []),
        ({"chat_template": "{{ messages }} "}, ["chat template"]),
        ({"unk_token": "<e>"}, ["special tokens"]),
        ({"decoder": decoders.Replace("a", "b")}, ["text of tokens"]),
        ({"normalizer": normalizers.NFKC()}, ["tokens of a text", "text of tokens"]),
        ({"pre_tokenizer": of_one_byte("1")}, ["tokens of a text"]),
        ({"pre_tokenizer": of_one_byte(" ")}, ["tokens of a text"]),
    ],
    ids=str,
)
def test_digests_differ_in_what_tokens_and_texts_depend_on(
    changed: dict[str, Any], expected: list[str]
) -> None:
    assert differing(byte_tokenizer(), byte_tokenizer(**changed)) == expected


def test_other_numbers_of_the_same_tokens_differ(tmp_path: Path) -> None:
    build_arithmetic_tokenizer().save_pretrained(tmp_path)
    file = tmp_path / "tokenizer.json"
    described = json.loads(file.read_text())
    numbers = described["model"]["vocab"]
    numbers["w"], numbers["z"] = numbers["z"], numbers["w"]
    file.write_text(json.dumps(described))
    assert "vocabulary" in differing(build_arithmetic_tokenizer(), load_tokenizer(tmp_path))


def test_an_added_token_that_swallows_blanks_differs() -> None:
    swallows, plain = byte_tokenizer(), byte_tokenizer()
    swallows.add_tokens([AddedToken("<u>", lstrip=True)])
    plain.add_tokens(["<u>"])
    assert "tokens of a text" in differing(swallows, plain)


def test_a_tokenizer_is_the_same_when_saved_and_in_files_as_earlier_versions_wrote_them(
    tmp_path: Path,
) -> None:
    """Those wrote the template into tokenizer_config.json, and named the class otherwise."""
    tokenizer = build_arithmetic_tokenizer()
    tokenizer.save_pretrained(tmp_path)
    assert differing(tokenizer, load_tokenizer(tmp_path)) == []
    template, settings = tmp_path / "chat_template.jinja", tmp_path / "tokenizer_config.json"
    described = json.loads(settings.read_text()) | {"chat_template": template.read_text()}
    template.unlink()
    del described["backend"]
    settings.write_text(json.dumps(described | {"tokenizer_class": "PreTrainedTokenizerFast"}))
    assert differing(tokenizer, load_tokenizer(tmp_path)) == []


def test_a_tokenizer_of_python_alone_has_digests(tmp_path: Path) -> None:
    """Its tokens are numbers of bytes, without files of the tokenizers library."""
    tokenizer = ByT5Tokenizer(chat_template="{{ messages }}")
    assert not tokenizer.is_fast
    tokenizer.save_pretrained(tmp_path)
    again = AutoTokenizer.from_pretrained(tmp_path)
    assert isinstance(again, ByT5Tokenizer)
    assert differing(tokenizer, again) == []
    again.chat_template = "{{ messages[0] }}"
    assert differing(tokenizer, again) == ["chat template"]
