"""Demonstrations, conversations and preferences as batches: their tokens, masks, order and limits."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from hybridengine.data.datasets import rows_after
from hybridengine.data.responses import ResponseDataset
from hybridengine.data.tokenizer import build_arithmetic_tokenizer
from hybridengine.errors import DataError

ROWS = [
    {
        "prompt": f"{n} + 1 =",
        "response": f"0 {n + 1}",
        "chosen": f"0 {n + 1}",
        "rejected": "0",
    }
    for n in range(7)
]
CONVERSATION = [
    {"role": "system", "content": "add"},
    {"role": "user", "content": "1 + 1"},
    {"role": "assistant", "content": "2"},
    {"role": "user", "content": "and 3"},
    {"role": "assistant", "content": "5"},
    {"role": "assistant", "content": "done"},
]
TEMPLATED = (
    "<|im_start|>systemadd<|im_end|><|im_start|>user1 + 1<|im_end|><|im_start|>assistant",
    "2<|im_end|>",
    "<|im_start|>userand 3<|im_end|><|im_start|>assistant",
    "5<|im_end|>",
    "<|im_start|>assistant",
    "done<|im_end|>",
)
"""Texts that the template makes of the conversation: the prompt, then turns of the assistant and texts between them."""
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return build_arithmetic_tokenizer()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return write(tmp_path, ROWS)


def write(folder: Path, rows: list[dict[str, Any]]) -> Path:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def prompt_text(row: dict[str, str]) -> str:
    return f"<|im_start|>user{row['prompt']}<|im_end|><|im_start|>assistant"


def texts_of(batch: Any, tokenizer: Any) -> list[tuple[str, str]]:
    """Return the prompt and the response of each sequence; the rest must be padding."""
    found = []
    for tokens, prompt, response in zip(
        batch["tokens"], batch["prompt_lengths"].tolist(), batch["response_lengths"].tolist(), strict=True
    ):
        assert set(tokens[prompt + response :].tolist()) <= {tokenizer.pad_token_id}
        found.append(
            (tokenizer.decode(tokens[:prompt]), tokenizer.decode(tokens[prompt : prompt + response]))
        )
    return found


def test_demonstrations_follow_their_prompts(path: Path, tokenizer: Any) -> None:
    data = ResponseDataset(path, tokenizer, "demonstrations", 17, seed=1)
    batch = data.rows([6, 2])
    assert batch["tokens"].shape == (2, 17)
    assert "response_mask" not in batch.keys()  # noqa: SIM118
    assert texts_of(batch, tokenizer) == [
        (prompt_text(row), row["response"] + "<|im_end|>") for row in (ROWS[6], ROWS[2])
    ]
    assert data.batch(4, 3)["row_ids"].tolist() == rows_after(7, 3, 1, 12)
    assert str(data) == "7 demonstrations"


def test_a_resume_needs_only_the_step(path: Path, tokenizer: Any) -> None:
    whole = ResponseDataset(path, tokenizer, "demonstrations", 25, seed=3)
    seen = [whole.batch(step, 3)["row_ids"].tolist() for step in range(9)]
    resumed = ResponseDataset(path, tokenizer, "demonstrations", 25, seed=3)
    assert [resumed.batch(step, 3)["row_ids"].tolist() for step in (7, 5)] == [seen[7], seen[5]]
    assert Counter(itertools.chain(*seen[:7])) == dict.fromkeys(range(7), 3)


def test_a_preference_is_two_sequences_the_chosen_one_first(path: Path, tokenizer: Any) -> None:
    data = ResponseDataset(path, tokenizer, "preferences", 20)
    assert (len(data), data.unit) == (7, 2)
    batch = data.rows([6, 7, 0])
    assert batch["row_ids"].tolist() == [3, 3, 0]
    assert texts_of(batch, tokenizer) == [
        (prompt_text(ROWS[3]), "0 4<|im_end|>"),
        (prompt_text(ROWS[3]), "0<|im_end|>"),
        (prompt_text(ROWS[0]), "0 1<|im_end|>"),
    ]


def test_only_what_the_assistant_writes_in_a_conversation_is_trained(tmp_path: Path, tokenizer: Any) -> None:
    rows = [{"messages": CONVERSATION}, ROWS[0]]
    batch = ResponseDataset(write(tmp_path, rows), tokenizer, "demonstrations", 64).rows([0, 1])
    (prompt, response), (_, single) = texts_of(batch, tokenizer)
    assert (prompt, response) == (TEMPLATED[0], "".join(TEMPLATED[1:]))
    mask, length = batch["response_mask"][0], int(batch["response_lengths"][0])
    assert mask.shape == (64,)
    assert not mask[length:].any()
    first = int(batch["prompt_lengths"][0])
    turns = [
        (trained, tokenizer.decode([token for _, token in some]))
        for trained, some in itertools.groupby(
            zip(mask[:length].tolist(), batch["tokens"][0, first:].tolist(), strict=False),
            key=lambda one: one[0],
        )
    ]
    assert turns == [(place % 2 == 0, text) for place, text in enumerate(TEMPLATED[1:])]
    assert batch["response_mask"][1].sum() == batch["response_lengths"][1]
    assert single == ROWS[0]["response"] + "<|im_end|>"
    whole = tokenizer.apply_chat_template(CONVERSATION, tokenize=False)
    assert prompt + response == whole


def test_a_conversation_of_one_turn_is_a_demonstration(tmp_path: Path, tokenizer: Any) -> None:
    messages = [{"role": "user", "content": "3 + 1 ="}, {"role": "assistant", "content": "0 4"}]
    one, other = (
        ResponseDataset(write(tmp_path, [row]), tokenizer, "demonstrations", 30).rows([0])
        for row in ({"messages": messages}, {"prompt": "3 + 1 =", "response": "0 4"})
    )
    for name in ("tokens", "prompt_lengths", "response_lengths"):
        assert one[name].tolist() == other[name].tolist()


def test_long_rows_are_named(path: Path, tokenizer: Any) -> None:
    with pytest.raises(DataError) as caught:
        ResponseDataset(path, tokenizer, "demonstrations", 12)
    assert str(caught.value).startswith("7 problems:")
    assert (
        "line 7: prompt and response have 16 tokens with the end token, data.max_tokens=12;"
        " raise the limit or shorten the row"
    ) in str(caught.value)


def test_long_rows_are_truncated_or_dropped_and_counted(tmp_path: Path, tokenizer: Any) -> None:
    long = {"prompt": "1 =", "response": "1 2 3 45", "chosen": "1 2 3 45", "rejected": "1 2 3 46"}
    hopeless = {"prompt": "1" * 20, "response": "1", "chosen": "1", "rejected": "2"}
    path = write(tmp_path, [ROWS[0], long, hopeless, ROWS[1]])
    cut = ResponseDataset(path, tokenizer, "demonstrations", 16, "truncate")
    assert str(cut) == "3 demonstrations, 1 truncated to 16 tokens, 1 too long and dropped"
    assert texts_of(cut.rows([1]), tokenizer) == [(prompt_text(long), "1 2 3 45")]
    dropped = ResponseDataset(path, tokenizer, "demonstrations", 16, "drop")
    assert str(dropped) == "2 demonstrations, 2 too long and dropped"
    # What is left of the two responses is the same.
    pairs = ResponseDataset(path, tokenizer, "preferences", 15, "truncate")
    assert (len(pairs), pairs.num_truncated, pairs.num_dropped) == (2, 2, 2)
    with pytest.raises(DataError, match=r"has no row left of 4: all are longer than data\.max_tokens=3"):
        ResponseDataset(path, tokenizer, "demonstrations", 3, "drop")


def test_a_conversation_cut_before_the_assistant_writes_is_dropped(tmp_path: Path, tokenizer: Any) -> None:
    rows = [{"messages": CONVERSATION[:3]}, {"prompt": "1", "response": "2"}]
    path = write(tmp_path, rows)
    length = len(tokenizer(TEMPLATED[0], add_special_tokens=False)["input_ids"])
    data = ResponseDataset(path, tokenizer, "demonstrations", length, "truncate")
    assert (len(data), data.num_dropped) == (1, 1)
    assert len(ResponseDataset(path, tokenizer, "demonstrations", length + 1, "truncate")) == 2


def test_characters_that_the_tokenizer_lacks_are_named_wherever_they_are(
    tmp_path: Path, tokenizer: Any
) -> None:
    for place in (1, 2, 3):
        messages = [dict(one) for one in CONVERSATION]
        messages[place]["content"] += "€"
        with pytest.raises(DataError, match=r'line 1: parts of the \w+ unknown to the tokenizer: "€";'):
            ResponseDataset(write(tmp_path, [{"messages": messages}]), tokenizer, "demonstrations", 99)


def test_a_template_that_refuses_a_later_turn_is_reported(tmp_path: Path) -> None:
    strict = build_arithmetic_tokenizer()
    strict.chat_template = str(strict.chat_template).replace(
        "{% for", "{% if messages|length > 2 %}{{ raise_exception('too many') }}{% endif %}{% for", 1
    )
    with pytest.raises(DataError, match=r"line 1: the chat template refuses the messages .*too many"):
        ResponseDataset(write(tmp_path, [{"messages": CONVERSATION}]), strict, "demonstrations", 99)


def test_a_template_that_does_not_repeat_earlier_turns_has_no_conversations(tmp_path: Path) -> None:
    last = build_arithmetic_tokenizer()
    last.chat_template = "{{ messages[-1].content }}\na:"
    path = write(tmp_path, [ROWS[0], {"messages": CONVERSATION}])
    with pytest.raises(
        DataError, match=r"line 2: the chat template does not repeat the assistant's earlier turns"
    ):
        ResponseDataset(path, last, "demonstrations", 99)
    single = ResponseDataset(write(tmp_path, ROWS[:1]), last, "demonstrations", 99)
    assert texts_of(single.rows([0]), last) == [("0 + 1 =\na:", "0 1<|im_end|>")]


def test_turns_end_as_the_chat_template_ends_them(tmp_path: Path) -> None:
    """Also where the tokenizer's own end token is another one, as that of Qwen2.5-7B, whose template is ChatML."""
    base = build_arithmetic_tokenizer()
    base.chat_template, base.eos_token = CHATML, "<|pad|>"
    data = ResponseDataset(write(tmp_path, [{"messages": CONVERSATION}, ROWS[0]]), base, "demonstrations", 99)
    batch = data.rows([0, 1])
    first, length = int(batch["prompt_lengths"][0]), int(batch["response_lengths"][0])
    tokens = batch["tokens"][0, : first + length]
    assert f"{base.decode(tokens)}\n" == base.apply_chat_template(CONVERSATION, tokenize=False)
    trained = tokens[first:][batch["response_mask"][0, :length]]
    assert base.decode(trained) == "2<|im_end|>5<|im_end|>done<|im_end|>"
    prompt, response = texts_of(batch, base)[1]
    assert (prompt[-10:], response) == ("assistant\n", "0 1<|im_end|>")
    pairs = ResponseDataset(write(tmp_path, ROWS), base, "preferences", 99).rows([0, 1])
    assert [one for _, one in texts_of(pairs, base)] == ["0 1<|im_end|>", "0<|im_end|>"]


@pytest.mark.parametrize("end", ["<|im_end|>", "<|pad|>", "<|im_end|>\n", "<|im_end|><|pad|>"])
def test_an_end_that_is_written_in_a_response_is_not_repeated(tmp_path: Path, end: str) -> None:
    base = build_arithmetic_tokenizer()
    base.chat_template, base.eos_token = CHATML, "<|pad|>"
    turns = [one | {"content": one["content"] + end * (one["role"] == "assistant")} for one in CONVERSATION]
    written = [ROWS[0] | {"response": ROWS[0]["response"] + end}, {"messages": turns}]
    plain = [ROWS[0], {"messages": CONVERSATION}]
    batches = [
        ResponseDataset(write(tmp_path, rows), base, "demonstrations", 99).rows([0, 1])
        for rows in (written, plain)
    ]
    for name in ("tokens", "prompt_lengths", "response_lengths", "response_mask"):
        assert batches[0][name].tolist() == batches[1][name].tolist()
    with pytest.raises(
        DataError, match="line 1: chosen and rejected response have the same tokens; correct one"
    ):
        ResponseDataset(
            write(tmp_path, [ROWS[0] | {"rejected": ROWS[0]["chosen"] + end}]), base, "preferences", 99
        )
