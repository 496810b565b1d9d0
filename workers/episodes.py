"""Episodes on a rank's engine: functions that draw several turns each, in calls of a few engine steps.

The first rank of an engine runs the functions, in processes of their own, and shares what they ask for with the engine's
other ranks, so that all add the same requests between the same steps.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from tensordict import NonTensorStack, TensorDict, TensorDictBase

from hybridengine.backends.engine import Request, Response, SamplingSettings
from hybridengine.backends.lead import Lead
from hybridengine.backends.vllm.engine import VllmEngine
from hybridengine.config import RunConfig
from hybridengine.config.run_config import reward_sections
from hybridengine.config.sections import RolloutSection
from hybridengine.data.datasets import EPISODE_ROWS
from hybridengine.data.dropped_rows import DroppedRows
from hybridengine.episodes import wire
from hybridengine.episodes.processes import Episodes
from hybridengine.errors import DataError
from hybridengine.rollouts.drawn import ADDED, CUT, DRAWN, STOPPED, Drawn, DrawnSupports
from hybridengine.rollouts.episodes import episode_columns
from hybridengine.rollouts.queue import Rollout
from hybridengine.rows.micro_batches import ROUTES, padded_routes
from hybridengine.rows.supports import SUPPORTS, WHOLE, support_row
from workers.prompts import PromptReader

TOKEN_COLUMNS = ("drawn_log_probs", "drawn_versions", "drawn_marks")
"""Columns of episodes to continue in addition to `ROLLOUT_COLUMNS`: what is known of their tokens, [B, D]."""
COUNTED_AS = "episode/failed_share, eval/dropped_share"
STEPS = 128
"""Engine steps of an episode's batch between two looks at what has ended."""
WAIT_S = 0.05
"""Longest wait for a function while the engine has nothing to draw; ranks of an engine wait for each other meanwhile."""


@dataclass
class _Stream:
    """An unfinished episode: the tokens after its prompt."""

    number: int
    row: str
    """File and line of the data's row, for messages."""
    prompt: tuple[int, ...]
    seed: int
    num_routed: int
    """Tokens of prompt and response whose experts are known."""
    tokens: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    marks: list[int] = field(default_factory=list)
    supports: list[np.ndarray] = field(default_factory=list)
    """Support of each token's draw; those of tokens that another engine has drawn are not needed here."""
    turns: list[int] = field(default_factory=list)
    """Place of each turn that has begun: that of the first token added before it."""
    first: int = 0
    """Place of the first token that the present request draws."""
    num_taken: int = 0
    """Tokens whose experts the present request has told."""
    routes: list[np.ndarray] = field(default_factory=list)
    """Experts that the controller does not know, [n, L, K] each."""
    told: int = 0
    """Number of tokens that the controller knows."""
    told_routes: int = 0
    """Number of tokens of prompt and response whose experts it knows."""
    outcome: wire.Ended | None = None

    def add(self, wanted: wire.Wanted) -> None:
        """Add the tokens before a turn, unless they are known, with some of the turn's own, from an earlier engine."""
        begin = self.turns[wanted.turn] if wanted.turn < len(self.turns) else len(self.tokens)
        end = begin + len(wanted.added)
        self.turns = [*self.turns[: wanted.turn], begin]
        marks = [ADDED] * len(wanted.added)
        is_known = self.tokens[begin:end] == wanted.added and self.marks[begin:end] == marks
        if not is_known or any(mark != DRAWN for mark in self.marks[end:]):
            self.cut(begin)
            self.tokens += wanted.added
            self.log_probs += [0.0] * len(marks)
            self.versions += [-1] * len(marks)
            self.marks += marks
        # A turn may be shorter now than it has become: its last token is drawn again, and ends it.
        self.cut(min(len(self.tokens), end + wanted.max_tokens - 1))
        self.supports += [WHOLE] * (len(self.tokens) - len(self.supports))
        self.first, self.num_taken = len(self.tokens), 0

    def draw(self, response: Response) -> None:
        """Take over what the present request has drawn."""
        self.tokens[self.first :] = response.token_ids
        self.log_probs[self.first :] = response.log_probs
        self.versions[self.first :] = response.versions
        self.marks[self.first :] = [DRAWN] * len(response.token_ids)
        self.supports[self.first :] = response.supports or [WHOLE] * len(response.token_ids)
        if response.finish_reason:
            self.marks[-1] = STOPPED if response.finish_reason == "stop" else CUT
        if response.routes is not None:
            self.routes.append(response.routes[self.num_taken :])
            self.num_routed += len(self.routes[-1])
            self.num_taken = len(response.routes)

    def cut(self, place: int) -> None:
        """Forget the tokens from a place on, and the experts of these and of the one before, which would be the last."""
        for values in (self.tokens, self.log_probs, self.versions, self.marks, self.supports):
            del values[place:]
        self.told = min(self.told, place)
        most = max(0, len(self.prompt) + place - 1)
        self.told_routes, self.num_routed = min(self.told_routes, most), min(self.num_routed, most)
        if self.routes:
            self.routes = [np.concatenate(self.routes)[: most - self.told_routes]]

    def keep_turns(self, count: int) -> None:
        """Forget what follows the first `count` turns."""
        if count < len(self.turns):
            self.cut(self.turns[count])

    def take_routes(self, none: np.ndarray) -> np.ndarray:
        """Return the experts that the controller does not know, once; `none` are those of no tokens."""
        routes, self.routes, self.told_routes = self.routes, [], self.num_routed
        return np.concatenate([none, *routes])

    def turn_drawn(self, number: int) -> wire.DrawnTurn:
        """Return a complete turn as the episode gets it."""
        begin = self.turns[number]
        end = self.turns[number + 1] if number + 1 < len(self.turns) else len(self.tokens)
        first = next(place for place in range(begin, end) if self.marks[place] != ADDED)
        return wire.DrawnTurn(
            self.tokens[begin:first],
            self.tokens[first:end],
            self.log_probs[first:end],
            self.marks[end - 1] == STOPPED,
        )

    def complete_turns(self) -> list[wire.DrawnTurn]:
        """Return the turns that are complete, and find the places of all."""
        ends = [place + 1 for place, mark in enumerate(self.marks) if mark in (CUT, STOPPED)]
        self.turns = [begin for begin in (0, *ends) if begin < len(self.tokens)]
        return [self.turn_drawn(number) for number in range(len(ends))]


