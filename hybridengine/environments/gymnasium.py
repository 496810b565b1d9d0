"""Environments of Gymnasium (gymnasium.farama.org) whose observations and actions are texts, or become texts."""

from __future__ import annotations

import contextlib
import importlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from hybridengine.environments.environment import Prompt, constructed, plain, settings_of, system_message
from hybridengine.episodes.client import Client, EpisodeError, LimitError, Result, Row
from hybridengine.errors import DataError, shown

ACTIONS = {
    "FrozenLake": ("left", "down", "right", "up"),
    "FrozenLake8x8": ("left", "down", "right", "up"),
    "CliffWalking": ("up", "right", "down", "left"),
    "CliffWalkingSlippery": ("up", "right", "down", "left"),
    "Taxi": ("south", "north", "east", "west", "pickup", "dropoff"),
    "Blackjack": ("stick", "hit"),
}
"""Words for the actions of Gymnasium's toy texts, as its documentation has them, by name without version."""
COLOURS = dict(enumerate(("black", "red", "green", "yellow", "blue", "magenta", "cyan", "white")))
COLOURED = re.compile(r"\x1b\[((?:\d+;?)+)m(.*?)\x1b\[0m", re.DOTALL)
SEED_STRIDE = 1_000_003
"""Distance between seeds: neighbouring ones would share episodes."""


@dataclass(frozen=True)
class Settings:
    """How an environment is played in words."""

    instructions: str = ""
    """Text of a system message: the rules, and how to answer."""
    actions: list[str] = field(default_factory=list)  # type: ignore[assignment]
    """Words for the actions of a discrete space, in its order."""
    choices: str = "Answer with one of: {actions}."
    """Format of what follows the first observation, and answers a turn without an action."""
    observation: str = ""
    """Format of an observation that is a number or a tuple: its parts are {0}, {1}, ..."""
    invalid_actions: int = 3
    """Turns without an action that are answered by `choices`; one more ends the episode."""
    max_steps: int = 0
    """Largest number of actions; the environment's own limit with 0."""
    max_tokens: int = 0
    """Longest turn; no limit but the response's with 0."""

    def __post_init__(self) -> None:
        if not all(isinstance(word, str) and word.strip() for word in self.actions):
            raise DataError(
                f"settings.actions={self.actions!r} must be words; write one for each action of the space"
            )


