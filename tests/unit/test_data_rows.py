"""Rows of data files: every malformed row is reported with its number."""

from __future__ import annotations

import codecs
import json
import os
import pickle

import pyarrow
import pyarrow.parquet
import pytest

from hybridengine.data import row_files as rows
from hybridengine.data.row_files import read_rows
from hybridengine.errors import DataError

GOOD = {"prompt": "1 + 2 =", "answer": "3"}
ANSWER = {"role": "assistant", "content": "3"}
CHAT = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "1 + 2 ="}]


def write(folder, *lines, name="rows.jsonl"):
    path = folder / name
    path.write_bytes(
        b"\n".join(line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines)
    )
    return path


def test_jsonl_rows_keep_their_values(tmp_path):
    path = write(tmp_path, GOOD, b"", {"prompt": CHAT, "answer": {"b": [1, "ü"]}, "level": 4}, b"")
    first, second = read_rows(path)
    assert (first.prompt, first.answer, first.place) == ("1 + 2 =", "3", f"{path}, line 1")
    assert first.messages == [{"role": "user", "content": "1 + 2 ="}]
    assert second.place == f"{path}, line 3"
    assert second.messages == CHAT
    assert json.loads(second.answer) == {"b": [1, "ü"]}


def test_a_file_may_begin_as_editors_on_windows_write_it(tmp_path, monkeypatch):
    path = write(tmp_path, codecs.BOM_UTF8 + json.dumps(GOOD).encode(), GOOD)
    assert [row.prompt for row in read_rows(path)] == ["1 + 2 ="] * 2
    monkeypatch.setattr(rows, "MAX_LINE_BYTES", 10)
    with pytest.raises(DataError, match="line 1: the line has more than 10 bytes"):
        read_rows(path)


def test_a_parquet_file_gives_the_same_rows_as_jsonl(tmp_path):
    rows = [
        {"prompt": CHAT, "answer": f"{n}", "response": f"r{n}", "chosen": f"c{n}", "rejected": ""}
        for n in range(3)
    ]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "rows.parquet")
    jsonl = write(tmp_path, *rows)
    for kind in ("prompts", "demonstrations", "preferences"):
        from_parquet, from_jsonl = read_rows(tmp_path / "rows.parquet", kind), read_rows(jsonl, kind)
        assert [(r.prompt, r.answer, r.responses) for r in from_parquet] == [
            (r.prompt, r.answer, r.responses) for r in from_jsonl
        ]
        assert from_parquet[2].place == f"{tmp_path}/rows.parquet, row 3"


def test_parquet_files_of_conversations_have_null_where_rows_have_none(tmp_path):
    rows = [
        {"messages": [*CHAT, ANSWER], "prompt": None, "response": None},
        {"messages": None, "prompt": "1", "response": "2"},
    ]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "rows.parquet")
    conversation, single = read_rows(tmp_path / "rows.parquet", "demonstrations")
    assert (conversation.prompt, list(conversation.later), conversation.responses) == (CHAT, [ANSWER], ())
    assert (single.prompt, single.later, single.responses) == ("1", (), ("2",))


def test_rows_without_images_beside_rows_with_some_have_null_in_parquet(tmp_path):
    rows = [GOOD | {"images": ["a.png"]}, GOOD]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "rows.parquet")
    assert [row.images for row in read_rows(tmp_path / "rows.parquet")] == [(tmp_path / "a.png",), ()]


