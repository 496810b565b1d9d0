"""Rules of responses of several turns, and of rewards that their functions return."""

from __future__ import annotations

from collections.abc import Iterator

from hybridengine.config.algorithm import Conflict, ServedAlgorithm
from hybridengine.config.reward_sections import scorer_key
from hybridengine.config.run_config import RunConfig, reward_sections


def episode_conflicts(config: RunConfig) -> Iterator[Conflict]:
    """Yield the violated rules of `rollout.episode`."""
    rewards = [
        scorer_key(name, term)
        for name, section in reward_sections(config).items()
        for term in section.episodes
    ]
    if config.rollout.episode is None:
        for key in rewards:
            yield Conflict(
                f"{key}.kind=episode is the reward that rollout.episode.function returns, and the run has no"
                f" rollout.episode; add it, or choose {key}.kind=function",
                (f"{key}.kind", "rollout.episode"),
            )
    elif config.generation.replay is not None:
        yield Conflict(
            f"generation.replay={config.generation.replay} repeats a run bit by bit, and what functions of"
            " rollout.episode do between turns takes time that differs; leave one of them out",
            ("generation.replay", "rollout.episode"),
        )
    elif isinstance(config.algorithm, ServedAlgorithm):
        yield Conflict(
            "rollout.episode is not read by a server, whose clients draw turn by turn; leave it out",
            ("rollout.episode",),
        )
