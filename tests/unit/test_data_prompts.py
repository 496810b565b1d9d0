"""Prompt batches: their tokens, order and limits."""

from __future__ import annotations

import json

import pytest

from hybridengine.data import datasets
from hybridengine.data.datasets import PromptDataset, prompts_digest, rows_after
from hybridengine.data.tokenizer import build_arithmetic_tokenizer
from hybridengine.errors import DataError

ROWS = [{"prompt": f"{n} + 1 =", "answer": str(n + 1), "response": f"0 {n + 1}"} for n in range(7)]


@pytest.fixture(scope="module")
def tokenizer():
    return build_arithmetic_tokenizer()


@pytest.fixture
def path(tmp_path):
    return write(tmp_path, ROWS)


def write(folder, rows):
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def prompt_text(row):
    return f"<|im_start|>user{row['prompt']}<|im_end|><|im_start|>assistant"


def test_a_batch_holds_the_templated_prompts_right_padded(path, tokenizer):
    batch = PromptDataset(path, tokenizer, max_prompt_tokens=20).rows([4, 0, 4])
    assert list(batch.batch_size) == [3]
    assert batch["prompt_tokens"].shape == (3, 20)
    assert batch["row_ids"].tolist() == [4, 0, 4]
    assert list(batch["answers"]) == ["5", "1", "5"]
    for tokens, length, row in zip(
        batch["prompt_tokens"], batch["prompt_lengths"], (ROWS[4], ROWS[0], ROWS[4]), strict=True
    ):
        assert tokenizer.decode(tokens[:length]) == prompt_text(row)
        assert tokens[length:].tolist() == [tokenizer.pad_token_id] * (20 - int(length))
    assert str(batch["prompt_tokens"].dtype) == str(batch["prompt_lengths"].dtype) == "torch.int64"


def test_chat_messages_go_through_the_template(tmp_path, tokenizer):
    messages = [{"role": "system", "content": "add"}, {"role": "user", "content": "1"}]
    data = PromptDataset(write(tmp_path, [{"prompt": messages, "answer": 2.5}]), tokenizer, 20)
    row = data.rows([0])
    text = tokenizer.decode(row["prompt_tokens"][0, : row["prompt_lengths"][0]])
    assert text == "<|im_start|>systemadd<|im_end|><|im_start|>user1<|im_end|><|im_start|>assistant"
    assert list(row["answers"]) == ["2.5"]


@pytest.mark.parametrize(("num_rows", "batch_size"), [(1, 1), (1, 4), (5, 2), (7, 7), (8, 3), (100, 16)])
def test_every_epoch_holds_each_row_once(num_rows, batch_size):
    steps = 3 * num_rows
    stream = [row for step in range(steps) for row in rows_after(num_rows, batch_size, 5, step * batch_size)]
    epochs = [stream[first : first + num_rows] for first in range(0, len(stream), num_rows)]
    assert all(sorted(epoch) == list(range(num_rows)) for epoch in epochs)
    if num_rows >= 100:
        assert epochs[0] != epochs[1] and epochs[0] != sorted(epochs[0])
        assert stream[:100] != rows_after(num_rows, 100, 6, 0)


@pytest.mark.parametrize("sizes", [[4, 4, 2, 2, 2, 7], [1, 9, 1], [3, 5, 5, 5]])
def test_batches_of_other_sizes_go_on_where_those_before_have_ended(sizes: list[int]):
    stream, num_rows = list[int](), 5
    for size in sizes:
        stream += rows_after(num_rows, size, 3, len(stream))
    assert stream == [row for drawn in range(len(stream)) for row in rows_after(num_rows, 1, 3, drawn)]


def test_the_digest_of_prompts_is_that_of_their_tokens(path, tmp_path, tokenizer):
    prompts = PromptDataset(path, tokenizer, 20)
    digest = prompts_digest(prompts, 1, [3, 4])
    assert digest == prompts_digest(PromptDataset(path, tokenizer, 30), 1, [3, 4])
    assert digest != prompts_digest(prompts, 1, [4, 3])
    assert len({prompts_digest(prompts, seed, range(len(ROWS))) for seed in range(4)}) == 4
    others = [row | {"prompt": f"1 + {row['prompt']}"} for row in ROWS]
    (tmp_path / "others").mkdir()
    assert digest != prompts_digest(
        PromptDataset(write(tmp_path / "others", others), tokenizer, 20), 1, [3, 4]
    )


def test_long_prompts_are_all_named(tmp_path, tokenizer):
    rows = [{"prompt": "1" * n, "answer": "1"} for n in (5, 6, 20)]
    assert len(PromptDataset(write(tmp_path, rows[:1]), tokenizer, max_prompt_tokens=10)) == 1
    with pytest.raises(DataError) as caught:
        PromptDataset(write(tmp_path, rows), tokenizer, max_prompt_tokens=10)
    text = str(caught.value)
    assert "line 2: the prompt has 11 tokens, max_prompt_tokens=10; raise the limit" in text
    assert "line 3: the prompt has 25 tokens" in text
    assert "line 1" not in text


def test_characters_that_the_tokenizer_lacks_are_named(tmp_path, tokenizer):
    with pytest.raises(
        DataError, match=r'line 1: parts of the prompt unknown to the tokenizer: "€", "\$"; remove'
    ):
        PromptDataset(write(tmp_path, [{"prompt": "1 € 2 $ €", "answer": "1"}]), tokenizer, 20)
    capitals = "".join(map(chr, range(ord("À"), ord("À") + 12)))
    with pytest.raises(DataError, match=r'tokenizer: "À", "Á", "Â", "Ã", "Ä", "Å", "Æ", "Ç", \.\.\.; remove'):
        PromptDataset(write(tmp_path, [{"prompt": capitals, "answer": "1"}]), tokenizer, 20)


def test_a_template_that_refuses_a_prompt_is_reported(path):
    strict = build_arithmetic_tokenizer()
    strict.chat_template = "{{ raise_exception('no users here') }}"
    with pytest.raises(DataError, match=r"line 1: the chat template refuses the prompt \(no users here\)"):
        PromptDataset(path, strict, 20)


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("{{ messages[0].content|length / 0 }}", r"fails \(ZeroDivisionError: division by zero\)"),
        ("{{ range(10 ** 9)|list }}", r"fails \(OverflowError: Range too big"),
        ("{{ '\ud800' }}", r"fails \(UnicodeEncodeError: "),
        ("{{ 'a' * 10 ** 6 }}", "has 1000000 characters, max_prompt_tokens=20 holds at most 5120"),
    ],
)
def test_a_template_that_fails_is_told_with_its_row(path, template, said):
    broken = build_arithmetic_tokenizer()
    broken.chat_template = template
    with pytest.raises(DataError, match=f"rows.jsonl, line 1: .*{said}"):
        PromptDataset(path, broken, 20)


def test_a_text_that_cannot_fit_is_not_tokenised(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets, "MAX_CHARACTERS_PER_TOKEN", 2)
    strict = build_arithmetic_tokenizer()
    strict.chat_template = "{{ messages[0].content }}"
    rows = [{"prompt": "1" * n, "answer": "1", "response": "2" * n} for n in (40, 41)]
    with pytest.raises(DataError) as caught:
        PromptDataset(write(tmp_path, rows), strict, 20)
    assert str(caught.value) == (
        f"{tmp_path}/rows.jsonl, line 2: the prompt has 41 characters, max_prompt_tokens=20 holds at most 40; raise"
        " the limit or shorten the prompt"
    )