class Gymnasium:
    """An environment with a discrete or textual space of actions. A seed of its `reset` is a problem.

    An observation is the environment's `ansi` rendering if it has one, as `plain_text`; otherwise it is the observation
    as text. The action of a turn is the last word of `actions` in its text, or the whole text in a textual space. The
    reward is the sum of the environment's; metrics are `steps` and `invalid_actions`.
    """

    def __init__(self, name: str, options: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
        import gymnasium
        from gymnasium.envs.registration import load_env_creator

        self._options = dict(options)
        self._settings = settings_of(Settings, settings)
        try:
            module, _, name = name.rpartition(":")
            if module:
                importlib.import_module(module)  # registers it
            spec = gymnasium.spec(name)
            entry: Any = spec.entry_point
            creator = load_env_creator(entry) if isinstance(entry, str) else entry
            modes = getattr(creator, "metadata", {})
        except (gymnasium.error.Error, ImportError, AttributeError, ValueError) as error:
            raise DataError(
                f"is not registered with Gymnasium ({' '.join(str(error).split())}); correct the name, or write"
                " package.module:NAME for one that a module registers"
            ) from None
        self._name, self._renders = name, "ansi" in modes.get("render_modes", ())
        if self._renders:
            self._options.setdefault("render_mode", "ansi")
        self._renders = self._options.get("render_mode") == "ansi"
        space = self._made().action_space
        self._is_text = isinstance(space, gymnasium.spaces.Text)
        self._words = self._settings.actions or list(
            ACTIONS.get(spec.name, ()) if isinstance(space, gymnasium.spaces.Discrete) else ()
        )
        if not self._is_text and not isinstance(space, gymnasium.spaces.Discrete):
            raise DataError(
                f"has the actions {space}; only discrete and textual ones can be played in words: choose another"
            )
        if isinstance(space, gymnasium.spaces.Discrete):
            self._first = int(space.start)
            if len(self._words) != space.n:
                raise DataError(
                    f"has {space.n} actions, and settings.actions has {len(self._words)} words; write one for each"
                )
            alternatives = "|".join(sorted(map(re.escape, self._words), key=len, reverse=True))
            self._pattern = re.compile(rf"(?<!\w)(?:{alternatives})(?!\w)", re.IGNORECASE)

    def prompts(self, seed: int, count: int) -> Iterator[Prompt]:
        environment, first = self._made(), seed * SEED_STRIDE
        begun, again = self._begun(environment, first), self._begun(self._made(), first)
        if begun != again:
            raise DataError(
                f"begins differently each time with one seed ({shown(begun)}, {shown(again)}), so that episodes would not"
                " be those of their prompts; choose options with which the seed decides all"
            )
        for number in range(first, first + count):
            asked = {"role": "user", "content": self._begun(environment, number)}
            yield Prompt([*system_message(self._settings.instructions), asked], {"seed": number}, str(number))

    async def play(self, client: Client, row: Row, answer: Any) -> Result:
        environment = self._made()
        try:
            begun = self._begun(environment, answer["seed"])
            if begun != row.messages[-1]["content"]:
                raise EpisodeError(
                    f"its environment begins otherwise than its prompt: {shown(begun)}; only the seed may decide that"
                )
            return await self._play(client, environment)
        finally:
            environment.close()

    async def _play(self, client: Client, environment: Any) -> Result:
        total, steps, invalid = 0.0, 0, 0
        with contextlib.suppress(LimitError):  # it is cut off, with the rewards that it has reached
            while True:
                turn = await client.generate(max_tokens=self._settings.max_tokens or None)
                if (action := self._action(turn.text)) is None:
                    invalid += 1
                    if invalid > self._settings.invalid_actions:
                        break
                    client.add({"role": "user", "content": self._choices()})
                    continue
                observation, reward, terminated, truncated, _ = environment.step(action)
                total, steps = total + float(reward), steps + 1
                if terminated or truncated or steps == self._settings.max_steps:
                    break
                client.add({"role": "user", "content": self._text(environment, observation)})
        return Result(total, {"steps": steps, "invalid_actions": invalid})

    def _begun(self, environment: Any, seed: int) -> str:
        """Begin an environment anew, and return what it shows."""
        observation, _ = environment.reset(seed=seed)
        text = self._text(environment, observation)
        return text if self._is_text else f"{text}\n{self._choices()}"

    def _choices(self) -> str:
        return self._settings.choices.format(actions=", ".join(self._words))

    def _action(self, text: str) -> Any:
        if self._is_text:
            return text.strip()
        found = self._pattern.findall(text)
        words = [word.lower() for word in self._words]
        return self._first + words.index(found[-1].lower()) if found else None

    def _text(self, environment: Any, observation: Any) -> str:
        if self._renders:
            return plain_text(environment.render()).strip("\n")
        parts = observation if isinstance(observation, tuple) else (observation,)
        if self._settings.observation:
            return self._settings.observation.format(*parts)
        return str(plain(observation))

    def _made(self) -> Any:
        import gymnasium

        try:
            return gymnasium.make(self._name, **self._options)
        except Exception as error:  # whatever its constructor raises
            raise constructed(error) from None


def plain_text(rendered: str) -> str:
    """Return a rendering with a terminal's colours as text: "[x]" on a coloured ground, "x(blue)" for a blue x."""

    def marked(match: re.Match[str]) -> str:
        codes, text = [int(code) for code in match[1].split(";") if code], match[2]
        ground = any(40 <= code <= 47 or 100 <= code <= 107 for code in codes)
        colour = next((COLOURS[code % 10] for code in codes if 30 <= code <= 37 or 90 <= code <= 97), None)
        text = f"[{text}]" if ground else text
        return f"{text}({colour})" if colour else text

    return COLOURED.sub(marked, rendered)
