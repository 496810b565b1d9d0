"""The demo's tokenizer, and the checks on tokenizers loaded from folders."""

from __future__ import annotations

import json

import pytest
import transformers
from transformers import AutoTokenizer

from hybridengine.config.build_section import BUILT_TOKENS
from hybridengine.data.tokenizer import build_arithmetic_tokenizer, load_tokenizer, token_id
from hybridengine.errors import DataError

SAMPLE = "12 + 34 - (5*6)/7 =\nwhat is it, user? a! b:c-8.0"


@pytest.fixture
def folder(tmp_path):
    build_arithmetic_tokenizer().save_pretrained(tmp_path)
    return tmp_path


def change_settings(folder, **changes):
    path = folder / "tokenizer_config.json"
    settings = json.loads(path.read_text())
    settings |= changes
    path.write_text(json.dumps({key: value for key, value in settings.items() if value is not None}))


def test_text_survives_encoding_and_decoding():
    tokenizer = build_arithmetic_tokenizer()
    tokens = tokenizer(SAMPLE)["input_ids"]
    assert tokenizer.decode(tokens) == SAMPLE
    assert tokenizer.decode([*tokens, token_id(tokenizer, "eos")], skip_special_tokens=True) == SAMPLE
    assert len(tokens) == len(SAMPLE) - len("user") + 1
    assert tokenizer.unk_token_id not in tokens
    assert tokenizer("A")["input_ids"] == [tokenizer.unk_token_id]


def test_the_vocabulary_is_small_and_odd():
    tokenizer = build_arithmetic_tokenizer()
    assert len(tokenizer) == BUILT_TOKENS == 57
    assert sorted(tokenizer.get_vocab().values()) == list(range(57))


def test_a_saved_tokenizer_loads_unchanged(folder):
    loaded = load_tokenizer(folder)
    built = build_arithmetic_tokenizer()
    assert loaded.get_vocab() == built.get_vocab()
    assert loaded(SAMPLE)["input_ids"] == built(SAMPLE)["input_ids"]
    assert loaded.decode(loaded(SAMPLE)["input_ids"]) == SAMPLE
    assert (loaded.eos_token, loaded.pad_token) == ("<|im_end|>", "<|pad|>")
    messages = [{"role": "user", "content": "1 + 2 ="}]
    text = loaded.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert isinstance(text, str)
    assert text == "<|im_start|>user1 + 2 =<|im_end|><|im_start|>assistant"
    assert len(loaded(text, add_special_tokens=False)["input_ids"]) == 2 + len("1 + 2 =") + 3


def test_what_a_tokenizer_lacks_is_reported_at_once(folder):
    change_settings(folder, eos_token=None, pad_token=None)
    (folder / "chat_template.jinja").unlink()
    with pytest.raises(DataError) as caught:
        load_tokenizer(folder, pad_with_eos=True)
    text = str(caught.value)
    assert text.startswith("3 problems:")
    assert "eos_token=None" in text and "pad_token=None" in text and "no chat template" in text


def test_padding_with_eos_must_be_asked_for(folder):
    change_settings(folder, pad_token=None)
    assert AutoTokenizer.from_pretrained(folder).pad_token is None
    with pytest.raises(DataError, match=r"pad_token=None.*pad_with_eos"):
        load_tokenizer(folder)
    loaded = load_tokenizer(folder, pad_with_eos=True)
    assert loaded.pad_token_id == loaded.eos_token_id


def test_padding_with_eos_keeps_a_padding_token_that_is_there(folder):
    assert load_tokenizer(folder, pad_with_eos=True).pad_token == "<|pad|>"


def test_folders_without_a_tokenizer(tmp_path):
    with pytest.raises(DataError, match="missing does not exist"):
        load_tokenizer(tmp_path / "missing")
    with pytest.raises(DataError, match="no loadable tokenizer"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"version": "1.0", "trunc')
    with pytest.raises(DataError, match="no loadable tokenizer"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("family", ["Qwen2", "Qwen3"])
def test_built_tokenizer_reads_alike_beside_a_model_of_the_qwen_family(tmp_path, family):
    config = getattr(transformers, f"{family}Config")()
    config.save_pretrained(tmp_path)
    built = build_arithmetic_tokenizer()
    built.save_pretrained(tmp_path)
    text = "7 - 3 + 12 = 4 16\nso, is it?"
    expected = built(text)["input_ids"]
    assert len(expected) == len(text)
    for loaded in (load_tokenizer(tmp_path), transformers.AutoTokenizer.from_pretrained(tmp_path)):
        assert loaded(text)["input_ids"] == expected
        assert loaded.decode(expected) == text