class EpisodeRollouts:
    """Numbered episodes on one rank's engine, and how many of their tokens the controller knows."""

    def __init__(
        self,
        run: RunConfig,
        engine: VllmEngine,
        lead: Lead,
        stop_token_ids: tuple[int, ...],
    ) -> None:
        assert run.rollout.episode is not None, "the run has episodes"
        self._section, self._engine, self._lead = run.rollout.episode, engine, lead
        self._longest, self._stops = run.rollout.max_response_tokens, stop_token_ids
        self._rollout = run.rollout
        self._reader = PromptReader(run)
        self._greedy = False
        self._failures = DroppedRows(COUNTED_AS)
        """Those of the rows that were begun last."""
        self._streams: dict[int, _Stream] = {}
        self._ended: list[_Stream] = []
        limits = wire.Limits(
            max_tokens=self._longest,
            max_turns=self._section.max_turns,
            vocab_size=engine.vocab_size,
            deadline_s=self._section.deadline_s,
            blocked_s=self._section.blocked_s,
            metrics=[*self._section.metrics],
            needs_reward=any(section.episodes for section in reward_sections(run).values()),
        )
        self._episodes = Episodes(
            self._section, limits, str(run.tokenizer_folder.absolute()), run.timeouts.start_s
        )
        if lead.is_here:
            self._episodes.start()

    def __len__(self) -> int:
        return len(self._streams)

    def begin(self, rows: TensorDictBase, *, greedy: bool = False) -> None:
        """Begin an episode for each row; one that has tokens is given the turns that it had.

        Reads `ROLLOUT_COLUMNS` and `TOKEN_COLUMNS`; a row without `prompt_numbers` has the prompt's own columns.
        """
        self._greedy = greedy
        self._failures = DroppedRows(COUNTED_AS)
        if "prompt_numbers" in rows.keys():  # noqa: SIM118
            rows = self._reader.prompts(rows["prompt_numbers"].tolist()).update(rows)
        for place in range(len(rows)):
            length = int(rows["drawn_lengths"][place])
            data = json.loads(rows[EPISODE_ROWS][place])
            prompt = rows["prompt_tokens"][place, : rows["prompt_lengths"][place]].tolist()
            stream = _Stream(
                int(rows["numbers"][place]),
                data.pop("place"),
                tuple(prompt),
                int(rows["seeds"][place]),
                int(rows["drawn_routes"][place]),
                *(rows[name][place, :length].tolist() for name in ("drawn_tokens", *TOKEN_COLUMNS)),
                told=length,
                told_routes=int(rows["drawn_routes"][place]),
            )
            turns = stream.complete_turns()
            self._streams[stream.number] = stream
            if self._lead.is_here:
                row = {**data, "prompt_tokens": prompt, "seed": stream.seed}
                self._episodes.begin(stream.number, row, turns)

    def advance(self, num_steps: int) -> Drawn:
        """Take up to `num_steps` engine steps while episodes are unfinished; return their new tokens.

        Raises DataError for an episode that fails, if failures end the run.
        """
        for _ in range(num_steps):
            if not self._streams:
                break
            events = self._lead.share(self._events() if self._lead.is_here else None)
            for event in events:
                stream = self._streams[event.number]
                if isinstance(event, wire.Wanted):
                    self._request(stream, event)
                else:
                    self._end(stream, event)
            if self._engine.num_unfinished:
                for response in self._engine.advance(1):
                    self._answer(response)
        for response in self._engine.progress():
            self._streams[int(response.request_id)].draw(response)
        return self._drawn()

    def withdraw(self, numbers: Sequence[int] | None = None) -> None:
        """Drop some episodes or all; the controller knows the tokens drawn so far."""
        numbers = [*self._streams] if numbers is None else numbers
        dropped = [number for number in numbers if number in self._streams]
        self._engine.abort(map(str, dropped))
        self._episodes.drop(dropped)
        for number in dropped:
            del self._streams[number]

    def close(self) -> None:
        """End the processes of functions."""
        self._episodes.close()

    def _events(self) -> list[wire.Wanted | wire.Ended]:
        return self._episodes.events(0.0 if self._engine.num_unfinished else WAIT_S)

    def _request(self, stream: _Stream, wanted: wire.Wanted) -> None:
        """Queue the request for a turn, or for the rest of one that another engine has begun."""
        self._engine.abort([str(stream.number)])  # another turn, which it wanted before its process ended
        stream.add(wanted)
        begun = stream.first - stream.turns[-1] - len(wanted.added)
        stops = (*self._stops, *wanted.stop_token_ids)
        sampling = SamplingSettings.of(self._rollout, wanted.max_tokens - begun, stops, greedy=self._greedy)
        sampling = replace(sampling, stop_strings=(*sampling.stop_strings, *wanted.stop_strings))
        request = Request(
            str(stream.number),
            (*stream.prompt, *stream.tokens),
            stream.seed,
            sampling,
            first_position=stream.first,
            num_read=begun,
            num_routed=stream.num_routed,
        )
        self._engine.add([request])

    def _answer(self, response: Response) -> None:
        """Give a turn that has ended to its episode."""
        stream = self._streams[int(response.request_id)]
        stream.draw(response)
        if self._lead.is_here:
            self._episodes.answer(stream.number, stream.turn_drawn(len(stream.turns) - 1))

    def _end(self, stream: _Stream, ended: wire.Ended) -> None:
        """Take an episode for ended, with the turns that its function has had.

        Raises DataError if it has failed and failures end the run.
        """
        if ended.kind:
            text = f"rollout.episode.function={self._section.function}, {stream.row}, turn {ended.turn}: {ended.text}"
            if self._section.on_failure == "fail":
                raise DataError(
                    f"{text}; correct the function, or let rollout.episode.on_failure drop the row"
                )
            if self._lead.is_here:
                self._failures.warn(f"response {stream.number} is dropped: {text}", ended.kind)
        for response in self._engine.abort([str(stream.number)]):
            stream.draw(response)
        if not ended.kind:  # turns may follow that only an earlier start had, or that nobody has waited for
            stream.keep_turns(len(ended.trained))
        stream.outcome = ended
        self._ended.append(self._streams.pop(stream.number))

    def _drawn(self) -> Drawn:
        """Return what is new in all episodes."""
        streams = [*self._ended, *self._streams.values()]
        streams = [one for one in streams if one.outcome is not None or len(one.tokens) > one.told]
        kept, no_routes = [one.told for one in streams], self._engine.no_routes

        def joined(name: str, kind: type) -> np.ndarray:
            parts = [getattr(one, name)[told:] for one, told in zip(streams, kept, strict=True)]
            return np.array([value for part in parts for value in part], dtype=kind)

        drawn = Drawn(
            numbers=np.array([one.number for one in streams], dtype=np.int64),
            counts=np.array(
                [len(one.tokens) - told for one, told in zip(streams, kept, strict=True)], np.int64
            ),
            has_ended=np.array([one.outcome is not None for one in streams], dtype=bool),
            tokens=joined("tokens", np.int32),
            log_probs=joined("log_probs", np.float32),
            versions=joined("versions", np.int32),
            marks=joined("marks", np.uint8),
            kept=np.array(kept, dtype=np.int64),
            kept_routes=np.array([one.told_routes for one in streams], dtype=np.int64),
            routes=() if no_routes is None else tuple(one.take_routes(no_routes) for one in streams),
            supports=DrawnSupports.of(
                [part for one, told in zip(streams, kept, strict=True) for part in one.supports[told:]]
            ),
            outcomes={one.number: one.outcome for one in streams if one.outcome is not None},
        )
        for one in streams:
            one.told = len(one.tokens)
        self._ended = []
        return drawn


