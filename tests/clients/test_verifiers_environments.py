"""Environments of the published `verifiers` package play the episodes of a run, in their own Python and offline."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from hybridengine.config import load_config
from hybridengine.data.tokenizer import build_arithmetic_tokenizer
from hybridengine.environments.files import write_environment_files
from hybridengine.episodes.processes import Episodes
from hybridengine.episodes.wire import DrawnTurn, Ended, Limits
from hybridengine.errors import DataError
from tests.clients.servers import CLIENT_PYTHON, ROOT

pytestmark = pytest.mark.timeout(1800)

TIMEOUT_S = 600


@pytest.fixture(autouse=True)
def _plugins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "tests/clients")  # for packages of environments: sums, guesses


def config_with(folder: Path, name: str, metrics: tuple[str, ...] = (), **options: Any) -> Any:
    environment = {"name": f"verifiers/{name}", "options": options, "train_rows": 5, "eval_rows": 2}
    described = {
        "base": str(ROOT / "configs/grpo.yaml"),
        "run": {"folder": str(folder), "name": "run"},
        "data": {"task": None, "environment": environment, "batch_size": 5},
        "warmup": None,
        "reward": {"kind": "episode", "function": None},
        "rollout": {"episode": {"python": str(CLIENT_PYTHON), "metrics": [*metrics]}},
    }
    file = folder / "run.yaml"
    file.write_text(yaml.safe_dump(described))
    return load_config(file)


class Played:
    """Episodes of the rows of an environment, whose turns a test writes."""

    def __init__(self, folder: Path, config: Any, max_turns: int = 4) -> None:
        self.tokenizer = build_arithmetic_tokenizer()
        self.tokenizer.save_pretrained(folder / "tokenizer")
        files = write_environment_files(config)
        lines = [line for name in ("held_out", "train") for line in files[name].read_text().splitlines()]
        self.rows = [json.loads(line) for line in lines]
        section = config.rollout.episode
        limits = Limits(200, max_turns, len(self.tokenizer), 300.0, 300.0, [*section.metrics], True)
        self.episodes = Episodes(section, limits, str(folder / "tokenizer"), TIMEOUT_S)
        self.episodes.start()

    def tokens(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]  # type: ignore[return-value]

    def outcomes(self, turns: dict[int, list[str]]) -> tuple[dict[int, Ended], dict[int, list[str]]]:
        """Run episodes at once, number N of row N modulo their number; return how they ended, and the texts added before
        each turn."""
        read = {number: list[str]() for number in turns}
        for number in turns:
            row = self.rows[number % len(self.rows)]
            prompt: Any = self.tokenizer.apply_chat_template(
                row["prompt"], add_generation_prompt=True, tokenize=False
            )
            data = {"number": number, "seed": 0, "prompt": row["prompt"], "answer": json.dumps(row["answer"])}
            self.episodes.begin(number, {**data, "prompt_tokens": self.tokens(prompt)}, [])
        ended, end = dict[int, Ended](), time.monotonic() + TIMEOUT_S
        while len(ended) < len(turns):
            assert time.monotonic() < end
            for event in self.episodes.events(0.1):
                if isinstance(event, Ended):
                    ended[event.number] = event
                    continue
                read[event.number].append(str(self.tokenizer.decode(event.added)))
                drawn = [*self.tokens(turns[event.number][event.turn]), self.tokenizer.eos_token_id]
                self.episodes.answer(event.number, DrawnTurn(event.added, drawn, [-1.0] * len(drawn), True))
        return ended, read


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Played]:
    folder = tmp_path_factory.mktemp("guesses")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "tests/clients")
        one = Played(folder, config_with(folder, "guesses", ("guesses", "found")))
    yield one
    one.episodes.close()


def test_an_environment_of_several_turns_plays_episodes_at_once(played: Played) -> None:
    assert [row["answer"]["index"] for row in played.rows] == [*range(7)]
    assert played.rows[3]["prompt"] == [
        {"role": "system", "content": "guess"},
        {"role": "user", "content": "from 1 to 9?"},
    ]
    # Row n is the number n + 1: found at once, found at the second guess, and not found.
    ended, read = played.outcomes({0: ["1"], 4: ["3", "5"], 5: ["8", "7"]})
    rewards = {number: (one.kind, one.reward, one.metrics) for number, one in ended.items()}
    assert rewards == {
        0: ("", 2.0, {"guesses": 1.0, "found": 2.0}),
        4: ("", 2.0, {"guesses": 2.0, "found": 2.0}),
        5: ("", 0.0, {"guesses": 2.0, "found": 0.0}),
    }
    assert read[0] == [""]
    for number, word in ((4, "higher"), (5, "lower")):
        assert read[number] == ["", f"<|im_start|>user{word}<|im_end|><|im_start|>assistant"]


def test_as_many_episodes_as_run_at_once_by_default_end_well(played: Played) -> None:
    """Each of them connects to the library's server twice, in one loop that is busy for seconds."""
    ended, _ = played.outcomes({number: ["5", "5"] for number in range(256)})
    assert {number: (one.kind, one.text, one.reward) for number, one in ended.items()} == {
        number: ("", "", 2.0 * (number % 7 == 4)) for number in range(256)
    }


def test_an_episode_that_runs_out_of_tokens_is_scored(played: Played) -> None:
    """The first guess leaves no room, of 200 tokens, for what the environment says."""
    ended, read = played.outcomes({2: ["5".zfill(196)], 4: ["3", "5"]})
    assert {number: (one.kind, one.reward, one.metrics) for number, one in ended.items()} == {
        2: ("", 0.0, {"guesses": 1.0, "found": 0.0}),
        4: ("", 2.0, {"guesses": 2.0, "found": 2.0}),
    }
    assert (len(read[2]), len(read[4])) == (1, 2)


def test_an_episode_that_runs_out_of_turns_is_scored(tmp_path: Path) -> None:
    played = Played(tmp_path, config_with(tmp_path, "guesses", ("guesses", "found")), max_turns=1)
    try:
        ended, _ = played.outcomes({2: ["5"], 4: ["5"]})
    finally:
        played.episodes.close()
    assert {number: (one.kind, one.reward, one.metrics) for number, one in ended.items()} == {
        2: ("", 0.0, {"guesses": 1.0, "found": 0.0}),
        4: ("", 2.0, {"guesses": 1.0, "found": 2.0}),
    }


def test_an_error_of_the_environment_fails_its_episode_alone(played: Played) -> None:
    ended, _ = played.outcomes({1: ["a lot"], 2: ["3"]})
    assert (ended[1].kind, ended[1].turn) == ("raised", 1)
    assert "the environment failed" in ended[1].text
    assert "invalid literal for int()" in ended[1].text
    assert ended[2].reward == 2.0


@pytest.mark.parametrize(
    ("name", "options", "text"),
    [
        (
            "gusses",
            {},
            r"data.environment.name=verifiers/gusses is not installed \(taskset 'gusses' not found",
        ),
        ("guesses", {"moost": 3}, "refuses its options .*moost"),
        ("unscored", {}, "has no reward: Unscored has no method with @vf.reward"),
        ("guesses", {"most": 3}, r"has 3 different prompts, and train_rows \+ eval_rows is 7"),
    ],
)
def test_refusals(tmp_path: Path, name: str, options: dict[str, Any], text: str) -> None:
    with pytest.raises(DataError, match=text):
        write_environment_files(config_with(tmp_path, name, **options))
