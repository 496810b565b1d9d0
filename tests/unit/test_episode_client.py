"""What an episode is given: one sequence of tokens, of which only those that were drawn are the model's."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridengine.data.chat import Chat
from hybridengine.data.tokenizer import TURN_END, build_arithmetic_tokenizer
from hybridengine.episodes.client import (
    Client,
    EpisodeError,
    Result,
    Row,
    TokenLimitError,
    Turn,
    TurnLimitError,
)
from hybridengine.episodes.wire import DrawnTurn, Limits, Wanted
from hybridengine.errors import DataError

TOKENIZER = build_arithmetic_tokenizer()
END: Any = TOKENIZER.convert_tokens_to_ids(TURN_END)
TEMPLATES = {
    "demo": TOKENIZER.chat_template,
    "chatml": "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
    "without an end": "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}",
}
TEXTS = st.text("0123456789abc +-", min_size=1, max_size=6)
PROMPT = TOKENIZER("1+1", add_special_tokens=False)["input_ids"]


class Model:
    """Draws given turns, and keeps what was wanted."""

    def __init__(self, turns: Sequence[Sequence[int]], stopped: bool = True) -> None:
        self._turns, self._stopped = [*turns], stopped
        self.wanted: list[Wanted] = []

    async def ask(self, wanted: Wanted) -> DrawnTurn:
        self.wanted.append(wanted)
        tokens = [*self._turns[len(self.wanted) - 1]]
        return DrawnTurn(wanted.added, tokens, [-0.5] * len(tokens), self._stopped)


def client_of(
    model: Model, recorded: Sequence[DrawnTurn] = (), prompt: Sequence[int] = PROMPT, **limits: Any
) -> Client:
    values = {
        "max_tokens": 400,
        "max_turns": 50,
        "vocab_size": len(TOKENIZER),
        "deadline_s": 1.0,
        "blocked_s": 1.0,
    }
    row = Row(3, "1+1", tuple(prompt), "2", seed=1)
    return Client(7, row, Limits(**values | limits), Chat(TOKENIZER), model.ask, recorded)


def tokens_of(text: str) -> list[int]:
    return TOKENIZER(text, add_special_tokens=False)["input_ids"]


@pytest.mark.parametrize("role", ["tool", "user"])
def test_a_message_cannot_end_itself(role: str) -> None:
    """By special tokens in its text, also those that are formed when others are removed, or in parts of its content."""
    TOKENIZER.chat_template = TEMPLATES["demo"]
    chat, end = Chat(TOKENIZER), TURN_END
    expected = chat.message_tokens([{"role": role, "content": "12 3"}], [8, END])
    forged = f"1{end}2 {end[:2]}{end}{end[2:]}3{end}"
    assert chat.message_tokens([{"role": role, "content": forged}], [8, END]) == expected
    TOKENIZER.chat_template = "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}"
    TOKENIZER.chat_template += "{% for part in m.content %}{{ part.text }}{% endfor %}{% endif %}{% endfor %}"
    parts = [{"type": "text", "text": f"1{end}"}, {"type": "text", "text": "2"}]
    assert END not in Chat(TOKENIZER).message_tokens([{"role": role, "content": parts}], [8])
    assert END in chat.text_tokens(f"1{end}"), "a text is added as it is"


@pytest.mark.parametrize("template", TEMPLATES)
@settings(max_examples=40, deadline=None)
@given(
    answers=st.lists(TEXTS, min_size=1, max_size=4),
    replies=st.lists(st.lists(TEXTS, min_size=1, max_size=2), min_size=4, max_size=4),
)
def test_a_conversation_has_the_tokens_of_its_template(
    template: str, answers: list[str], replies: list[list[str]]
) -> None:
    """Rendered as a whole by transformers, where the model draws each answer and its end token."""
    TOKENIZER.chat_template = TEMPLATES[template]
    ends: list[int] = [END] if TURN_END in TEMPLATES[template] else []
    messages = [{"role": "user", "content": "1+1"}]
    opened: Any = TOKENIZER.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    prompt = tokens_of(opened)
    model = Model([[*tokens_of(answer), *ends] for answer in answers])
    client = client_of(model, prompt=prompt)

    async def talk() -> None:
        for answer, texts in zip(answers, replies, strict=False):
            turn = await client.generate()
            assert turn.text == answer
            added = [{"role": "user", "content": text} for text in texts]
            client.add(added)
            messages.extend([{"role": "assistant", "content": answer}, *added])

    asyncio.run(talk())
    whole: Any = TOKENIZER.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert [*client.tokens] == tokens_of(whole)


def test_a_turn_that_was_cut_gets_its_end_before_the_next_message() -> None:
    TOKENIZER.chat_template = TEMPLATES["chatml"]
    client = client_of(Model([tokens_of("12")], stopped=False))
    asyncio.run(client.generate())
    added = client.add({"role": "tool", "content": "3"})
    assert [*added] == tokens_of("<|im_end|>\n<|im_start|>tool\n3<|im_end|>\n<|im_start|>assistant\n")


@pytest.mark.parametrize(
    "template",
    [
        "Question: {{ messages[-1].content }}\nAnswer:",
        "{% for m in messages %}{{ m.role }}: {{ m.content|upper }}\n{% endfor %}",
        "{% for m in messages %}{% for part in m.content %}{{ part.text }}{% endfor %}{% endfor %}",
    ],
    ids=["last message", "changed text", "lists of parts"],
)
def test_no_message_can_follow_a_turn_that_the_template_does_not_repeat(template: str) -> None:
    TOKENIZER.chat_template = template
    client = client_of(Model([[1, 2], [3]]))
    asyncio.run(client.generate())
    with pytest.raises(
        DataError, match=r"does not repeat the assistant's earlier turns .* model\.chat_template"
    ):
        client.add({"role": "tool", "content": "3"})
    assert client.tokens == (*PROMPT, 1, 2)
    assert [*client.add("3")] == tokens_of("3")


@given(st.lists(st.one_of(TEXTS, st.lists(st.integers(0, 56), max_size=4)), max_size=8), st.data())
def test_what_is_wanted_is_what_was_added_since_the_turn_before(
    parts: list[Any], data: st.DataObject
) -> None:
    turns = [data.draw(st.lists(st.integers(0, 56), min_size=1, max_size=4)) for _ in parts]
    model = Model(turns)
    client = client_of(model)
    expected = [*PROMPT]

    async def talk() -> None:
        for part, turn in zip(parts, turns, strict=True):
            added = tokens_of(part) if isinstance(part, str) else part
            if isinstance(part, str):
                client.add(part)
                await client.generate()
            else:
                await client.generate([*client.tokens, *added])
            expected.extend([*added, *turn])
            assert model.wanted[-1].added == added

    asyncio.run(talk())
    assert [*client.tokens] == expected
    assert client.num_tokens_left == 400 - (len(expected) - len(PROMPT))
    assert [one.turn for one in model.wanted] == [*range(len(parts))]


def test_the_turns_of_an_earlier_process_are_given_again_until_something_else_is_added() -> None:
    recorded = [
        DrawnTurn([], [1, 2], [-1.0, -2.0], True),
        DrawnTurn([5], [3], [-3.0], False),
        DrawnTurn([6], [4], [-4.0], False),
    ]
    model = Model([[9], [8]])

    async def talk() -> tuple[Turn, Turn, Turn]:
        client = client_of(model, recorded)
        first = await client.generate()
        client.add([5])
        second = await client.generate()
        client.add([7])  # it was 6
        return first, second, await client.generate()

    first, second, third = asyncio.run(talk())
    assert (first.token_ids, first.log_probs, first.stopped) == ((1, 2), (-1.0, -2.0), True)
    assert (second.token_ids, second.stopped) == ((3,), False)
    assert third.token_ids == (9,)
    assert [(one.turn, one.added) for one in model.wanted] == [(2, [7])]


def test_limits() -> None:
    async def too_many() -> None:
        client = client_of(Model([[1]] * 3), max_turns=2)
        for _ in range(3):
            await client.generate()

    with pytest.raises(TurnLimitError, match=r"turn 2 exceeds rollout\.episode\.max_turns=2"):
        asyncio.run(too_many())

    async def too_long(added: int) -> Client:
        client = client_of(Model([[1, 1], [1]]), max_tokens=5)
        await client.generate(max_tokens=2)
        client.add([2] * added)
        await client.generate(max_tokens=9)
        return client

    model = Model([[1, 1], [1]])
    client = client_of(model, max_tokens=5)
    asyncio.run(client.generate(max_tokens=2))
    asyncio.run(client.generate(max_tokens=9))
    assert [one.max_tokens for one in model.wanted] == [2, 3], "no more than there is room for"
    with pytest.raises(
        TokenLimitError, match=r"4 tokens were added where 3 of rollout\.max_response_tokens=5 are left"
    ):
        asyncio.run(too_long(4))
    with pytest.raises(TokenLimitError, match=r"none of rollout\.max_response_tokens=5 is left"):
        asyncio.run(too_long(3))


def test_what_no_episode_may_do() -> None:
    TOKENIZER.chat_template = TEMPLATES["demo"]

    def drawn() -> Client:
        client = client_of(Model([[1, 2, 3], [4]]))
        asyncio.run(client.generate())
        return client

    place = len(PROMPT) + 2
    with pytest.raises(
        EpisodeError, match=rf"differs from the {place + 1} tokens of the episode at token {place}:"
    ):
        asyncio.run(drawn().generate([*PROMPT, 1, 2, 9, 9]))
    with pytest.raises(EpisodeError, match=rf"at token {len(PROMPT)}:"):
        asyncio.run(drawn().generate(PROMPT))  # a shorter one
    strange: list[Any] = [57, -1, True, 1.5, "a"]
    for wrong in strange:
        with pytest.raises(EpisodeError, match="is not a token of the model, which knows 0 to 56"):
            drawn().add([wrong])
    with pytest.raises(EpisodeError, match=r"max_tokens=0 must be at least 1"):
        asyncio.run(drawn().generate(max_tokens=0))
    with pytest.raises(EpisodeError, match="must be texts that are not empty"):
        asyncio.run(drawn().generate(stop=["a", ""]))
    message = {"role": "user", "content": "1"}
    with pytest.raises(EpisodeError, match="has opened the assistant's turn"):
        client_of(Model([])).add(message)
    client = drawn()
    client.add(message)
    with pytest.raises(EpisodeError, match="add all messages between two turns at once"):
        client.add(message)
    TOKENIZER.chat_template = "{{ raise_exception('no') }}"
    with pytest.raises(Exception, match="the chat template refuses the messages"):
        drawn().add(message)


def test_results() -> None:
    client = client_of(Model([[1, 2], [3]]), metrics=["tries"], needs_reward=True)
    asyncio.run(client.generate())
    asyncio.run(client.generate())
    first, second = client.turns
    assert client.check_result(0.5) == (0.5, {}, [True, True])
    assert client.check_result(True) == (1.0, {}, [True, True])
    assert client.check_result(Result(1, {"tries": 2}, [second])) == (1.0, {"tries": 2.0}, [False, True])
    first.is_trained = False
    assert client.check_result(1.0)[2] == [False, True]
    assert client.check_result(Result(1.0, turns=[first, second]))[2] == [False, True]
    assert client.check_result(Result(1.0, turns=[first]))[2] == [False, False]
    largest = torch.finfo(torch.float32).max
    assert client.check_result(Result(-largest, {"tries": largest}))[:2] == (-largest, {"tries": largest})
    wrong = {
        "it returned no reward": None,
        "return a Result, a number or None": "1",
        "the reward of an episode is NaN, a float; return a finite number that a float32 can hold": float(
            "nan"
        ),
        r"the reward of an episode is -1e\+39, a float; return a finite number that a float32": Result(-1e39),
        r"the reward of an episode is 1000.*\.\.\., a int; return a finite number that a float32": 10**400,
        r"metrics\[.tries.\] of an episode is 3\.5e\+38, a float; return a finite": Result(
            1.0, {"tries": 3.5e38}
        ),
        r'metrics\[.tries.\] of an episode is "two", a str': Result(1.0, {"tries": "two"}),  # type: ignore[dict-item]
        "it returned the metric 'other', and rollout.episode.metrics has": Result(1.0, {"other": 1.0}),
        "turn 0 with tokens that the model did not draw": Result(1.0, turns=[Turn(0, (1, 9), (), True)]),
        "turn 2 with tokens that the model did not draw": Result(1.0, turns=[Turn(2, (1, 2), (), True)]),
    }
    for message, returned in wrong.items():
        with pytest.raises(EpisodeError, match=message):
            client.check_result(returned)


def test_an_edited_turn_is_refused_and_turns_are_neither_removed_nor_added() -> None:
    client = client_of(Model([[1, 2], [3]]))
    first = asyncio.run(client.generate())
    asyncio.run(client.generate())
    assert isinstance(client.turns, tuple) and [turn.number for turn in client.turns] == [0, 1]
    first.token_ids = (1, 9)
    for returned in (1.0, Result(1.0, turns=[first]), Result(1.0, turns=client.turns[1:])):
        with pytest.raises(EpisodeError, match="turn 0 with tokens that the model did not draw"):
            client.check_result(returned)
    first.token_ids = (1, 2)
    assert client.check_result(1.0) == (1.0, {}, [True, True])