def test_keys_of_messages_that_are_read_or_say_nothing_are_kept(tmp_path):
    called = {"role": "tool", "content": "2", "tool_call_id": "a"}
    empty = {"tool_calls": [], "name": None, "reasoning_content": "", "weight": 1}
    row = {"messages": [CHAT[1] | {"name": "x"}, ANSWER | empty, called, ANSWER]}
    (found,) = read_rows(write(tmp_path, row), "demonstrations")
    assert found.prompt == [CHAT[1] | {"name": "x"}]
    assert list(found.later) == [ANSWER | empty, called, ANSWER]
    # In a prompt, the chat template reads them.
    calls = ANSWER | {"tool_calls": [{"type": "function"}]}
    (found,) = read_rows(
        write(tmp_path, {"prompt": [CHAT[1], calls, called], "response": "2"}), "demonstrations"
    )
    assert found.prompt == [CHAT[1], calls, called]


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        (b'{"prompt": "1 + 2", ', "is not JSON"),
        (b"\xff\xfe", "is not JSON"),
        (b'{"prompt": "1", "answer": ' + b"9" * 4301 + b"}", "is not JSON (number out of range"),
        (b"[" * 100_000, "is not JSON (recursion limit exceeded"),
        ({"prompt": "1\ud800", "answer": "1"}, "is not JSON (unexpected end of hex escape"),
        ({"prompt": "1", "answer": {"a": ["\udfff"]}}, "is not JSON (lone leading surrogate"),
        ([1, 2], "the line=[1, 2] must be an object"),
        (b"null", "the line=null must be an object"),
        ({"prompt": "1"}, "answer is missing; each row needs prompt, answer"),
        ({"prompt": "1", "answer": None}, "answer=null must be a value other than null"),
        ({"answer": "1", "prompt": None}, "prompt=null must be a string"),
        ({"answer": "1", "prompt": ""}, 'prompt="" must be a text that is not empty'),
        ({"answer": "1", "prompt": 7}, "prompt=7 must be a string"),
        ({"answer": "1", "prompt": []}, "prompt=[] must be messages that end with one to be answered"),
        ({"answer": "1", "prompt": ["hello"]}, 'prompt.0="hello" must be an object'),
        ({"answer": "1", "prompt": [{"role": "user"}]}, "prompt.0.content is missing"),
        ({"answer": "1", "prompt": [{"role": "assistant", "content": "hi"}]}, "not of role 'assistant'"),
    ],
)
def test_each_malformed_row_is_named_by_its_line(tmp_path, bad, said):
    with pytest.raises(DataError) as caught:
        read_rows(write(tmp_path, GOOD, b"", bad, GOOD))
    assert "rows.jsonl, line 3: " in str(caught.value)
    assert said in str(caught.value)
    assert str(caught.value).count("rows.jsonl, line") == 1


def test_a_line_that_is_too_long_is_not_held_in_memory(tmp_path, monkeypatch):
    good = json.dumps(GOOD).encode()
    monkeypatch.setattr(rows, "MAX_LINE_BYTES", len(good))
    path = write(tmp_path, good, good + b" ", good + b" " * 5 * len(good), good, good + b" " * len(good))
    with pytest.raises(DataError) as caught:
        read_rows(path)
    assert max(len(line) for _, line in rows._read_jsonl(path)) == len(good) + 1
    for number in (2, 3, 5):
        assert f"rows.jsonl, line {number}: the line has more than {len(good)} bytes" in str(caught.value)
    assert str(caught.value).startswith("3 problems:")


def test_all_malformed_rows_are_reported_at_once_up_to_ten(tmp_path):
    with pytest.raises(DataError) as caught:
        read_rows(write(tmp_path, {"prompt": "1"}, GOOD, b"{", {"answer": "1"}))
    text = str(caught.value)
    assert text.startswith("3 problems:")
    assert [f"line {n}:" in text for n in (1, 2, 3, 4)] == [True, False, True, True]

    with pytest.raises(DataError) as caught:
        read_rows(write(tmp_path, *[b"{"] * 25))
    text = str(caught.value)
    assert "line 10:" in text and "line 11:" not in text
    assert "and 15 more malformed rows" in text
    assert str(pickle.loads(pickle.dumps(caught.value))) == text


KEYS = "must be a row with prompt and response, or with messages alone; correct the row"
ROLES = "must be a row whose messages begin with another role and end with the role 'assistant'"