def respond_by_episodes(
    rollouts: EpisodeRollouts,
    prompts: TensorDictBase,
    seeds: Sequence[int],
    section: RolloutSection,
    padding: int,
    *,
    greedy: bool,
) -> TensorDict:
    """Return the responses to prompts that their episodes draw, as `respond` does, with `episode_columns`."""
    count, width = len(prompts), section.max_response_tokens
    nothing = torch.zeros(count, 0)
    columns = dict.fromkeys(("drawn_tokens", *TOKEN_COLUMNS), nothing)
    none = torch.zeros(count, dtype=torch.int64)
    columns |= {
        "numbers": torch.arange(count),
        "seeds": torch.tensor(seeds),
        "drawn_lengths": none,
        "drawn_routes": none,
    }
    known = {number: Rollout(number) for number in range(count)}
    rollouts.begin(prompts.copy().update(columns), greedy=greedy)
    try:
        while len(rollouts):
            drawn = rollouts.advance(STEPS)
            supports = drawn.supports.each(drawn.num_tokens)
            for index, (number, has_ended, place) in enumerate(drawn.parts()):
                known[number].record(drawn, index, place, supports, has_ended=has_ended)
    finally:
        rollouts.withdraw()  # episodes remain only after a failure or an interrupt
    tokens = torch.full((count, prompts["prompt_tokens"].size(1) + width), padding)
    log_probs = torch.zeros(count, width)
    for place, rollout in enumerate(known.values()):
        length = int(prompts["prompt_lengths"][place])
        tokens[place, :length] = prompts["prompt_tokens"][place, :length]
        tokens[place, length : length + len(rollout.tokens)] = torch.tensor(rollout.tokens)
        log_probs[place, : len(rollout.tokens)] = torch.tensor(rollout.log_probs)
    found = {
        "tokens": tokens,
        "response_lengths": torch.tensor([len(rollout.tokens) for rollout in known.values()]),
        "rollout_log_probs": log_probs,
        **episode_columns([*known.values()], section),
    }
    if section.restricts:  # also if all of this rank's episodes have failed: others have the column
        rows = (support_row(rollout.supports) for rollout in known.values())
        found[SUPPORTS] = NonTensorStack(*rows)
    if section.routing_replay:
        routes = [np.concatenate(rollout.routes) for rollout in known.values()]
        found[ROUTES] = padded_routes(routes, tokens.size(1))
    return TensorDict(found, batch_size=[count])  # pyright: ignore[reportArgumentType]