@pytest.mark.parametrize(
    ("kind", "bad", "said"),
    [
        ("demonstrations", {"prompt": "1"}, KEYS),
        ("demonstrations", {"response": "1"}, KEYS),
        ("demonstrations", {"messages": [*CHAT, ANSWER], "response": "1"}, KEYS),
        ("demonstrations", {"prompt": "1", "response": "2", "messages": [*CHAT, ANSWER]}, KEYS),
        ("demonstrations", {"prompt": "1", "response": 5}, "response=5 must be a string"),
        ("demonstrations", {"messages": CHAT}, ROLES),
        ("demonstrations", {"messages": [ANSWER]}, ROLES),
        ("demonstrations", {"messages": []}, ROLES),
        (
            "demonstrations",
            {"messages": [{"role": "user"}]},
            "messages.0.content is missing; each message needs",
        ),
        *(
            (
                "demonstrations",
                {"messages": [*CHAT, ANSWER | {key: value}, CHAT[1], ANSWER]},
                f"must be a message without the key {key}, as all of the assistant's turns are trained, and their content"
                f" alone; {remedy}",
            )
            for key, value, remedy in (
                (
                    "tool_calls",
                    [{"type": "function"}],
                    "write what the chat template makes of it into the content",
                ),
                ("reasoning_content", "1 and 2", "write what the chat template makes of it into the content"),
                ("weight", 0, "for the last turn alone, write those before it as prompt and it as response"),
            )
        ),
        (
            "preferences",
            {"prompt": "1", "chosen": "2"},
            "rejected is missing; each row needs prompt, chosen, rejected",
        ),
        (
            "preferences",
            {"prompt": "1", "chosen": "2", "rejected": "2"},
            "whose chosen response is another than the",
        ),
    ],
)
def test_rows_with_wrong_responses_are_named_by_their_line(tmp_path, kind, bad, said):
    good = GOOD | {"response": "3", "chosen": "3", "rejected": "4"}
    with pytest.raises(DataError) as caught:
        read_rows(write(tmp_path, good, bad, good), kind)
    assert "rows.jsonl, line 2: " in str(caught.value)
    assert said in str(caught.value)


def test_a_response_matters_only_for_demonstrations_and_an_answer_only_for_prompts(tmp_path):
    assert read_rows(write(tmp_path, GOOD))[0].responses == ()
    row = {"prompt": "1", "response": "2"}
    assert read_rows(write(tmp_path, row), "demonstrations")[0].responses == ("2",)
    with pytest.raises(DataError, match="with the keys prompt and response, or messages"):
        read_rows(write(tmp_path, b""), "demonstrations")


def test_files_that_are_no_data_set(tmp_path):
    with pytest.raises(DataError, match=r"rows\.csv ends in '\.csv'; it must end in \.jsonl or \.parquet"):
        read_rows(write(tmp_path, GOOD, name="rows.csv"))
    with pytest.raises(DataError, match=r"missing\.jsonl does not exist"):
        read_rows(tmp_path / "missing.jsonl")
    os.mkfifo(tmp_path / "fifo.jsonl")  # opening it would wait for a writer forever
    with pytest.raises(
        DataError, match=r"fifo\.jsonl is a pipe, a socket or a device, not a regular file; name a \.jsonl"
    ):
        read_rows(tmp_path / "fifo.jsonl")
    with pytest.raises(DataError, match="has no rows"):
        read_rows(write(tmp_path, b"", b"  "))
    with pytest.raises(DataError, match="is not a readable parquet file"):
        read_rows(write(tmp_path, b"PAR1 but not really", name="rows.parquet"))
    late = pyarrow.array([2**62], pyarrow.timestamp("us"))
    pyarrow.parquet.write_table(pyarrow.table({"answer": late}), tmp_path / "late.parquet")
    with pytest.raises(DataError, match="is not a readable parquet file"):
        read_rows(tmp_path / "late.parquet")
    pyarrow.parquet.write_table(pyarrow.table({"question": ["1"]}), tmp_path / "other.parquet")
    with pytest.raises(DataError, match=r"2 problems:\s.*row 1: prompt is missing"):
        read_rows(tmp_path / "other.parquet")
